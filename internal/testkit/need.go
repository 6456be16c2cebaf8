package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck/feature"
)

// MustRun is the environment variable that turns every skip of Need into a failure.
const MustRun = "SANDBOX_MUST_RUN"

// Requirement is one thing that a test needs of the machine.
type Requirement struct {
	name string
	// feature is its row in the table of what a node must have; empty: it is none of the kernel's.
	feature feature.ID
	// missing says what is not there and how to get it; empty when it is there.
	missing func() string
}

// What a test can ask for.
var (
	Root           = Requirement{name: "root", missing: missingRoot}
	UserNamespaces = Requirement{name: "user namespaces", feature: feature.UserNS, missing: missingUserNamespaces}
	CgroupV1orV2   = Requirement{name: "cgroups", missing: missingCgroups}
	CgroupV1       = Requirement{name: "cgroup v1", missing: missingCgroupV1}
	CgroupV2       = Requirement{name: "cgroup v2", missing: missingCgroupV2}
	Bash           = Program("bash")
	Git            = Program("git")
	GCC            = Program("gcc")
	// MountAPI is what every mount of a sandbox needs.
	MountAPI = Feature(feature.MountAPI)
	Busybox  = Program("busybox")
)

// Program is a requirement for a program on PATH.
func Program(name string) Requirement {
	return Requirement{name: name, missing: func() string {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Sprintf("the program %s is not on PATH; install it", name)
		}
		return ""
	}}
}

// Feature is a requirement for a row of the feature table that has a version of Linux: a test may do without it only where the
// kernel is older than that.
func Feature(id feature.ID) Requirement {
	return Requirement{name: string(id), feature: id, missing: func() string {
		row, known := feature.Find(id)
		switch release := readTrimmed(osRelease); {
		case !known || !strings.HasPrefix(row.Since, "Linux "):
			return "the feature table (internal/nodecheck/feature) names no version of Linux for it"
		case row.OlderThan(release):
			return fmt.Sprintf("it came with %s, and this kernel is %s", row.Since, release)
		}
		return ""
	}}
}

const osRelease = "/proc/sys/kernel/osrelease"

// OlderKernel says whether this kernel's version is below the given one.
func OlderKernel(major, minor int) bool { return olderKernel(readTrimmed(osRelease), major, minor) }

// olderKernel compares a release such as "5.10.0-46-cloud-amd64". One that doesn't parse is not older.
func olderKernel(release string, major, minor int) bool {
	var m, n int
	if _, err := fmt.Sscanf(release, "%d.%d", &m, &n); err != nil {
		return false
	}
	return m < major || m == major && n < minor
}

// Need skips the test, or with SANDBOX_MUST_RUN=1 fails it, unless the machine has everything asked for. A feature of the kernel
// that is missing although the kernel is not older than the feature table says fails the test in any case: the table is wrong
// then, or the machine has it switched off, and neither must be passed over.
func Need(t testing.TB, reqs ...Requirement) {
	t.Helper()
	for _, r := range reqs {
		switch skip, text := r.decide(readTrimmed(osRelease), os.Getenv(MustRun) == "1"); {
		case text == "":
		case skip:
			t.Skip(text)
		default:
			t.Fatal(text)
		}
	}
}

// decide says whether a test may be skipped on a kernel of this release, and why it can't run; it can where text is empty.
func (r Requirement) decide(release string, must bool) (skip bool, text string) {
	why := r.missing()
	if why == "" {
		return false, ""
	}
	text = fmt.Sprintf("this test needs %s: %s", r.name, why)
	if must {
		return false, fmt.Sprintf("%s (%s=1 forbids to skip it)", text, MustRun)
	}
	row, known := feature.Find(r.feature)
	if known && !row.OlderThan(release) {
		return false, fmt.Sprintf("%s; it may be skipped for that only on kernels before %s, and this one is %s", text, row.Since, release)
	}
	return true, text
}

func missingRoot() string {
	if os.Geteuid() != 0 {
		return "run the tests as root"
	}
	return ""
}

func missingUserNamespaces() string {
	if v := readTrimmed("/proc/sys/user/max_user_namespaces"); v == "" || v == "0" {
		return "set the sysctl user.max_user_namespaces above 0 (kernel option CONFIG_USER_NS)"
	}
	return ""
}

func missingCgroupV1() string {
	for _, f := range strings.Split(readTrimmed("/proc/self/mounts"), "\n") {
		if fields := strings.Fields(f); len(fields) > 2 && fields[2] == "cgroup" {
			return ""
		}
	}
	return "no cgroup v1 hierarchy is mounted"
}

func missingCgroupV2() string {
	var st unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		return "/sys/fs/cgroup is not a cgroup v2 mount; boot with systemd.unified_cgroup_hierarchy=1"
	}
	return ""
}

func missingCgroups() string {
	if missingCgroupV1() == "" || missingCgroupV2() == "" {
		return ""
	}
	return "no cgroup hierarchy is mounted at /sys/fs/cgroup"
}

func readTrimmed(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
