package agent

import "fmt"

// WorkspaceState says who may do what with a worktree and what the agent keeps for it. A reservation is as durable as its
// session; the mark of a deletion has a record of its own.
type WorkspaceState string

// The states of a workspace.
const (
	WorkspaceFree     WorkspaceState = "FREE"
	WorkspaceReserved WorkspaceState = "RESERVED" // one session has it, or a deletion of one that nobody has
	// WorkspaceDeleting: its deletion has begun, and a part may be gone: it can only be completed.
	WorkspaceDeleting WorkspaceState = "DELETING"
	// WorkspaceHalf is Deleting that nobody is at: the call failed, or the agent was killed.
	WorkspaceHalf WorkspaceState = "HALF_DELETED"
)

// WorkspaceEvent is what happens to a workspace.
type WorkspaceEvent string

// The events of a workspace.
const (
	WsReserve WorkspaceEvent = "reserve" // a session is created on it, or nobody has it and it is deleted
	WsUse     WorkspaceEvent = "use"     // a session opens it, or a sandbox is made on it
	WsRelease WorkspaceEvent = "release" // its session is deleted, with evidence (EvDelete), or the deletion's call ends
	WsDelete  WorkspaceEvent = "delete"  // the point of no return: no command runs, and nothing would be lost, or force
	WsDeleted WorkspaceEvent = "deleted" // nothing of it is left
)

// WorkspaceEffects are what must come with a change of state.
type WorkspaceEffects struct {
	// Durable: the mark is on disk before anything is removed, and goes when everything is.
	Durable bool
	// Remove: worktree, private Git folder, refs and caches are removed; each step can be repeated.
	Remove bool
}

type workspaceTransition struct {
	to      WorkspaceState
	effects WorkspaceEffects
}

// workspaceTable is the whole machine; what isn't in it is refused.
var workspaceTable = map[WorkspaceState]map[WorkspaceEvent]workspaceTransition{
	WorkspaceFree: {
		WsReserve: {WorkspaceReserved, WorkspaceEffects{}},
	},
	WorkspaceReserved: {
		WsUse:     {WorkspaceReserved, WorkspaceEffects{}},
		WsRelease: {WorkspaceFree, WorkspaceEffects{}},
		WsDelete:  {WorkspaceDeleting, WorkspaceEffects{Durable: true, Remove: true}},
	},
	WorkspaceDeleting: {
		WsDelete:  {WorkspaceDeleting, WorkspaceEffects{Durable: true, Remove: true}},
		WsDeleted: {WorkspaceReserved, WorkspaceEffects{Durable: true}},
		WsRelease: {WorkspaceHalf, WorkspaceEffects{}},
	},
	WorkspaceHalf: {
		WsReserve: {WorkspaceDeleting, WorkspaceEffects{}},
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

// state is that of a workspace that whoever asks has reserved; nil: the agent keeps nothing for it yet.
func (r *workspaceRecord) state() WorkspaceState {
	if r != nil && r.Deleting {
		return WorkspaceDeleting
	}
	return WorkspaceReserved
}
