package faults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

const (
	// owner owns the repositories and worktrees.
	owner = 4322
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = node.Patience
	poll     = 5 * time.Millisecond
)

// long says whether everything is tried.
func long() bool { return os.Getenv("SANDBOX_TEST_LONG") == "1" }

var (
	agentBinary string
	building    sync.Mutex
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	defer testkit.Clean()
	dir, err := os.MkdirTemp("/var/tmp", "sa-faults-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	agentBinary = filepath.Join(dir, "sandbox-agent")
	return m.Run()
}

// needAgent builds the agent with its crash points, once.
func needAgent(t testing.TB) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git, testkit.UserNamespaces, testkit.CgroupV1orV2)
	building.Lock()
	defer building.Unlock()
	if _, err := os.Stat(agentBinary); err == nil {
		return
	}
	if built := filepath.Join(os.Getenv(testkit.BinDirEnv), "sandbox-agent-crashpoints"); os.Link(built, agentBinary) == nil {
		return // for a machine that has no Go
	}
	testkit.Need(t, testkit.Program("go"), testkit.GCC)
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	build := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-tags", "crashpoints", "-o", agentBinary, "./cmd/sandbox-agent")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
}

// agent is an agent with crash points.
type agent struct {
	*node.Agent
	armed  string // the file that says where it dies
	points string // the file that says where it came by
}

// newAgent starts an agent. extra is appended to its configuration, prepare is called with the state folder before.
func newAgent(t testing.TB, extra string, prepare ...func(state string)) *agent {
	t.Helper()
	needAgent(t)
	dir := testkit.StateDir(t)
	a := &agent{armed: filepath.Join(dir, "armed"), points: filepath.Join(dir, "points")}
	a.Agent = node.Start(t, node.Options{
		Config: extra, Program: agentBinary,
		Env: []string{"SANDBOX_AGENT_CRASH_AT=" + a.armed, "SANDBOX_AGENT_CRASH_LOG=" + a.points},
		Prepare: func(n *node.Agent) {
			a.Agent = n
			require.NoError(t, os.Mkdir(a.State, 0o711))
			// Some of the points are on threads that have the worktree's owner's rights for a moment.
			require.NoError(t, os.WriteFile(a.points, nil, 0o600))
			require.NoError(t, os.Chmod(a.points, 0o666))
			t.Cleanup(a.nothingLeft)
			for _, f := range prepare {
				f(a.State)
			}
		},
	})
	t.Cleanup(a.disarm)
	return a
}

// arm has the agent die when it comes to a point for the count-th time.
func (a *agent) arm(name string, count int) {
	a.T.Helper()
	require.NoError(a.T, os.WriteFile(a.armed, fmt.Appendf(nil, "%s:%d", name, count), 0o644))
}

func (a *agent) disarm() { _ = os.Remove(a.armed) }

// passed gives the points that the agent came by since the last call, in their order.
func (a *agent) passed() []string {
	b, _ := os.ReadFile(a.points)
	require.NoError(a.T, os.Truncate(a.points, 0))
	return strings.Fields(string(b))
}

// nothingLeft looks, after the agent's end, for what no deletion may leave.
func (a *agent) nothingLeft() {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		left := a.left()
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			a.T.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
			return
		}
	}
}

func (a *agent) left() (left []string) {
	entries, _ := os.ReadDir(filepath.Join(a.State, "sandboxes"))
	for _, e := range entries {
		left = append(left, "folder "+filepath.Join(a.State, "sandboxes", e.Name()))
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, a.State+"/") {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	for _, id := range a.sandboxes() {
		for _, pid := range processesOf(id) {
			left = append(left, fmt.Sprintf("process %d of %s", pid, id))
		}
		left = append(left, cgroupsOf(id)...)
	}
	return left
}

// sandboxes are the ids of all sandboxes that this state folder ever had: their receipts stay.
func (a *agent) sandboxes() (ids []string) {
	entries, _ := os.ReadDir(filepath.Join(a.State, "receipts"))
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids
}

// processesOf are those in a sandbox's cgroup that have not ended: one of an agent that was killed is reaped by the node's
// init, which may take its time.
func processesOf(sandbox string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(b), sandbox) {
			continue
		}
		stat, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "stat"))
		if _, rest, _ := strings.Cut(string(stat), ") "); rest == "" || rest[0] == 'Z' || rest[0] == 'X' {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func cgroupsOf(sandbox string) (dirs []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(d.Name(), sandbox) {
			dirs = append(dirs, "cgroup "+path)
			return fs.SkipDir
		}
		return nil
	})
	return dirs
}

// named are a sandbox's processes of one name: that of their argument 0, since pid1 is started by descriptor.
func named(sandbox, name string) (pids []int) {
	for _, pid := range processesOf(sandbox) {
		arg, _, _ := strings.Cut(string(read(fmt.Sprintf("/proc/%d/cmdline", pid))), "\x00")
		if filepath.Base(arg) == name {
			pids = append(pids, pid)
		}
	}
	return pids
}

func codeOf(err error) connect.Code {
	if e, ok := errors.AsType[*connect.Error](err); ok {
		return e.Code()
	}
	return 0
}

