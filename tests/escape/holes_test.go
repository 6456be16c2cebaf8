package escape

import (
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// setIDAttack tries every call that could make a set-id file and names those that succeeded.
const setIDAttack = `
import ctypes, os, platform, struct
l = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def made(name, path):
    try:
        if os.lstat(path).st_mode & 0o6000: print("made", name, path)
    except OSError: pass
def attempt(name, path, f):
    try: f()
    except OSError: pass
    made(name, path)
os.umask(0)
def fresh(p):
    open(p, "w").close(); return p
attempt("chmod", "a1", lambda: os.chmod(fresh("a1"), 0o4755))
attempt("chmod gid", "a2", lambda: os.chmod(fresh("a2"), 0o2755))
attempt("fchmod", "a3", lambda: os.fchmod(os.open("a3", os.O_CREAT | os.O_RDWR), 0o6755))
attempt("fchmodat", "a4", lambda: (fresh("a4"), l.syscall(268 if x86 else 53, -100, b"a4", 0o4755)))
attempt("fchmodat2", "a5", lambda: (fresh("a5"), l.syscall(452, -100, b"a5", 0o4755, 0)))
attempt("chmod by the high half", "a6", lambda: (fresh("a6"), l.syscall(268 if x86 else 53, ctypes.c_long(-100), b"a6", ctypes.c_ulong(0x100000000 | 0o4755))))
attempt("open", "a7", lambda: os.open("a7", os.O_CREAT | os.O_WRONLY, 0o4755))
attempt("O_TMPFILE", "a8", lambda: os.link("/proc/self/fd/%d" % os.open(".", os.O_TMPFILE | os.O_RDWR, 0o4755), "a8", follow_symlinks=True))
attempt("openat2", "a9", lambda: l.syscall(437, -100, b"a9", struct.pack("QQQ", os.O_CREAT | os.O_WRONLY, 0o4755, 0), 24))
attempt("mknod", "b1", lambda: os.mknod("b1", 0o104755))
attempt("mkdir", "b2", lambda: os.mkdir("b2", 0o6755))
attempt("chmod of a folder", "b3", lambda: (os.mkdir("b3"), os.chmod("b3", 0o2755)))
if x86: attempt("creat", "b4", lambda: l.syscall(85, b"b4", 0o4755))
attempt("io_uring", "b5", lambda: l.syscall(425, 8, ctypes.create_string_buffer(120)))
attempt("fifo", "b6", lambda: os.mknod("b6", 0o014755))
def bound(p):
    import socket
    s = socket.socket(socket.AF_UNIX); os.fchmod(s.fileno(), 0o4755); s.bind(p)
attempt("a socket's mode", "b7", lambda: bound("b7"))
import tarfile, io
t = tarfile.TarInfo("b8"); t.mode = 0o4755
b = io.BytesIO(); w = tarfile.open(fileobj=b, mode="w"); w.addfile(t); w.close(); b.seek(0)
attempt("tar", "b8", lambda: tarfile.open(fileobj=b).extractall("."))
`

func TestHole1ACommandMakesNoSetIDFileOnTheNode(t *testing.T) {
	require.Contains(t, pythonHere(t, setIDAttack), "made chmod a1", "the control case")
	// Root's worktree, the worst case: a set-id file made there would be root's. Under gVisor it is refused (docs/gvisor.md).
	ownedBy := 0
	if node.OnGVisor() {
		ownedBy = owner
	}
	s := newAgent(t, "workspace: {roots: [/var/tmp], allow_root_owned: true}\n").session(ownedBy)
	res := s.python(setIDAttack, 0)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	require.Zero(t, res.GetExitCode(), res.GetStderrText())
	require.Empty(t, res.GetStdoutText())
	s.exec(`cp -p /usr/bin/passwd p; cp -a /usr/bin/su q; install -m 6755 /bin/true r; git init -q --shared=all sub; setfacl -m u::rwx r; true`, 0)
	require.NoError(t, filepath.WalkDir(s.worktree, func(p string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		st, err := d.Info()
		require.NoError(t, err)
		require.Zero(t, st.Mode()&(os.ModeSetuid|os.ModeSetgid|os.ModeDevice|os.ModeCharDevice), p)
		return nil
	}))
}

func TestHole1ASetIDFileThatIsThereGivesNothing(t *testing.T) {
	s := newAgent(t, "workspace: {roots: [/var/tmp], allow_root_owned: true}\n").session(0)
	id, err := os.ReadFile("/usr/bin/id")
	require.NoError(t, err)
	s.put("id", string(id), 0o755|os.ModeSetuid|os.ModeSetgid)
	here := exec.Command(filepath.Join(s.worktree, "id"), "-u")
	here.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner, Gid: owner}}
	out, err := here.CombinedOutput()
	require.NoError(t, err)
	require.Equal(t, "0\n", string(out), "the control case: on the node it makes one root")
	require.Equal(t, "1000\n", s.output("./id -u"))
	require.Equal(t, "1\n", s.output("grep NoNewPrivs /proc/self/status | cut -f2"))
}

