package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// job is what the child process does: an agent that makes a session, runs a command, and is then killed.
type job struct {
	Config         config.Config
	Parent         string
	Receiptd, Pid1 string
	Session        *sandboxv1.CreateSessionRequest
	Before         []string // commands that are waited for
	Command        string   // the one during which it dies
	DieStarting    bool     // it dies when the runtime has started the sandbox, before anyone is told
}

// agentProcess is the main of the child process. It says "session" and "answered" on standard output.
func agentProcess(args []string) {
	var j job
	if err := json.Unmarshal([]byte(args[0]), &j); err != nil {
		panic(err)
	}
	a, err := newAgent(j.Config, j.Parent, j.Receiptd, j.Pid1)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if j.DieStarting {
		a.hosts.all["embedded"] = deadly{a.hosts.all["embedded"]}
	}
	ctx := context.Background()
	s, err := a.CreateSession(ctx, j.Session)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for i, c := range j.Before {
		if _, err := a.Exec(ctx, &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: fmt.Sprintf("before%d", i), Command: c}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	fmt.Println("session")
	if j.Command != "" {
		if _, err := a.Exec(ctx, &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: "during", Command: j.Command}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("answered")
	}
	select {}
}

// deadly is the real runtime in an agent that is killed (kill -9) the moment its sandbox runs.
type deadly struct{ runtime.Runtime }

func (r deadly) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	if _, err := r.Runtime.Create(ctx, spec); err != nil {
		return nil, err
	}
	fmt.Println("started")
	p, _ := os.FindProcess(os.Getpid())
	p.Kill()
	select {}
}

// crash is a node whose first agent runs in a process of its own.
type crash struct {
	*node
	worktree string
	cmd      *exec.Cmd
	out      *bufio.Scanner
}

func newCrash(t *testing.T, before []string, command string) *crash {
	t.Helper()
	c := startCrash(t, job{Before: before, Command: command})
	c.await("session")
	return c
}

func startCrash(t *testing.T, j job) *crash {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git, testkit.Bash)
	n := &node{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}
	n.cfg = testConfig(n.state, "/var/tmp")
	repo := testkit.Repo(t, owner)
	c := &crash{node: n, worktree: filepath.Join(filepath.Dir(repo), "wt")}
	receiptd, pid1 := testkit.Binaries(t)
	j.Config, j.Parent, j.Receiptd, j.Pid1 = n.cfg, n.parent, receiptd, pid1
	j.Session = &sandboxv1.CreateSessionRequest{SessionId: "s", Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: c.worktree, Branch: "b"}}
	arg, err := json.Marshal(j)
	require.NoError(t, err)
	c.cmd = exec.Command("/proc/self/exe", "agent", string(arg))
	c.cmd.Stderr = os.Stderr
	pipe, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	t.Cleanup(func() { c.cmd.Process.Kill(); c.cmd.Wait() })
	c.out = bufio.NewScanner(pipe)
	return c
}

func (c *crash) await(word string) {
	c.t.Helper()
	require.True(c.t, c.out.Scan(), "the agent's process ended before it said %q", word)
	require.Equal(c.t, word, c.out.Text())
}

// kill is kill -9; restart is the next agent on the same state folder.
func (c *crash) kill() {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Kill())
	c.cmd.Wait()
}

func (c *crash) restart() {
	c.t.Helper()
	c.start()
	c.t.Cleanup(c.end)
}

func (c *crash) during() *sandboxv1.ExecRequest {
	return &sandboxv1.ExecRequest{SessionId: "s", ExecId: "during", Command: "cat go; echo done >> ran; date +%N"}
}

func (c *crash) openFifo() *os.File {
	c.t.Helper()
	w, err := os.OpenFile(filepath.Join(c.worktree, "go"), os.O_WRONLY, 0)
	require.NoError(c.t, err)
	return w
}

const duringCommand = "cat go; echo done >> ran; date +%N"