// lost says that an error is the connection's and not an answer.
func lost(err error) bool { return err != nil && client.ConnectionLost(err) }

// session is a session on a repository with a worktree of its own, as its clients know it.
type session struct {
	*agent
	id, repo, worktree, branch string
	create                     *sandboxv1.CreateSessionRequest
	count                      int
	answers                    map[string]*answered
	pending                    []*sandboxv1.ExecRequest // asked for, and not judged yet
	sandbox                    string                   // the one that it had last, if noteSandbox was called
}

// answered is what was answered once, and may never be answered differently.
type answered struct {
	request *sandboxv1.ExecRequest
	result  *sandboxv1.ExecResult
}

var sessionCount atomic.Int64

// unborn is a session that nobody has created yet.
func (a *agent) unborn(repo string) *session {
	id := fmt.Sprintf("s%d", sessionCount.Add(1))
	s := &session{
		agent: a, id: id, repo: repo, worktree: filepath.Join(filepath.Dir(repo), "wt-"+id), branch: "b-" + id,
		answers: map[string]*answered{},
	}
	s.create = &sandboxv1.CreateSessionRequest{SessionId: id, Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: s.worktree, Branch: s.branch}}
	return s
}

func (a *agent) session(repo string) *session {
	a.T.Helper()
	s := a.unborn(repo)
	s.born()
	return s
}

func (s *session) born() *sandboxv1.Session {
	s.T.Helper()
	res, err := s.Client.Sessions.CreateSession(context.Background(), proto.CloneOf(s.create))
	require.NoError(s.T, err, s.LogText())
	return res.GetSession()
}

func (s *session) get() *sandboxv1.Session {
	s.T.Helper()
	res, err := s.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	require.NoError(s.T, err)
	return res.GetSession()
}

// request is a new exec: it counts itself in a file of its own, and then does what.
func (s *session) request(what string) *sandboxv1.ExecRequest {
	s.count++
	id := fmt.Sprintf("e%d", s.count)
	// Whoever finds the lock taken runs beside another command, or beside what one left behind.
	command := fmt.Sprintf("mkdir -p runs; printf x >> runs/%s; exec 9>>runs/lock; flock -n 9 || echo %s >> runs/beside; echo %s", id, id, id)
	if what != "" {
		command += "; " + what
	}
	return &sandboxv1.ExecRequest{SessionId: s.id, ExecId: id, Command: command}
}

// gated is a command that goes on until open is called.
func gated(name string) string { return "until [ -e runs/open-" + name + " ]; do sleep 0.01; done" }

func (s *session) open(name string) {
	s.T.Helper()
	runs := filepath.Join(s.worktree, "runs")
	require.NoError(s.T, os.MkdirAll(runs, 0o755))
	require.NoError(s.T, os.Chown(runs, owner, owner))
	require.NoError(s.T, os.WriteFile(filepath.Join(s.worktree, "runs", "open-"+name), nil, 0o644))
}

// ran is how often an exec's command began, as the command itself says.
func (s *session) ran(exec string) int {
	b, err := os.ReadFile(filepath.Join(s.worktree, "runs", exec))
	if err != nil {
		return 0
	}
	return len(b)
}

func (s *session) awaitRun(exec string) {
	s.T.Helper()
	s.Until("exec "+exec+" runs", func() bool { return s.ran(exec) > 0 })
}

// exec asks once. The request is copied: the agent fills in what is missing.
func (s *session) exec(r *sandboxv1.ExecRequest) (*sandboxv1.ExecResult, error) {
	res, err := s.Client.Execs.Exec(context.Background(), proto.CloneOf(r))
	return res.GetResult(), err
}

// start asks, and gives the answer later; nil when there was none.
func (s *session) start(r *sandboxv1.ExecRequest) <-chan *sandboxv1.ExecResult {
	done := make(chan *sandboxv1.ExecResult, 1)
	c := s.Client
	go func() {
		res, _ := c.Execs.Exec(context.Background(), proto.CloneOf(r))
		done <- res.GetResult()
	}()
	return done
}

// known says whether the agent has an exec of this id.
func (s *session) known(exec string) bool {
	s.T.Helper()
	_, err := s.Client.Execs.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: exec})
	if codeOf(err) == connect.CodeNotFound {
		return false
	}
	require.NoError(s.T, err)
	return true
}

// settle has an exec answered, whatever became of it, and judges the answer. It gives the answer.
func (s *session) settle(r *sandboxv1.ExecRequest) *sandboxv1.ExecResult {
	s.T.Helper()
	if !s.known(r.GetExecId()) {
		require.Zero(s.T, s.ran(r.GetExecId()), "P1: exec %s ran, and there is no intent of it", r.GetExecId())
	}
	result, err := s.exec(r)
	require.NoError(s.T, err, s.LogText())
	require.NoError(s.T, s.judge(r, result))
	return result
}