func TestHole1ACommandMakesNoDeviceAndNoWhiteout(t *testing.T) {
	s := newSession(t, "")
	s.output(`! mknod c c 1 3; ! mknod b b 8 0; ! mknod w c 0 0; echo x > f; ! python3 -c 'import ctypes;exit(ctypes.CDLL(None).renameat2(-100,b"f",-100,b"g",4)==-1)'; ls`)
	entries, err := os.ReadDir(s.worktree)
	require.NoError(t, err)
	for _, e := range entries {
		require.Zero(t, e.Type()&(os.ModeDevice|os.ModeCharDevice), e.Name())
	}
}

func TestHole2AForkBombEndsAsTheCommandsOwnResult(t *testing.T) {
	s := newSession(t, "limits: {pids: 100, grace: 200ms}\n")
	for _, bomb := range []string{
		`f() { f | f & }; f; while :; do :; done`,
		`exec python3 -c 'import os
while True:
    try: os.fork()
    except OSError: pass'`,
		`while :; do (setsid sleep 1000 &) ; done`,
	} {
		res := s.exec(bomb, 2*time.Second)
		require.Contains(t, []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_TIMED_OUT, sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED}, res.GetStatus(), res.GetReason())
		s.alive()
	}
}

func TestHole3SealedGitPathsCannotBeMovedAway(t *testing.T) {
	s := newSession(t, "")
	pointer, err := os.ReadFile(filepath.Join(s.worktree, ".git"))
	require.NoError(t, err)
	config, err := os.ReadFile(filepath.Join(s.repo, ".git", "config"))
	require.NoError(t, err)
	script := strings.ReplaceAll(`
mv .git y && mkdir .git; echo 'gitdir: /tmp/evil' > .git; rm -f .git; ln -sf /tmp/evil .git
cd REPO 2>/dev/null || cd /
mv REPO/.git REPO/y; mkdir -p REPO/.git/hooks; mv REPO REPO.old; mv REPO/.git/hooks REPO/.git/h; mv REPO/.git/config REPO/.git/c
printf '[core]\n\tfsmonitor = touch /tmp/pwned\n' > REPO/.git/config
printf '#!/bin/sh\ntouch /tmp/pwned\n' > REPO/.git/hooks/post-checkout; chmod +x REPO/.git/hooks/post-checkout
mv REPO/.git/objects REPO/.git/o2; mkdir -p REPO/.git/objects/info; echo /tmp/evil > REPO/.git/objects/info/alternates
mv REPO/.git/objects/info REPO/.git/objects/i2; mv REPO/.git/worktrees REPO/.git/w2
git config --global core.hooksPath /tmp/evil; git -C "$OLDPWD" config core.fsmonitor /tmp/evil
true`, "REPO", s.repo)
	s.exec(script, 0)
	after, err := os.ReadFile(filepath.Join(s.worktree, ".git"))
	require.NoError(t, err)
	require.Equal(t, string(pointer), string(after))
	after, err = os.ReadFile(filepath.Join(s.repo, ".git", "config"))
	require.NoError(t, err)
	require.Equal(t, string(config), string(after))
	require.NoFileExists(t, filepath.Join(s.repo, ".git", "hooks", "post-checkout"))
	require.NoDirExists(t, s.repo+".old")
	for _, planted := range []string{"o2", "w2", "objects/i2", "objects/info/alternates"} {
		require.NoFileExists(t, filepath.Join(s.repo, ".git", planted))
		require.NoDirExists(t, filepath.Join(s.repo, ".git", planted))
	}
	require.EqualValues(t, 0, s.exec("git gc -q && git repack -adq && git fsck", 0).GetExitCode(), "ordinary Git goes on")
	s.alive()
}

