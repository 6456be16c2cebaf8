package receiptd

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// serverEnv makes the test binary a receiptd in the folder that it names: a process of its own, because receiptd
// destroys every socket of its network namespace.
const serverEnv = "RECEIPTD_TEST_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(serverEnv); dir != "" {
		serveForTest(dir)
	}
	if socket := os.Getenv(attachEnv); socket != "" {
		attachForTest(socket)
	}
	code := m.Run()
	testkit.Clean()
	os.Exit(code)
}

func serveForTest(dir string) {
	// A container's /proc is its own.
	if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("proc", "/proc", "proc", 0, "")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	s, err := New(Options{Receipts: filepath.Join(dir, "receipts"), Socket: filepath.Join(dir, "socket"), Pid1: filepath.Join(dir, "pid1"), Version: "test"})
	if err == nil {
		var l net.Listener
		if l, err = listen(filepath.Join(dir, "socket")); err == nil {
			err = sayReady()
		}
		if err == nil {
			err = s.Serve(context.Background(), l)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// sandbox is a receiptd without a container: the node's root file system, a network namespace of its own.
type sandbox struct {
	t        *testing.T
	dir      string
	receipts string
	cmd      *exec.Cmd
	client   receiptdv1.ReceiptdClient
	epoch    uint64
	key      []byte
	seals    []string
}

func startSandbox(t *testing.T, seals ...string) *sandbox {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces)
	_, pid1 := testkit.Binaries(t)
	s := &sandbox{t: t, dir: testkit.StateDir(t), seals: seals}
	s.receipts = filepath.Join(s.dir, "receipts")
	require.NoError(t, os.Mkdir(s.receipts, 0o700))
	b, err := os.ReadFile(pid1)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, "pid1"), b, 0o755))
	s.cmd = exec.Command("/proc/self/exe")
	s.cmd.Env = []string{serverEnv + "=" + s.dir}
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	ready, err := s.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() })
	line := make([]byte, 6)
	_, err = io.ReadFull(ready, line)
	require.NoError(t, err)
	require.Equal(t, "ready\n", string(line))
	s.client, s.epoch, s.key = s.attach(1)
	return s
}

func (s *sandbox) dial() receiptdv1.ReceiptdClient {
	s.t.Helper()
	c, err := net.Dial("unix", filepath.Join(s.dir, "socket"))
	require.NoError(s.t, err)
	client := ttrpc.NewClient(c)
	s.t.Cleanup(func() { client.Close() })
	return receiptdv1.NewReceiptdClient(client)
}

func (s *sandbox) initRequest(epoch uint64) *receiptdv1.InitRequest {
	return &receiptdv1.InitRequest{
		Identity:    &receiptdv1.Identity{SessionId: "s1", SandboxId: "sb-1", Generation: 3},
		AttachEpoch: epoch,
		View: &receiptdv1.View{Dir: "/tmp", Pid1Uid: 65000, CommandUid: 1000, CommandGid: 1000, Seals: s.seals,
			Env: []*receiptdv1.EnvVar{{Name: "PATH", Value: "/usr/bin:/bin"}, {Name: "A", Value: "session"}}},
		Limits:     &receiptdv1.Limits{OutputBytes: 64 << 10, Nofile: 1024, GraceMs: 200, MaxTimeoutMs: 60_000},
		Provenance: &receiptdv1.Provenance{Rootfs: "r", RootfsKind: "image", RootfsDigest: "sha256:d", ReceiptdSha256: "1", Pid1Sha256: fmt.Sprint(epoch)},
	}
}

func (s *sandbox) attach(epoch uint64) (receiptdv1.ReceiptdClient, uint64, []byte) {
	s.t.Helper()
	client := s.dial()
	res, err := client.Init(context.Background(), s.initRequest(epoch))
	require.NoError(s.t, err)
	return client, epoch, res.GetPublicKey()
}

func (s *sandbox) request(id, command string) *receiptdv1.ExecRequest {
	nonce := make([]byte, receipt.NonceSize)
	_, _ = rand.Read(nonce)
	return &receiptdv1.ExecRequest{AttachEpoch: s.epoch, ExecId: id, Nonce: nonce, Command: command, TimeoutMs: 20_000}
}

