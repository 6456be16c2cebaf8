// Package node runs the real agent as a process of its own, for the tests that look at the product from outside: it
// builds sandbox-agent once per test process, starts it on a state folder of the test's, kills it and starts it again,
// and in the end deletes what is left, so that no sandbox stays on the machine.
package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

const (
	// Patience bounds what a test waits for when it fails; nothing passes or fails by it.
	Patience = 60 * time.Second
	poll     = 5 * time.Millisecond
)

// patience is Patience, or more where everything takes longer.
var patience = testkit.Patience()

// program is the agent that Main has built.
var program string

// Main builds the agent, runs a package's tests, and removes what was built: os.Exit(node.Main(m)) in TestMain.
func Main(m *testing.M) int {
	defer testkit.Clean()
	dir, err := os.MkdirTemp("/var/tmp", "sa-agent-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "sandbox-agent")
	if err := testkit.BuildAgent(program); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// Program is the path of the agent that Main has built, for tests that run its other commands.
func Program() string { return program }

// Options say what is not as usual.
type Options struct {
	// Config is appended to the configuration, which names state folder, socket and, unless it has a "workspace:" of its
	// own, /var/tmp as the root of workspaces.
	Config string
	// Env is added to the agent's environment.
	Env []string
	// State is the state folder; empty: one of the test's own.
	State string
	// Program is another build of the agent; empty: the one that Main has built.
	Program string
	// Prepare is called before the first start.
	Prepare func(*Agent)
}

// Agent is a state folder and the process that serves it, again and again.
type Agent struct {
	// T is the test that it reports to; a subtest may take its place for a while.
	T testing.TB
	// Dir holds everything of it, unless Options.State says otherwise.
	Dir, State, Socket, Config, Log string
	Client                          *client.Client
	Cmd                             *exec.Cmd
	// Ended is closed when the process has ended.
	Ended chan struct{}

	env     []string
	program string
}

// Start starts an agent that is shut down at the test's end.
func Start(t testing.TB, o Options) *Agent {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	dir := testkit.StateDir(t)
	a := &Agent{
		T: t, Dir: dir, State: o.State, Socket: filepath.Join(dir, "exec.sock"),
		Config: filepath.Join(dir, "config.yaml"), Log: filepath.Join(dir, "log"), env: o.Env, program: o.Program,
	}
	if a.State == "" {
		a.State = filepath.Join(dir, "state")
	}
	if a.program == "" {
		a.program = program
	}
	if name := os.Getenv(RuntimeEnv); name != "" && !strings.Contains(o.Config, "runtime:") {
		o.Config += onContainerd(t, name)
	}
	text := fmt.Sprintf("state_dir: %s\nsocket: {path: %s}\n%s\n", a.State, a.Socket, o.Config)
	if !strings.Contains(o.Config, "workspace:") {
		text += "workspace: {roots: [/var/tmp]}\n"
	}
	require.NoError(t, os.WriteFile(a.Config, []byte(text), 0o600))
	if o.Prepare != nil {
		o.Prepare(a)
	}
	a.Serve()
	t.Cleanup(a.Shutdown)
	return a
}

// RuntimeEnv names a runtime of containerd (runc, gvisor) that every agent is to host its sandboxes with, in a containerd of
// its own, where the test does not say another; so that the same tests run over every runtime.
const RuntimeEnv = "SANDBOX_TEST_RUNTIME"

func onContainerd(t testing.TB, name string) string {
	t.Helper()
	parts := map[string][]string{"runc": {"runc"}, "gvisor": {"runc", "gvisor"}}[name]
	require.NotEmpty(t, parts, "%s=%s: there is no such runtime", RuntimeEnv, name)
	d := containerd.Start(t, parts...)
	if name == "gvisor" {
		addGuests(filepath.Dir(d.Address))
	}
	return fmt.Sprintf("runtime: {default: %[1]s, allowed: [%[1]s]}\ncontainerd: {address: %[2]s}\n", name, d.Address)
}

// Launch starts the process and waits for nothing.
func (a *Agent) Launch() {
	a.T.Helper()
	receiptd, _ := testkit.Binaries(a.T)
	log, err := os.OpenFile(a.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(a.T, err)
	defer log.Close()
	a.Cmd = exec.Command(a.program, "serve", "--config", a.Config, "--libexec-dir", filepath.Dir(receiptd))
	a.Cmd.Stdout, a.Cmd.Stderr = log, log
	a.Cmd.Env = append(os.Environ(), a.env...)
	a.Cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	require.NoError(a.T, a.Cmd.Start())
	a.Ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(a.Cmd, a.Ended)
	a.Client = client.New(a.Socket)
}

// Serve starts the process and waits until it answers.
func (a *Agent) Serve() {
	a.T.Helper()
	a.Launch()
	a.Until("the agent answers", func() bool {
		if a.Dead() {
			a.T.Fatalf("the agent ended:\n%s", a.LogText())
		}
		return a.Answers()
	})
}

// Answers says whether the agent answers a question.
func (a *Agent) Answers() bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := a.Client.Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
	return err == nil
}

// Dead says whether the process has ended.
func (a *Agent) Dead() bool {
	select {
	case <-a.Ended:
		return true
	default:
		return false
	}
}

// Kill ends the agent as a crash would (kill -9). Its sandboxes go on.
func (a *Agent) Kill() {
	a.T.Helper()
	_ = a.Cmd.Process.Kill()
	<-a.Ended
}

// Restart is a crash and a start.
func (a *Agent) Restart() {
	a.T.Helper()
	a.Kill()
	a.Serve()
}

// LogText is the end of the agent's log, at most 16 KiB.
func (a *Agent) LogText() string {
	b, _ := os.ReadFile(a.Log)
	return string(b[max(0, len(b)-16<<10):])
}

// Until polls for something that comes by itself, and fails the test when it never does.
func (a *Agent) Until(what string, holds func() bool) {
	a.T.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(poll) {
		if time.Now().After(end) {
			a.T.Fatalf("never: %s\n%s", what, a.LogText())
		}
	}
}

// Shutdown deletes what is left of sessions and stops the agent; an agent that is dead is started for it.
func (a *Agent) Shutdown() {
	if a.T.Failed() {
		a.T.Logf("the agent's log:\n%s", a.LogText())
	}
	if a.Dead() {
		a.Serve()
	}
	a.deleteSessions()
	_ = a.Cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.Ended:
	case <-time.After(patience):
		a.T.Errorf("the agent does not end on SIGTERM")
		a.Kill()
	}
}

func (a *Agent) deleteSessions() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := a.Client.Sessions.ListSessions(ctx, &sandboxv1.ListSessionsRequest{PageSize: 1000})
	if err != nil {
		a.T.Errorf("listing what is left: %v", err)
		return
	}
	for _, s := range list.GetSessions() {
		if err := a.deleteSession(s.GetSessionId()); err != nil {
			a.T.Errorf("deleting session %s: %v", s.GetSessionId(), err)
		}
	}
}

func (a *Agent) deleteSession(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := a.Client.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: id})
	return err
}

// BoundaryMethod is how receipts of the runtime that RuntimeEnv names say that a boundary was established.
func BoundaryMethod() string {
	if OnGVisor() {
		return "wait4+cgroup"
	}
	return "wait4"
}
