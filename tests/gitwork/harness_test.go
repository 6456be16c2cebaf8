package gitwork

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const (
	// owner owns clones and worktrees on disk.
	owner = 4321
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = 60 * time.Second
	isolated = "isolated"
	shared   = "shared"
)

var (
	layouts     = []string{isolated, shared}
	agentBinary string
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	// A sequence costs a clone and a session on each side: a few by default, more with -rapid.checks.
	if err := flag.Set("rapid.checks", "2"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer testkit.CleanBinaries()
	dir, err := os.MkdirTemp("/var/tmp", "sa-gitwork-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	agentBinary = filepath.Join(dir, "sandbox-agent")
	if err := testkit.BuildAgent(agentBinary); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// agent is one running `sandbox-agent serve` with a state folder of its own.
type agent struct {
	t      *testing.T
	state  string
	socket string
	log    string
	config string
	cmd    *exec.Cmd
	ended  chan struct{}
	client *client.Client
}

// newAgent starts an agent that accepts both layouts below /var/tmp. export are patterns of refs that a session in
// the layout "isolated" may move in the base clone besides its own.
func newAgent(t *testing.T, export string) *agent {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	testkit.Leaks(t)
	dir := testkit.StateDir(t)
	a := &agent{
		t: t, state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "exec.sock"),
		log: filepath.Join(dir, "log"), config: filepath.Join(dir, "config.yaml"),
	}
	text := fmt.Sprintf("state_dir: %s\nsocket: {path: %s}\nworkspace: {roots: [/var/tmp]%s}\n", a.state, a.socket, export)
	require.NoError(t, os.WriteFile(a.config, []byte(text), 0o600))
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
	a.cmd = exec.Command(agentBinary, "serve", "--config", a.config, "--libexec-dir", filepath.Dir(receiptd))
	a.cmd.Stdout, a.cmd.Stderr = log, log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	require.NoError(a.t, a.cmd.Start())
	a.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(a.cmd, a.ended)
	a.client = client.New(a.socket)
	require.Eventually(a.t, func() bool {
		select {
		case <-a.ended:
			a.t.Fatalf("the agent ended:\n%s", a.logText())
		default:
		}
		_, err := a.client.Node.GetNodeInfo(context.Background(), &sandboxv1.GetNodeInfoRequest{})
		return err == nil
	}, patience, 10*time.Millisecond, "the agent answers")
}

func (a *agent) logText() string {
	b, _ := os.ReadFile(a.log)
	return string(b)
}

// kill ends the agent as a crash would. Its sandboxes go on.
func (a *agent) kill() {
	a.t.Helper()
	require.NoError(a.t, a.cmd.Process.Kill())
	<-a.ended
}

// shutdown deletes what is left of sessions, so that no sandbox stays on the machine, and stops the agent.
func (a *agent) shutdown() {
	if a.t.Failed() {
		a.t.Logf("the agent's log:\n%s", a.logText())
	}
	select {
	case <-a.ended:
		a.serve()
	default:
	}
	list, err := a.client.Sessions.ListSessions(context.Background(), &sandboxv1.ListSessionsRequest{})
	if err != nil {
		a.t.Errorf("listing what is left: %v", err)
	}
	for _, s := range list.GetSessions() {
		if _, err := a.client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.GetSessionId()}); err != nil {
			a.t.Errorf("deleting session %s: %v", s.GetSessionId(), err)
		}
	}
	_ = a.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.ended:
	case <-time.After(patience):
		a.t.Errorf("the agent does not end on SIGTERM")
		_ = a.cmd.Process.Kill()
		<-a.ended
	}
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
	res, err := a.client.Sessions.CreateSession(context.Background(), &sandboxv1.CreateSessionRequest{
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
	res, err := s.client.Execs.Exec(context.Background(), &sandboxv1.ExecRequest{SessionId: s.id, Command: script, Text: true, TimeoutSeconds: &seconds})
	require.NoError(t, err, script)
	s.newest = res.GetResult()
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.newest.GetStatus(), "%s\n%s\n%s", s.newest.GetReason(), script, s.newest.GetStderrText())
	return s.newest.GetStdoutText(), int(s.newest.GetExitCode())
}

// said is what the newest command wrote on standard error.
func (s *session) said() string { return s.newest.GetStderrText() }

// retire stops the sandbox; the next command gets another one.
func (s *session) retire(t require.TestingT) {
	_, err := s.client.Sessions.RetireSandbox(context.Background(), &sandboxv1.RetireSandboxRequest{SessionId: s.id})
	require.NoError(t, err)
}

// forget deletes the session. The worktree stays, and what the agent keeps for it.
func (s *session) forget(t require.TestingT) {
	_, err := s.client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.id})
	require.NoError(t, err)
}
