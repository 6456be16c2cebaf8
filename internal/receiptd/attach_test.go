package receiptd

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
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
)

// attachEnv makes the test binary an attach process to the socket that it names.
const attachEnv = "RECEIPTD_TEST_ATTACH"

func attachForTest(socket string) {
	if err := Attach(socket, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// attachProcess is an attach process, and the agent's ends of its standard streams as a connection.
type attachProcess struct {
	net.Conn // only what ttrpc uses of one: the rest is nil

	t      *testing.T
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    io.ReadCloser
	stderr strings.Builder
	ended  chan struct{}
}

func (a *attachProcess) Read(b []byte) (int, error)  { return a.out.Read(b) }
func (a *attachProcess) Write(b []byte) (int, error) { return a.in.Write(b) }
func (a *attachProcess) Close() error                { return a.in.Close() }

func attachTo(t *testing.T, socket string, as ...*syscall.SysProcAttr) *attachProcess {
	t.Helper()
	a := &attachProcess{t: t, cmd: exec.Command("/proc/self/exe"), ended: make(chan struct{})}
	a.cmd.Env = []string{attachEnv + "=" + socket}
	a.cmd.Stderr = &a.stderr
	for _, attr := range as {
		a.cmd.SysProcAttr = attr
	}
	in, theirOut, err := os.Pipe()
	require.NoError(t, err)
	theirIn, out, err := os.Pipe()
	require.NoError(t, err)
	a.cmd.Stdin, a.cmd.Stdout, a.in, a.out = theirIn, theirOut, out, in
	require.NoError(t, a.cmd.Start())
	theirIn.Close()
	theirOut.Close()
	go func() { _ = a.cmd.Wait(); close(a.ended) }()
	t.Cleanup(func() {
		_ = a.cmd.Process.Kill()
		<-a.ended
		a.in.Close()
		a.out.Close()
	})
	return a
}

// exits waits for the process's end and gives its exit code.
func (a *attachProcess) exits() int {
	a.t.Helper()
	select {
	case <-a.ended:
		return a.cmd.ProcessState.ExitCode()
	case <-time.After(30 * time.Second):
		a.t.Fatal("the attach process does not end")
		return -1
	}
}

// attachOver makes a client of receiptd over an attach process, and initialises it.
func (s *sandbox) attachOver(epoch uint64) (*attachProcess, receiptdv1.ReceiptdClient) {
	s.t.Helper()
	a := attachTo(s.t, filepath.Join(s.dir, "socket"))
	rpc := ttrpc.NewClient(a)
	s.t.Cleanup(func() { rpc.Close() })
	client := receiptdv1.NewReceiptdClient(rpc)
	res, err := client.Init(context.Background(), s.initRequest(epoch))
	require.NoError(s.t, err, "%s", &a.stderr)
	require.Equal(s.t, s.key, res.GetPublicKey())
	s.client, s.epoch = client, epoch
	return a, client
}

func TestACommandRunsOverAnAttachProcess(t *testing.T) {
	s := startSandbox(t)
	a, _ := s.attachOver(2)
	o := s.exec(s.request("e1", "echo out; echo err >&2; head -c 3000000 /dev/zero | tr '\\0' x"))
	require.NotNil(t, o.done, "%v", o.err)
	require.Equal(t, "err\n", o.stderr)
	require.Equal(t, 3000000+len("out\n"), len(o.stdout)+int(o.lost))
	require.NoError(t, a.in.Close(), "the agent has gone")
	require.Zero(t, a.exits(), "%s", &a.stderr)
}

func TestP6OfTwoAttachProcessesTheNewerOneServes(t *testing.T) {
	s := startSandbox(t)
	older, old := s.attachOver(2)
	_, err := old.Exec(context.Background(), s.request("e1", "touch "+s.dir+"/begun; until [ -e "+s.dir+"/gate ]; do sleep 0.01; done"))
	require.NoError(t, err)
	require.NoError(t, os.Chmod(s.dir, 0o777))
	require.Eventually(t, func() bool { _, err := os.Stat(s.dir + "/begun"); return err == nil }, 10*time.Second, time.Millisecond)

	_, newer := s.attachOver(3)
	require.Zero(t, older.exits(), "receiptd closes the older one: %s", &older.stderr)
	_, err = old.Exec(context.Background(), s.request("late", "true"))
	require.Error(t, err)
	require.NoError(t, os.WriteFile(s.dir+"/gate", nil, 0o644))
	info, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 3, ExecId: "e1", WaitMs: 20_000})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_RECEIPTED, info.GetExec())
	info, err = newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 3, ExecId: "late"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_NEVER_SEEN, info.GetExec())
	require.NotNil(t, s.exec(s.request("e2", "true")).done)

	late := attachTo(t, filepath.Join(s.dir, "socket"))
	rpc := ttrpc.NewClient(late)
	defer rpc.Close()
	_, err = receiptdv1.NewReceiptdClient(rpc).Init(context.Background(), s.initRequest(2))
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "an older agent's attach that comes late: %v", err)
	require.NotNil(t, s.exec(s.request("e3", "true")).done, "and the newest goes on")
}