func TestP6ACommandOutlivesAKilledAgentAndIsAnsweredByTheNextOne(t *testing.T) {
	c := newCrash(t, []string{"mkfifo go"}, duringCommand)
	w := c.openFifo() // it runs
	c.kill()
	c.restart()
	s, err := c.agent.GetSession(c.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.EqualValues(t, 1, s.GetGeneration())
	got, err := c.agent.GetExec(c.ctx(), &sandboxv1.GetExecRequest{SessionId: "s", ExecId: "during"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecState_EXEC_RUNNING, got.GetState())
	require.NoError(t, w.Close())
	r, err := c.agent.Exec(c.ctx(), c.during())
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.NotEmpty(t, r.GetReceipt())
	after := c.exec("s", "after", "cat ran")
	require.Equal(t, "done\n", after.GetStdoutText(), "it ran once")
	require.EqualValues(t, 1, after.GetGeneration(), "the sandbox went on")
}

func TestP6ACommandThatEndsWhileNoAgentIsThereIsAnsweredFromItsReceipt(t *testing.T) {
	c := newCrash(t, []string{"mkfifo go"}, duringCommand)
	w := c.openFifo()
	c.kill()
	require.NoError(t, w.Close())
	receipts, err := filepath.Glob(filepath.Join(c.state, "receipts", "sb-*"))
	require.NoError(t, err)
	require.Len(t, receipts, 1)
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(receipts[0], "during.json"))
		return err == nil
	}, bound, pollEvery)
	c.restart()
	r, err := c.agent.Exec(c.ctx(), c.during())
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.Equal(t, "done\n", c.exec("s", "after", "cat ran").GetStdoutText())
}

func TestP6AnAnsweredExecGivesTheSameAnswerAfterACrash(t *testing.T) {
	c := newCrash(t, nil, "echo done >> ran; date +%N")
	c.await("answered")
	c.kill()
	c.restart()
	req := &sandboxv1.ExecRequest{SessionId: "s", ExecId: "during", Command: "echo done >> ran; date +%N"}
	r, err := c.agent.Exec(c.ctx(), req)
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus())
	require.Len(t, strings.TrimSpace(string(r.GetStdout())), 9)
	require.Equal(t, "done\n", c.exec("s", "after", "cat ran").GetStdoutText())
}

func TestP6ASandboxThatDiedWithTheAgentLeavesUncertain(t *testing.T) {
	c := newCrash(t, []string{"mkfifo go"}, duringCommand)
	w := c.openFifo()
	defer w.Close()
	c.kill()
	killReceiptds(t, c.parent)
	c.restart()
	r, err := c.agent.Exec(c.ctx(), c.during())
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus())
	s, err := c.agent.GetSession(c.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_IDLE, s.GetState())
	require.True(t, s.GetSandbox().GetEvidence().GetComplete())
	require.EqualValues(t, 2, c.exec("s", "after", "true").GetGeneration())
}

// killReceiptds ends the inits of this test's own sandboxes, found by their cgroup.
func killReceiptds(t *testing.T, parent string) {
	t.Helper()
	found := 0
	stats, err := filepath.Glob("/proc/[0-9]*/cgroup")
	require.NoError(t, err)
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(b), parent+"/") {
			continue
		}
		comm, err := os.ReadFile(filepath.Join(filepath.Dir(path), "comm"))
		if err != nil || strings.TrimSpace(string(comm)) != "receiptd" {
			continue
		}
		var pid int
		_, err = fmt.Sscanf(filepath.Base(filepath.Dir(path)), "%d", &pid)
		require.NoError(t, err)
		p, err := os.FindProcess(pid)
		require.NoError(t, err)
		require.NoError(t, p.Kill())
		found++
	}
	require.NotZero(t, found)
}

func TestP6AnAgentThatIsKilledWhileItStartsASandboxLeavesNoneBehind(t *testing.T) {
	c := startCrash(t, job{DieStarting: true})
	c.await("started")
	c.cmd.Wait()
	c.restart()
	s, err := c.agent.GetSession(c.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_IDLE, s.GetState())
	require.True(t, s.GetSandbox().GetEvidence().GetComplete())
	ids, err := c.agent.hosts.all["embedded"].List(c.ctx())
	require.NoError(t, err)
	require.Empty(t, ids)
	require.EqualValues(t, 2, c.exec("s", "e1", "true").GetGeneration())
}

func TestASessionThatWasRecordedWhileItsCommandRanGoesOnAfterTheCrash(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.exec("s", "mk", "mkfifo go")
	done := make(chan error, 1)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: "cat go"})
		done <- err
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "s"}) // records EXECUTING
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.NoError(t, <-done)
	require.NoError(t, n.agent.Close())
	n.start()
	after, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_READY, after.GetState())
	require.EqualValues(t, 2, after.GetOwnerEpoch())
	require.EqualValues(t, 1, n.exec("s", "e2", "true").GetGeneration())
}

func TestP6AnIntentWhoseRequestNeverArrivedIsNotStarted(t *testing.T) {
	n := newNode(t)
	n.session("s")
	sb := n.agent.sessions["s"].sandboxRecord()
	in := intentRecord{ExecID: "lost", SessionID: "s", SandboxID: sb.ID, Generation: 1, AttachEpoch: sb.AttachEpoch, OwnerEpoch: 1,
		Nonce: randomHex(32), RequestDigest: "d", TimeoutMS: 1000}
	require.NoError(t, n.agent.journal.Update(n.ctx(), true,
		journal.Set(execKey("s", "lost"), encode(execRecord{Intent: in})), journal.Set(openKey("s", "lost"), nil)))
	require.NoError(t, n.agent.Close())
	n.start()
	require.Eventually(t, func() bool {
		got, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "s", ExecId: "lost"})
		return err == nil && got.GetResult().GetStatus() == sandboxv1.ExecResult_NOT_STARTED
	}, bound, pollEvery)
	require.EqualValues(t, 1, n.exec("s", "after", "true").GetGeneration())
}

