package agent

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

func TestACommandIsAnsweredWithItsOutputAndAReceipt(t *testing.T) {
	n := newNode(t)
	s := n.session("one")
	require.Equal(t, sandboxv1.Session_READY, s.GetState())
	r := n.exec("one", "e1", "echo out; echo err >&2; exit 3")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.EqualValues(t, 3, r.GetExitCode())
	require.Equal(t, "out\n", r.GetStdoutText())
	require.Equal(t, "err\n", r.GetStderrText())
	key, err := verify.LoadKey(filepath.Join(n.state, "keys", s.GetSandbox().GetId()+".pub"))
	require.NoError(t, err)
	p, err := verify.File(filepath.Join(n.state, "receipts", s.GetSandbox().GetId(), "e1.json"), key)
	require.NoError(t, err)
	require.Equal(t, 3, p.ExitCode)
	require.Equal(t, "wait4", p.Boundary.Method)
}

func TestGitWorksInTheWorktreeAtItsOwnPath(t *testing.T) {
	n := newNode(t)
	s := n.session("git")
	r := n.exec("git", "e1", "pwd && echo x > new && git add new && git commit -qm Second && git log --format='%an <%ae> %s' -1 && git status --porcelain")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus())
	require.Zero(t, r.GetExitCode(), r.GetStderrText())
	require.Equal(t, s.GetWorkspace().GetWorktree()+"\nSandbox Agent <sandbox-agent@localhost> Second\n", r.GetStdoutText())
}

func TestP7TheSameExecIdWithTheSameRequestGivesTheRecordedAnswer(t *testing.T) {
	n := newNode(t)
	n.session("ids")
	req := &sandboxv1.ExecRequest{SessionId: "ids", ExecId: "e1", Command: "date +%N; echo ran >> ran; echo e >&2; exit 4", Labels: map[string]string{"turn": "7"}}
	first, err := n.agent.Exec(n.ctx(), req)
	require.NoError(t, err)
	for range 3 {
		again, err := n.agent.Exec(n.ctx(), req)
		require.NoError(t, err)
		require.True(t, proto.Equal(first, again), "%v\n%v", first, again)
	}
	got, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "ids", ExecId: "e1"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecState_EXEC_DONE, got.GetState())
	require.True(t, proto.Equal(first, got.GetResult()))
	require.Equal(t, "ran\n", n.exec("ids", "e2", "cat ran").GetStdoutText(), "it ran once")

	for name, other := range map[string]*sandboxv1.ExecRequest{
		"another command": {SessionId: "ids", ExecId: "e1", Command: "true"},
		"another timeout": {SessionId: "ids", ExecId: "e1", Command: req.GetCommand(), TimeoutSeconds: proto.Float64(9), Labels: req.GetLabels()},
		"other labels":    {SessionId: "ids", ExecId: "e1", Command: req.GetCommand()},
	} {
		_, err := n.agent.Exec(n.ctx(), other)
		require.ErrorIs(t, err, ErrExists, name)
		require.ErrorContains(t, err, "e1", name)
	}
	_, err = n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "ids", ExecId: "none"})
	require.ErrorIs(t, err, ErrNotFound)
}

func TestP7WhoAsksForARunningExecWaitsForIt(t *testing.T) {
	n := newNode(t)
	s := n.session("wait")
	fifo := filepath.Join(s.GetWorkspace().GetWorktree(), "go")
	n.exec("wait", "mk", "mkfifo go")
	req := &sandboxv1.ExecRequest{SessionId: "wait", ExecId: "e1", Command: "cat go; date +%N"}
	var wg sync.WaitGroup
	results := make([]*sandboxv1.ExecResult, 3)
	for i := range results {
		wg.Go(func() { results[i], _ = n.agent.Exec(n.ctx(), req) })
	}
	ctx, cancel := context.WithCancel(n.ctx())
	gone := make(chan error, 1)
	go func() { _, err := n.agent.Exec(ctx, req); gone <- err }()
	w, err := os.OpenFile(fifo, os.O_WRONLY, 0) // returns once the command reads
	require.NoError(t, err)
	cancel()
	require.ErrorIs(t, <-gone, context.Canceled, "a caller that goes away cancels nothing")
	_, err = w.WriteString("released\n")
	require.NoError(t, err)
	require.NoError(t, w.Close())
	wg.Wait()
	require.Contains(t, string(results[0].GetStdout()), "released")
	for _, r := range results {
		require.True(t, proto.Equal(results[0], r))
	}
}

