package nsexec

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// testConfig is a view of the node itself: these tests are about the boundary, not about the root file system.
func testConfig(t *testing.T) Config {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces)
	_, pid1 := testkit.Binaries(t)
	fd, err := unix.Open(pid1, unix.O_PATH|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), pid1)
	t.Cleanup(func() { f.Close() })
	return Config{Pid1: f, Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000, NoFile: 1024}
}

func testView(t *testing.T, change ...func(*Config)) *View {
	t.Helper()
	cfg := testConfig(t)
	for _, f := range change {
		f(&cfg)
	}
	v, err := NewView(cfg)
	require.NoError(t, err)
	t.Cleanup(v.Close)
	return v
}

func request(command string) Request {
	return Request{
		Command: wire.Command{Path: "/bin/bash", Argv: []string{"bash", "-c", command}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"}},
		Timeout: 20 * time.Second, Grace: 200 * time.Millisecond, OutputBytes: 64 << 10,
	}
}

func start(t *testing.T, v *View, r Request) *Running {
	t.Helper()
	p, err := v.Prepare()
	require.NoError(t, err)
	run, err := p.Start(r)
	require.NoError(t, err)
	return run
}

func run(t *testing.T, v *View, command string) Result {
	t.Helper()
	return start(t, v, request(command)).Wait()
}

func TestACommandsExitAndOutputAreReported(t *testing.T) {
	v := testView(t)
	res := run(t, v, "echo out; echo err >&2; exit 7")
	require.Empty(t, res.NotStarted)
	require.NotNil(t, res.Report)
	require.Equal(t, wire.Report{Ended: true, Code: 7, UserUS: res.Report.UserUS, SystemUS: res.Report.SystemUS, AtNS: res.Report.AtNS}, *res.Report)
	require.Positive(t, res.BoundaryWait)
	require.Equal(t, "out\n", string(res.Stdout.Kept()))
	require.Equal(t, "err\n", string(res.Stderr.Kept()))
	require.Equal(t, "exited 0", res.Pid1)
}

func TestMain(m *testing.M) {
	code := m.Run()
	testkit.Clean()
	os.Exit(code)
}

func TestADeathBySignalIsReportedAsOne(t *testing.T) {
	v := testView(t)
	res := run(t, v, "kill -SEGV $$")
	require.NotNil(t, res.Report)
	require.True(t, res.Report.Ended)
	require.EqualValues(t, unix.SIGSEGV, res.Report.Signal)
	require.Equal(t, "exited 0", res.Pid1, "pid1 reports a signal death, it does not die of it")
}

func TestP3NothingThatACommandStartedOutlivesItsBoundary(t *testing.T) {
	v := testView(t)
	for name, command := range map[string]string{
		"a background child":               "sleep 300 & echo done",
		"a double-forked child":            "( ( sleep 300 & ) & ) ; echo done",
		"a daemon in a session of its own": "setsid bash -c 'setsid sleep 300 & disown; sleep 300' </dev/null >/dev/null 2>&1 & sleep 0.1; echo done",
		"one that ignores every signal":    "bash -c 'trap \"\" TERM HUP INT QUIT USR1; while :; do sleep 1; done' & sleep 0.1; echo done",
		"a stopped one":                    "( kill -STOP $BASHPID ) & sleep 0.1; echo done",
		"one that forks while it dies":     "( while :; do ( sleep 100 & ) ; done ) 2>/dev/null & sleep 0.2; echo done",
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, v, request(command))
			ns := r.Namespace()
			res := r.Wait()
			require.Equal(t, "done\n", string(res.Stdout.Kept()))
			require.Empty(t, processesIn(t, ns), "processes of the namespace after its boundary")
			require.Less(t, time.Since(res.StartedAt), 15*time.Second, "it did not wait for them either")
		})
	}
}

// processesIn names the processes of a PID namespace, as the node sees them.
func processesIn(t *testing.T, namespace uint64) []string {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/ns/pid")
	require.NoError(t, err)
	var found []string
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && target == fmt.Sprintf("pid:[%d]", namespace) {
			comm, _ := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(l)), "comm"))
			found = append(found, l+" "+string(comm))
		}
	}
	return found
}

