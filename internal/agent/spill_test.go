package agent

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// Exec ids are a session's own, and the worktree may have been another session's before.
func TestAFileThatAnEarlierSessionsAnswerNamesOutlivesARecoveredExecOfTheSameID(t *testing.T) {
	n := newNode(t)
	n.session("s")
	s := n.agent.sessions["s"]
	w, sb := s.workspace(), s.sandboxRecord()
	var ops []journal.Op
	for id, spill := range map[string]bool{"asked": true, "not": false} {
		require.NoError(t, workspace.KeepOutput(w.Worktree, w.Owner, receipt.StdoutName(id), strings.NewReader("whole"), 5, 1<<20))
		in := intentRecord{ExecID: id, SessionID: "s", SandboxID: sb.ID, Generation: 1, AttachEpoch: sb.AttachEpoch, OwnerEpoch: 1,
			Nonce: randomHex(32), RequestDigest: "d", TimeoutMS: 1000, Spill: spill}
		ops = append(ops, journal.Set(execKey("s", id), encode(execRecord{Intent: in})), journal.Set(openKey("s", id), nil))
	}
	require.NoError(t, n.agent.journal.Update(n.ctx(), true, ops...))
	n.restart(func() {})
	for _, id := range []string{"asked", "not"} {
		require.Eventually(t, func() bool {
			got, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "s", ExecId: id})
			return err == nil && got.GetResult().GetStatus() == sandboxv1.ExecResult_NOT_STARTED
		}, bound, pollEvery)
	}
	require.NoFileExists(t, workspace.OutputPath(w.Worktree, receipt.StdoutName("asked")), "the control case: the agent before may have left it")
	require.FileExists(t, workspace.OutputPath(w.Worktree, receipt.StdoutName("not")))
}
