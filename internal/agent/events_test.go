package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// events are those after a cursor, of one session or of all.
func (n *node) events(session, cursor string) []*sandboxv1.Event {
	n.t.Helper()
	var list []*sandboxv1.Event
	err := n.agent.WatchEvents(n.ctx(), &sandboxv1.WatchEventsRequest{SessionId: session, Cursor: cursor, UntilNow: true},
		func(m *sandboxv1.WatchEventsResponse) error {
			list = append(list, m.GetEvent())
			return nil
		})
	require.NoError(n.t, err)
	return list
}

// steps are events as "kind" or "kind exec".
func steps(list []*sandboxv1.Event) []string {
	var out []string
	for _, e := range list {
		out = append(out, strings.TrimSpace(e.GetKind()+" "+e.GetExecId()))
	}
	return out
}

func (n *node) requireRising(list []*sandboxv1.Event) {
	n.t.Helper()
	for i := 1; i < len(list); i++ {
		require.Greater(n.t, list[i].GetCursor(), list[i-1].GetCursor())
	}
}

func details(list []*sandboxv1.Event) map[string]string {
	out := map[string]string{}
	for _, e := range list {
		out[strings.TrimSpace(e.GetKind()+" "+e.GetExecId())] = e.GetDetail()
	}
	return out
}

func TestEveryStepOfASessionIsToldInItsOrder(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.exec("s", "e1", "exit 3")
	_, err := n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	n.retire("s")
	n.exec("s", "e2", "kill -9 $$")
	again := n.exec("s", "e2", "kill -9 $$")
	require.Equal(t, sandboxv1.ExecResult_SIGNALED, again.GetStatus(), "the same one again tells nothing")
	_, err = n.agent.DeleteWorkspace(n.ctx(), &sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
	require.NoError(t, err)

	list := n.events("s", "")
	n.requireRising(list)
	require.Equal(t, []string{
		"session.created", "sandbox.assigned", "sandbox.ready",
		"exec.requested e1", "exec.started e1", "exec.boundary e1", "exec.result e1",
		"session.claimed", "sandbox.retired",
		"sandbox.assigned", "sandbox.ready",
		"exec.requested e2", "exec.started e2", "exec.boundary e2", "exec.result e2",
		"sandbox.retired", "workspace.deleted", "session.deleted",
	}, steps(list))
	d := details(list)
	require.Equal(t, "EXITED 3", d["exec.result e1"])
	require.Equal(t, "SIGNALED 9", d["exec.result e2"])
	require.Equal(t, "EXITED", d["exec.boundary e1"])
	require.Equal(t, "owner_epoch 2", d["session.claimed"])
	require.Equal(t, s.GetWorkspace().GetWorktree(), d["session.created"])
	require.Equal(t, s.GetWorkspace().GetWorktree(), d["workspace.deleted"])
	require.Contains(t, list[1].GetDetail(), s.GetSandbox().GetId())
	require.Contains(t, list[8].GetDetail(), s.GetSandbox().GetId()+": Retired on request. Evidence: ")
	for i, e := range list {
		require.False(t, e.GetAt().AsTime().IsZero())
		if kind := e.GetKind(); strings.HasPrefix(kind, "sandbox.") || e.GetExecId() != "" && kind != "exec.requested" {
			want := uint64(1)
			if i > 8 {
				want = 2
			}
			require.Equal(t, want, e.GetGeneration(), kind)
		}
	}
	require.Equal(t, list[10:], n.events("s", list[9].GetCursor()), "from any cursor on")
	all := n.events("", "")
	require.Equal(t, "agent.started", all[0].GetKind())
	require.Len(t, all, len(list)+1)
}

// The end of the sandbox is told after that of the command with which it had to go, and each of them once, also when the
// agent dies before it has recorded the answer.
func TestTheBoundaryIsToldBeforeTheEndOfTheSandbox(t *testing.T) {
	n := newNode(t)
	done, _ := n.blocked(n.session("s"), "e1", "true")
	r, err := n.cancel("s", "e1")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, r.GetStatus())
	require.NoError(t, (<-done).err)
	list := steps(n.events("s", ""))
	want := []string{"exec.started e1", "exec.boundary e1", "sandbox.retired", "exec.result e1"}
	require.Equal(t, want, list[len(list)-len(want):])

	e := n.forgetOutcome("s", "e1")
	require.NoError(t, n.agent.journal.Update(n.ctx(), true, journal.Set(openKey("s", "e1"), nil),
		journal.Set(execKey("s", "e1"), encode(execRecord{Intent: e.intent, BoundaryTold: true}))))
	require.NoError(t, n.agent.Close())
	n.start()
	again, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: "echo begun; cat go; true"})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, again.GetStatus())
	list = append(list, "exec.result e1")
	require.Equal(t, list, steps(n.events("s", "")))
}