// outcome reads a stream to its end.
type outcome struct {
	stdout, stderr string
	lost           uint64
	done           *receiptdv1.Done
	notStarted     *receiptdv1.NotStarted
	lostReceipt    *receiptdv1.Lost
	err            error
}

func (s *sandbox) exec(req *receiptdv1.ExecRequest) outcome {
	s.t.Helper()
	stream, err := s.client.Exec(context.Background(), req)
	require.NoError(s.t, err)
	return read(stream)
}

func read(stream receiptdv1.Receiptd_ExecClient) (o outcome) {
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return o
		}
		if err != nil {
			o.err = err
			return o
		}
		if c := e.GetOutput(); c != nil {
			if c.GetStream() == receiptdv1.Stream_STDOUT {
				o.stdout += string(c.GetData())
			} else {
				o.stderr += string(c.GetData())
			}
			o.lost += c.GetLostBytes()
		}
		if e.GetDone() != nil {
			o.done = e.GetDone()
		}
		if e.GetNotStarted() != nil {
			o.notStarted = e.GetNotStarted()
		}
		if e.GetLost() != nil {
			o.lostReceipt = e.GetLost()
		}
	}
}

func (s *sandbox) receipt(id string) receipt.Predicate {
	s.t.Helper()
	p, err := verify.File(filepath.Join(s.receipts, receipt.FileName(id)), s.key)
	require.NoError(s.t, err)
	return p
}

func TestACommandIsAnsweredWhenItsReceiptIsOnDisk(t *testing.T) {
	s := startSandbox(t)
	req := s.request("e1", "echo out; echo err >&2; exit 3")
	req.Labels = map[string]string{"turn": "7"}
	req.RequestedTimeoutMs = 20_000
	o := s.exec(req)
	require.NoError(t, o.err)
	require.Equal(t, "out\n", o.stdout)
	require.Equal(t, "err\n", o.stderr)
	require.NotNil(t, o.done)
	p := s.receipt("e1")
	require.Equal(t, receipt.Exited, p.Status)
	require.Equal(t, 3, p.ExitCode)
	require.NoError(t, verify.Expect{
		SessionID: "s1", SandboxID: "sb-1", Generation: 3, ExecID: "e1", Nonce: fmt.Sprintf("%x", req.GetNonce()),
		RequestDigest: receipt.Request{SessionID: "s1", Command: req.GetCommand(), TimeoutMS: 20_000, Labels: req.GetLabels()}.Digest(),
	}.Match(p))
	require.Equal(t, "wait4", p.Boundary.Method)
	require.NotZero(t, p.Boundary.PIDNamespace)
	require.True(t, p.SealsIntact)
	require.EqualValues(t, 1, p.Sequence)
}

func TestEachReceiptSaysWhatTheSandboxWasMadeOfAsTheFirstInitToldIt(t *testing.T) {
	s := startSandbox(t)
	want := receipt.Provenance{Rootfs: "r", RootfsKind: "image", RootfsDigest: "sha256:d", ReceiptdSHA256: "1", Pid1SHA256: "1"}
	require.NotNil(t, s.exec(s.request("e1", "true")).done)
	require.Equal(t, want, s.receipt("e1").Provenance)
	s.client, s.epoch, _ = s.attach(2)
	require.NotNil(t, s.exec(s.request("e2", "true")).done)
	require.Equal(t, want, s.receipt("e2").Provenance, "not what a later one tells")
}

func TestTheEnvironmentIsTheViewsAndThenTheExecs(t *testing.T) {
	s := startSandbox(t)
	req := s.request("e1", "echo $A $B")
	req.Env = []*receiptdv1.EnvVar{{Name: "A", Value: "exec"}, {Name: "B", Value: "b"}}
	require.Equal(t, "exec b\n", s.exec(req).stdout)
	require.Equal(t, "session\n", s.exec(s.request("e2", "echo $A $B")).stdout)
}

