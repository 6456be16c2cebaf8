package escape

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// flat is a session with little memory, for attacks on what the node holds on behalf of a command.
const (
	flat       = "limits: {pids: 64, tmp_bytes: 8388608, home_bytes: 8388608, memory_bytes: 134217728, grace: 200ms}\n"
	flatMemory = 128 << 20
)

// while runs a program inside, looks at the node once the program has called hold(), and lets it end after that. What
// the program printed is the answer.
func (s *session) while(program string, look func()) string {
	s.T.Helper()
	for _, f := range []string{"held", "go"} {
		require.NoError(s.T, os.RemoveAll(filepath.Join(s.worktree, f)))
	}
	s.put("attack.py", `import os,time
def hold():
    open("held","w").close()
    while not os.path.exists("go"): time.sleep(0.01)
`+program, 0o644)
	_, answer := s.start("exec python3 attack.py", patience)
	s.Until("the command holds what it took", func() bool {
		_, err := os.Stat(filepath.Join(s.worktree, "held"))
		return err == nil
	})
	look()
	s.put("go", "", 0o644)
	res := <-answer
	require.NotNil(s.T, res)
	s.ends(res)
	require.Zero(s.T, res.GetExitCode(), res.GetStderrText())
	return res.GetStdoutText()
}

// socketBytes is what the queues of all UDP sockets of the node hold (proc_pid_net(5), sockstat: the counter is the
// protocol's, not the network namespace's).
func socketBytes(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/net/sockstat")
	require.NoError(t, err)
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "UDP: "); ok {
			f := strings.Fields(rest)
			pages, err := strconv.ParseInt(f[len(f)-1], 10, 64)
			require.NoError(t, err)
			return pages * int64(os.Getpagesize())
		}
	}
	t.Fatal("no line for UDP in /proc/net/sockstat")
	return 0
}

func TestP16SocketQueuesCountAsTheCommandsMemory(t *testing.T) {
	s := newSession(t, flat)
	before := socketBytes(t)
	s.while(`import socket
keep=[]
for child in range(2):
    if os.fork()==0: break
else: hold(); os._exit(0)
for i in range(900):
    u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.bind(("127.0.0.1",0)); keep.append(u)
    out=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); out.connect(u.getsockname()); out.setblocking(False)
    try:
        for j in range(300): out.send(b"x"*1000)
    except OSError: pass
    out.close()
open("full%d"%child,"w").close()
while True: time.sleep(1)
`, func() {
		s.Until("both have filled their sockets", func() bool {
			full, err := filepath.Glob(filepath.Join(s.worktree, "full*"))
			return err == nil && len(full) == 2
		})
		require.LessOrEqual(t, socketBytes(t)-before, int64(flatMemory), "bytes of the node that a command's sockets hold")
	})
	s.alive()
}

// What the kernel counts for each user of the node, and not for a cgroup: a command that uses it up must not use up
// root's (user_namespaces(7): what is counted in a user namespace is counted in its creator's account, too). The node's
// own part is what a daemon of the node, or the agent, would do next.
func TestP16ACommandLeavesTheNodesRootWhatIsCountedForEachUser(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, flat)
	for _, c := range []struct {
		name, program string
		here          func(t *testing.T) error
	}{
		{"inotify instances", `import ctypes
l=ctypes.CDLL(None); n=0
while n<3000 and l.inotify_init()>=0: n+=1
print(0<n<3000); hold()`, func(*testing.T) error {
			fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}},
		{"inotify watches", `import ctypes
l=ctypes.CDLL(None); n=0; full=False; os.makedirs("/tmp/w",exist_ok=True)
fds=[l.inotify_init() for i in range(110)]
names=[]
try:
    while len(names)<1900: open("/tmp/w/%d"%len(names),"w").close(); names.append(b"/tmp/w/%d"%len(names))
except OSError: pass
for fd in fds:
    for name in names:
        if full or n>400000: break
        if l.inotify_add_watch(fd,name,2)<0: full=True
        else: n+=1
print(0<n<400000); hold()`, func(t *testing.T) error {
			fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
			require.NoError(t, err)
			defer unix.Close(fd)
			_, err = unix.InotifyAddWatch(fd, t.TempDir(), unix.IN_MODIFY)
			return err
		}},
		{"pending signals", `import ctypes,signal
l=ctypes.CDLL(None); n=0
signal.pthread_sigmask(signal.SIG_BLOCK,[40])
while n<150000 and l.sigqueue(os.getpid(),40,ctypes.c_void_p(0))==0: n+=1
print(0<n<150000); hold()`, func(*testing.T) error {
			var id int32
			_, _, e := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&id)))
			if e != 0 {
				return e
			}
			unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(id), 0, 0)
			return nil
		}},
		{"message queues", `import ctypes
l=ctypes.CDLL(None); n=0
while n<1000 and l.mq_open(b"/q%d"%n,os.O_CREAT|os.O_RDWR,0o600,None)>=0: n+=1
print(n<1000); hold()`, func(*testing.T) error {
			name, _ := unix.BytePtrFromString("sandbox-agent-test")
			fd, _, e := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(name)), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600, 0, 0, 0)
			if e != 0 {
				return e
			}
			unix.Close(int(fd))
			unix.Syscall(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(name)), 0, 0)
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.within(t)
			var here error
			out := s.while(c.program, func() { here = c.here(t) })
			require.NoError(t, here, "the same, for the node's root, while the command holds what it got")
			require.Equal(t, "True\n", out, "the command came to an end of its own")
			s.alive()
		})
	}
}