// judge compares an answer with what the command did, with its receipt, and with what was answered before.
func (s *session) judge(r *sandboxv1.ExecRequest, result *sandboxv1.ExecResult) error {
	id, ran := r.GetExecId(), s.ran(r.GetExecId())
	if b, err := os.ReadFile(filepath.Join(s.worktree, "runs", "beside")); err == nil {
		return fmt.Errorf("P4: these ran beside another command: %q", b)
	}
	switch result.GetStatus() {
	case sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_TIMED_OUT, sandboxv1.ExecResult_KILLED:
		// A pid1 that is killed may not have come to start it.
		if ran != 1 && (ran > 1 || result.GetStatus() != sandboxv1.ExecResult_KILLED) {
			return fmt.Errorf("P6: exec %s is %s and ran %d times", id, result.GetStatus(), ran)
		}
		if err := s.verifies(result); err != nil {
			return fmt.Errorf("P2: exec %s is %s: %w", id, result.GetStatus(), err)
		}
	case sandboxv1.ExecResult_NOT_STARTED:
		if ran != 0 {
			return fmt.Errorf("P6: exec %s is NOT_STARTED and ran %d times", id, ran)
		}
	case sandboxv1.ExecResult_CANCELLED, sandboxv1.ExecResult_UNCERTAIN:
		if ran > 1 {
			return fmt.Errorf("P6: exec %s ran %d times", id, ran)
		}
		if result.GetStatus() == sandboxv1.ExecResult_CANCELLED && !result.GetEvidence().GetComplete() {
			return fmt.Errorf("P5: exec %s is CANCELLED without the whole evidence", id)
		}
	default:
		return fmt.Errorf("exec %s is %s", id, result.GetStatus())
	}
	return s.sameAsBefore(r, result)
}

func (s *session) sameAsBefore(r *sandboxv1.ExecRequest, result *sandboxv1.ExecResult) error {
	before := s.answers[r.GetExecId()]
	if before == nil {
		s.answers[r.GetExecId()] = &answered{proto.CloneOf(r), result}
		return nil
	}
	if a, b := lasting(before.result), lasting(result); !proto.Equal(a, b) {
		return fmt.Errorf("P7: exec %s was answered before\n  %v\nand now\n  %v", r.GetExecId(), a, b)
	}
	return nil
}

// lasting is the part of an answer that stays. Evidence may come to an uncertain one later.
func lasting(r *sandboxv1.ExecResult) *sandboxv1.ExecResult {
	c := proto.CloneOf(r)
	if c.GetStatus() == sandboxv1.ExecResult_UNCERTAIN {
		c.Evidence = nil
	}
	c.StdoutText, c.StderrText = "", ""
	return c
}

// verifies checks an answer's receipt with the key that lies beside it, as anyone could offline.
func (s *session) verifies(r *sandboxv1.ExecResult) error {
	key, err := verify.LoadKey(filepath.Join(s.State, "keys", r.GetSandboxId()+".pub"))
	if err != nil {
		return err
	}
	p, err := verify.Envelope(r.GetReceipt(), key)
	if err != nil {
		return err
	}
	if p.ExecID != r.GetExecId() || p.SessionID != r.GetSessionId() || p.Generation != r.GetGeneration() || string(p.Status) != r.GetStatus().String() {
		return fmt.Errorf("the receipt is of exec %s of session %s, generation %d, %s", p.ExecID, p.SessionID, p.Generation, p.Status)
	}
	return nil
}

// same asks for everything that was ever answered again: with the same request, and with another one.
func (s *session) same() {
	s.T.Helper()
	for id, before := range s.answers {
		again, err := s.exec(before.request)
		require.NoError(s.T, err, "P7: exec %s", id)
		require.NoError(s.T, s.judge(before.request, again))
		other := proto.CloneOf(before.request)
		other.Command += " "
		_, err = s.exec(other)
		require.Equal(s.T, connect.CodeAlreadyExists, codeOf(err), "P7: exec %s with another command: %v", id, err)
	}
}

// works asserts that the session runs commands.
func (s *session) works() {
	s.T.Helper()
	r := s.settle(s.request(""))
	require.Equal(s.T, sandboxv1.ExecResult_EXITED, r.GetStatus(), "%s\n%s", r.GetReason(), s.LogText())
}

// destroyed deletes the session: with the whole evidence, and then nothing of its sandbox is alive.
func (s *session) destroyed() {
	s.T.Helper()
	sandbox := s.get().GetSandbox().GetId()
	res, err := s.Client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.id})
	require.NoError(s.T, err, s.LogText())
	if sandbox == "" {
		return
	}
	require.True(s.T, res.GetEvidence().GetComplete(), "P5: %v", res.GetEvidence())
	require.Empty(s.T, processesOf(sandbox), "P5: the evidence says that %s is gone", sandbox)
}

// noteSandbox keeps the id of the sandbox that there is now; lastSandbox gives it when nobody can be asked any more.
func (s *session) noteSandbox() {
	res, err := s.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	if err == nil {
		s.sandbox = res.GetSession().GetSandbox().GetId()
	}
}

func (s *session) lastSandbox() string {
	s.T.Helper()
	require.NotEmpty(s.T, s.sandbox)
	return s.sandbox
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	return strings.TrimSpace(testkit.GitAs(t, owner, dir, args...))
}