func TestEveryEndOfACommandIsInItsReceipt(t *testing.T) {
	s := startSandbox(t)
	for name, c := range map[string]struct {
		command string
		change  func(*receiptdv1.ExecRequest)
		want    func(*testing.T, receipt.Predicate)
	}{
		"signal": {command: "kill -KILL $$", want: func(t *testing.T, p receipt.Predicate) {
			require.Equal(t, receipt.Signaled, p.Status)
			require.Equal(t, 9, p.Signal)
		}},
		"timeout": {command: "sleep 100", change: func(r *receiptdv1.ExecRequest) { r.TimeoutMs = 200 }, want: func(t *testing.T, p receipt.Predicate) {
			require.Equal(t, receipt.TimedOut, p.Status)
			require.NotEmpty(t, p.Reason)
		}},
		"timeout beyond grace": {command: "trap '' TERM; while :; do sleep 1; done", change: func(r *receiptdv1.ExecRequest) { r.TimeoutMs = 2000 }, want: func(t *testing.T, p receipt.Predicate) {
			require.Equal(t, receipt.TimedOut, p.Status)
			require.Contains(t, p.Reason, "grace")
		}},
		"no such program": {command: "no-such-program", want: func(t *testing.T, p receipt.Predicate) {
			require.Equal(t, receipt.Exited, p.Status)
			require.Equal(t, 127, p.ExitCode)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			id := strings.ReplaceAll(name, " ", "-")
			req := s.request(id, c.command)
			if c.change != nil {
				c.change(req)
			}
			require.NotNil(t, s.exec(req).done)
			c.want(t, s.receipt(id))
		})
	}
}

func TestP2AKilledPid1IsKILLEDAndNotAnExit(t *testing.T) {
	s := startSandbox(t)
	stream, err := s.client.Exec(context.Background(), s.request("e1", "sleep 300"))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return exec.Command("pkill", "-KILL", "-f", "^pid1$", "--ns", fmt.Sprint(s.cmd.Process.Pid), "--nslist", "net").Run() == nil
	}, 10*time.Second, 20*time.Millisecond)
	require.NotNil(t, read(stream).done)
	require.Equal(t, receipt.Killed, s.receipt("e1").Status)
}

// sealed makes a file that is mounted read-only over itself, and gives a second name of it that is not.
func sealed(t *testing.T, content string) (seal, open string) {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	seal, open = filepath.Join(dir, "config"), filepath.Join(dir, "open")
	require.NoError(t, os.WriteFile(seal, []byte(content), 0o644))
	require.NoError(t, os.Link(seal, open))
	require.NoError(t, unix.Mount(seal, seal, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(seal, unix.MNT_DETACH) })
	require.NoError(t, unix.Mount("", seal, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	return seal, open
}

func TestP11AReceiptNamesTheSealWhoseContentChangedWhileTheCommandRan(t *testing.T) {
	seal, open := sealed(t, "good")
	s := startSandbox(t, seal)
	require.NotNil(t, s.exec(s.request("e1", "cat "+seal)).done)
	require.True(t, s.receipt("e1").SealsIntact, "the control case")
	stream, err := s.client.Exec(context.Background(), s.request("e2", "echo begun; sleep 1"))
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(open, []byte("evil"), 0o644))
	require.NotNil(t, read(stream).done)
	p := s.receipt("e2")
	require.False(t, p.SealsIntact)
	require.Equal(t, []string{seal}, p.SealsBroken)
}

func TestP11ASealWhoseContentChangedBeforeTheNextPid1WasMadeStopsEveryCommand(t *testing.T) {
	seal, open := sealed(t, "good")
	s := startSandbox(t, seal)
	end := func() {
		s.settle()
		require.NoError(t, exec.Command("pkill", "-KILL", "-f", "^pid1$", "--ns", fmt.Sprint(s.cmd.Process.Pid), "--nslist", "net").Run())
	}
	end()
	require.NotNil(t, s.exec(s.request("e1", "true")).done, "the control case: another pid1 is made")
	end()
	require.NoError(t, os.WriteFile(open, []byte("evil"), 0o644))
	for _, id := range []string{"e2", "e3"} {
		o := s.exec(s.request(id, "touch "+s.dir+"/ran"))
		require.NotNil(t, o.notStarted)
		require.Contains(t, o.notStarted.GetReason(), seal)
	}
	require.NoFileExists(t, s.dir+"/ran")
	require.NoError(t, os.WriteFile(open, []byte("good"), 0o644))
	require.NotNil(t, s.exec(s.request("e4", "true")).done, "and what it was lets it go on")
}

func TestTheSealsOfASandboxAreSaidWithTheDigestOfTheirContent(t *testing.T) {
	seal, _ := sealed(t, "good")
	folder := filepath.Dir(seal)
	s := startSandbox(t, seal, folder)
	_, err := s.dial().Init(context.Background(), s.initRequest(2))
	require.NoError(t, err)
	res, err := s.dial().Init(context.Background(), s.initRequest(3))
	require.NoError(t, err)
	require.Len(t, res.GetSeals(), 2)
	require.Equal(t, fmt.Sprintf("%x", sha256.Sum256([]byte("good"))), res.GetSeals()[0].GetSha256())
	require.NotZero(t, res.GetSeals()[0].GetMountId())
	require.Empty(t, res.GetSeals()[1].GetSha256(), "a folder has no content to digest")
}

func TestP4OneCommandAtATime(t *testing.T) {
	s := startSandbox(t)
	stream, err := s.client.Exec(context.Background(), s.request("e1", "echo begun; sleep 1"))
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	o := s.exec(s.request("e2", "echo two"))
	require.Equal(t, codes.FailedPrecondition, status.Code(o.err))
	require.NotNil(t, read(stream).done)
	info, err := s.client.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: s.epoch, ExecId: "e2"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_NEVER_SEEN, info.GetExec())
}