func TestP3TheControlCaseADetachedChildDoesOutliveAnOrdinaryShell(t *testing.T) {
	testkit.Need(t, testkit.Bash)
	marker := filepath.Join(t.TempDir(), "written")
	require.NoError(t, exec.Command("bash", "-c", "(setsid bash -c 'sleep 0.3; echo late > "+marker+"' &) >/dev/null 2>&1").Run())
	require.Eventually(t, func() bool { _, err := os.Stat(marker); return err == nil }, 10*time.Second, 20*time.Millisecond)
}

func TestATimeoutEndsThreeGenerations(t *testing.T) {
	v := testView(t)
	r := request("bash -c 'bash -c \"sleep 300 & sleep 300\" & sleep 300' & sleep 300")
	r.Timeout = 300 * time.Millisecond
	running := start(t, v, r)
	res := running.Wait()
	require.NotNil(t, res.Report)
	require.True(t, res.Report.TimedOut)
	require.False(t, res.SecondLine)
	require.Empty(t, processesIn(t, res.Namespace))
}

func TestATimeoutGivesTheGroupSIGTERMAndTheGracePeriodFirst(t *testing.T) {
	v := testView(t)
	r := request("trap 'echo cleaned up; exit 9' TERM; sleep 300 & wait")
	r.Timeout, r.Grace = 200*time.Millisecond, 10*time.Second
	res := start(t, v, r).Wait()
	require.NotNil(t, res.Report)
	require.True(t, res.Report.TimedOut)
	require.True(t, res.Report.Ended)
	require.EqualValues(t, 9, res.Report.Code)
	require.Equal(t, "cleaned up\n", string(res.Stdout.Kept()))
}

func TestACommandThatIgnoresSIGTERMEndsAfterTheGracePeriod(t *testing.T) {
	v := testView(t)
	r := request("trap '' TERM; while :; do sleep 1; done")
	r.Timeout, r.Grace = 200*time.Millisecond, 200*time.Millisecond
	res := start(t, v, r).Wait()
	require.NotNil(t, res.Report)
	require.True(t, res.Report.TimedOut)
	require.False(t, res.Report.Ended)
}

func TestCancelEndsACommandWithAReport(t *testing.T) {
	v := testView(t)
	running := start(t, v, request("echo begun; sleep 300"))
	require.NoError(t, running.Cancel())
	res := running.Wait()
	require.NotNil(t, res.Report)
	require.True(t, res.Report.Cancelled)
	require.NoError(t, running.Cancel(), "a cancel after the end does nothing")
}

func TestTheSecondLineEndsACommandWhosePid1DoesNotKeepTheTime(t *testing.T) {
	v := testView(t)
	r := request("sleep 300")
	r.Timeout, r.Grace = 200*time.Millisecond, 100*time.Millisecond
	running := start(t, v, r)
	// Only an ancestor can stop the init of a namespace.
	require.NoError(t, unix.PidfdSendSignal(running.p.pidfd, unix.SIGSTOP, nil, 0))
	res := running.Wait()
	require.Nil(t, res.Report)
	require.True(t, res.SecondLine)
	require.Equal(t, "killed by signal 9", res.Pid1)
	require.Empty(t, processesIn(t, res.Namespace))
}

func TestP2AnEndOfPid1WithoutAReportIsNeverTheCommandsExit(t *testing.T) {
	v := testView(t)
	running := start(t, v, request("sleep 300"))
	running.Kill()
	res := running.Wait()
	require.Nil(t, res.Report)
	require.False(t, res.SecondLine)
	require.Equal(t, "killed by signal 9", res.Pid1)
}

func TestACommandThatCantBeExecutedCertainlyNeverRan(t *testing.T) {
	v := testView(t)
	for name, change := range map[string]func(*wire.Command){
		"no shell":          func(c *wire.Command) { c.Path = "/nonexistent/bash" },
		"no folder":         func(c *wire.Command) { c.Dir = "/nonexistent" },
		"a folder by link":  func(c *wire.Command) { c.Dir = "/proc/self/cwd" },
		"too long a string": func(c *wire.Command) { c.Argv[2] = strings.Repeat("x", 131072) },
	} {
		t.Run(name, func(t *testing.T) {
			r := request("echo ran")
			change(&r.Command)
			res := start(t, v, r).Wait()
			require.NotEmpty(t, res.NotStarted)
			require.Zero(t, res.Stdout.Total())
		})
	}
}

