package clients

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const (
	// owner owns the repositories and the worktrees on disk.
	owner = 4321
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = 60 * time.Second
)

// node is the one agent of this package. Tests that restart it run alone, as all of them do.
var node *agent

// TestMain starts the agent before the first test and takes everything away after the last one, examples included: they
// have no way of their own to do either. Where no agent can run, they are skipped, and each test says why.
func TestMain(m *testing.M) {
	flag.Parse()
	main := &mainTB{}
	code := 1
	if main.run(func() { node = startAgent(main) }) {
		code = m.Run()
	} else if !main.failed {
		_ = flag.Set("test.skip", "^Example")
		code = m.Run()
	}
	main.cleanup()
	testkit.CleanBinaries()
	if main.failed {
		code = 1
	}
	os.Exit(code)
}

// mainTB is what testkit needs of a test, for TestMain.
type mainTB struct {
	testing.TB
	cleanups []func()
	failed   bool
}

// run says whether f came to its end.
func (m *mainTB) run(f func()) (ended bool) {
	done := make(chan struct{})
	go func() { // Goexit is how a test ends itself
		defer close(done)
		f()
		ended = true
	}()
	<-done
	return ended
}

func (m *mainTB) cleanup() {
	m.run(func() {
		for i := len(m.cleanups) - 1; i >= 0; i-- {
			m.cleanups[i]()
		}
	})
}

func (m *mainTB) Helper()                         {}
func (m *mainTB) Cleanup(f func())                { m.cleanups = append(m.cleanups, f) }
func (m *mainTB) Failed() bool                    { return m.failed }
func (m *mainTB) FailNow()                        { m.failed = true; runtime.Goexit() }
func (m *mainTB) Fatal(args ...any)               { m.Errorf("%s", fmt.Sprint(args...)); m.FailNow() }
func (m *mainTB) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
func (m *mainTB) Errorf(format string, args ...any) {
	m.failed = true
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}
func (m *mainTB) Fatalf(format string, args ...any) { m.Errorf(format, args...); m.FailNow() }
func (m *mainTB) Skipf(string, ...any)              { runtime.Goexit() }

// agent is a running `sandbox-agent serve` with a state folder of its own.
type agent struct {
	t                           testing.TB
	binary, config, socket, log string
	state                       string
	cmd                         *exec.Cmd
	ended                       chan struct{}
	common                      *sandboxv1.Session
}

// needAgent skips the test where there is none.
func needAgent(t testing.TB) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	require.NotNil(t, node)
}

func startAgent(t testing.TB) *agent {
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	dir := testkit.StateDir(t)
	a := &agent{
		t: t, binary: filepath.Join(dir, "sandbox-agent"), config: filepath.Join(dir, "config.yaml"),
		socket: filepath.Join(dir, "exec.sock"), log: filepath.Join(dir, "log"), state: filepath.Join(dir, "state"),
	}
	require.NoError(t, testkit.BuildAgent(a.binary))
	config := fmt.Sprintf("state_dir: %s\nsocket: {path: %s}\nworkspace: {roots: [/var/tmp]}\nlimits: {grace: 200ms}\n", a.state, a.socket)
	require.NoError(t, os.WriteFile(a.config, []byte(config), 0o600))
	a.serve()
	t.Cleanup(a.shutdown)
	return a
}

// serve starts the process and waits until it answers.
func (a *agent) serve() {
	a.t.Helper()
	receiptd, _ := testkit.Binaries(a.t)
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(a.t, err)
	defer log.Close()
	a.cmd = exec.Command(a.binary, "serve", "--config", a.config, "--libexec-dir", filepath.Dir(receiptd))
	a.cmd.Stdout, a.cmd.Stderr = log, log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	require.NoError(a.t, a.cmd.Start())
	a.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(a.cmd, a.ended)
	c := a.client()
	until(a.t, "the agent answers", func() bool {
		select {
		case <-a.ended:
			a.t.Errorf("the agent ended:\n%s", a.logText())
			a.t.FailNow()
		default:
		}
		_, err := c.NodeInfo(context.Background())
		return err == nil
	})
}

// client is a new client, as of another program.
func (a *agent) client() *client.Client { return client.New(a.socket, client.Options{}) }

// logText is the end of the log.
func (a *agent) logText() string {
	b, _ := os.ReadFile(a.log)
	return string(b[max(0, len(b)-4096):])
}

// end ends the process by a signal.
func (a *agent) end(s os.Signal) {
	a.t.Helper()
	require.NoError(a.t, a.cmd.Process.Signal(s))
	<-a.ended
}

// shutdown deletes what is left of sessions, so that no sandbox stays on the machine, and stops the agent.
func (a *agent) shutdown() {
	c := a.client()
	for s, err := range c.Sessions(context.Background()) {
		require.NoError(a.t, err)
		_, err = c.DeleteSession(context.Background(), s.GetSessionId(), 0)
		require.NoError(a.t, err)
	}
	a.end(syscall.SIGTERM)
}

// until polls for something that comes by itself, and fails the test when it never does.
func until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited for long: %s", what)
		}
	}
}

// session makes a session on a repository of its own; with the test both go.
func session(t testing.TB, c *client.Client) *sandboxv1.Session {
	t.Helper()
	repo := testkit.Repo(t, owner)
	s, err := c.CreateSession(context.Background(), &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: testkit.Worktree(t, owner, repo, "topic")},
	})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_READY, s.GetState(), s.GetReason())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent's log ends:\n%s", node.logText())
		}
		_, err := node.client().DeleteSession(context.Background(), s.GetSessionId(), 0)
		require.NoError(t, err)
	})
	return s
}

// common is a session for tests that leave it as it is; each has exec ids and files of its own.
func common(t testing.TB) *sandboxv1.Session {
	t.Helper()
	needAgent(t)
	if node.common == nil {
		node.common = session(node.t, node.client())
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent's log ends:\n%s", node.logText())
		}
	})
	return node.common
}

// lines counts the lines of a file in the session's worktree, 0 without one.
func lines(s *sandboxv1.Session, name string) int {
	b, _ := os.ReadFile(filepath.Join(s.GetWorkspace().GetWorktree(), name))
	return strings.Count(string(b), "\n")
}

// let makes the file that a command of the session waits for.
func let(t testing.TB, s *sandboxv1.Session, name string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(s.GetWorkspace().GetWorktree(), name), nil, 0o600))
}