func TestP6AnExecIdRunsOnce(t *testing.T) {
	s := startSandbox(t)
	require.NotNil(t, s.exec(s.request("e1", "echo x")).done)
	require.Equal(t, codes.AlreadyExists, status.Code(s.exec(s.request("e1", "echo y")).err))
	info, err := s.client.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: s.epoch, ExecId: "e1"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_RECEIPTED, info.GetExec())
}

func TestP6AnOlderConnectionNeverStartsAnything(t *testing.T) {
	s := startSandbox(t)
	old := s.client
	newer, _, _ := s.attach(2)
	stream, err := old.Exec(context.Background(), s.request("late", "echo ran > "+s.dir+"/ran"))
	if err == nil {
		o := read(stream)
		require.Error(t, o.err)
		require.Nil(t, o.done)
	}
	info, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 2, ExecId: "late"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_NEVER_SEEN, info.GetExec())
	require.NoFileExists(t, s.dir+"/ran")
	// Nor does a newer connection with an older epoch's words.
	s.client = newer
	require.Equal(t, codes.FailedPrecondition, status.Code(s.exec(s.request("late", "true")).err), "the request names epoch 1")
	_, err = s.dial().Init(context.Background(), s.initRequest(2))
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "an epoch can't be used twice")
	other := s.initRequest(3)
	other.Identity.Generation = 4
	_, err = s.dial().Init(context.Background(), other)
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "another sandbox's agent")
}

// Also those that receiptd has accepted a moment ago, and does not serve yet.
func TestP6ANewerInitClosesEveryConnectionThatCameBeforeIt(t *testing.T) {
	s := startSandbox(t)
	for epoch := uint64(2); epoch < 60; epoch++ {
		before, err := net.Dial("unix", filepath.Join(s.dir, "socket"))
		require.NoError(t, err)
		s.attach(epoch)
		require.NoError(t, before.SetDeadline(time.Now().Add(30*time.Second)))
		_, err = before.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, before.Close())
	}
}