func TestP4CommandsOfOneSessionRunOneAfterTheOther(t *testing.T) {
	n := newNode(t)
	n.session("turns")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "turns", Command: "mkdir lock && sleep 0.02 && rmdir lock"})
			if err != nil || r.GetExitCode() != 0 {
				t.Errorf("a command met another one: %v %v", r, err)
			}
		})
	}
	wg.Wait()
	list, _, err := n.agent.ListExecs(n.ctx(), &sandboxv1.ListExecsRequest{SessionId: "turns"})
	require.NoError(t, err)
	require.Len(t, list, 8)
}

func TestP16AFullQueueRefuses(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Limits.Queue = 1 })
	s := n.session("q")
	n.exec("q", "mk", "mkfifo go")
	done := make(chan error, 2)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "q", ExecId: "running", Command: "cat go"})
		done <- err
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "q", ExecId: "waiting", Command: "true"})
		done <- err
	}()
	require.Eventually(t, func() bool {
		x, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "q"})
		return err == nil && len(x.GetQueuedExecIds()) == 1
	}, bound, pollEvery)
	x, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "q"})
	require.NoError(t, err)
	require.Equal(t, "running", x.GetRunningExecId())
	require.Equal(t, sandboxv1.Session_EXECUTING, x.GetState())
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "q", ExecId: "toomany", Command: "true"})
	require.ErrorIs(t, err, ErrExhausted)
	require.ErrorContains(t, err, "limits.queue")
	got, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "q", ExecId: "waiting"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecState_EXEC_QUEUED, got.GetState())
	require.NoError(t, w.Close())
	require.NoError(t, <-done)
	require.NoError(t, <-done)
}

func TestP8AnOldEpochOrGenerationStartsNothing(t *testing.T) {
	n := newNode(t)
	s := n.session("fence")
	require.EqualValues(t, 1, s.GetOwnerEpoch())
	require.EqualValues(t, 1, s.GetGeneration())
	known := &sandboxv1.ExecRequest{SessionId: "fence", ExecId: "known", Command: "echo 1", OwnerEpoch: 1, Generation: 1}
	first, err := n.agent.Exec(n.ctx(), known)
	require.NoError(t, err)
	claimed, err := n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "fence", OwnerEpoch: 1})
	require.NoError(t, err)
	require.EqualValues(t, 2, claimed.GetOwnerEpoch())
	_, err = n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "fence", OwnerEpoch: 1})
	require.ErrorIs(t, err, ErrPrecondition)
	_, _, err = n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "fence", OwnerEpoch: 1})
	require.ErrorIs(t, err, ErrPrecondition)
	_, err = n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "fence", OwnerEpoch: 1})
	require.ErrorIs(t, err, ErrPrecondition)

	_, evidence, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "fence", OwnerEpoch: 2, Generation: 1})
	require.NoError(t, err)
	require.True(t, evidence.GetComplete())
	require.NotEmpty(t, evidence.GetItems())
	for name, r := range map[string]*sandboxv1.ExecRequest{
		"an old epoch":             {SessionId: "fence", ExecId: "x", Command: "touch never", OwnerEpoch: 1},
		"a generation that's gone": {SessionId: "fence", ExecId: "x", Command: "touch never", Generation: 1},
		"one that isn't there yet": {SessionId: "fence", ExecId: "x", Command: "touch never", Generation: 2},
	} {
		_, err := n.agent.Exec(n.ctx(), r)
		require.ErrorIs(t, err, ErrPrecondition, name)
	}
	r := n.exec("fence", "y", "test ! -e never")
	require.Zero(t, r.GetExitCode())
	require.EqualValues(t, 2, r.GetGeneration(), "without a fence the next generation is started")
	again, err := n.agent.Exec(n.ctx(), known)
	require.NoError(t, err, "a known id is answered whatever is current")
	require.True(t, proto.Equal(first, again))
}

