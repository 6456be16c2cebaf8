package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// MustRun is the environment variable that turns every skip of Need into a failure.
const MustRun = "SANDBOX_MUST_RUN"

// Requirement is one thing that a test needs of the machine.
type Requirement struct {
	name string
	// missing says what is not there and how to get it; empty when it is there.
	missing func() string
}

// What a test can ask for.
var (
	Root           = Requirement{"root", missingRoot}
	UserNamespaces = Requirement{"user namespaces", missingUserNamespaces}
	CgroupV1orV2   = Requirement{"cgroups", missingCgroups}
	CgroupV1       = Requirement{"cgroup v1", missingCgroupV1}
	CgroupV2       = Requirement{"cgroup v2", missingCgroupV2}
	Bash           = Program("bash")
	Git            = Program("git")
	GCC            = Program("gcc")
	// MountAPI is what every mount of a sandbox needs.
	MountAPI = Kernel(5, 12, "mount_setattr")
	Busybox  = Program("busybox")
)

// Program is a requirement for a program on PATH.
func Program(name string) Requirement {
	return Requirement{name, func() string {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Sprintf("the program %s is not on PATH; install it", name)
		}
		return ""
	}}
}

// Kernel is a requirement for a version of Linux: a test may do without a feature only where the kernel is older than it.
func Kernel(major, minor int, feature string) Requirement {
	return Requirement{fmt.Sprintf("Linux %d.%d (%s)", major, minor, feature), func() string {
		if OlderKernel(major, minor) {
			return "this kernel is " + readTrimmed(osRelease)
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

// Need skips the test, or with SANDBOX_MUST_RUN=1 fails it, unless the machine has everything asked for.
func Need(t testing.TB, reqs ...Requirement) {
	t.Helper()
	for _, r := range reqs {
		why := r.missing()
		if why == "" {
			continue
		}
		if os.Getenv(MustRun) == "1" {
			t.Fatalf("this test needs %s, and %s=1 forbids to skip it: %s", r.name, MustRun, why)
		}
		t.Skipf("this test needs %s: %s", r.name, why)
	}
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
