package agent

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// times are so long that nothing ends while a test runs: the tests say what time it is.
func times(c *config.Config) {
	c.Lifetime.Idle, c.Lifetime.Max = config.Duration(10*time.Hour), config.Duration(100*time.Hour)
}

// atRest waits for the session's goroutine to have ended: a command is answered a moment before.
func (n *node) atRest(id string) {
	n.t.Helper()
	require.Eventually(n.t, func() bool { return !n.agent.sessions[id].vitals().busy }, bound, pollEvery)
}

func TestAnIdleSandboxIsRemovedAndTheNextCommandGetsAnother(t *testing.T) {
	n := newNode(t, times)
	s := n.session("s")
	n.exec("s", "e1", "echo work > file; echo > ~/scratch")
	n.atRest("s")
	began := time.Now()
	require.WithinRange(t, n.agent.endWhatIsOver(began), began.Add(9*time.Hour), began.Add(10*time.Hour))
	require.Equal(t, sandboxv1.Session_READY, n.get("s").GetState())
	n.agent.endWhatIsOver(began.Add(10*time.Hour + time.Minute))
	idle := n.until("s", sandboxv1.Session_IDLE)
	require.Contains(t, idle.GetReason(), "lifetime.idle")
	require.True(t, idle.GetSandbox().GetEvidence().GetComplete())
	require.FileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "file"))
	require.Zero(t, n.agent.endWhatIsOver(began.Add(1000*time.Hour)), "there is nothing left to look for")
	r := n.exec("s", "e2", "cat file; ls ~")
	require.Equal(t, "work\n", r.GetStdoutText())
	require.EqualValues(t, 2, r.GetGeneration())
	require.Equal(t, "work\n", n.exec("s", "e2", "cat file; ls ~").GetStdoutText(), "what was answered is answered")
	n.counts(`sandboxes_evicted_total{reason="idle"} 1`, `sandbox_start_seconds_count{runtime="embedded"} 2`, `sandboxes{runtime="embedded"} 1`, `execs_total{status="EXITED"} 2`)
}

func TestASandboxThatIsTooOldGoesOnceItsCommandHasEnded(t *testing.T) {
	n := newNode(t, times)
	s := n.session("s")
	w := s.GetWorkspace().GetWorktree()
	running := n.holding("s", "running", w)
	waiting := n.queued("s", "waiting", "echo waited")
	n.agent.endWhatIsOver(time.Now().Add(101 * time.Hour))
	n.agent.endWhatIsOver(time.Now().Add(101 * time.Hour))
	require.Equal(t, sandboxv1.Session_EXECUTING, n.get("s").GetState(), "between commands only")
	n.counts(`execs_running 1`, `exec_queue_length 1`, `sessions{state="EXECUTING"} 1`)
	require.NoError(t, os.WriteFile(filepath.Join(w, "go"), nil, 0o644))
	r, err := running.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.EqualValues(t, 1, r.GetGeneration())
	r, err = waiting.wait()
	require.NoError(t, err)
	require.Equal(t, "waited\n", r.GetStdoutText())
	require.EqualValues(t, 2, r.GetGeneration(), "the one that waited has a sandbox of its own")
	n.counts(`sandboxes_evicted_total{reason="age"} 1`)
	n.atRest("s")
	n.agent.endWhatIsOver(time.Now().Add(99 * time.Hour))
	require.Contains(t, n.until("s", sandboxv1.Session_IDLE).GetReason(), "lifetime.idle")
}

func TestARestartOfTheAgentProlongsNothing(t *testing.T) {
	n := newNode(t, times)
	n.session("s")
	n.exec("s", "e1", "true")
	used := time.Now()
	require.NoError(t, n.agent.Close())
	n.start()
	sess := n.agent.sessions["s"]
	require.Equal(t, sandboxv1.Session_READY, n.get("s").GetState())
	v := sess.vitals()
	require.WithinRange(t, v.used, v.started, used, "from the disk: the agent was not there then")
	require.WithinDuration(t, used, v.used, time.Minute)
	newest := filepath.Join(n.agent.receiptsDir(sess.sandboxRecord().ID), receipt.FileName("e1"))
	require.NoError(t, os.Chtimes(newest, time.Now().Add(time.Hour), time.Now().Add(time.Hour)))
	sess.mu.Lock()
	sess.used = time.Time{}
	sess.mu.Unlock()
	require.False(t, sess.vitals().used.After(time.Now()), "never in the future")
	n.agent.endWhatIsOver(v.started.Add(100 * time.Hour))
	require.Contains(t, n.until("s", sandboxv1.Session_IDLE).GetReason(), "lifetime.max")
}

func TestP16ASandboxBeyondTheNodesMemoryIsNotStarted(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Limits.TotalMemoryBytes = c.Limits.MemoryBytes })
	n.session("first")
	req := n.grantedRequest("second")
	_, err := n.agent.CreateSession(n.ctx(), req)
	require.ErrorIs(t, err, ErrExhausted)
	require.ErrorContains(t, err, "limits.total_memory_bytes")
	require.NoDirExists(t, req.GetWorkspace().GetWorktree(), "what was made for it is taken back")
	require.NoError(t, n.agent.Close())
	n.start()
	_, err = n.agent.CreateSession(n.ctx(), req)
	require.ErrorIs(t, err, ErrExhausted, "what lives on counts after a restart")
	_, _, err = n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "first"})
	require.NoError(t, err)
	_, err = n.agent.CreateSession(n.ctx(), req)
	require.NoError(t, err)
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "first", ExecId: "e", Command: "true"})
	require.ErrorIs(t, err, ErrExhausted)
	_, err = n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "second"})
	require.NoError(t, err)
	require.EqualValues(t, 0, n.exec("first", "e", "true").GetExitCode(), "the id was not used up")
}