// processes are those of the sandbox with this argument 0.
func (s *sandbox) processes(name string) (pids []int) {
	s.t.Helper()
	net, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", s.cmd.Process.Pid))
	require.NoError(s.t, err)
	dirs, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(s.t, err)
	for _, dir := range dirs {
		theirs, _ := os.Readlink(dir + "/ns/net")
		cmdline, _ := os.ReadFile(dir + "/cmdline")
		if arg, _, _ := strings.Cut(string(cmdline), "\x00"); theirs != net || arg != name {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		require.NoError(s.t, err)
		pids = append(pids, pid)
	}
	return pids
}

// dead says whether a process has ended with all its threads, reaped or not. Of a PID namespace's first process that means
// that all the others of it have: its last thread, which need not be the first, waits for them.
func dead(pid int) bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil || len(tasks) > 1 {
		return err != nil
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, _ := strings.Cut(string(stat), ") ")
	return err != nil || strings.HasPrefix(after, "Z") || strings.HasPrefix(after, "X")
}

// waiting gives the one pid1 that waits for a command, and its launcher.
func (s *sandbox) waiting() (pid1, launcher int) {
	s.t.Helper()
	require.Eventually(s.t, func() bool {
		return len(s.processes("pid1")) == 1 && len(s.processes("pid1-launcher")) == 1
	}, 10*time.Second, time.Millisecond)
	return s.processes("pid1")[0], s.processes("pid1-launcher")[0]
}

func TestP6APid1ThatIsKilledWhileItWaitsCostsNoCommand(t *testing.T) {
	s := startSandbox(t)
	for n := range 5 { // one that waits, or one that is just being made
		killed := s.processes("pid1")
		for _, pid := range killed {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		// A killed pid1 takes its launcher with it only once it has been on a processor again: until then the launcher could
		// take the command and begin it.
		for _, pid := range killed {
			require.Eventually(t, func() bool { return dead(pid) }, 10*time.Second, time.Millisecond)
		}
		id := fmt.Sprintf("e%d", n)
		o := s.exec(s.request(id, "echo ran"))
		require.Equal(t, "ran\n", o.stdout, "%v", o)
		require.Equal(t, receipt.Exited, s.receipt(id).Status)
	}
}

// The worst moment: the command has been handed over, and its launcher, which SIGSTOP keeps from it, has not read it.
func TestP6ACommandThatItsPid1NeverReadIsRunByAnother(t *testing.T) {
	s := startSandbox(t)
	pid1, launcher := s.waiting()
	require.NoError(t, unix.Kill(launcher, unix.SIGSTOP))
	stream, err := s.client.Exec(context.Background(), s.request("e1", "echo ran >> "+s.dir+"/ran; echo ran"))
	require.NoError(t, err)
	// The next one is made only once the command has been handed to this one.
	require.Eventually(t, func() bool { return len(s.processes("pid1")) == 2 }, 10*time.Second, time.Millisecond)
	require.NoError(t, os.Chmod(s.dir, 0o777))
	require.NoError(t, unix.Kill(pid1, unix.SIGKILL))
	require.Equal(t, "ran\n", read(stream).stdout)
	require.Equal(t, receipt.Exited, s.receipt("e1").Status)
	ran, err := os.ReadFile(s.dir + "/ran")
	require.NoError(t, err)
	require.Equal(t, "ran\n", string(ran), "once")
}

// A newer connection that comes in between has the last word: the old one's command is not begun anew.
func TestP6ACommandThatItsPid1NeverReadIsNotRunForAnOlderConnection(t *testing.T) {
	s := startSandbox(t)
	pid1, launcher := s.waiting()
	require.NoError(t, unix.Kill(launcher, unix.SIGSTOP))
	_, err := s.client.Exec(context.Background(), s.request("e1", "echo ran"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(s.processes("pid1")) == 2 }, 10*time.Second, time.Millisecond)
	newer, _, _ := s.attach(2)
	require.NoError(t, unix.Kill(pid1, unix.SIGKILL))
	info, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 2, ExecId: "e1", WaitMs: 20_000})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_NEVER_SEEN, info.GetExec(), "and so it is answered NOT_STARTED")
}

