package escape

import (
	"bytes"
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
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

const (
	// owner owns the repository and the worktree on disk, unless a test is about root's.
	owner = 4321
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = 60 * time.Second
)

var agentBinary string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	defer testkit.CleanBinaries()
	dir, err := os.MkdirTemp("/var/tmp", "sa-escape-bin-")
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
	dir    string // everything of it
	state  string
	socket string
	log    string
	config string
	cmd    *exec.Cmd
	ended  chan struct{}
	client *client.Client
}

// newAgent starts an agent. extra is appended to its configuration.
func newAgent(t *testing.T, extra string) *agent {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	dir := testkit.StateDir(t)
	return startAgent(t, dir, filepath.Join(dir, "state"), extra)
}

func startAgent(t *testing.T, dir, state, extra string) *agent {
	t.Helper()
	a := &agent{
		t: t, dir: dir, state: state, socket: filepath.Join(dir, "exec.sock"),
		log: filepath.Join(dir, "log"), config: filepath.Join(dir, "config.yaml"),
	}
	text := fmt.Sprintf("state_dir: %s\nsocket: {path: %s}\n", a.state, a.socket)
	if !strings.Contains(extra, "workspace:") {
		extra += "workspace: {roots: [/var/tmp]}\n"
	}
	require.NoError(t, os.WriteFile(a.config, []byte(text+extra), 0o600))
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
	a.until("the agent answers", func() bool {
		select {
		case <-a.ended:
			a.t.Fatalf("the agent ended:\n%s", a.logText())
		default:
		}
		_, err := a.client.Node.GetNodeInfo(context.Background(), &sandboxv1.GetNodeInfoRequest{})
		return err == nil
	})
}

func (a *agent) logText() string {
	b, _ := os.ReadFile(a.log)
	return string(b)
}

// until polls for something that comes by itself, and fails the test when it never does.
func (a *agent) until(what string, holds func() bool) {
	a.t.Helper()
	require.Eventually(a.t, holds, patience, 10*time.Millisecond, what)
}

// kill ends the agent as a crash would.
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
		return
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

// session is a session on a real repository with a worktree of its own.
type session struct {
	*agent
	id, repo, worktree string
	first              *sandboxv1.Session
	count              int
}

func (a *agent) session(ownedBy int, change ...func(*sandboxv1.CreateSessionRequest)) *session {
	a.t.Helper()
	repo := testkit.Repo(a.t, ownedBy)
	worktree := testkit.Worktree(a.t, ownedBy, repo, "topic")
	req := &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: worktree}}
	for _, f := range change {
		f(req)
	}
	res, err := a.client.Sessions.CreateSession(context.Background(), req)
	require.NoError(a.t, err, a.logText())
	s := &session{agent: a, id: res.GetSession().GetSessionId(), repo: repo, worktree: worktree, first: res.GetSession()}
	require.Equal(a.t, sandboxv1.Session_READY, s.first.GetState(), s.first.GetReason())
	return s
}

// newSession is a session of an agent of its own.
func newSession(t *testing.T, extra string, change ...func(*sandboxv1.CreateSessionRequest)) *session {
	t.Helper()
	return newAgent(t, extra).session(owner, change...)
}

// within has the session report to a subtest, for as long as that runs.
func (s *session) within(t *testing.T) {
	outer := s.t
	s.t = t
	t.Cleanup(func() { s.t = outer })
}

// request is an exec with an id of its own.
func (s *session) request(command string, timeout time.Duration) *sandboxv1.ExecRequest {
	s.count++
	r := &sandboxv1.ExecRequest{SessionId: s.id, ExecId: fmt.Sprintf("exec-%d", s.count), Command: command, Text: true}
	if timeout > 0 {
		seconds := timeout.Seconds()
		r.TimeoutSeconds = &seconds
	}
	return r
}

// exec runs a command and verifies its receipt where the status asks for one (P2).
func (s *session) exec(command string, timeout time.Duration) *sandboxv1.ExecResult {
	s.t.Helper()
	res, err := s.client.Execs.Exec(context.Background(), s.request(command, timeout))
	require.NoError(s.t, err, "%s\n%s", command, s.logText())
	s.verified(res.GetResult())
	return res.GetResult()
}

func (s *session) receiptFile(r *sandboxv1.ExecResult) string {
	return filepath.Join(s.state, "receipts", r.GetSandboxId(), r.GetExecId()+".json")
}

