package embedded

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/mountview"
)

// posture is what the kernel says of a running receiptd.
type posture struct {
	Capabilities  map[string]string
	NoNewPrivs    string
	Seccomp       string
	Uid, Gid      string
	OwnNamespaces []string
	UIDMap        string
	GIDMap        string
	Environment   string
	CommandLine   string
	Cwd, Root     string
	OOMScoreAdj   string
	Core, NoFile  string
	Cgroup        []string
}

func read(t *testing.T, pid int, name string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	require.NoError(t, err)
	return strings.TrimRight(string(b), "\n")
}

func status(t *testing.T, pid int, key string) string {
	t.Helper()
	for _, line := range strings.Split(read(t, pid, "status"), "\n") {
		if rest, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.Join(strings.Fields(rest), " ")
		}
	}
	t.Fatalf("no %s in the status of process %d", key, pid)
	return ""
}

func limit(t *testing.T, pid int, name string) string {
	t.Helper()
	for _, line := range strings.Split(read(t, pid, "limits"), "\n") {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.Join(strings.Fields(rest)[:2], " ")
		}
	}
	t.Fatalf("no limit %q of process %d", name, pid)
	return ""
}

func link(t *testing.T, path string) string {
	t.Helper()
	target, err := os.Readlink(path)
	require.NoError(t, err)
	return target
}

func ownNamespaces(t *testing.T, pid int) []string {
	var own []string
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"} {
		if link(t, fmt.Sprintf("/proc/%d/ns/%s", pid, ns)) != link(t, "/proc/self/ns/"+ns) {
			own = append(own, ns)
		}
	}
	return own
}

func postureOf(t *testing.T, pid int) posture {
	p := posture{
		Capabilities: map[string]string{}, NoNewPrivs: status(t, pid, "NoNewPrivs"), Seccomp: status(t, pid, "Seccomp"),
		Uid: status(t, pid, "Uid"), Gid: status(t, pid, "Gid"), OwnNamespaces: ownNamespaces(t, pid),
		UIDMap: strings.Join(strings.Fields(read(t, pid, "uid_map")), " "), GIDMap: strings.Join(strings.Fields(read(t, pid, "gid_map")), " "),
		Environment: read(t, pid, "environ"), CommandLine: read(t, pid, "cmdline"),
		Cwd: link(t, fmt.Sprintf("/proc/%d/cwd", pid)), Root: link(t, fmt.Sprintf("/proc/%d/root", pid)),
		OOMScoreAdj: read(t, pid, "oom_score_adj"),
		Core:        limit(t, pid, "Max core file size"), NoFile: limit(t, pid, "Max open files"),
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		p.Capabilities[set] = status(t, pid, set)
	}
	for _, line := range strings.Split(read(t, pid, "cgroup"), "\n") {
		f := strings.SplitN(line, ":", 3)
		p.Cgroup = append(p.Cgroup, f[2])
	}
	sort.Strings(p.Cgroup)
	return p
}

func TestPostureOfReceiptd(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 2)
	s := h.create(spec)
	const caps = "00000000002015e0" // SYS_ADMIN 21, NET_ADMIN 12, NET_BIND_SERVICE 10, SETPCAP 8, SETUID 7, SETGID 6, KILL 5, by number
	got := postureOf(t, s.Identity().Pid)
	cgroup := h.parent + "/" + spec.SandboxID + "/init"
	for _, c := range got.Cgroup {
		require.Equal(t, cgroup, c, "receiptd is in no cgroup of a command")
	}
	got.Cgroup = nil
	files := min(hostkernel.NoFile, hostkernel.HardLimit(unix.RLIMIT_NOFILE, hostkernel.NoFile))
	if got.NoFile == fmt.Sprintf("%d %d", files-1, files) {
		got.NoFile = fmt.Sprintf("%[1]d %[1]d", files) // a Go program raises its soft limit to one below the hard one (syscall/rlimit.go)
	}
	require.Equal(t, posture{
		Capabilities: map[string]string{"CapInh": "0000000000000000", "CapPrm": caps, "CapEff": caps, "CapBnd": caps, "CapAmb": "0000000000000000"},
		NoNewPrivs:   "1", Seccomp: "2",
		Uid: "1879179264 1879179264 1879179264 1879179264", Gid: "1879179264 1879179264 1879179264 1879179264",
		OwnNamespaces: []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"},
		UIDMap:        "0 1879179264 65536", GIDMap: "0 1879179264 65536",
		Environment: "HOME=/\x00", CommandLine: "/.sandbox/bin/receiptd\x00", Cwd: "/", Root: "/", OOMScoreAdj: "0",
		Core: fmt.Sprintf("%[1]d %[1]d", min(1, hostkernel.HardLimit(unix.RLIMIT_CORE, 0))), NoFile: fmt.Sprintf("%[1]d %[1]d", files),
	}, got)
	h.stop(s)
}