func TestAnExecThatWasFencedOffInTheQueueNeverRuns(t *testing.T) {
	n := newNode(t)
	s := n.session("late")
	n.exec("late", "mk", "mkfifo go")
	done := make(chan error, 1)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "late", ExecId: "running", Command: "cat go"})
		done <- err
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	late := make(chan error, 1)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "late", ExecId: "late", Command: "touch never", OwnerEpoch: 1})
		late <- err
	}()
	require.Eventually(t, func() bool {
		x, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "late"})
		return err == nil && len(x.GetQueuedExecIds()) == 1
	}, bound, pollEvery)
	_, err = n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "late"})
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.NoError(t, <-done)
	require.ErrorIs(t, <-late, ErrPrecondition)
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "never"))
	_, err = n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "late", ExecId: "late"})
	require.ErrorIs(t, err, ErrNotFound, "nothing of it is recorded")
}

func TestRetiringEndsTheRunningCommandAtItsBoundary(t *testing.T) {
	n := newNode(t)
	s := n.session("retire")
	n.exec("retire", "mk", "mkfifo go")
	got := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "retire", ExecId: "long", Command: "echo begun; cat go; sleep 600"})
		if err != nil {
			t.Errorf("%v", err)
		}
		got <- r
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	after, evidence, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "retire"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_IDLE, after.GetState())
	require.True(t, evidence.GetComplete())
	r := <-got
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus(), r.GetReason())
	require.Equal(t, "begun\n", string(r.GetStdout()))
	require.NotEmpty(t, r.GetReceipt())
}

func TestStreamExecGivesTheOutputAndThenWhatExecGives(t *testing.T) {
	n := newNode(t)
	n.session("stream")
	req := &sandboxv1.ExecRequest{SessionId: "stream", ExecId: "e1", Command: "for i in {1..5}; do echo $i; echo e$i >&2; done"}
	collect := func(outOffset uint64) (started bool, out, errOut string, result *sandboxv1.ExecResult) {
		err := n.agent.StreamExec(n.ctx(), &sandboxv1.StreamExecRequest{Exec: req, StdoutOffset: outOffset}, func(m *sandboxv1.StreamExecResponse) error {
			switch x := m.GetEvent().(type) {
			case *sandboxv1.StreamExecResponse_Started:
				started = x.Started.GetExecId() == "e1" && x.Started.GetGeneration() == 1
			case *sandboxv1.StreamExecResponse_Output:
				require.True(t, started)
				require.Zero(t, x.Output.GetLostBytes())
				if x.Output.GetStream() == stdout {
					out += string(x.Output.GetData())
				} else {
					errOut += string(x.Output.GetData())
				}
			case *sandboxv1.StreamExecResponse_Result:
				result = x.Result
			}
			return nil
		})
		require.NoError(t, err)
		return started, out, errOut, result
	}
	started, out, errOut, result := collect(0)
	require.True(t, started)
	require.Equal(t, "1\n2\n3\n4\n5\n", out)
	require.Equal(t, "e1\ne2\ne3\ne4\ne5\n", errOut)
	unary, err := n.agent.Exec(n.ctx(), req)
	require.NoError(t, err)
	require.True(t, proto.Equal(unary, result))
	_, out, errOut, result = collect(4) // after the end, from an offset
	require.Equal(t, "3\n4\n5\n", out)
	require.Equal(t, "e1\ne2\ne3\ne4\ne5\n", errOut)
	require.True(t, proto.Equal(unary, result))
}