// An Init waits for what an older connection is just starting, and what comes after that one never starts. The start is
// made to last: the launcher is stopped, and the command's environment is more than its socket takes at once.
func TestP6AnInitIsNotAnsweredWhileAnOlderConnectionStartsSomething(t *testing.T) {
	s := startSandbox(t)
	_, launcher := s.waiting()
	require.NoError(t, unix.Kill(launcher, unix.SIGSTOP))
	first := s.request("first", "echo ran")
	for n := range 8 {
		first.Env = append(first.Env, &receiptdv1.EnvVar{Name: fmt.Sprintf("V%d", n), Value: strings.Repeat("x", 100_000)})
	}
	_, err := s.client.Exec(context.Background(), first)
	require.NoError(t, err)
	info := func() receiptdv1.ExecKnowledge {
		res, err := s.client.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 1, ExecId: "first"})
		require.NoError(t, err)
		return res.GetExec()
	}
	require.Eventually(t, func() bool { return info() == receiptdv1.ExecKnowledge_RUNNING }, 10*time.Second, time.Millisecond)
	_, err = s.client.Exec(context.Background(), s.request("late", "echo late"))
	require.NoError(t, err)
	newer := s.dial()
	answered := make(chan *receiptdv1.InitResponse, 1)
	go func() {
		res, err := newer.Init(context.Background(), s.initRequest(2))
		if err != nil {
			res = nil
		}
		answered <- res
	}()
	for range 200 { // receiptd answers everything else meanwhile
		require.Equal(t, receiptdv1.ExecKnowledge_RUNNING, info())
		require.Empty(t, answered, "the older connection's start is not over")
	}
	require.NoError(t, unix.Kill(launcher, unix.SIGCONT))
	res := <-answered
	require.NotNil(t, res)
	if res.GetRunningExecId() == "" { // it has ended since
		require.NotEmpty(t, res.GetLastReceiptSha256())
	} else {
		require.Equal(t, "first", res.GetRunningExecId())
	}
	for id, want := range map[string]receiptdv1.ExecKnowledge{"first": receiptdv1.ExecKnowledge_RECEIPTED, "late": receiptdv1.ExecKnowledge_NEVER_SEEN} {
		known, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 2, ExecId: id, WaitMs: 20_000})
		require.NoError(t, err)
		require.Equal(t, want, known.GetExec(), id)
	}
}

// A request that lies in an old connection when the newer Init comes has started when that is answered, or never does.
// receiptd is stopped until both are written, so that it may take them in either order.
func TestP6ARequestOnAnOldConnectionStartsBeforeTheNewerInitIsAnsweredOrNever(t *testing.T) {
	s := startSandbox(t)
	require.NoError(t, os.Chmod(s.dir, 0o777))
	before := 0
	const rounds = 10
	for n := range rounds {
		id := fmt.Sprintf("e%d", n)
		old, epoch := s.client, s.epoch
		newer := s.dial()
		require.NoError(t, s.cmd.Process.Signal(unix.SIGSTOP))
		// Both clients write before they give up waiting for an answer.
		stream, err := old.Exec(context.Background(), s.request(id, "echo ran >> "+s.dir+"/"+id))
		require.NoError(t, err)
		answered := make(chan *receiptdv1.InitResponse, 1)
		go func() {
			res, err := newer.Init(context.Background(), s.initRequest(epoch+1))
			if err != nil {
				res = nil
			}
			answered <- res
		}()
		require.NoError(t, s.cmd.Process.Signal(unix.SIGCONT))
		res := <-answered
		require.NotNil(t, res)
		s.client, s.epoch = newer, epoch+1
		started := res.GetRunningExecId() == id || res.GetLastReceiptSha256() != "" && s.has(id)
		_ = read(stream)
		known, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: s.epoch, ExecId: id, WaitMs: 20_000})
		require.NoError(t, err)
		require.NotNil(t, s.exec(s.request("after-"+id, "true")).done, "by then an earlier command has come to its end")
		if started {
			before++
			require.Equal(t, receiptdv1.ExecKnowledge_RECEIPTED, known.GetExec())
			require.FileExists(t, s.dir+"/"+id)
		} else {
			require.Equal(t, receiptdv1.ExecKnowledge_NEVER_SEEN, known.GetExec())
			require.NoFileExists(t, s.dir+"/"+id)
			require.False(t, s.has(id))
		}
	}
	t.Logf("%d of %d started before the newer Init was answered, the rest never", before, rounds)
}

// has says whether there is a receipt.
func (s *sandbox) has(id string) bool {
	_, err := os.Stat(filepath.Join(s.receipts, id+".json"))
	return err == nil
}

func TestACommandGoesOnWhenItsConnectionDoesNot(t *testing.T) {
	s := startSandbox(t)
	stream, err := s.client.Exec(context.Background(), s.request("e1", "echo begun; sleep 1; echo end"))
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	newer, _, _ := s.attach(2)
	info, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 2, ExecId: "e1"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_RUNNING, info.GetExec())
	info, err = newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 2, ExecId: "e1", WaitMs: 20_000})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_RECEIPTED, info.GetExec())
	p := s.receipt("e1")
	kept, err := receipt.ReadKept(s.receipts, &p, receipt.Stdout)
	require.NoError(t, err)
	require.Equal(t, "begun\nend\n", string(kept))
}

