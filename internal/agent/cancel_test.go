package agent

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// answer is what an Exec in the background came to.
type answer struct {
	result *sandboxv1.ExecResult
	err    error
}

func (n *node) begin(r *sandboxv1.ExecRequest) <-chan answer {
	done := make(chan answer, 1)
	ctx := n.ctx()
	go func() {
		res, err := n.agent.Exec(ctx, r)
		done <- answer{res, err}
	}()
	return done
}

// blocked runs `echo begun; cat go; then` as exec id, and returns once it reads: it goes on when the file is closed.
func (n *node) blocked(s *sandboxv1.Session, id, then string) (<-chan answer, *os.File) {
	n.t.Helper()
	n.exec(s.GetSessionId(), "mk-"+id, "test -p go || mkfifo go")
	done := n.begin(&sandboxv1.ExecRequest{SessionId: s.GetSessionId(), ExecId: id, Command: "echo begun; cat go; " + then})
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(n.t, err)
	n.t.Cleanup(func() { w.Close() })
	return done, w
}

// waiting queues an exec behind the running one.
func (n *node) waiting(session, id, command string) <-chan answer {
	n.t.Helper()
	before := n.get(session).GetQueuedExecIds()
	done := n.begin(&sandboxv1.ExecRequest{SessionId: session, ExecId: id, Command: command})
	require.Eventually(n.t, func() bool { return len(n.get(session).GetQueuedExecIds()) == len(before)+1 }, bound, pollEvery)
	return done
}

func (n *node) cancel(session, id string) (*sandboxv1.ExecResult, error) {
	return n.agent.CancelExec(n.ctx(), &sandboxv1.CancelExecRequest{SessionId: session, ExecId: id})
}

func TestAQueuedCommandThatIsCancelledCertainlyNeverRan(t *testing.T) {
	n := newNode(t)
	s := n.session("queued")
	running, w := n.blocked(s, "running", "true")
	late := n.waiting("queued", "late", "touch never")
	next := n.waiting("queued", "next", "touch ran")
	r, err := n.cancel("queued", "late")
	require.NoError(t, err, "and it is answered while the other one still runs")
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, r.GetStatus())
	require.Contains(t, r.GetReason(), "certainly never ran")
	require.EqualValues(t, 1, r.GetGeneration())
	got := <-late
	require.NoError(t, got.err)
	require.True(t, proto.Equal(r, got.result), "who waits for it gets the same answer")
	require.Equal(t, []string{"next"}, n.get("queued").GetQueuedExecIds())
	require.Equal(t, "running", n.get("queued").GetRunningExecId())
	require.NoError(t, w.Close())
	require.NoError(t, (<-running).err)
	require.NoError(t, (<-next).err)
	worktree := s.GetWorkspace().GetWorktree()
	require.NoFileExists(t, filepath.Join(worktree, "never"))
	require.FileExists(t, filepath.Join(worktree, "ran"))

	// The id is used up, also for the next agent.
	require.NoError(t, n.agent.Close())
	n.start()
	for range 2 {
		again := <-n.begin(&sandboxv1.ExecRequest{SessionId: "queued", ExecId: "late", Command: "touch never"})
		require.NoError(t, again.err)
		require.True(t, proto.Equal(r, again.result))
		again.result, err = n.cancel("queued", "late")
		require.NoError(t, err)
		require.True(t, proto.Equal(r, again.result))
	}
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "queued", ExecId: "late", Command: "another"})
	require.ErrorIs(t, err, ErrExists)
	require.NoFileExists(t, filepath.Join(worktree, "never"))
}

func TestACommandCancelledWhileItsSandboxIsMadeNeverRuns(t *testing.T) {
	n := newNode(t)
	s := n.session("making")
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "making"})
	require.NoError(t, err)
	// The job holds the session's goroutine, so that the exec's turn is cut short where it begins.
	x := n.agent.sessions["making"]
	hold, held := make(chan struct{}), make(chan struct{})
	x.enqueue(func() error { close(held); <-hold; return nil })
	<-held
	done := n.waiting("making", "e1", "touch never")
	x.mu.Lock()
	e := x.live["e1"]
	x.queue, x.running = nil, e // as next does, before execute
	x.mu.Unlock()
	r, err := n.cancel("making", "e1")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, r.GetStatus())
	require.True(t, proto.Equal(r, (<-done).result))
	executed := x.enqueue(func() error { x.execute(e); return nil })
	close(hold)
	require.NoError(t, <-executed)
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "never"))
	require.Zero(t, n.exec("making", "e2", "test ! -e never").GetExitCode(), "the session goes on")
	require.Equal(t, sandboxv1.Session_READY, n.get("making").GetState())
}

