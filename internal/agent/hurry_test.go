package agent

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
)

func TestAHarvestIsInterruptedOnlyWhileSomebodyWaits(t *testing.T) {
	h := &haste{}
	ctx, end := h.harvesting(t.Context())
	require.NoError(t, ctx.Err(), "nobody waits")
	over := h.hurry()
	require.ErrorIs(t, context.Cause(ctx), errHurried, "who comes while it is under way")
	require.True(t, end())

	ctx, end = h.harvesting(t.Context())
	require.ErrorIs(t, context.Cause(ctx), errHurried, "who waits already when it begins")
	require.True(t, end())
	over()
	over()

	ctx, end = h.harvesting(t.Context())
	require.NoError(t, ctx.Err(), "nobody waits any more")
	require.False(t, end())
	require.Error(t, ctx.Err(), "nothing of it stays")

	other, cancel := context.WithCancel(t.Context())
	cancel()
	_, end = h.harvesting(other)
	require.False(t, end(), "the agent's end is no interruption")
}

func TestAHarvestHasTheTimeOfWhoWaits(t *testing.T) {
	h := &haste{patience: time.Millisecond}
	ctx, end := h.harvesting(t.Context())
	defer end()
	defer h.hurry()()
	<-ctx.Done()
	require.ErrorIs(t, context.Cause(ctx), errHurried)
}

// Who ends something does not wait for a harvest, and nothing is lost: it is brought over afterwards.
func TestP5WhatEndsASandboxDoesNotWaitForAHarvestWhichIsMadeUpFor(t *testing.T) {
	n := newNode(t)
	for id, end := range map[string]func(id string) *sandboxv1.Evidence{
		"cancelled": func(id string) *sandboxv1.Evidence {
			r, err := n.cancel(id, "e")
			require.NoError(t, err)
			require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus())
			return r.GetEvidence()
		},
		"retired": func(id string) *sandboxv1.Evidence {
			_, evidence, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: id})
			require.NoError(t, err)
			return evidence
		},
	} {
		t.Run(id, func(t *testing.T) {
			s := n.session(id)
			x := n.agent.sessions[id]
			x.haste.patience = 0
			n.exec(id, "mk", "mkfifo go")
			begun := filepath.Join(s.GetWorkspace().GetWorktree(), "begun")
			done := n.begin(&sandboxv1.ExecRequest{SessionId: id, ExecId: "e", Command: commitNew + " && echo begun > begun; cat go"})
			require.Eventually(t, func() bool { _, err := os.Stat(begun); return err == nil }, bound, pollEvery)
			evidence := end(id)
			require.True(t, evidence.GetComplete(), "and it has all of its evidence")
			r := <-done
			require.NoError(t, r.err)
			require.Equal(t, gitview.Failed, r.result.GetHarvest().GetStatus())
			require.Contains(t, r.result.GetHarvest().GetDetail(), "interrupted")
			require.Eventually(t, func() bool {
				return n.get(id).GetLastHarvest().GetStatus() == gitview.Harvested
			}, bound, pollEvery)
			require.Equal(t, "From inside\n", n.base(s, "log", "-1", "--format=%s", s.GetWorkspace().GetBranch()))
		})
	}
}
