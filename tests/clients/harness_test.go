package clients

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

const (
	// owner owns the repositories and the worktrees on disk.
	owner = 4321
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = node.Patience
)

// host is the one agent of this package. Tests that restart it run alone, as all of them do.
var host *agent

// TestMain starts the agent before the first test and takes everything away after the last one, examples included: they
// have no way of their own to do either. Where no agent can run, they are skipped, and each test says why.
func TestMain(m *testing.M) {
	flag.Parse()
	main := &mainTB{}
	code := 1
	if main.run(func() { host = startAgent(main) }) {
		code = m.Run()
	} else if !main.failed {
		_ = flag.Set("test.skip", "^Example")
		code = m.Run()
	}
	main.cleanup()
	testkit.Clean()
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
	*node.Agent
	binary string
	common *sandboxv1.Session
}

// needAgent skips the test where there is none.
func needAgent(t testing.TB) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	require.NotNil(t, host)
}

func startAgent(t testing.TB) *agent {
	binary := filepath.Join(testkit.StateDir(t), "sandbox-agent")
	require.NoError(t, testkit.BuildAgent(binary))
	return &agent{Agent: node.Start(t, node.Options{Program: binary, Config: "limits: {grace: 200ms}"}), binary: binary}
}

// client is a new client, as of another program.
func (a *agent) client() *client.Client { return client.New(a.Socket, client.Options{}) }

// end ends the process by a signal.
func (a *agent) end(s os.Signal) {
	a.T.Helper()
	require.NoError(a.T, a.Cmd.Process.Signal(s))
	<-a.Ended
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
			t.Logf("the agent's log ends:\n%s", host.LogText())
		}
		_, err := host.client().DeleteSession(context.Background(), s.GetSessionId(), 0)
		require.NoError(t, err)
	})
	return s
}

// common is a session for tests that leave it as it is; each has exec ids and files of its own.
func common(t testing.TB) *sandboxv1.Session {
	t.Helper()
	needAgent(t)
	if host.common == nil {
		host.common = session(host.T, host.client())
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent's log ends:\n%s", host.LogText())
		}
	})
	return host.common
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
