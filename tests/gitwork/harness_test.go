package gitwork

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

const (
	// owner owns clones and worktrees on disk.
	owner = 4321
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = node.Patience
	isolated = "isolated"
	shared   = "shared"
)

var layouts = []string{isolated, shared}

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	// A sequence costs a clone and a session on each side: a few by default, more with -rapid.checks.
	if err := flag.Set("rapid.checks", "2"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return node.Main(m)
}

// agent is one running `sandbox-agent serve` with a state folder of its own.
type agent struct{ *node.Agent }

// newAgent starts an agent that accepts both layouts below /var/tmp. export are patterns of refs that a session in
// the layout "isolated" may move in the base clone besides its own.
func newAgent(t *testing.T, export string) *agent {
	t.Helper()
	testkit.Leaks(t)
	return &agent{node.Start(t, node.Options{Config: fmt.Sprintf("workspace: {roots: [/var/tmp]%s}\n", export)})}
}

// session is a session with a worktree of its own.
type session struct {
	*agent
	id, worktree string
	first        *sandboxv1.Session
	// newest is the answer to the newest command.
	newest *sandboxv1.ExecResult
}

// open makes a session. The worktree is made by the agent where it doesn't exist.
func (a *agent) open(t require.TestingT, repo, worktree, branch, layout string) *session {
	res, err := a.Client.Sessions.CreateSession(context.Background(), &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: worktree, Branch: branch, BaseRef: "main", GitLayout: layout},
	})
	require.NoError(t, err)
	s := &session{agent: a, id: res.GetSession().GetSessionId(), worktree: worktree, first: res.GetSession()}
	require.Equal(t, sandboxv1.Session_READY, s.first.GetState(), s.first.GetReason())
	return s
}

// run runs a script in the worktree and gives its standard output and its exit code.
func (s *session) run(t require.TestingT, script string) (string, int) {
	seconds := patience.Seconds()
	res, err := s.Client.Execs.Exec(context.Background(), &sandboxv1.ExecRequest{SessionId: s.id, Command: script, Text: true, TimeoutSeconds: &seconds})
	require.NoError(t, err, script)
	s.newest = res.GetResult()
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.newest.GetStatus(), "%s\n%s\n%s", s.newest.GetReason(), script, s.newest.GetStderrText())
	return s.newest.GetStdoutText(), int(s.newest.GetExitCode())
}

// said is what the newest command wrote on standard error.
func (s *session) said() string { return s.newest.GetStderrText() }

// retire stops the sandbox; the next command gets another one.
func (s *session) retire(t require.TestingT) {
	_, err := s.Client.Sessions.RetireSandbox(context.Background(), &sandboxv1.RetireSandboxRequest{SessionId: s.id})
	require.NoError(t, err)
}

// forget deletes the session. The worktree stays, and what the agent keeps for it.
func (s *session) forget(t require.TestingT) {
	_, err := s.Client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.id})
	require.NoError(t, err)
}