func TestACommandThatWaitsIsToldWhenItIsRequestedAndOneThatIsRefusedIsToldSo(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.exec("s", "mk", "mkfifo go")
	done := make(chan error, 2)
	exec := func(id, command string, generation uint64) {
		go func() {
			_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: id, Command: command, Generation: generation})
			done <- err
		}()
	}
	exec("first", "cat go", 0)
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0) // it runs
	require.NoError(t, err)
	exec("second", "true", 1)
	require.Eventually(t, func() bool { return slices.Contains(steps(n.events("s", "")), "exec.requested second") }, bound, pollEvery)
	require.NotContains(t, steps(n.events("s", "")), "exec.boundary first", "it was told while the other one ran")
	retired := make(chan error, 1)
	go func() { // before the second has its turn: it insists on a generation that is gone then
		_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "s"})
		retired <- err
	}()
	require.NoError(t, <-retired)
	require.NoError(t, w.Close())
	errs := []error{<-done, <-done}
	require.Condition(t, func() bool { return (errs[0] == nil) != (errs[1] == nil) }, "%v", errs)
	var second []string
	for _, e := range n.events("s", "") {
		if e.GetExecId() == "second" {
			second = append(second, e.GetKind()+" "+e.GetDetail())
		}
	}
	require.Equal(t, []string{"exec.requested ", "exec.refused failed_precondition"}, second)
}

func TestP6TheChainGoesOnAfterAKilledAgentAndSaysWhatMayBeMissing(t *testing.T) {
	c := newCrash(t, []string{"mkfifo go"}, duringCommand)
	w := c.openFifo() // it runs
	c.kill()
	c.restart()
	before := c.events("", "")
	n := slices.IndexFunc(before, func(e *sandboxv1.Event) bool { return e.GetKind() == "gap" })
	require.Positive(t, n)
	require.Equal(t, "agent.started", before[n+1].GetKind())
	require.Contains(t, before[n].GetDetail(), before[n-1].GetCursor())
	require.Subset(t, steps(before[:n]), []string{"session.created", "sandbox.ready", "exec.requested during", "exec.started during"},
		"what was durable is told, also after kill -9")
	require.NoError(t, w.Close())
	_, err := c.agent.Exec(c.ctx(), c.during())
	require.NoError(t, err)
	all := c.events("", "")
	c.requireRising(all)
	require.Equal(t, before, all[:len(before)])
	require.Equal(t, []string{"exec.boundary during", "exec.result during"}, steps(c.events("", before[len(before)-1].GetCursor())),
		"told once, by the agent that found out; the request and the start were told before")
	require.Equal(t, all[n:], c.events("", all[n-1].GetCursor()), "a cursor of the killed agent is good")
}

func TestAnAgentThatStopsSaysSoAndThereIsNoGap(t *testing.T) {
	n := newNode(t)
	last := n.events("", "")
	require.NoError(t, n.agent.Close())
	n.start()
	require.Equal(t, []string{"agent.stopped", "agent.started"}, steps(n.events("", last[len(last)-1].GetCursor())))
}

func TestAnAuditLogThatCanNotBeOpenedStopsTheAgentAtItsStart(t *testing.T) {
	n := newNode(t)
	last := n.events("", "")
	require.NoError(t, n.agent.Close())
	receiptd, pid1 := testkit.Binaries(t)
	broken := n.cfg
	broken.Audit.Path = "/proc/audit.jsonl"
	_, err := newAgent(broken, n.parent, receiptd, pid1)
	require.ErrorIs(t, err, events.ErrAudit)
	require.ErrorContains(t, err, "/proc/audit.jsonl")
	n.start()
	require.NotContains(t, steps(n.events("", last[len(last)-1].GetCursor())), "gap", "it ended in order")
}

func TestASlowWatcherStallsNeitherCommandsNorTheAgentsEnd(t *testing.T) {
	n := newNode(t)
	n.session("s")
	stuck, goOn := make(chan struct{}), make(chan struct{})
	watched := make(chan error, 1)
	var seen []*sandboxv1.Event
	go func() {
		watched <- n.agent.WatchEvents(context.WithoutCancel(n.ctx()), &sandboxv1.WatchEventsRequest{}, func(m *sandboxv1.WatchEventsResponse) error {
			if seen = append(seen, m.GetEvent()); len(seen) == 1 {
				close(stuck)
				<-goOn
			}
			return nil
		})
	}()
	<-stuck
	for i := range 10 {
		n.exec("s", fmt.Sprintf("e%d", i), "true")
	}
	all := n.events("", "")
	require.Equal(t, "exec.result e9", steps(all)[len(all)-1])
	close(goOn)
	last := all[len(all)-1].GetCursor()
	require.NoError(t, n.agent.Close())
	require.ErrorIs(t, <-watched, ErrUnavailable)
	n.start()
	both := min(len(seen), len(all))
	require.Greater(t, both, 1)
	require.Equal(t, steps(all)[:both], steps(seen)[:both], "in order, nothing left out")
	require.Equal(t, []string{"agent.stopped", "agent.started"}, steps(n.events("", last)))
}