func TestP5ARunningCommandIsCancelledWithEvidenceAndItsReceiptSurvives(t *testing.T) {
	n := newNode(t)
	s := n.session("running")
	done, w := n.blocked(s, "long", "sleep 600")
	require.NoError(t, w.Close())
	waiting := n.waiting("running", "after", "cat begun 2>/dev/null; echo next")
	_, err := n.agent.CancelExec(n.ctx(), &sandboxv1.CancelExecRequest{SessionId: "running", ExecId: "long", OwnerEpoch: 7})
	require.ErrorIs(t, err, ErrPrecondition, "fenced off")
	gone, cancel := context.WithCancel(n.ctx())
	cancel()
	_, err = n.agent.CancelExec(gone, &sandboxv1.CancelExecRequest{SessionId: "running", ExecId: "long"})
	require.ErrorIs(t, err, context.Canceled, "a caller that goes away, and the cancel goes on")

	var wg sync.WaitGroup
	results := make([]*sandboxv1.ExecResult, 4)
	for i := range results {
		wg.Go(func() { results[i], _ = n.cancel("running", "long") })
	}
	wg.Wait()
	got := <-done
	require.NoError(t, got.err)
	r := got.result
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r.GetReason())
	require.True(t, r.GetEvidence().GetComplete())
	require.NotEmpty(t, r.GetEvidence().GetItems())
	require.Equal(t, s.GetSandbox().GetContainerId(), r.GetEvidence().GetContainerId())
	require.Equal(t, "begun\n", string(r.GetStdout()))
	require.NotEmpty(t, r.GetReceipt())
	for _, same := range results {
		require.True(t, proto.Equal(r, same), "%v\n%v", r, same)
	}
	after := <-waiting
	require.NoError(t, after.err)
	require.Equal(t, "next\n", string(after.result.GetStdout()))
	require.EqualValues(t, 2, after.result.GetGeneration(), "the sandbox was stopped")

	require.NoError(t, n.agent.Close())
	n.start()
	again, err := n.cancel("running", "long")
	require.NoError(t, err)
	require.True(t, proto.Equal(r, again), "%v\n%v", r, again)
	rec, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "running", ExecId: "long"})
	require.NoError(t, err)
	require.True(t, proto.Equal(r, rec.GetResult()))
}

func TestACommandThatEndedByItselfKeepsItsAnswerAndItsSandbox(t *testing.T) {
	n := newNode(t)
	s := n.session("ended")
	first := n.exec("ended", "e1", "echo done; exit 5")
	first.StdoutText = ""
	r, err := n.agent.CancelExec(n.ctx(), &sandboxv1.CancelExecRequest{SessionId: "ended", ExecId: "e1", OwnerEpoch: 7})
	require.NoError(t, err, "a known answer is given whatever owner_epoch is current")
	require.True(t, proto.Equal(first, r), "%v\n%v", first, r)
	require.Equal(t, sandboxv1.Session_READY, n.get("ended").GetState())
	require.Equal(t, s.GetGeneration(), n.get("ended").GetGeneration())
	_, err = n.cancel("ended", "none")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = n.cancel("none", "e1")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = n.cancel("ended", "a/b")
	require.ErrorIs(t, err, ErrInvalid)
}

func TestACommandThatIgnoresTheCancelIsEndedWithItsNamespace(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Limits.Grace = 0 })
	s := n.session("deaf")
	done, w := n.blocked(s, "e1", "")
	_, err := w.WriteString("x")
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.NoError(t, (<-done).err)
	done, _ = n.blocked(s, "e2", "sleep 600") // cat holds the fifo open
	r, err := n.cancel("deaf", "e2")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r.GetReason())
	require.True(t, r.GetEvidence().GetComplete())
	require.True(t, proto.Equal(r, (<-done).result))
}

func TestP5WithoutAReceiptACancelIsAnsweredWithTheEvidenceOfTheSandboxesEnd(t *testing.T) {
	n := newNode(t)
	s := n.session("frozen")
	done, _ := n.blocked(s, "e1", "sleep 600")
	sb := n.agent.sessions["frozen"].current()
	p, err := os.FindProcess(sb.Identity().Pid)
	require.NoError(t, err)
	require.NoError(t, p.Kill()) // receiptd, and with it everything
	r, err := n.cancel("frozen", "e1")
	require.NoError(t, err)
	require.True(t, proto.Equal(r, (<-done).result))
	// The cancel may have come first, or the news of the end.
	require.Contains(t, []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_CANCELLED, sandboxv1.ExecResult_UNCERTAIN}, r.GetStatus())
	require.True(t, r.GetEvidence().GetComplete(), r.GetReason())
	require.Empty(t, r.GetReceipt())
	require.Equal(t, sandboxv1.Session_IDLE, n.get("frozen").GetState())
}