func TestHole12TheLongestCommandRuns(t *testing.T) {
	v := testView(t)
	command := "echo ok #" + strings.Repeat("x", 131071-len("echo ok #"))
	require.Len(t, command, 131071)
	require.Equal(t, "ok\n", string(run(t, v, command).Stdout.Kept()))
}

func TestAPreparedPid1ThatDiedMeansNotStarted(t *testing.T) {
	v := testView(t)
	p, err := v.Prepare()
	require.NoError(t, err)
	require.NoError(t, unix.PidfdSendSignal(p.pidfd, unix.SIGKILL, nil, 0))
	require.Eventually(t, func() bool { return len(processesIn(t, p.ns)) == 0 || isZombie(p.pid) }, 10*time.Second, time.Millisecond)
	_, err = p.Start(request("echo ran"))
	require.ErrorIs(t, err, ErrNotStarted)
}

// launcherOf is the launcher of a prepared pid1: the only other process of its namespace.
func launcherOf(t *testing.T, p *Prepared) int {
	t.Helper()
	for _, found := range processesIn(t, p.ns) {
		var pid int
		_, err := fmt.Sscanf(found, "/proc/%d/", &pid)
		require.NoError(t, err)
		if pid != p.pid {
			return pid
		}
	}
	t.Fatal("a prepared pid1 has no launcher")
	return 0
}

// The worst moment: the command is in the launcher's socket, and the launcher has not read it. It is made to last by SIGSTOP.
func TestP6ACommandThatNobodyReadBeforePid1WasKilledCertainlyNeverRan(t *testing.T) {
	for name, victim := range map[string]func(*Prepared, int) int{
		"pid1":         func(p *Prepared, _ int) int { return p.pid },
		"the launcher": func(_ *Prepared, launcher int) int { return launcher },
	} {
		t.Run(name, func(t *testing.T) {
			v := testView(t)
			p, err := v.Prepare()
			require.NoError(t, err)
			launcher := launcherOf(t, p)
			require.NoError(t, unix.Kill(launcher, unix.SIGSTOP))
			running, err := p.Start(request("echo ran"))
			require.NoError(t, err, "nothing is to be seen yet")
			require.NoError(t, unix.Kill(victim(p, launcher), unix.SIGKILL))
			res := running.Wait()
			require.True(t, res.Untouched)
			require.Contains(t, res.NotStarted, "before it had read the command")
			require.Zero(t, res.Stdout.Total())
		})
	}
}

// The control case: one that was read may have run, although it is killed before it has said a word.
func TestP2ACommandThatWasReadMayHaveRun(t *testing.T) {
	v := testView(t)
	r, begun := request("echo ran; sleep 300"), make(chan struct{}, 1)
	r.Stdout = func(uint64, []byte) { begun <- struct{}{} }
	running := start(t, v, r)
	<-begun
	running.Kill()
	res := running.Wait()
	require.False(t, res.Untouched)
	require.Empty(t, res.NotStarted)
}

func TestTheLastWordOfALauncher(t *testing.T) {
	failed := wire.Failed{Reason: "no folder"}.Encode()
	for _, c := range []struct {
		name       string
		kind       wire.Kind
		body       []byte
		err        error
		notStarted string
		untouched  bool
	}{
		{name: "became the command", err: wire.ErrClosed},
		{name: "did not get to read it", err: fmt.Errorf("read: %w", unix.ECONNRESET), untouched: true,
			notStarted: "the waiting pid1 or its launcher was killed before it had read the command"},
		{name: "could not", kind: wire.KindFailed, body: failed, notStarted: "no folder"},
		{name: "nothing was to be had in time", err: os.ErrDeadlineExceeded},
		{name: "something else", kind: wire.KindReady},
	} {
		notStarted, untouched := lastWord(c.kind, c.body, c.err)
		require.Equal(t, c.notStarted, notStarted, c.name)
		require.Equal(t, c.untouched, untouched, c.name)
	}
}

func isZombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && bytes.Contains(b, []byte(") Z "))
}

// The posture of pid1, launcher and command, read from the running processes and compared as a whole.
func TestThePostureOfACommandIsExactlyThis(t *testing.T) {
	v := testView(t)
	res := run(t, v, `sed -nE '/^(Uid|Gid|Groups|NoNewPrivs|Seccomp|Cap[A-Z][a-z]+|SigBlk|SigIgn|SigCgt):/p' /proc/self/status
		ls /proc/self/fd; readlink /proc/self/fd/0; cat /proc/self/oom_score_adj; ulimit -Hc; ulimit -Hn; ulimit -Hi; ulimit -Hq; tty; env | sort; cat /proc/self/sessionid >/dev/null; echo $(ps -o pgid= -o sid= -p $$); echo $$`)
	lines := strings.Split(strings.TrimSpace(string(res.Stdout.Kept())), "\n")
	pid := lines[len(lines)-1]
	want := []string{
		"Uid:\t1000\t1000\t1000\t1000", "Gid:\t1000\t1000\t1000\t1000", "Groups:\t ",
		"SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000", "SigCgt:\t0000000000000000",
		"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "CapAmb:\t0000000000000000",
		"NoNewPrivs:\t1", "Seccomp:\t2",
		"0", "1", "2", "3", // 3 is ls's own folder
		"/dev/null", "1000", "0", "1024", "1024", "819200", "not a tty", // ulimit counts core files in blocks of 1024: 1 byte shows as 0
		"PATH=/usr/bin:/bin", "PWD=/tmp", "SHLVL=1", "_=/usr/bin/env",
		pid + " " + pid, pid,
	}
	require.Equal(t, want, lines)
}

func TestThePostureOfPid1IsExactlyThis(t *testing.T) {
	v := testView(t)
	p, err := v.Prepare()
	require.NoError(t, err)
	defer p.Discard()
	status := statusOf(t, p.pid)
	require.Equal(t, map[string]string{
		"Uid": "65000\t65000\t65000\t65000", "NoNewPrivs": "1",
		"CapInh": "0000000000000000", "CapPrm": "0000000000000024", "CapEff": "0000000000000024", "CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
		"SigIgn": "0000000000000000", "SigCgt": "0000000000000000",
	}, pick(status, "Uid", "NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "SigIgn", "SigCgt"))
	require.Len(t, strings.Fields(status["NSpid"]), 2)
	for _, ns := range []string{"user", "pid", "mnt", "ipc", "uts"} {
		require.NotEqual(t, link(t, "/proc/self/ns/"+ns), link(t, fmt.Sprintf("/proc/%d/ns/%s", p.pid, ns)), ns)
	}
	uidMap, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", p.pid))
	require.NoError(t, err)
	require.Equal(t, "0 65000 1 1000 1000 1", strings.Join(strings.Fields(string(uidMap)), " "))
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
	require.NoError(t, err)
	require.Equal(t, "GODEBUG=asyncpreemptoff=1\x00GOGC=off\x00GOMAXPROCS=1\x00", string(environ))
}

func statusOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), ":")
		m[k] = strings.TrimSpace(v)
	}
	return m
}

func pick(m map[string]string, keys ...string) map[string]string {
	out := map[string]string{}
	for _, k := range keys {
		out[k] = m[k]
	}
	return out
}

func link(t *testing.T, path string) string {
	t.Helper()
	l, err := os.Readlink(path)
	require.NoError(t, err)
	return l
}

