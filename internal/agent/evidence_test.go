package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// stubborn is the real runtime, which while it is set can't see that a sandbox is gone: it asks for the stop, as a
// runtime that answers "accepted" would.
type stubborn struct {
	runtime.Runtime
	set *atomic.Bool
}

type stubbornSandbox struct {
	runtime.Sandbox
	set *atomic.Bool
}

func (r stubborn) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	s, err := r.Runtime.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return stubbornSandbox{s, r.set}, nil
}

func (r stubborn) Remove(ctx context.Context, id runtime.Identity) (runtime.Evidence, error) {
	if r.set.Load() {
		return runtime.Evidence{}, fmt.Errorf("removing sandbox %s: %w", id.SandboxID, runtime.ErrNoEvidence)
	}
	return r.Runtime.Remove(ctx, id)
}

func (s stubbornSandbox) Stop(ctx context.Context) (runtime.Evidence, error) {
	if s.set.Load() {
		return runtime.Evidence{Items: []runtime.EvidenceItem{{Source: "pidfd"}}}, fmt.Errorf("stopping: %w", runtime.ErrNoEvidence)
	}
	return s.Sandbox.Stop(ctx)
}

func TestP5WithoutEvidenceTheWorkspaceStaysReservedUntilThereIsSome(t *testing.T) {
	n := newNode(t)
	set := &atomic.Bool{}
	n.agent.hosts.all["embedded"] = stubborn{n.agent.hosts.all["embedded"], set}
	s := n.session("reserved")
	set.Store(true)
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "reserved"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorIs(t, err, runtime.ErrNoEvidence)
	after, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "reserved"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_UNCERTAIN, after.GetState())
	require.NotEmpty(t, after.GetReason())
	require.False(t, after.GetSandbox().GetEvidence().GetComplete())
	n.counts(`sessions{state="UNCERTAIN"} 1`)

	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "reserved", ExecId: "e1", Command: "touch never"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "still reserved")
	_, err = n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "reserved"})
	require.ErrorIs(t, err, ErrPrecondition)
	w := s.GetWorkspace()
	_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "other",
		Workspace: &sandboxv1.Workspace{Repository: w.GetRepository(), Worktree: w.GetWorktree()}})
	require.ErrorIs(t, err, ErrPrecondition, "nobody else gets the worktree")
	require.Len(t, n.agent.slots.taken, 1, "nor the host uids")
	_, err = n.agent.DeleteWorkspace(n.ctx(), &sandboxv1.DeleteWorkspaceRequest{SessionId: "reserved", Force: true})
	require.ErrorIs(t, err, ErrPrecondition, "nor is it deleted under whoever may still write there")
	require.FileExists(t, filepath.Join(w.GetWorktree(), "README"))
	_, err = n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "reserved", Args: []string{"status"}})
	require.ErrorIs(t, err, ErrPrecondition)

	set.Store(false)
	_, evidence, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "reserved"})
	require.NoError(t, err)
	require.True(t, evidence.GetComplete())
	require.Empty(t, n.agent.slots.taken)
	require.NoFileExists(t, filepath.Join(w.GetWorktree(), "never"))
	require.EqualValues(t, 2, n.exec("reserved", "e1", "true").GetGeneration())
}

func TestP1ACommandWhoseIntentCannotBeMadeDurableNeverRuns(t *testing.T) {
	n := newNode(t)
	s := n.session("journal")
	require.NoError(t, n.agent.journal.Close())
	_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "journal", ExecId: "e1", Command: "touch ran"})
	require.Error(t, err)
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "ran"))
	_ = n.agent.Close() // it closes the journal a second time
	n.start()
	require.Zero(t, n.exec("journal", "e1", "touch ran").GetExitCode())
}

func TestASandboxWhoseSealWasBrokenFromTheHostIsStopped(t *testing.T) {
	n := newNode(t)
	s := n.session("seal")
	require.Zero(t, n.exec("seal", "e1", "true").GetExitCode())
	// A rename over the file detaches the seal on it in the sandbox's mount namespace, and the pointer is writable there.
	pointer := filepath.Join(s.GetWorkspace().GetWorktree(), ".git")
	b, err := os.ReadFile(pointer)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(pointer+".new", b, 0o644))
	require.NoError(t, os.Chown(pointer+".new", owner, owner))
	require.NoError(t, os.Rename(pointer+".new", pointer))
	r := n.exec("seal", "e2", "touch never")
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, r.GetStatus(), r.GetReason())
	require.Contains(t, r.GetReason(), pointer)
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "never"))
	require.EqualValues(t, 2, n.exec("seal", "e3", "true").GetGeneration())
}

func TestDeletingEndsWhatRunsAndWhatWaitsNeverRuns(t *testing.T) {
	n := newNode(t)
	s := n.session("del")
	n.exec("del", "mk", "mkfifo go")
	running, waiting := make(chan *sandboxv1.ExecResult, 1), make(chan error, 1)
	go func() {
		r, _ := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "del", ExecId: "running", Command: "cat go; sleep 600"})
		running <- r
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer w.Close()
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "del", ExecId: "waiting", Command: "touch never"})
		waiting <- err
	}()
	require.Eventually(t, func() bool {
		x, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "del"})
		return err == nil && len(x.GetQueuedExecIds()) == 1
	}, bound, pollEvery)
	evidence, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "del"})
	require.NoError(t, err)
	require.True(t, evidence.GetComplete())
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, (<-running).GetStatus())
	require.ErrorIs(t, <-waiting, ErrNotFound)
	require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "never"))
}

func TestDeletingASessionThatIsBeingDeletedAnswersTheSame(t *testing.T) {
	n := newNode(t)
	n.session("twice")
	found, err := n.agent.find("twice")
	require.NoError(t, err)
	first, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "twice"})
	require.NoError(t, err)
	require.True(t, first.GetComplete())
	// Whoever had found the session before the first deletion was over waited for its goroutine, and has its turn now.
	second, err := found.delete(n.ctx(), 0)
	require.NoError(t, err)
	require.True(t, proto.Equal(first, second), "%v\n%v", first, second)
	_, err = n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "twice"})
	require.ErrorIs(t, err, ErrNotFound, "afterwards there is none")
}