// The files in /tmp, HOME and /dev/shm are memory, and the memory of whoever wrote them; they outlive the command.
func TestP16FullFileSystemsInMemoryLeaveLaterCommandsRoom(t *testing.T) {
	s := newSession(t, "limits: {pids: 64, tmp_bytes: 134217728, home_bytes: 134217728, memory_bytes: 134217728, grace: 200ms}\n")
	for _, dir := range []string{"/tmp", "$HOME", "/dev/shm"} {
		res := s.exec("head -c 1000000000 /dev/zero > "+dir+"/big", patience)
		s.ends(res)
		require.Contains(t, res.GetStderrText(), "No space left on device", "%s: %s", dir, res.GetReason())
	}
	s.alive()
	require.Equal(t, "33554432\n", s.output("head -c 33554432 /dev/zero | tail -c 33554432 | wc -c"), "a quarter of the limit is still to be had")
	s.alive()
}

func TestP16ACommandsProcessesCantOpenAllFilesOfTheNode(t *testing.T) {
	const pids, least = 512, 256
	s := newSession(t, "limits: {pids: "+strconv.Itoa(pids)+"}\n")
	b, err := os.ReadFile("/proc/sys/fs/file-max")
	require.NoError(t, err)
	most, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	require.NoError(t, err)
	each, err := strconv.ParseUint(strings.TrimSpace(s.output("ulimit -Hn")), 10, 64)
	require.NoError(t, err)
	require.LessOrEqual(t, each, max(least, most/4/pids))
	require.Equal(t, "refused\n", s.output("ulimit -n $(($(ulimit -Hn)+1)) 2>/dev/null || echo refused"))
}

// It may give up being the first to go, but never put itself behind the node's other processes.
func TestP16ACommandsOomScoreIsNeverBelowTheUsualOne(t *testing.T) {
	s := newSession(t, flat)
	require.Equal(t, "1000\nrefused\n", s.output("cat /proc/self/oom_score_adj; (echo -1 > /proc/self/oom_score_adj) 2>/dev/null || echo refused"))
}

// A command of many busy processes would otherwise take the CPU from the clock that ends it: the scheduler shares it out
// among cgroups first, and among processes within each.
func TestP16ACommandNeverSharesTheCpuTimeOfReceiptdAndPid1(t *testing.T) {
	s := newSession(t, flat)
	s.while("hold()", func() {
		commands := processes(t, "attack.py")
		require.Len(t, commands, 1)
		commandsCgroup := cpuCgroup(t, filepath.Join(filepath.Dir(commands[0]), "cgroup"))
		receiptds := cpuCgroup(t, fmt.Sprintf("/proc/%d/cgroup", s.receiptdPID()))
		require.NotEqual(t, receiptds, commandsCgroup)
		require.Equal(t, filepath.Dir(receiptds), filepath.Dir(commandsCgroup), "both are of one sandbox, so their weights are compared")
		require.GreaterOrEqual(t, cpuWeight(t, receiptds), 8*cpuWeight(t, commandsCgroup))
		pid1s, err := os.ReadFile(filepath.Join(receiptds, "cgroup.procs"))
		require.NoError(t, err)
		require.GreaterOrEqual(t, len(strings.Fields(string(pid1s))), 2, "the command's pid1 is with receiptd")
	})
}

// cpuCgroup is the folder of a process's cgroup in the hierarchy that has the cpu controller.
func cpuCgroup(t testing.TB, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	v2 := ""
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.SplitN(line, ":", 3)
		require.Len(t, f, 3)
		switch {
		case f[0] == "0":
			v2 = "/sys/fs/cgroup" + f[2]
		case slices.Contains(strings.Split(f[1], ","), "cpu"):
			return "/sys/fs/cgroup/" + f[1] + f[2]
		}
	}
	return v2
}

// cpuWeight is in v1's or v2's own unit.
func cpuWeight(t testing.TB, dir string) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "cpu.shares"))
	if os.IsNotExist(err) {
		b, err = os.ReadFile(filepath.Join(dir, "cpu.weight"))
	}
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(t, err)
	return n
}