func TestP9ACommandCantTouchPid1(t *testing.T) {
	testkit.Need(t, testkit.Program("python3"))
	v := testView(t)
	res := run(t, v, `
		for s in KILL STOP TERM QUIT SEGV BUS HUP ABRT; do kill -$s 1 2>/dev/null && echo "kill -$s 1 worked"; done
		for f in mem environ maps auxv root cwd exe fd ns ns/user status cmdline; do [ -e /proc/1/$f ] && echo "sees /proc/1/$f"; done
		/usr/bin/python3 - <<'P'
import ctypes, os
l = ctypes.CDLL(None, use_errno=True)
def attempt(name, r):
    if r >= 0: print(name, "worked", r)
attempt("ptrace attach", l.ptrace(16, 1, 0, 0))
attempt("ptrace seize", l.ptrace(0x4206, 1, 0, 0))
attempt("prlimit (hole 6)", l.prlimit(1, 0, ctypes.byref((ctypes.c_uint64 * 2)(0, 0)), None))
attempt("setpriority", l.setpriority(0, 1, 19))
attempt("sched_setscheduler", l.sched_setscheduler(1, 0, ctypes.byref(ctypes.c_int(0))))
b = ctypes.create_string_buffer(8)
class IOV(ctypes.Structure): _fields_ = [("b", ctypes.c_void_p), ("l", ctypes.c_size_t)]
attempt("process_vm_readv", l.process_vm_readv(1, ctypes.byref(IOV(ctypes.addressof(b), 8)), 1, ctypes.byref(IOV(0x400000, 8)), 1, 0))
fd = l.syscall(434, 1, 0)
if fd >= 0:
    attempt("pidfd_getfd", l.syscall(438, fd, 3, 0))
    attempt("pidfd_send_signal", l.syscall(424, fd, 9, 0, 0))
P
		echo end`)
	require.Equal(t, "end\n", string(res.Stdout.Kept()), "stderr: %s", res.Stderr.Kept())
	require.NotNil(t, res.Report)
	require.True(t, res.Report.Ended)
}