func TestP13ASlowReaderStallsNothingAndIsToldWhatItLost(t *testing.T) {
	s := startSandbox(t)
	stream, err := s.client.Exec(context.Background(), s.request("e1", "head -c 8000000 /dev/zero"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(s.receipts, "e1.json")); return err == nil },
		30*time.Second, 10*time.Millisecond, "the command ends while nobody reads")
	o := read(stream)
	require.NotNil(t, o.done)
	require.EqualValues(t, 8_000_000, s.receipt("e1").Stdout.Bytes)
	require.Less(t, len(o.stdout), 8_000_000)
}

func TestCancelEndsTheCommandAndKeepsItsReceipt(t *testing.T) {
	s := startSandbox(t)
	stream, err := s.client.Exec(context.Background(), s.request("e1", "echo begun; sleep 300"))
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	res, err := s.client.Cancel(context.Background(), &receiptdv1.CancelRequest{AttachEpoch: s.epoch, ExecId: "e1"})
	require.NoError(t, err)
	require.True(t, res.GetWasRunning())
	require.NotNil(t, read(stream).done)
	require.True(t, s.receipt("e1").Cancelled)
	res, err = s.client.Cancel(context.Background(), &receiptdv1.CancelRequest{AttachEpoch: s.epoch, ExecId: "e1"})
	require.NoError(t, err)
	require.False(t, res.GetWasRunning())
}

func TestARequestThatCantBeRunIsRefused(t *testing.T) {
	s := startSandbox(t)
	for name, change := range map[string]func(*receiptdv1.ExecRequest){
		"no id":            func(r *receiptdv1.ExecRequest) { r.ExecId = "" },
		"an id with slash": func(r *receiptdv1.ExecRequest) { r.ExecId = "../x" },
		"a short nonce":    func(r *receiptdv1.ExecRequest) { r.Nonce = []byte{1} },
		"no time":          func(r *receiptdv1.ExecRequest) { r.TimeoutMs = 0 },
		"too much time":    func(r *receiptdv1.ExecRequest) { r.TimeoutMs = 60_001 },
	} {
		t.Run(name, func(t *testing.T) {
			req := s.request("e1", "true")
			change(req)
			require.Equal(t, codes.InvalidArgument, status.Code(s.exec(req).err))
		})
	}
	o := s.exec(s.request("nul", "echo \x00"))
	require.NotNil(t, o.notStarted, "the kernel has no way to pass a NUL byte: it never ran")
}

func TestProveShowsWhatHolds(t *testing.T) {
	s := startSandbox(t)
	res, err := s.client.Prove(context.Background(), &receiptdv1.ProveRequest{AttachEpoch: s.epoch})
	require.NoError(t, err)
	require.NotEmpty(t, res.GetItems())
	for _, i := range res.GetItems() {
		// This receiptd runs on the node's own root file system, which is writable only for root: all must hold.
		require.True(t, i.GetHolds(), "%s %s: %s", i.GetPromise(), i.GetWhat(), i.GetDetail())
	}
	require.NotNil(t, s.exec(s.request("e1", "true")).done, "the sandbox is of use afterwards")
	require.EqualValues(t, 1, s.receipt("e1").Sequence, "the probe leaves no receipt")
}