func TestHole5MemoryEndsTheCommandAndNothingElse(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	s := newSession(t, "limits: {memory_bytes: 134217728}\n")
	hog := `exec python3 -c 'b=[]
while True: b.append(bytearray(1<<20))'`
	res := s.exec(hog, patience)
	require.NotEqual(t, sandboxv1.ExecResult_TIMED_OUT, res.GetStatus())
	require.False(t, res.GetStatus() == sandboxv1.ExecResult_EXITED && res.GetExitCode() == 0, "it can't have got what it wanted")
	require.Contains(t, []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_KILLED}, res.GetStatus(), res.GetReason())
	require.True(t, res.GetOom())
	s.alive()
	// Many at once, detached, each with a share.
	res = s.exec(`for i in $(seq 20); do setsid python3 -c 'b=bytearray(64<<20)
while True: b+=b[:1<<20]' & done; wait`, patience)
	require.NotEqual(t, sandboxv1.ExecResult_UNCERTAIN, res.GetStatus(), res.GetReason())
	require.True(t, res.GetOom())
	s.alive()
}

func TestHole5EveryProcessOfACommandIsTheKernelsFirstChoice(t *testing.T) {
	s := newSession(t, "")
	scores := s.output(`for i in $(seq 50); do (cat /proc/self/oom_score_adj; (cat /proc/self/oom_score_adj)) & done; wait`)
	require.Equal(t, strings.Repeat("1000\n", 100), scores)
	// A process may take back what the kernel has down as its least, 0: never what receiptd has, or less.
	receiptd, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", s.receiptdPID()))
	require.NoError(t, err)
	least, err := strconv.Atoi(strings.TrimSpace(string(receiptd)))
	require.NoError(t, err)
	lowered, err := strconv.Atoi(strings.TrimSpace(s.output("for n in 0 -1 -500 -1000; do { echo $n > /proc/self/oom_score_adj; } 2>/dev/null; done; cat /proc/$$/oom_score_adj")))
	require.NoError(t, err)
	require.GreaterOrEqual(t, lowered, max(least, 0))
}

// controlSocket finds receiptd's socket on the node.
func (s *session) controlSocket() string {
	s.T.Helper()
	var found string
	require.NoError(s.T, filepath.WalkDir(s.State, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type()&fs.ModeSocket != 0 && d.Name() == "receiptd.sock" {
			found = p
		}
		return nil
	}))
	require.NotEmpty(s.T, found)
	return found
}