func TestACancelledOrKilledCommandLeavesNoDescriptorsBehind(t *testing.T) {
	v := testView(t)
	run(t, v, "true")
	before := descriptors(t)
	for range 20 {
		r := start(t, v, request("sleep 300"))
		r.Kill()
		r.Wait()
		p, err := v.Prepare()
		require.NoError(t, err)
		p.Discard()
	}
	require.Eventually(t, func() bool { return descriptors(t) <= before }, 10*time.Second, 10*time.Millisecond)
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// sealedFile makes a file that is mounted read-only over itself.
func sealedFile(t *testing.T) (dir, path string) {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir = testkit.StateDir(t)
	path = filepath.Join(dir, "config")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o644))
	require.NoError(t, unix.Mount(path, path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	require.NoError(t, unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	return dir, path
}

// during makes a change after a command has begun, and before it ends.
func during(t *testing.T, v *View, change func()) Result {
	t.Helper()
	dir := testkit.StateDir(t)
	require.NoError(t, os.Chmod(dir, 0o777))
	began, changed := filepath.Join(dir, "began"), filepath.Join(dir, "changed")
	r := start(t, v, request("echo > "+began+"; until [ -e "+changed+" ]; do sleep 0.02; done"))
	require.Eventually(t, func() bool { _, err := os.Stat(began); return err == nil }, 20*time.Second, 10*time.Millisecond, "the command began")
	change()
	require.NoError(t, os.WriteFile(changed, nil, 0o644))
	return r.Wait()
}

func TestP11ABrokenSealIsSeenBeforeAndAfterACommand(t *testing.T) {
	dir, sealed := sealedFile(t)
	v := testView(t, func(c *Config) { c.Seals = []string{sealed} })

	res := run(t, v, "true")
	require.Empty(t, res.Report.SealsBroken)

	res = during(t, v, func() { rename(t, dir) })
	require.Equal(t, []string{sealed}, res.Report.SealsBroken, "broken while the command ran")
}

func TestP11ASealBrokenWhileNothingRunsStopsTheNextCommand(t *testing.T) {
	dir, sealed := sealedFile(t)
	v := testView(t, func(c *Config) { c.Seals = []string{sealed} })
	p, err := v.Prepare()
	require.NoError(t, err)
	rename(t, dir)
	running, err := p.Start(request("echo ran"))
	require.NoError(t, err)
	res := running.Wait()
	require.Contains(t, res.NotStarted, sealed)
	require.Zero(t, res.Stdout.Total())
}

// rewrite changes a sealed file in place, by the name of it that is not sealed, as somebody on the node can: mount, device
// and inode stay what they were.
func rewrite(t *testing.T, dir, content string) {
	t.Helper()
	out, err := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c",
		"umount "+dir+"/config && printf '%s' \"$1\" > "+dir+"/config", "sh", content).CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestP11AChangeOfASealedFilesContentIsSeenBeforeAndAfterACommand(t *testing.T) {
	dir, sealed := sealedFile(t)
	v := testView(t, func(c *Config) { c.Seals = []string{sealed} })

	res := during(t, v, func() { rewrite(t, dir, "y") })
	require.Equal(t, []string{sealed}, res.Report.SealsBroken, "written while the command ran")

	p, err := v.Prepare()
	require.NoError(t, err)
	before := p.Seals()[0]
	require.Equal(t, sha256.Sum256([]byte("y")), before.SHA256)
	rewrite(t, dir, "z")
	running, err := p.Start(request("echo ran"))
	require.NoError(t, err)
	res = running.Wait()
	require.Contains(t, res.NotStarted, sealed, "written while nothing ran")
	require.Zero(t, res.Stdout.Total())

	p, err = v.Prepare()
	require.NoError(t, err)
	defer p.Discard()
	after := p.Seals()[0]
	require.False(t, before.Same(after), "written before the next pid1 was made")
	after.SHA256 = before.SHA256
	require.True(t, before.Same(after), "the control case: without the content nothing of it shows")
}

func TestP11ASealThatCantBeReadInFullIsAnErrorThatNamesIt(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	for name, x := range map[string]struct {
		make func(path string) error
		says string
	}{
		"a large file": {func(p string) error { return os.WriteFile(p, bytes.Repeat([]byte("x"), 1<<20+1), 0o644) }, "larger than 1 MiB"},
		"a FIFO":       {func(p string) error { return unix.Mkfifo(p, 0o644) }, "neither a file nor a folder"},
		"a link":       {func(p string) error { return os.Symlink("/etc/passwd", p) }, "neither a file nor a folder"},
		"nothing":      {func(string) error { return nil }, "no such file or directory"},
	} {
		sealed := filepath.Join(dir, "seal")
		require.NoError(t, x.make(sealed), name)
		v := testView(t, func(c *Config) { c.Seals = []string{sealed} })
		_, err := v.Prepare()
		require.ErrorContains(t, err, x.says, name)
		require.ErrorContains(t, err, sealed, name)
		require.NoError(t, os.RemoveAll(sealed))
	}
}

func TestAFileOfExactlyTheLargestSizeIsDigested(t *testing.T) {
	testkit.Need(t, testkit.Root)
	sealed := filepath.Join(testkit.StateDir(t), "seal")
	content := bytes.Repeat([]byte("x"), 1<<20)
	require.NoError(t, os.WriteFile(sealed, content, 0o644))
	p, err := testView(t, func(c *Config) { c.Seals = []string{sealed} }).Prepare()
	require.NoError(t, err)
	defer p.Discard()
	require.Equal(t, sha256.Sum256(content), p.Seals()[0].SHA256)
}

// rename puts another file over dir/config from a mount namespace in which that is no mount point: the kernel then
// detaches the mount everywhere (facts.md, mounts).
func rename(t *testing.T, dir string) {
	t.Helper()
	out, err := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-c",
		"umount "+dir+"/config && echo other > "+dir+"/new && mv "+dir+"/new "+dir+"/config").CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestHole10ASocketThatOutlivesItsProcessIsDestroyed(t *testing.T) {
	testkit.Need(t, testkit.Root)
	total, err := orphan(false)
	require.NoError(t, err, "the control case")
	require.Greater(t, total, 0)
	received, err := orphan(true)
	if testkit.OlderKernel(5, 15) {
		require.ErrorIs(t, err, errLeft, "a kernel that can't destroy it does not hide that it is there")
		return
	}
	require.NoError(t, err)
	require.Less(t, received, total, "what was buffered in the dead process's socket was still sent")
}

var errLeft = errors.New("a socket is left")

// orphan fills a connection, closes its sending end as a death would, maybe destroys what is left, and answers how
// much the other end, which goes on living in another network namespace, receives.
func orphan(destroy bool) (received int, err error) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread has a network namespace of its own
		done <- func() error {
			client, server, err := pairAcrossNamespaces()
			if err != nil {
				return err
			}
			defer unix.Close(server)
			for { // until both buffers are full: the rest is sent when the server reads
				if _, err := unix.Write(client, make([]byte, 64<<10)); err != nil {
					break
				}
			}
			unix.Close(client)
			if destroy {
				destroyed, left, err := DestroySockets()
				if err != nil || destroyed == 0 {
					return fmt.Errorf("%d destroyed, %d left, error %v", destroyed, left, err)
				}
				if left != 0 {
					return errLeft
				}
			}
			buf := make([]byte, 1<<20)
			for {
				n, err := unix.Read(server, buf)
				received += n
				if n <= 0 {
					if destroy && err == nil {
						return errors.New("the connection ended in an orderly way")
					}
					return nil
				}
			}
		}()
	}()
	return received, <-done
}

