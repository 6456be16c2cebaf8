package agent

import "fmt"

// WorkspaceState says what may be done with a worktree, and what the agent keeps for it, by the one session that has it or,
// when none has, by the call that deletes it. Agent.reserveWorkspace sees to it that there is only one.
type WorkspaceState string

// The states of a workspace.
const (
	WorkspaceReserved WorkspaceState = "RESERVED"
	// WorkspaceDeleting: its deletion has begun, and a part may be gone: it can only be completed.
	WorkspaceDeleting WorkspaceState = "DELETING"
)

// WorkspaceEvent is what happens to a workspace.
type WorkspaceEvent string

// The events of a workspace.
const (
	WsUse     WorkspaceEvent = "use"     // a session opens it, or a sandbox is made on it
	WsDelete  WorkspaceEvent = "delete"  // the point of no return: no command runs, and nothing would be lost, or force
	WsDeleted WorkspaceEvent = "deleted" // nothing of it is left
)

// WorkspaceEffects are what must come with a change of state.
type WorkspaceEffects struct {
	// Durable: the mark is on disk before anything is removed, and goes when everything is.
	Durable bool
}

type workspaceTransition struct {
	to      WorkspaceState
	effects WorkspaceEffects
}

// workspaceTable is the whole machine; what isn't in it is refused.
var workspaceTable = map[WorkspaceState]map[WorkspaceEvent]workspaceTransition{
	WorkspaceReserved: {
		WsUse:    {WorkspaceReserved, WorkspaceEffects{}},
		WsDelete: {WorkspaceDeleting, WorkspaceEffects{Durable: true}},
	},
	WorkspaceDeleting: {
		WsDelete:  {WorkspaceDeleting, WorkspaceEffects{Durable: true}},
		WsDeleted: {WorkspaceReserved, WorkspaceEffects{Durable: true}},
	},
}

// Next says where an event leads, or that it can't happen in this state.
func (s WorkspaceState) Next(e WorkspaceEvent) (WorkspaceState, WorkspaceEffects, error) {
	t, ok := workspaceTable[s][e]
	if !ok {
		return s, WorkspaceEffects{}, fmt.Errorf("%w: a workspace in state %s can't take %q", ErrPrecondition, s, e)
	}
	return t.to, t.effects, nil
}

// state is that of the workspace that the record is about; nil: the agent keeps nothing for it yet.
func (r *workspaceRecord) state() WorkspaceState {
	if r != nil && r.Deleting {
		return WorkspaceDeleting
	}
	return WorkspaceReserved
}

// step takes an event through the workspace's state machine; the record is then as it has to be written.
func (r *workspaceRecord) step(e WorkspaceEvent) (WorkspaceEffects, error) {
	to, effects, err := r.state().Next(e)
	if err == nil {
		r.Deleting = to == WorkspaceDeleting
	}
	return effects, err
}