func TestP13AStalledReaderNeverHoldsTheCommandUp(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Limits.OutputBytes = 4096 })
	n.session("stall")
	release := make(chan struct{})
	var lost, given uint64
	streamed := make(chan error, 1)
	req := &sandboxv1.ExecRequest{SessionId: "stall", ExecId: "flood", Command: "head -c 20000000 /dev/zero"}
	go func() {
		streamed <- n.agent.StreamExec(n.ctx(), &sandboxv1.StreamExecRequest{Exec: req}, func(m *sandboxv1.StreamExecResponse) error {
			if c := m.GetOutput(); c != nil {
				<-release
				lost, given = lost+c.GetLostBytes(), given+uint64(len(c.GetData()))
			}
			return nil
		})
	}()
	r, err := n.agent.Exec(n.ctx(), req) // ends although the other reader stands still
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.EqualValues(t, 20000000, r.GetStdoutInfo().GetBytes())
	require.True(t, r.GetStdoutInfo().GetTruncated())
	require.LessOrEqual(t, len(r.GetStdout()), 4096)
	close(release)
	require.NoError(t, <-streamed)
	require.LessOrEqual(t, lost+given, uint64(20000000))
	require.NotZero(t, lost)
}

func TestP2AReceiptThatWasTamperedWithIsNeverAnswered(t *testing.T) {
	n := newNode(t)
	s := n.session("tamper")
	req := &sandboxv1.ExecRequest{SessionId: "tamper", ExecId: "e1", Command: "echo kept"}
	_, err := n.agent.Exec(n.ctx(), req)
	require.NoError(t, err)
	dir := filepath.Join(n.state, "receipts", s.GetSandbox().GetId())
	for _, name := range []string{receipt.StdoutName("e1"), receipt.FileName("e1")} {
		path := filepath.Join(dir, name)
		whole, err := os.ReadFile(path)
		require.NoError(t, err)
		bad := append([]byte{}, whole...)
		bad[len(bad)/2] ^= 1
		require.NoError(t, os.WriteFile(path, bad, 0o600))
		_, err = n.agent.Exec(n.ctx(), req)
		require.ErrorIs(t, err, ErrDataLoss, name)
		require.NoError(t, os.Remove(path))
		_, err = n.agent.Exec(n.ctx(), req)
		require.ErrorIs(t, err, ErrDataLoss, name)
		require.NoError(t, os.WriteFile(path, whole, 0o600))
	}
	_, err = n.agent.Exec(n.ctx(), req)
	require.NoError(t, err)
}

func TestP1TheIntentIsInTheJournalWhileTheCommandRuns(t *testing.T) {
	n := newNode(t)
	s := n.session("intent")
	n.exec("intent", "mk", "mkfifo go")
	done := make(chan error, 1)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "intent", ExecId: "e1", Command: "cat go"})
		done <- err
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	b, err := n.agent.journal.Get(execKey("intent", "e1"))
	require.NoError(t, err)
	var rec execRecord
	require.NoError(t, json.Unmarshal(b, &rec))
	require.Nil(t, rec.Outcome)
	require.Len(t, rec.Intent.Nonce, 64)
	require.Equal(t, s.GetSandbox().GetId(), rec.Intent.SandboxID)
	require.False(t, strings.Contains(string(b), "cat go"), "the command's text is not kept")
	_, err = n.agent.journal.Get(openKey("intent", "e1"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.NoError(t, <-done)
	_, err = n.agent.journal.Get(openKey("intent", "e1"))
	require.Error(t, err)
}

func TestASandboxThatDiedIsReplacedByTheNextGeneration(t *testing.T) {
	n := newNode(t)
	s := n.session("dead")
	sb := n.agent.sessions["dead"].current()
	p, err := os.FindProcess(sb.Identity().Pid)
	require.NoError(t, err)
	require.NoError(t, p.Kill())
	<-sb.Exited()
	r := n.exec("dead", "e1", "echo back")
	require.EqualValues(t, s.GetGeneration()+1, r.GetGeneration())
	require.Equal(t, "back\n", r.GetStdoutText())
}

func TestASandboxThatDiesUnderItsCommandLeavesItUncertainAndTheWorkspaceUsable(t *testing.T) {
	n := newNode(t)
	s := n.session("under")
	n.exec("under", "mk", "mkfifo go")
	got := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "under", ExecId: "e1", Command: "cat go; sleep 600"})
		if err != nil {
			t.Errorf("%v", err)
		}
		got <- r
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer w.Close()
	p, err := os.FindProcess(n.agent.sessions["under"].current().Identity().Pid)
	require.NoError(t, err)
	require.NoError(t, p.Kill())
	r := <-got
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus())
	require.NotEmpty(t, r.GetReason())
	after, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "under"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_IDLE, after.GetState(), "stopped with evidence")
	require.True(t, after.GetSandbox().GetEvidence().GetComplete())
	again, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "under", ExecId: "e1", Command: "cat go; sleep 600"})
	require.NoError(t, err)
	require.True(t, proto.Equal(r, again), "UNCERTAIN is recorded, nothing is run twice")
	require.EqualValues(t, 2, n.exec("under", "e2", "true").GetGeneration())
}