// pairAcrossNamespaces leaves this thread in a new network namespace, with a socket there that is connected to one in
// another new namespace.
func pairAcrossNamespaces() (client, server int, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return 0, 0, err
	}
	serverNS, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return 0, 0, err
	}
	defer serverNS.Close()
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(listener)
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return 0, 0, err
	}
	// The veth's other end goes to the first namespace.
	script := "ip link add v0 type veth peer name v1 && ip link set v1 netns /proc/$$/fd/3 && ip addr add 10.99.0.1/24 dev v0 && ip link set v0 up && " +
		"nsenter --net=/proc/$$/fd/3 sh -c 'ip addr add 10.99.0.2/24 dev v1 && ip link set v1 up'"
	cmd := exec.Command("sh", "-c", script)
	cmd.ExtraFiles = []*os.File{serverNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, 0, fmt.Errorf("connecting two namespaces: %w: %s", err, out)
	}
	address := &unix.SockaddrInet4{Addr: [4]byte{10, 99, 0, 2}, Port: 4000}
	client, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	if err := errors.Join(unix.Bind(listener, address), unix.Listen(listener, 1), unix.Connect(client, address), unix.SetNonblock(client, true)); err != nil {
		return 0, 0, err
	}
	server, _, err = unix.Accept(listener)
	return client, server, err
}

func TestStrangersAreReapedAndOwnChildrenAreNot(t *testing.T) {
	v := testView(t)
	p, err := v.Prepare()
	require.NoError(t, err)
	stranger, err := syscall.ForkExec("/bin/true", []string{"true"}, nil)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return ReapStrangers() > 0 }, 10*time.Second, time.Millisecond)
	_, err = unix.Wait4(stranger, nil, 0, nil)
	require.ErrorIs(t, err, unix.ECHILD)
	running, err := p.Start(request("exit 4"))
	require.NoError(t, err)
	res := running.Wait()
	ReapStrangers()
	require.EqualValues(t, 4, res.Report.Code)
}

func TestP13OutputIsCountedAndHashedInFullAndKeptInBounds(t *testing.T) {
	v := testView(t)
	var mu sync.Mutex
	var streamed uint64
	r := request("head -c 30000000 /dev/zero; echo end")
	r.Stdout = func(offset uint64, data []byte) {
		mu.Lock()
		defer mu.Unlock()
		if offset == streamed {
			streamed += uint64(len(data))
		}
	}
	res := start(t, v, r).Wait()
	require.EqualValues(t, 30000004, res.Stdout.Total())
	require.EqualValues(t, 30000004, streamed)
	require.Len(t, res.Stdout.Kept(), 64<<10)
	require.True(t, bytes.HasSuffix(res.Stdout.Kept(), []byte("end\n")))
	from, omitted := res.Stdout.Omitted()
	require.EqualValues(t, 32<<10, from)
	require.EqualValues(t, 30000004-64<<10, omitted)
}

func TestAViewThatCouldProtectNothingIsRefused(t *testing.T) {
	cfg := testConfig(t)
	for name, change := range map[string]func(*Config){
		"one uid for pid1 and command":       func(c *Config) { c.CommandUID = c.Pid1UID },
		"a root command":                     func(c *Config) { c.CommandUID = 0 },
		"no pid1":                            func(c *Config) { c.Pid1 = nil },
		"no limit of open files":             func(c *Config) { c.NoFile = 0 },
		"a mount point to hide that is none": func(c *Config) { c.Hide = []string{"/usr/bin"} },
	} {
		t.Run(name, func(t *testing.T) {
			broken := cfg
			change(&broken)
			_, err := NewView(broken)
			require.Error(t, err)
		})
	}
}