func TestHole7AnOldConnectionStartsNothing(t *testing.T) {
	s := newSession(t, "")
	s.alive()
	dial := func() receiptdv1.ReceiptdClient {
		// A path may be longer than a socket's name: dial it from its folder's descriptor.
		dir, err := os.Open(filepath.Dir(s.controlSocket()))
		require.NoError(t, err)
		defer dir.Close()
		conn, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/receiptd.sock", dir.Fd()))
		require.NoError(t, err)
		c := ttrpc.NewClient(conn)
		t.Cleanup(func() { c.Close() })
		return receiptdv1.NewReceiptdClient(c)
	}
	marker := filepath.Join(s.worktree, "ran")
	run := func(c receiptdv1.ReceiptdClient, epoch uint64, id string) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		stream, err := c.Exec(ctx, &receiptdv1.ExecRequest{AttachEpoch: epoch, ExecId: id, Nonce: make([]byte, 32), Command: "touch ran", TimeoutMs: 1000})
		for err == nil {
			var ev *receiptdv1.ExecEvent
			if ev, err = stream.Recv(); err == nil {
				require.Nil(t, ev.GetDone(), "it ran")
				require.Nil(t, ev.GetLost(), "it ran")
			}
		}
		require.NoFileExists(t, marker)
	}
	run(dial(), 0, "stale-1")
	run(dial(), 1, "stale-2")
	identity := &receiptdv1.Identity{SessionId: s.id, SandboxId: s.first.GetSandbox().GetId(), Generation: s.first.GetGeneration()}
	stale := dial()
	_, err := stale.Init(context.Background(), &receiptdv1.InitRequest{Identity: identity, AttachEpoch: 0})
	require.Error(t, err)
	run(stale, 0, "stale-3")
	other := dial()
	_, err = other.Init(context.Background(), &receiptdv1.InitRequest{AttachEpoch: 1 << 40, Identity: &receiptdv1.Identity{SessionId: "other", SandboxId: "sb-other", Generation: 1}})
	require.Error(t, err)
	run(other, 1<<40, "stale-4")
	require.NoFileExists(t, marker)
	s.alive()
}

func TestHole8AFullDiskLosesNoReceipt(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	state := filepath.Join(dir, "state")
	require.NoError(t, os.Mkdir(state, 0o711))
	require.NoError(t, unix.Mount("tmpfs", state, "tmpfs", 0, "size=96m,mode=711"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(state, unix.MNT_DETACH)) })
	s := (&agent{node.Start(t, node.Options{State: state})}).session(owner)
	s.put("gate", "", 0o644)
	req, answer := s.start("echo once >> running; while [ -e gate ]; do :; done; echo done; exit 4", patience)
	s.Until("it runs", func() bool { _, err := os.Stat(filepath.Join(s.worktree, "running")); return err == nil })
	filler := fill(t, state)
	t.Cleanup(func() { _ = os.Remove(filler) }) // or the sandbox could not be ended
	require.NoError(t, os.Remove(filepath.Join(s.worktree, "gate")))
	res := <-answer // nothing can be recorded any more, but there is a receipt
	require.NotNil(t, res)
	require.Equal(t, sandboxv1.ExecResult_EXITED, res.GetStatus(), res.GetReason())
	again, err := s.Client.Execs.Exec(context.Background(), req)
	require.NoError(t, err)
	require.True(t, proto.Equal(res, again.GetResult()), "the same answer, although it is in no record")
	receipt := filepath.Join(state, "receipts", s.first.GetSandbox().GetId(), req.GetExecId()+".json")
	require.FileExists(t, receipt, "the receipt has its space since before the command began")

	// The next one either runs with a receipt, or certainly does not run.
	next, err := s.Client.Execs.Exec(context.Background(), s.request("touch next", 0))
	_, statErr := os.Stat(filepath.Join(s.worktree, "next"))
	if err != nil || next.GetResult().GetStatus() == sandboxv1.ExecResult_NOT_STARTED {
		require.ErrorIs(t, statErr, os.ErrNotExist, "refused, and yet it ran: %v", err)
	} else {
		require.Equal(t, sandboxv1.ExecResult_EXITED, next.GetResult().GetStatus(), next.GetResult().GetReason())
		s.verified(next.GetResult())
	}

	require.NoError(t, os.Remove(filler))
	s.Kill()
	s.Serve()
	again, err = s.Client.Execs.Exec(context.Background(), req)
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, again.GetResult().GetStatus(), again.GetResult().GetReason())
	require.EqualValues(t, 4, again.GetResult().GetExitCode())
	require.Equal(t, "done\n", again.GetResult().GetStdoutText())
	s.verified(again.GetResult())
	require.Equal(t, "once\n", s.output("cat running"))
}

// fill writes a file until nothing more goes in.
func fill(t testing.TB, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	for _, size := range []int{1 << 20, 4096, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		require.ErrorIs(t, err, unix.ENOSPC)
	}
	return path
}