func TestJudgeNamesWhatDoesNotHold(t *testing.T) {
	view := &receiptdv1.View{CommandUid: 1000, Pid1Uid: 65000, Hide: []string{"/.sandbox/receipts"}}
	good := func() *probe {
		return &probe{status: map[string]string{"Uid": "1000\t1000\t1000\t1000", "CapInh": "0", "CapPrm": "0", "CapEff": "0", "CapBnd": "0", "CapAmb": "0", "NoNewPrivs": "1", "Seccomp": "2"},
			flags: map[string]bool{"stdin": true}, before: 3, ended: true, mounts: []string{"1 2 0:1 / / ro - ext4 x rw"}}
	}
	for _, i := range judge(good(), view, nil) {
		require.True(t, i.GetHolds(), i.GetWhat())
	}
	for what, spoil := range map[string]func(*probe){
		"a detached, double-forked child is gone with its namespace": func(p *probe) { p.after = 1 },
		"the command has its own uid, not pid1's":                    func(p *probe) { p.status["Uid"] = "0\t0\t0\t0" },
		"no capability in CapEff":                                    func(p *probe) { p.status["CapEff"] = "0000000000000400" },
		"no_new_privs is set":                                        func(p *probe) { p.status["NoNewPrivs"] = "0" },
		"a seccomp filter is on":                                     func(p *probe) { p.status["Seccomp"] = "0" },
		"receipts, control socket and binaries are not visible":      func(p *probe) { p.sees = []string{"/.sandbox/receipts"} },
		"none of them is mounted in the command's view":              func(p *probe) { p.mounts = append(p.mounts, "1 2 0:1 / /.sandbox/receipts rw - ext4 x rw") },
		"pid1 is not visible":                                        func(p *probe) { p.flags["pid1"] = true },
		"the command has descriptors 0, 1 and 2 only":                func(p *probe) { p.fds = []string{"7"} },
		"standard input is /dev/null":                                func(p *probe) { p.flags = nil },
		"the root file system is read-only":                          func(p *probe) { p.flags["root"] = true },
	} {
		p := good()
		spoil(p)
		var failed []string
		for _, i := range judge(p, view, nil) {
			if !i.GetHolds() {
				failed = append(failed, i.GetWhat())
			}
		}
		require.Equal(t, []string{what}, failed)
	}
	unproved := good()
	unproved.before = 1
	require.False(t, judge(unproved, view, nil)[0].GetHolds(), "a child that was never seen proves nothing")
}

func TestAReceiptThatCantBeWrittenIsLostAndSaidSo(t *testing.T) {
	s := startSandbox(t)
	stream, err := s.client.Exec(context.Background(), s.request("e1", "echo begun; sleep 1"))
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(s.receipts, "e1.json"), []byte("planted"), 0o600))
	o := read(stream)
	require.NotNil(t, o.lostReceipt)
	info, err := s.client.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: s.epoch, ExecId: "e1"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_RECEIPT_LOST, info.GetExec())
	require.Equal(t, codes.AlreadyExists, status.Code(s.exec(s.request("e1", "true")).err))
}

func TestHundredsOfCommandsLeaveNothingBehind(t *testing.T) {
	s := startSandbox(t)
	for i := range 50 {
		require.NotNil(t, s.exec(s.request(fmt.Sprintf("warm-%d", i), "true")).done)
	}
	s.settle()
	before := s.holds()
	for i := range 300 {
		require.NotNil(t, s.exec(s.request(fmt.Sprintf("e-%d", i), "echo x; (sleep 100 &)")).done)
	}
	require.Eventually(t, func() bool {
		after := s.holds()
		return after.fds <= before.fds && after.processes <= before.processes && after.mounts <= before.mounts
	},
		20*time.Second, 50*time.Millisecond, "before %+v, after %+v", before, s.holds())
	require.Less(t, s.holds().rss, before.rss+16<<10, "kilobytes of resident memory")
	report, err := verify.Chain(s.receipts, s.key)
	require.NoError(t, err)
	require.NotNil(t, report)
}

// settle waits until a pid1 waits for its command, which is how an idle receiptd is.
func (s *sandbox) settle() {
	require.Eventually(s.t, func() bool {
		info, err := s.client.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: s.epoch})
		return err == nil && info.GetPrepared()
	}, 20*time.Second, 10*time.Millisecond)
}

type holdings struct{ fds, processes, mounts, rss int }

func (s *sandbox) holds() holdings {
	s.t.Helper()
	pid := s.cmd.Process.Pid
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(s.t, err)
	children, err := exec.Command("pgrep", "-c", "--ns", fmt.Sprint(pid), "--nslist", "net").Output()
	require.NoError(s.t, err)
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	require.NoError(s.t, err)
	statusFile, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(s.t, err)
	h := holdings{fds: len(fds), mounts: bytes.Count(mounts, []byte("\n"))}
	_, err = fmt.Sscan(string(children), &h.processes)
	require.NoError(s.t, err)
	_, rss, _ := strings.Cut(string(statusFile), "VmRSS:")
	_, err = fmt.Sscan(rss, &h.rss)
	require.NoError(s.t, err)
	return h
}