func TestADrainedNodeStartsNothingAndStopsEverythingWithEvidence(t *testing.T) {
	n := newNode(t)
	a, b := n.session("a"), n.session("b")
	n.session("c")
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "c"})
	require.NoError(t, err)
	n.exec("a", "known", "echo known")
	ends := n.holding("a", "ends", a.GetWorkspace().GetWorktree())
	stays := n.holding("b", "stays", b.GetWorkspace().GetWorktree())
	waiting := n.queued("b", "waiting", "touch waiting-ran")
	for _, bad := range []float64{-1, 3601} {
		_, err := n.agent.DrainNode(n.ctx(), &sandboxv1.DrainNodeRequest{TimeoutSeconds: bad})
		require.ErrorIs(t, err, ErrInvalid)
	}
	require.NoError(t, n.agent.checkDraining())
	type answer struct {
		list []*sandboxv1.DrainedSession
		err  error
	}
	// Long, and cut short by the second call's.
	first, second := make(chan answer, 1), make(chan answer, 1)
	ctx := n.ctx()
	drain := func(to chan answer, seconds float64) {
		list, err := n.agent.DrainNode(ctx, &sandboxv1.DrainNodeRequest{TimeoutSeconds: seconds})
		to <- answer{list, err}
	}
	go drain(first, 3600)
	require.Eventually(t, func() bool { return n.agent.checkDraining() != nil }, bound, pollEvery)
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "a", Command: "touch new-ran"})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "drained")
	_, err = n.agent.CreateSession(n.ctx(), n.grantedRequest("new"))
	require.ErrorIs(t, err, ErrUnavailable)
	_, err = n.grant("c", kube("x"))
	require.ErrorIs(t, err, ErrUnavailable)
	require.Equal(t, "known\n", n.exec("a", "known", "echo known").GetStdoutText(), "what is known is answered")
	require.NoError(t, os.WriteFile(filepath.Join(a.GetWorkspace().GetWorktree(), "go"), nil, 0o644))
	r, err := ends.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), "it had the time to end")
	n.until("a", sandboxv1.Session_IDLE)
	require.Equal(t, sandboxv1.Session_EXECUTING, n.get("b").GetState(), "this one still has")
	go drain(second, 0.001)
	r, err = stays.wait()
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus())
	require.Equal(t, "it was ended on request and may have run partly; the node is drained", r.GetReason())
	require.NotEmpty(t, r.GetReceipt())
	_, err = waiting.wait()
	require.ErrorIs(t, err, ErrUnavailable)
	require.NoFileExists(t, filepath.Join(b.GetWorkspace().GetWorktree(), "waiting-ran"))
	for _, c := range []chan answer{first, second} {
		got := <-c
		require.NoError(t, got.err)
		require.Len(t, got.list, 3)
		require.Equal(t, "The node is drained.", got.list[0].GetReason())
		require.Equal(t, "Exec stays: it was ended on request; the node is drained.", got.list[1].GetReason())
		require.Equal(t, "Retired on request.", got.list[2].GetReason())
		for i, id := range []string{"a", "b", "c"} {
			require.Equal(t, id, got.list[i].GetSessionId())
			require.True(t, got.list[i].GetEvidence().GetComplete(), id)
			require.Equal(t, sandboxv1.Session_IDLE, n.get(id).GetState())
		}
	}
	n.counts(`sandboxes_evicted_total{reason="drain"} 2`, `execs_total{status="CANCELLED"} 1`, `sessions{state="IDLE"} 3`, `execs_running 0`)
	require.NoError(t, n.agent.Close())
	n.start()
	require.EqualValues(t, 0, n.exec("b", "waiting", "touch waiting-ran").GetExitCode(), "a restarted agent is not drained, and the id was not used up")
}

func TestAnAgentThatEndsWhileItDrainsLeavesCommandsRunning(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	w := s.GetWorkspace().GetWorktree()
	running := n.holding("s", "running", w)
	drained := make(chan error, 1)
	ctx := n.ctx()
	go func() {
		_, err := n.agent.DrainNode(ctx, &sandboxv1.DrainNodeRequest{TimeoutSeconds: 3600})
		drained <- err
	}()
	require.Eventually(t, func() bool { return n.agent.checkDraining() != nil }, bound, pollEvery)
	require.NoError(t, n.agent.Close())
	require.ErrorIs(t, <-drained, ErrUnavailable)
	_, err := running.wait()
	require.ErrorIs(t, err, ErrUnavailable)
	n.start()
	require.NoError(t, os.WriteFile(filepath.Join(w, "go"), nil, 0o644))
	r := n.exec("s", "running", "touch runs-running; until [ -e go ]; do sleep 0.01; done")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.EqualValues(t, 1, r.GetGeneration())
}