func TestHole9CommandsLeaveNoCgroupBehind(t *testing.T) {
	s := newSession(t, "")
	count := func() (n int) {
		require.NoError(t, filepath.WalkDir("/sys/fs/cgroup", func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() && strings.Contains(p, s.first.GetSandbox().GetId()) {
				n++
			}
			return nil
		}))
		return n
	}
	s.alive()
	before := count()
	require.NotZero(t, before)
	for range 60 {
		s.output("head -c 100000 /dev/zero > /tmp/cache; cat /tmp/cache > cached")
	}
	require.Equal(t, before, count())
}

// receiptdPID finds the sandbox's init on the node.
func (s *session) receiptdPID() int {
	s.T.Helper()
	return node.SandboxProcess(s.T, s.first.GetSandbox().GetId())
}

// deadSender connects, waits until it has been accepted, fills its side of the connection and ends: the kernel goes on
// sending for the dead.
const deadSender = `import socket
c=socket.create_connection(("127.0.0.1",PORT)); c.recv(1); c.setblocking(False)
try:
    while True: c.send(b"x"*65536)
except BlockingIOError: pass
`

// slowServer accepts one connection, waits for a line on its standard input, and says how much lay in its queue and how
// much came in the end.
const slowServer = `import socket,sys,fcntl,termios,struct
l=socket.socket(); l.setsockopt(socket.SOL_SOCKET,socket.SO_RCVBUF,4096); l.bind(("127.0.0.1",0)); l.listen()
print(l.getsockname()[1],flush=True)
c,_=l.accept(); c.send(b"x")
sys.stdin.readline()
queued=struct.unpack("i",fcntl.ioctl(c,termios.FIONREAD,b"0000"))[0]
total=0
try:
    while True:
        b=c.recv(65536)
        if not b: break
        total+=len(b)
except OSError: pass
print("more" if total>queued else "no more", flush=True)
`

// serveSlowly starts the server in a network namespace, and gives its port and what to call for its verdict.
func serveSlowly(t testing.TB, prefix ...string) (port string, verdict func() string) {
	t.Helper()
	testkit.Need(t, testkit.Program("python3"), testkit.Program("nsenter"))
	argv := append(prefix, "python3", "-c", slowServer)
	cmd := exec.Command(argv[0], argv[1:]...)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line := func() string {
		var s string
		var more string
		n, err := fmt.Fscanln(out, &s, &more)
		if n == 2 {
			return s + " " + more
		}
		if n == 0 {
			require.NoError(t, err)
		}
		return s
	}
	return line(), func() string {
		_, err := in.Write([]byte("\n"))
		require.NoError(t, err)
		return line()
	}
}

func TestHole10NoSocketOfACommandSendsAfterItsAnswer(t *testing.T) {
	port, verdict := serveSlowly(t, "env")
	pythonHere(t, strings.ReplaceAll(deadSender, "PORT", port))
	require.Equal(t, "more", verdict(), "the control case: the dead one's socket sends")

	s := newSession(t, "")
	port, verdict = serveSlowly(t, node.InNetworkOf(t, s.first.GetSandbox().GetId())...)
	res := s.python(strings.ReplaceAll(deadSender, "PORT", port), 0)
	require.Zero(t, res.GetExitCode(), res.GetStderrText())
	require.Equal(t, "no more", verdict())
}

const foreignCalls = `
static long int80(long nr, long a, long b, long c) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(nr), "b"(a), "c"(b), "d"(c) : "memory", "r8", "r9", "r10", "r11"); return (int)r; }
static long native(long nr, long a, long b, long c) { long r; __asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(b), "d"(c) : "memory", "rcx", "r11"); return r; }
int main(int n, char **v) {
	static int vsock[3] = {40, 1, 0};
	switch (v[1][0]) {
	case 's': return int80(102, 1, (long)vsock, 0) >= 0;
	case 'c': return int80(15, (long)"f", 04755, 0) >= 0;
	case 'p': return int80(20, 0, 0, 0) > 0;
	case 'x': return native(0x40000000 | 41, 40, 1, 0) == -38;
	}
	return 99;
}
`

