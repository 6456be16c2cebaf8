package escape

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/attack/inside"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// owner owns the repository and the worktree on disk, unless a test is about root's.
const owner = 4321

// patience bounds what a test waits for when it fails; nothing passes or fails by it.
const patience = node.Patience

// TestMain is the attacker as well, inside.
func TestMain(m *testing.M) {
	inside.Init()
	os.Exit(node.Main(m))
}

// agent is one running `sandbox-agent serve` with a state folder of its own.
type agent struct{ *node.Agent }

// newAgent starts an agent. extra is appended to its configuration.
func newAgent(t *testing.T, extra string) *agent {
	t.Helper()
	return &agent{node.Start(t, node.Options{Config: extra})}
}

// session is a session on a real repository with a worktree of its own.
type session struct {
	*agent
	id, repo, worktree string
	first              *sandboxv1.Session
	count              int
}

func (a *agent) session(ownedBy int, change ...func(*sandboxv1.CreateSessionRequest)) *session {
	a.T.Helper()
	repo := testkit.Repo(a.T, ownedBy)
	worktree := testkit.Worktree(a.T, ownedBy, repo, "topic")
	req := &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: worktree}}
	for _, f := range change {
		f(req)
	}
	res, err := a.Client.Sessions.CreateSession(context.Background(), req)
	require.NoError(a.T, err, a.LogText())
	s := &session{agent: a, id: res.GetSession().GetSessionId(), repo: repo, worktree: worktree, first: res.GetSession()}
	require.Equal(a.T, sandboxv1.Session_READY, s.first.GetState(), s.first.GetReason())
	return s
}

// newSession is a session of an agent of its own.
func newSession(t *testing.T, extra string, change ...func(*sandboxv1.CreateSessionRequest)) *session {
	t.Helper()
	return newAgent(t, extra).session(owner, change...)
}

// within has the session report to a subtest, for as long as that runs.
func (s *session) within(t testing.TB) {
	outer := s.T
	s.T = t
	t.Cleanup(func() { s.T = outer })
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
	s.T.Helper()
	res, err := s.Client.Execs.Exec(context.Background(), s.request(command, timeout))
	require.NoError(s.T, err, "%s\n%s", command, s.LogText())
	s.verified(res.GetResult())
	return res.GetResult()
}

func (s *session) receiptFile(r *sandboxv1.ExecResult) string {
	return filepath.Join(s.State, "receipts", r.GetSandboxId(), r.GetExecId()+".json")
}

func (s *session) verified(r *sandboxv1.ExecResult) {
	s.T.Helper()
	switch r.GetStatus() {
	case sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_TIMED_OUT, sandboxv1.ExecResult_KILLED:
	default:
		return
	}
	key, err := verify.LoadKey(filepath.Join(s.State, "keys", r.GetSandboxId()+".pub"))
	require.NoError(s.T, err)
	p, err := verify.File(s.receiptFile(r), key)
	require.NoError(s.T, err)
	require.Equal(s.T, r.GetExecId(), p.ExecID)
	require.Equal(s.T, r.GetStatus().String(), string(p.Status))
	require.Equal(s.T, node.BoundaryMethod(), p.Boundary.Method)
}

// output runs a command that must succeed and gives its standard output.
func (s *session) output(command string) string {
	s.T.Helper()
	r := s.exec(command, patience)
	require.Equal(s.T, sandboxv1.ExecResult_EXITED, r.GetStatus(), "%s: %s", command, r.GetReason())
	require.Zero(s.T, r.GetExitCode(), "%s\n%s%s", command, r.GetStdoutText(), r.GetStderrText())
	return r.GetStdoutText()
}

// start begins a command whose answer comes later.
func (s *session) start(command string, timeout time.Duration) (*sandboxv1.ExecRequest, <-chan *sandboxv1.ExecResult) {
	req, answer := s.request(command, timeout), make(chan *sandboxv1.ExecResult, 1)
	c := s.Client
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
	s.T.Helper()
	require.Equal(s.T, "ok\n", s.output("echo ok"))
	res, err := s.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	require.NoError(s.T, err)
	require.Equal(s.T, s.first.GetGeneration(), res.GetSession().GetGeneration())
	require.Equal(s.T, s.first.GetSandbox().GetId(), res.GetSession().GetSandbox().GetId())
}

// put writes a file into the worktree from outside, as its owner would.
func (s *session) put(name, content string, mode os.FileMode) string {
	s.T.Helper()
	path := filepath.Join(s.worktree, name)
	require.NoError(s.T, os.WriteFile(path, []byte(content), mode))
	var st syscall.Stat_t
	require.NoError(s.T, syscall.Stat(s.worktree, &st))
	require.NoError(s.T, os.Chown(path, int(st.Uid), int(st.Gid)))
	require.NoError(s.T, os.Chmod(path, mode))
	return path
}

// python runs a program inside.
func (s *session) python(program string, timeout time.Duration) *sandboxv1.ExecResult {
	s.T.Helper()
	s.put("attack.py", program, 0o644)
	return s.exec("exec python3 attack.py", timeout)
}

// pythonHere runs a program on the node, without any sandbox: the control case.
func pythonHere(t testing.TB, program string) string {
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
	s.T.Helper()
	testkit.Need(s.T, testkit.GCC)
	src := filepath.Join(s.T.TempDir(), name+".c")
	require.NoError(s.T, os.WriteFile(src, []byte(source), 0o600))
	bin := filepath.Join(s.worktree, name)
	out, err := exec.Command("gcc", "-static", "-no-pie", "-O1", "-o", bin, src).CombinedOutput()
	require.NoError(s.T, err, string(out))
	require.NoError(s.T, os.Chmod(bin, 0o755))
}

// processes lists the processes one of whose threads has a word among its arguments: the node's, and under gVisor, whose
// processes are none of the node's, those in the sandboxes. Of threads, because a process goes on when its first one has ended.
// What is dead has no arguments.
func processes(t testing.TB, word string) (found []string) {
	t.Helper()
	threads, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/cmdline")
	for _, path := range threads {
		args, _ := os.ReadFile(path)
		for _, arg := range bytes.Split(args, []byte{0}) {
			if bytes.Equal(arg, []byte(word)) {
				found = append(found, path)
				break
			}
		}
	}
	for _, arg := range node.GuestArguments(t) {
		if arg == word {
			found = append(found, "in a guest")
		}
	}
	return found
}

// gone asserts that no process with the word is alive. Looked for more than once, because a walk through /proc misses a
// thread that begins while another one ends.
func gone(t testing.TB, word string) {
	t.Helper()
	for range 3 {
		require.Empty(t, processes(t, word))
	}
}
