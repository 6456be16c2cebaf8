package agent

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
)

// forgetOutcome is what a crash does to an answer that was recorded without a sync: the next agent has the intent alone.
func (n *node) forgetOutcome(session, id string) *execution {
	n.t.Helper()
	b, err := n.agent.journal.Get(execKey(session, id))
	require.NoError(n.t, err)
	var rec execRecord
	require.NoError(n.t, json.Unmarshal(b, &rec))
	x := n.agent.sessions[session]
	require.NoError(n.t, n.agent.journal.Update(n.ctx(), true, journal.Set(execKey(session, id), encode(execRecord{Intent: rec.Intent}))))
	e := x.recovered(rec.Intent)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.live[id] = e
	return e
}

func (n *node) listedAs(session, id string) *sandboxv1.ExecSummary {
	n.t.Helper()
	list, _, err := n.agent.ListExecs(n.ctx(), &sandboxv1.ListExecsRequest{SessionId: session})
	require.NoError(n.t, err)
	for _, e := range list {
		if e.GetExecId() == id {
			return e
		}
	}
	n.t.Fatalf("exec %s is not in the list", id)
	return nil
}

func TestP7WhatWasAnsweredIsAnsweredAlsoBeforeTheNextAgentHasLookedAtIt(t *testing.T) {
	n := newNode(t)
	n.session("s")
	answered := n.exec("s", "e1", "echo out; exit 3")
	before := n.listedAs("s", "e1")
	e := n.forgetOutcome("s", "e1")

	require.True(t, proto.Equal(before, n.listedAs("s", "e1")), "%v", n.listedAs("s", "e1"))
	require.Equal(t, sandboxv1.ExecState_EXEC_DONE, before.GetState())
	require.EqualValues(t, 3, before.GetExitCode())
	got, err := n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "s", ExecId: "e1", Text: true})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecState_EXEC_DONE, got.GetState())
	require.True(t, proto.Equal(answered, got.GetResult()), "%v", got.GetResult())

	// One that this agent runs itself is answered when all of it is known, what was harvested too.
	e.recovered = false
	require.Equal(t, sandboxv1.ExecState_EXEC_RUNNING, n.listedAs("s", "e1").GetState())
	e.recovered = true
	x := n.agent.sessions["s"]
	require.NoError(t, x.do(n.ctx(), func() error { x.reclaim(e); return nil }))
	require.True(t, proto.Equal(before, n.listedAs("s", "e1")))
}

func TestWhatWasCancelledIsNotAnsweredBeforeItsEvidenceIsThere(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	done, _ := n.blocked(s, "e1", "true")
	r, err := n.cancel("s", "e1")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus())
	require.NoError(t, (<-done).err)
	e := n.forgetOutcome("s", "e1")
	require.Equal(t, sandboxv1.ExecState_EXEC_RUNNING, n.listedAs("s", "e1").GetState(), "its receipt alone is not the answer")
	x := n.agent.sessions["s"]
	require.NoError(t, x.do(n.ctx(), func() error { x.reclaim(e); return nil }))
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, n.listedAs("s", "e1").GetStatus())
}