func TestP13AnAttachProcessThatCarriesNothingStallsNoCommand(t *testing.T) {
	s := startSandbox(t)
	a, client := s.attachOver(2)
	stream, err := client.Exec(context.Background(), s.request("e1", "echo begun; until [ -e "+s.dir+"/gate ]; do sleep 0.01; done; head -c 8000000 /dev/zero"))
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	require.NoError(t, unix.Kill(a.cmd.Process.Pid, unix.SIGSTOP))
	require.NoError(t, os.WriteFile(s.dir+"/gate", nil, 0o644))
	require.NoError(t, os.Chmod(s.dir, 0o755))
	require.Eventually(t, func() bool { return s.has("e1") }, 30*time.Second, 5*time.Millisecond, "the command ends while nobody carries its output")
	require.EqualValues(t, 8_000_000+len("begun\n"), s.receipt("e1").Stdout.Bytes)
	_, newer := s.attachOver(3)
	info, err := newer.Info(context.Background(), &receiptdv1.InfoRequest{AttachEpoch: 3, ExecId: "e1"})
	require.NoError(t, err)
	require.Equal(t, receiptdv1.ExecKnowledge_RECEIPTED, info.GetExec())
	require.NoError(t, unix.Kill(a.cmd.Process.Pid, unix.SIGCONT))
	require.NotNil(t, s.exec(s.request("e2", "true")).done, "whatever the older one still brings")
}

func TestAnAttachProcessWaitsForItsReceiptd(t *testing.T) {
	socket := filepath.Join(testkit.StateDir(t), "socket")
	a := attachTo(t, socket)
	_, err := a.in.Write([]byte("hello"))
	require.NoError(t, err)
	select {
	case <-a.ended:
		require.Fail(t, "it does not wait", "%s", &a.stderr)
	case <-time.After(2 * attachPoll):
	}
	l, err := listen(socket)
	require.NoError(t, err)
	defer l.Close()
	conn, err := l.Accept()
	require.NoError(t, err)
	b := make([]byte, 5)
	_, err = io.ReadFull(conn, b)
	require.NoError(t, err)
	require.Equal(t, "hello", string(b))
	_, err = conn.Write([]byte("there"))
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	answer, err := io.ReadAll(a.out)
	require.NoError(t, err)
	require.Equal(t, "there", string(answer))
	require.Zero(t, a.exits(), "%s", &a.stderr)
}

func TestAnAttachProcessThatCantReachReceiptdSaysWhy(t *testing.T) {
	a := attachTo(t, filepath.Join(testkit.StateDir(t), strings.Repeat("x", 120)))
	require.Equal(t, 1, a.exits())
	require.Contains(t, a.stderr.String(), "connecting to receiptd")
}

// Other uids and another PID namespace keep a container's commands from it already; this is the second line.
func TestP10AnAttachProcessIsUndumpable(t *testing.T) {
	testkit.Need(t, testkit.Root)
	const uid = 4322
	socket := filepath.Join(testkit.StateDir(t), "socket")
	l, err := listen(socket)
	require.NoError(t, err)
	defer l.Close()
	require.NoError(t, os.Chmod(socket, 0o666))
	owner := func(pid int) int { // of what others of its uid may look into: root, where a process is not dumpable (proc(5))
		t.Helper()
		var st unix.Stat_t
		require.NoError(t, unix.Stat(fmt.Sprintf("/proc/%d/environ", pid), &st))
		return int(st.Uid)
	}
	as := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	sleep := exec.Command("sleep", "600")
	sleep.SysProcAttr = as
	require.NoError(t, sleep.Start())
	defer func() { _ = sleep.Process.Kill(); _ = sleep.Wait() }()
	require.Equal(t, uid, owner(sleep.Process.Pid), "another process of that uid can be looked into")

	a := attachTo(t, socket, as)
	conn, err := l.Accept()
	require.NoError(t, err, "%s", &a.stderr)
	defer conn.Close()
	require.Zero(t, owner(a.cmd.Process.Pid))
}