func (s *session) verified(r *sandboxv1.ExecResult) {
	s.t.Helper()
	switch r.GetStatus() {
	case sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_TIMED_OUT, sandboxv1.ExecResult_KILLED:
	default:
		return
	}
	key, err := verify.LoadKey(filepath.Join(s.state, "keys", r.GetSandboxId()+".pub"))
	require.NoError(s.t, err)
	p, err := verify.File(s.receiptFile(r), key)
	require.NoError(s.t, err)
	require.Equal(s.t, r.GetExecId(), p.ExecID)
	require.Equal(s.t, r.GetStatus().String(), string(p.Status))
	require.Equal(s.t, "wait4", p.Boundary.Method)
}

// output runs a command that must succeed and gives its standard output.
func (s *session) output(command string) string {
	s.t.Helper()
	r := s.exec(command, patience)
	require.Equal(s.t, sandboxv1.ExecResult_EXITED, r.GetStatus(), "%s: %s", command, r.GetReason())
	require.Zero(s.t, r.GetExitCode(), "%s\n%s%s", command, r.GetStdoutText(), r.GetStderrText())
	return r.GetStdoutText()
}

// start begins a command whose answer comes later.
func (s *session) start(command string, timeout time.Duration) (*sandboxv1.ExecRequest, <-chan *sandboxv1.ExecResult) {
	req, answer := s.request(command, timeout), make(chan *sandboxv1.ExecResult, 1)
	c := s.client
	go func() {
		defer close(answer)
		if res, err := c.Execs.Exec(context.Background(), req); err == nil {
			answer <- res.GetResult()
		}
	}()
	return req, answer
}

// alive asserts that the sandbox is the one that the session began with, and works.
func (s *session) alive() {
	s.t.Helper()
	require.Equal(s.t, "ok\n", s.output("echo ok"))
	res, err := s.client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	require.NoError(s.t, err)
	require.Equal(s.t, s.first.GetGeneration(), res.GetSession().GetGeneration())
	require.Equal(s.t, s.first.GetSandbox().GetId(), res.GetSession().GetSandbox().GetId())
}

// put writes a file into the worktree from outside, as its owner would.
func (s *session) put(name, content string, mode os.FileMode) string {
	s.t.Helper()
	path := filepath.Join(s.worktree, name)
	require.NoError(s.t, os.WriteFile(path, []byte(content), mode))
	var st syscall.Stat_t
	require.NoError(s.t, syscall.Stat(s.worktree, &st))
	require.NoError(s.t, os.Chown(path, int(st.Uid), int(st.Gid)))
	require.NoError(s.t, os.Chmod(path, mode))
	return path
}

// python runs a program inside.
func (s *session) python(program string, timeout time.Duration) *sandboxv1.ExecResult {
	s.t.Helper()
	s.put("attack.py", program, 0o644)
	return s.exec("exec python3 attack.py", timeout)
}

// pythonHere runs a program on the node, without any sandbox: the control case.
func pythonHere(t *testing.T, program string) string {
	t.Helper()
	testkit.Need(t, testkit.Program("python3"))
	cmd := exec.Command("python3", "-c", program)
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return string(out)
}

// build compiles a static C program into the worktree.
func (s *session) build(name, source string) {
	s.t.Helper()
	testkit.Need(s.t, testkit.GCC)
	src := filepath.Join(s.t.TempDir(), name+".c")
	require.NoError(s.t, os.WriteFile(src, []byte(source), 0o600))
	bin := filepath.Join(s.worktree, name)
	out, err := exec.Command("gcc", "-static", "-no-pie", "-O1", "-o", bin, src).CombinedOutput()
	require.NoError(s.t, err, string(out))
	require.NoError(s.t, os.Chmod(bin, 0o755))
}

// processes lists the node's processes one of whose threads has a word among its arguments. Of threads, because a
// process goes on when its first one has ended. What is dead has no arguments.
func processes(word string) (pids []string) {
	threads, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/cmdline")
	for _, path := range threads {
		args, _ := os.ReadFile(path)
		for _, arg := range bytes.Split(args, []byte{0}) {
			if bytes.Equal(arg, []byte(word)) {
				pids = append(pids, path)
				break
			}
		}
	}
	return pids
}

// gone asserts that no process with the word is alive. Looked for more than once, because a walk through /proc misses a
// thread that begins while another one ends.
func gone(t *testing.T, word string) {
	t.Helper()
	for range 3 {
		require.Empty(t, processes(word))
	}
}