func TestP5WithoutEvidenceACancelIsUncertainUntilTheReconcilerFindsSome(t *testing.T) {
	n := newNode(t)
	set := &atomic.Bool{}
	n.agent.hosts.all["embedded"] = stubborn{n.agent.hosts.all["embedded"], set}
	s := n.session("stuck")
	done, w := n.blocked(s, "long", "sleep 600")
	require.NoError(t, w.Close())
	set.Store(true)
	r, err := n.cancel("stuck", "long")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus(), r.GetReason())
	require.Nil(t, r.GetEvidence())
	require.Contains(t, r.GetReason(), "stays reserved")
	require.NotEmpty(t, r.GetReceipt(), "what is known is given all the same")
	require.Equal(t, "begun\n", string(r.GetStdout()))
	require.True(t, proto.Equal(r, (<-done).result))
	x := n.get("stuck")
	require.Equal(t, sandboxv1.Session_UNCERTAIN, x.GetState())
	require.Contains(t, x.GetReason(), "The workspace stays reserved")
	require.Contains(t, x.GetReason(), "cgroup.procs")
	require.Contains(t, x.GetReason(), "restarts the node")
	for _, c := range n.agent.sessions["stuck"].sandboxRecord().Identity.Cgroups {
		require.Contains(t, x.GetReason(), c)
	}
	again, err := n.cancel("stuck", "long")
	require.NoError(t, err)
	require.True(t, proto.Equal(r, again))

	set.Store(false) // nobody asks
	require.Eventually(t, func() bool { return n.get("stuck").GetState() == sandboxv1.Session_IDLE }, bound, pollEvery)
	x = n.get("stuck")
	require.True(t, x.GetSandbox().GetEvidence().GetComplete())
	require.NotContains(t, x.GetReason(), "reserved")
	later, err := n.cancel("stuck", "long")
	require.NoError(t, err)
	require.True(t, later.GetEvidence().GetComplete(), "the evidence is added")
	later.Evidence = nil
	require.True(t, proto.Equal(r, later), "and nothing else is changed")
	require.EqualValues(t, 2, n.exec("stuck", "e2", "true").GetGeneration())
	got, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "stuck", ExecId: "long"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, got.GetResult().GetStatus())
	require.True(t, got.GetResult().GetEvidence().GetComplete(), "also when the session has another sandbox")
}

func TestTheNextAgentLooksAgainForEvidenceAtOnce(t *testing.T) {
	n := newNode(t)
	set := &atomic.Bool{}
	n.agent.hosts.all["embedded"] = stubborn{n.agent.hosts.all["embedded"], set}
	n.session("again")
	set.Store(true)
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "again"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.NoError(t, n.agent.Close())
	n.start()
	x := n.get("again")
	require.Equal(t, sandboxv1.Session_IDLE, x.GetState(), x.GetReason())
	require.True(t, x.GetSandbox().GetEvidence().GetComplete())
}

func TestACancelThatCannotBeRecordedIsNoAnswer(t *testing.T) {
	n := newNode(t)
	s := n.session("full")
	running, w := n.blocked(s, "running", "true")
	late := n.waiting("full", "late", "touch never")
	require.NoError(t, n.agent.journal.Close())
	_, err := n.cancel("full", "late")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, (<-late).err, journal.ErrClosed)
	require.NoError(t, w.Close())
	<-running
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "never"))
	_ = n.agent.Close() // it closes the journal a second time
	n.start()
}

func TestP6ACommandOfAnEarlierAgentIsCancelledWithEvidence(t *testing.T) {
	c := newCrash(t, []string{"mkfifo go"}, duringCommand)
	w := c.openFifo() // it runs
	defer w.Close()
	c.kill()
	c.restart()
	r, err := c.cancel("s", "during")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r.GetReason())
	require.True(t, r.GetEvidence().GetComplete())
	require.NotEmpty(t, r.GetReceipt())
	again, err := c.agent.Exec(c.ctx(), c.during())
	require.NoError(t, err)
	require.True(t, proto.Equal(r, again))
	require.Equal(t, sandboxv1.Session_IDLE, c.get("s").GetState())
	require.NoFileExists(t, filepath.Join(c.worktree, "ran"), "it was ended where it stood")
}