func TestUserNamespacesAreRefusedUnlessTheOperatorAllowsThem(t *testing.T) {
	refused := run(t, testView(t), "unshare -Ur id -u")
	require.Contains(t, string(refused.Stderr.Kept()), "Operation not permitted")
	allowed := testView(t, func(c *Config) { c.NestedUserns = true })
	res := run(t, allowed, "unshare -Urm sh -c 'id -u; mount -t tmpfs x /tmp && echo mounted'; kill -KILL 1; cat /proc/1/environ 2>/dev/null; echo end")
	require.Equal(t, "0\nmounted\nend\n", string(res.Stdout.Kept()), string(res.Stderr.Kept()))
	require.Empty(t, processesIn(t, res.Namespace))
	// Root of a namespace of its own is not pid1's root (facts.md, protecting PID 1).
	res = run(t, allowed, "unshare -Ur sh -c 'kill -KILL 1; kill -STOP 1; cat /proc/1/mem /proc/1/environ; nsenter -t 1 -m true; echo end' 2>/dev/null")
	require.Equal(t, "end\n", string(res.Stdout.Kept()))
	require.NotNil(t, res.Report)
	require.True(t, res.Report.Ended)
}

func TestACrashStartsNoProgramOnTheNode(t *testing.T) {
	testkit.Need(t, testkit.Root)
	const pattern = "/proc/sys/kernel/core_pattern"
	before, err := os.ReadFile(pattern)
	require.NoError(t, err)
	dir := testkit.StateDir(t)
	marker := filepath.Join(dir, "ran")
	handler := filepath.Join(dir, "handler")
	require.NoError(t, os.WriteFile(handler, []byte("#!/bin/sh\necho $1 >> "+marker+"\n"), 0o755))
	require.NoError(t, os.WriteFile(pattern, []byte("|"+handler+" %P"), 0o644))
	t.Cleanup(func() { require.NoError(t, os.WriteFile(pattern, before, 0o644)) })

	crash := exec.Command("bash", "-c", "ulimit -c 0; kill -SEGV $$")
	require.Error(t, crash.Run())
	require.Eventually(t, func() bool { _, err := os.Stat(marker); return err == nil }, 10*time.Second, 10*time.Millisecond,
		"the control case: the program runs in spite of a limit of 0")
	require.NoError(t, os.Remove(marker))

	res := run(t, testView(t), "bash -c 'kill -SEGV $$'; ulimit -c 0; bash -c 'kill -SEGV $$'; prlimit --core=0 true; ulimit -Hc; kill -ABRT $$")
	require.EqualValues(t, unix.SIGABRT, res.Report.Signal)
	// Whatever the kernel would have started has been by the time that the boundary is known; another crash shows that
	// programs do get started.
	require.Error(t, exec.Command("bash", "-c", "ulimit -c 0; kill -SEGV $$").Run())
	require.Eventually(t, func() bool { b, _ := os.ReadFile(marker); return bytes.Count(b, []byte("\n")) > 0 }, 10*time.Second, 10*time.Millisecond)
	b, err := os.ReadFile(marker)
	require.NoError(t, err)
	require.Equal(t, 1, bytes.Count(b, []byte("\n")), "only the control case's: %s", b)
}

func TestP11SealsInFoldersThatAreClosedToOthersAreSeenToHold(t *testing.T) {
	dir, sealed := sealedFile(t)
	require.NoError(t, os.Chown(dir, 1000, 1000))
	require.NoError(t, os.Chmod(dir, 0o700))
	v := testView(t, func(c *Config) { c.Seals = []string{sealed} })
	res := run(t, v, "chmod 500 "+dir)
	require.Empty(t, res.NotStarted)
	require.NotNil(t, res.Report)
	require.Empty(t, res.Report.SealsBroken)
}