func TestClosingLeavesSandboxesRunning(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.exec("s", "e1", "echo x > /tmp/kept")
	require.NoError(t, n.agent.Close())
	require.NoError(t, n.agent.Close(), "twice is fine")
	n.start()
	r := n.exec("s", "e2", "cat /tmp/kept")
	require.Equal(t, "x\n", r.GetStdoutText(), "the same /tmp")
	require.Equal(t, s.GetSandbox().GetId(), r.GetSandboxId())
}

func TestASandboxThatBelongsToNoSessionIsRemovedAtTheStart(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	require.NoError(t, n.agent.journal.Update(n.ctx(), true, journal.Delete(sessionKey("s"))))
	require.NoError(t, n.agent.Close())
	n.start()
	for _, rt := range n.agent.hosts.all {
		ids, err := rt.List(n.ctx())
		require.NoError(t, err)
		require.Empty(t, ids)
	}
	require.NoDirExists(t, filepath.Join(n.state, "sandboxes", s.GetSandbox().GetId()))
}

func TestASecondAgentOnTheSameStateFolderIsRefused(t *testing.T) {
	n := newNode(t)
	receiptd, pid1 := testkit.Binaries(t)
	_, err := newAgent(n.cfg, n.parent, receiptd, pid1)
	require.ErrorIs(t, err, journal.ErrLocked)
	require.ErrorContains(t, err, n.state)
}

func TestWhatTheAgentCannotStartWithIsNamed(t *testing.T) {
	testkit.Need(t, testkit.Root)
	state := testkit.StateDir(t)
	receiptd, pid1 := testkit.Binaries(t)
	cfg := testConfig(state, "/var/tmp")
	_, err := New(Options{Config: cfg, Receiptd: receiptd, Pid1: pid1})
	require.ErrorContains(t, err, "embedded")
	rts := map[string]runtime.Runtime{"embedded": nil}
	_, err = New(Options{Config: cfg, Runtimes: rts, Receiptd: receiptd, Pid1: pid1})
	require.ErrorContains(t, err, "embedded")
	_, err = newAgent(cfg, "/sandbox-agent-test", filepath.Join(state, "none"), pid1)
	require.ErrorContains(t, err, filepath.Join(state, "none"))
	file := filepath.Join(state, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	cfg.StateDir = filepath.Join(file, "x")
	_, err = newAgent(cfg, "/sandbox-agent-test", receiptd, pid1)
	require.ErrorContains(t, err, file)
}

func TestACorruptJournalStopsTheAgent(t *testing.T) {
	n := newNode(t)
	n.session("s")
	_, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.NoError(t, n.agent.journal.Update(n.ctx(), true, journal.Set(sessionKey("broken"), []byte("{"))))
	require.NoError(t, n.agent.Close())
	receiptd, pid1 := testkit.Binaries(t)
	_, err = newAgent(n.cfg, n.parent, receiptd, pid1)
	require.ErrorIs(t, err, ErrDataLoss)
	require.ErrorContains(t, err, "session/broken")
	j, err := journal.Open(filepath.Join(n.state, "journal"), testLog())
	require.NoError(t, err)
	require.NoError(t, j.Update(n.ctx(), true, journal.Delete(sessionKey("broken"))))
	require.NoError(t, j.Close())
	n.start()
}

func TestAStreamThatIsAttachedAfterACrashGivesWhatTheCommandWroteMeanwhile(t *testing.T) {
	c := newCrash(t, []string{"mkfifo go"}, "echo before; "+duringCommand)
	w := c.openFifo()
	c.kill()
	c.restart()
	require.NoError(t, w.Close())
	req := c.during()
	req.Command = "echo before; " + duringCommand
	var out string
	var result *sandboxv1.ExecResult
	err := c.agent.StreamExec(c.ctx(), &sandboxv1.StreamExecRequest{Exec: req}, func(m *sandboxv1.StreamExecResponse) error {
		require.Zero(t, m.GetOutput().GetLostBytes())
		out += string(m.GetOutput().GetData())
		result = m.GetResult()
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, string(result.GetStdout()), out)
	require.Regexp(t, "^before\n[0-9]+\n$", out)
}