func TestALostConnectionIsOpenedAgainUnderAHigherEpoch(t *testing.T) {
	n := newNode(t)
	s := n.session("conn")
	n.exec("conn", "mk", "mkfifo go")
	before := n.agent.sessions["conn"].sandboxRecord().AttachEpoch
	got := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "conn", ExecId: "e1", Command: "cat go"})
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		got <- r
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	require.NoError(t, n.agent.sessions["conn"].current().conn.Close())
	_, err = w.WriteString("still there\n")
	require.NoError(t, err)
	require.NoError(t, w.Close())
	r := <-got
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.Equal(t, "still there\n", string(r.GetStdout()))
	require.Greater(t, n.agent.sessions["conn"].sandboxRecord().AttachEpoch, before)
	require.NoError(t, n.agent.sessions["conn"].current().conn.Close())
	<-n.agent.sessions["conn"].current().lost
	require.EqualValues(t, 1, n.exec("conn", "e2", "true").GetGeneration(), "also between commands")
}

func TestP13AStreamThatIsTakenUpAgainSaysExactlyWhatWasLost(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Limits.OutputBytes = 1000 })
	n.session("lost")
	req := &sandboxv1.ExecRequest{SessionId: "lost", ExecId: "e1", Command: "head -c 5000 /dev/zero | tr '\\0' a; echo -n z"}
	r, err := n.agent.Exec(n.ctx(), req)
	require.NoError(t, err)
	info := r.GetStdoutInfo()
	require.True(t, info.GetTruncated())
	again := func() {
		for name, from := range map[string]uint64{
			"the beginning": 0, "the head": 100, "the end of the head": info.GetOmittedFrom(), "the hole": info.GetOmittedFrom() + 7,
			"the tail": info.GetOmittedFrom() + info.GetOmittedBytes() + 3, "the end": info.GetBytes(),
		} {
			var given, lost uint64
			next := from
			err := n.agent.StreamExec(n.ctx(), &sandboxv1.StreamExecRequest{Exec: req, StdoutOffset: from}, func(m *sandboxv1.StreamExecResponse) error {
				if c := m.GetOutput(); c != nil {
					require.Equal(t, next+c.GetLostBytes(), c.GetOffset(), name)
					next = c.GetOffset() + uint64(len(c.GetData()))
					given, lost = given+uint64(len(c.GetData())), lost+c.GetLostBytes()
				}
				return nil
			})
			require.NoError(t, err, name)
			require.Equal(t, info.GetBytes()-from, given+lost, "%s: nothing is left out silently", name)
			hole := info.GetOmittedFrom() + info.GetOmittedBytes()
			require.Equal(t, hole-min(max(from, info.GetOmittedFrom()), hole), lost, name)
		}
	}
	again()
	require.NoError(t, n.agent.Close())
	n.start()
	again()
}

func TestListExecsGivesPagesThatMissNothing(t *testing.T) {
	n := newNode(t)
	n.session("pages")
	var want []string
	for _, id := range []string{"a", "a.b", "b", "c-1", "c.1"} {
		n.exec("pages", id, "true")
		want = append(want, id)
	}
	slices.Sort(want)
	var got []string
	token := ""
	for {
		page, next, err := n.agent.ListExecs(n.ctx(), &sandboxv1.ListExecsRequest{SessionId: "pages", PageSize: 2, PageToken: token})
		require.NoError(t, err)
		for _, e := range page {
			require.Equal(t, sandboxv1.ExecState_EXEC_DONE, e.GetState())
			got = append(got, e.GetExecId())
		}
		if token = next; next == "" {
			break
		}
		require.Len(t, page, 2)
	}
	require.Equal(t, want, got)
}