func TestHole11ForeignABIsAreRefused(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the machine has no i386 and no x32")
	}
	s := newSession(t, "")
	s.build("foreign", foreignCalls)
	s.put("f", "", 0o644)
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.exec("exec ./foreign n", 0).GetStatus(), "the control case: natively it runs")
	refusal := unix.SIGSYS
	here := exec.Command(filepath.Join(s.worktree, "foreign"), "p")
	if err := here.Run(); here.ProcessState.ExitCode() != 1 {
		require.ErrorContains(t, err, "segmentation fault")
		t.Log("this machine runs no i386 call, in a sandbox or not")
		refusal = unix.SIGSEGV
	}
	for _, what := range []string{"s", "c", "p"} {
		res := s.exec("exec ./foreign "+what, 0)
		require.Equal(t, sandboxv1.ExecResult_SIGNALED, res.GetStatus(), what)
		require.EqualValues(t, refusal, res.GetSignal(), what)
	}
	require.EqualValues(t, 1, s.exec("exec ./foreign x", 0).GetExitCode(), "x32 answers ENOSYS")
	st, err := os.Stat(filepath.Join(s.worktree, "f"))
	require.NoError(t, err)
	require.Zero(t, st.Mode()&os.ModeSetuid)
	s.alive()
}

func TestHole12TheLongestCommandRunsAndALongerOneIsRefused(t *testing.T) {
	s := newSession(t, "")
	const longest = 131071
	pad := func(n int) string { return "echo ok #" + strings.Repeat("x", n-len("echo ok #")) }
	require.Equal(t, "ok\n", s.output(pad(longest)))
	_, err := s.Client.Execs.Exec(context.Background(), s.request(pad(longest+1), 0))
	require.ErrorContains(t, err, "invalid_argument")
	require.ErrorContains(t, err, "131071")
	_, err = s.Client.Execs.Exec(context.Background(), s.request("echo a\x00b", 0))
	require.ErrorContains(t, err, "invalid_argument")
	s.alive()
}

// The journal's promise: whatever ran is known. The agent is killed at random moments while commands arrive.
func TestHole13WhateverRanHasItsIntentOnDisk(t *testing.T) {
	s := newSession(t, "")
	for round := range 12 {
		var ids []string
		answers := []<-chan *sandboxv1.ExecResult{}
		for range 4 {
			req, answer := s.start(fmt.Sprintf("touch ran-exec-%d", s.count+1), 0)
			ids, answers = append(ids, req.GetExecId()), append(answers, answer)
		}
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) // where the kill falls doesn't matter to what must hold
		s.Kill()
		for _, a := range answers {
			<-a
		}
		s.Serve()
		for _, id := range ids {
			s.settled(id, round)
		}
	}
	s.exec("true", 0)
}

// settled waits until an exec is not under way any more, and checks that what ran is known.
func (s *session) settled(id string, round int) {
	s.T.Helper()
	var res *sandboxv1.GetExecResponse
	var err error
	s.Until("exec "+id+" is settled", func() bool {
		res, err = s.Client.Execs.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: id})
		return err != nil || res.GetState() == sandboxv1.ExecState_EXEC_DONE
	})
	if err != nil {
		require.ErrorContains(s.T, err, "not_found")
		require.NoFileExists(s.T, filepath.Join(s.worktree, "ran-"+id), "round %d: it ran and is not known", round)
		return
	}
	switch st := res.GetResult().GetStatus(); st {
	case sandboxv1.ExecResult_EXITED:
		s.verified(res.GetResult())
	case sandboxv1.ExecResult_NOT_STARTED:
		require.NoFileExists(s.T, filepath.Join(s.worktree, "ran-"+id), "round %d", round)
	default:
		require.Equal(s.T, sandboxv1.ExecResult_UNCERTAIN, st, res.GetResult().GetReason())
	}
}