func TestAHarvestsConflictIsToldWithoutTheNamesThatTheCommandChose(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "mk", "mkfifo $TMPDIR/go")
	done := make(chan error, 1)
	go func() {
		_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: "cat $TMPDIR/go; " + commitNew})
		done <- err
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), ".sandbox-tmp", "go"), os.O_WRONLY, 0) // it runs
	require.NoError(t, err)
	other := strings.TrimSpace(n.base(s, "commit-tree", "-p", "work", "-m", "Somebody else's", "work^{tree}"))
	n.base(s, "update-ref", "refs/heads/work", other)
	require.NoError(t, w.Close())
	require.NoError(t, <-done)
	list := n.events("s", "")
	require.Equal(t, []string{"exec.boundary e1", "harvest.conflict e1", "exec.result e1"}, steps(list)[len(list)-3:])
	require.Contains(t, details(list)["harvest.conflict e1"], "1 refs in conflict")
	require.NotContains(t, details(list)["harvest.conflict e1"], "work")
}

// A canary for each thing that must not be told. audit is the audit log's text, shown what WatchEvents gives.
func canaries(t *testing.T, commands bool) (audit, shown, journalled string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	n := newNode(t, func(c *config.Config) { c.Audit.Path, c.Audit.Commands = path, commands })
	s := n.session("plain")
	w := s.GetWorkspace()
	_, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "plain"})
	require.NoError(t, err)
	_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{
		SessionId: "s", Workspace: &sandboxv1.Workspace{Repository: w.GetRepository(), Worktree: w.GetWorktree()},
		Env:    map[string]string{"SECRET": "canary-env"},
		Grants: []*sandboxv1.Grant{{Name: "kube", Files: []*sandboxv1.GrantFile{{Path: "config", Content: []byte("canary-grant")}}, Env: map[string]string{"TOKEN": "canary-variable"}}},
	})
	require.NoError(t, err)
	r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Text: true, Labels: map[string]string{"turn": "canary-label"},
		Command: ": canary-command; echo canary-$((40+2)); echo canary-$((41+2)) >&2; cat /run/grants/kube/config; echo $SECRET $TOKEN; git branch canary-branch"})
	require.NoError(t, err)
	require.Equal(t, "canary-42\ncanary-grantcanary-env canary-variable\n", r.GetStdoutText(), "the control: the command had it all")
	_, err = n.agent.UpdateGrants(n.ctx(), &sandboxv1.UpdateGrantsRequest{SessionId: "s", Grants: []*sandboxv1.Grant{
		{Name: "other", Files: []*sandboxv1.GrantFile{{Path: "config", Content: []byte("canary-new")}}}}})
	require.NoError(t, err)
	list := n.events("", "")
	require.Equal(t, "other", details(list)["grants.updated"], "the name alone")
	for _, e := range list {
		shown += e.String() + "\n"
	}
	require.NoError(t, n.agent.chain.Watch(n.ctx(), 0, "", true, func(e events.Entry) error {
		b, err := json.Marshal(e)
		journalled += string(b) + "\n"
		return err
	}))
	require.NoError(t, n.agent.Close()) // writes the audit log to its end
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, len(list)+1, strings.Count(string(b), "\n"), "every event, and agent.stopped")
	require.Contains(t, string(b), `"kind":"exec.result"`)
	n.start()
	return string(b), shown, journalled
}

func TestP15NothingOfACommandNorOfASecretIsInTheEventsOrTheAuditLog(t *testing.T) {
	audit, shown, journalled := canaries(t, false)
	require.NotContains(t, audit, "canary")
	require.NotContains(t, shown, "canary")
	require.NotContains(t, journalled, "canary")
}

func TestCommandTextsAreInTheAuditLogAloneAndOnlyIfTheyAreToBe(t *testing.T) {
	audit, shown, _ := canaries(t, true)
	require.Contains(t, audit, `"command":": canary-command; echo`)
	require.NotContains(t, shown, "canary")
	for _, secret := range []string{"canary-42", "canary-43", "canary-grant", "canary-variable", "canary-env", "canary-label", "canary-new"} {
		require.NotContains(t, audit, secret)
	}
}

func TestAWatcherIsToldWhatIsWrongWithItsRequest(t *testing.T) {
	n := newNode(t)
	watch := func(r *sandboxv1.WatchEventsRequest) error {
		r.UntilNow = true
		return n.agent.WatchEvents(n.ctx(), r, func(*sandboxv1.WatchEventsResponse) error { return nil })
	}
	require.ErrorIs(t, watch(&sandboxv1.WatchEventsRequest{Cursor: "yesterday"}), ErrInvalid)
	require.ErrorIs(t, watch(&sandboxv1.WatchEventsRequest{SessionId: "a/b"}), ErrInvalid)
	require.ErrorIs(t, watch(&sandboxv1.WatchEventsRequest{Cursor: "ffffffffffffffff"}), ErrPrecondition)
	require.NoError(t, watch(&sandboxv1.WatchEventsRequest{SessionId: "nobody"}), "a session may be gone, its events not yet")
	n.agent.watching.n = maxWatchers
	require.ErrorIs(t, watch(&sandboxv1.WatchEventsRequest{}), ErrExhausted)
	n.agent.watching.n = 0
	require.NoError(t, watch(&sandboxv1.WatchEventsRequest{}))
	require.Zero(t, n.agent.watching.n)
}