func TestP16AContainersUserNamespaceBelongsToAnIdOfItsOwn(t *testing.T) {
	h := newHost(t)
	dumpable := func() int {
		d, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
		require.NoError(t, err)
		return d
	}
	before := dumpable()
	spec := h.spec(1234, 2)
	s := h.create(spec)
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", s.Identity().Pid))
	require.NoError(t, err)
	defer ns.Close()
	var owner uint32
	_, _, e := unix.Syscall(unix.SYS_IOCTL, ns.Fd(), unix.NS_GET_OWNER_UID, uintptr(unsafe.Pointer(&owner)))
	require.Zero(t, e)
	require.Equal(t, spec.IDs.HostBase, owner, "whoever made it is who pays for what commands use (inotify, signals, queues)")
	require.Equal(t, before, dumpable(), "and nothing of that stays with the agent")
	require.Zero(t, os.Geteuid())
	h.stop(s)
}

func TestPostureOfReceiptdsDescriptors(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	h.attach(s, spec) // an answer means that receiptd has let go of its pipe, which comes after "ready"
	dir := fmt.Sprintf("/proc/%d/fd", s.Identity().Pid)
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	got := map[string]string{}
	other := map[string]int{}
	for _, n := range names {
		target, err := os.Readlink(filepath.Join(dir, n.Name()))
		require.NoError(t, err)
		switch {
		case strings.HasPrefix(target, "/sys/fs/cgroup/"):
			got[n.Name()] = filepath.Base(filepath.Dir(target)) + "/" + filepath.Base(target)
		case n.Name() <= "2" && len(n.Name()) == 1:
			got[n.Name()] = filepath.Base(target)
		default:
			kind, _, _ := strings.Cut(target, ":[")
			other[kind]++
		}
	}
	want := map[string]string{"0": "null", "1": "null", "2": "receiptd.log"}
	for _, v := range s.View().Cgroups {
		require.NotEmpty(t, v.JoinFds)
		for _, fd := range v.JoinFds {
			want[itoa(int(fd))] = v.Name + "/cgroup.procs"
		}
		want[itoa(int(v.ProcsFd))] = v.Name + "/cgroup.procs"
		want[itoa(int(v.OomFd))] = v.Name + "/memory.oom_control"
		want[itoa(int(v.PeakFd))] = v.Name + "/memory.max_usage_in_bytes"
		if len(v.JoinFds) == 1 { // cgroup v2
			want[itoa(int(v.OomFd))], want[itoa(int(v.PeakFd))] = v.Name+"/memory.events", v.Name+"/memory.peak"
		}
	}
	require.Equal(t, want, got)
	for kind := range other {
		require.Contains(t, []string{
			"mnt", // the mount namespace of the commands' view
			"socket", "pipe", "anon_inode", "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[pidfd]", "/dev/null",
			runtime.ReceiptsPath, runtime.BinPath + "/pid1",
		}, kind, "nothing of the host but its cgroups")
	}
	h.stop(s)
}

func TestPostureOfTheContainersMounts(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	require.Equal(t, mountview.Planned(t, spec, "tmpfs ro,nosuid,nodev"), mountview.Of(t, s.Identity().Pid))
	h.stop(s)
}
