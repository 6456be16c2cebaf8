package agent

import "fmt"

// State is a session's state, as the API names it.
type State string

// The states of a session.
const (
	Provisioning State = "PROVISIONING"
	Ready        State = "READY"
	Executing    State = "EXECUTING"
	Stopping     State = "STOPPING"
	Idle         State = "IDLE"
	// GrantsRequired is Idle without the contents of the session's grants, which nobody but their owner can give again:
	// nothing leads from here to a sandbox but new ones (P15).
	GrantsRequired State = "GRANTS_REQUIRED"
	Uncertain      State = "UNCERTAIN"
	Deleted        State = "DELETED"
)

// Event is what happens to a session.
type Event string

// The events of a session.
const (
	EvProvision  Event = "provision"   // a sandbox is needed
	EvProved     Event = "proved"      // the new sandbox has proved itself
	EvExecStart  Event = "exec starts" // a command is about to get its intent
	EvExecEnd    Event = "exec ends"   // its outcome is known
	EvStop       Event = "stop"        // the sandbox must go: retired, failed, found dead
	EvEvidence   Event = "evidence"    // it is gone, with the whole set of evidence
	EvNoEvidence Event = "no evidence" // it could not be seen to be gone
	EvDelete     Event = "delete"      // the session is forgotten
	// EvEvidenceOnly is EvEvidence of a session whose grants are lost.
	EvEvidenceOnly Event = "evidence, grants lost"
	EvGrantsLost   Event = "grants lost"  // by a restart of the agent, or one has expired
	EvGrantsGiven  Event = "grants given" // UpdateGrants
)

// Effects are what must come with a change of state.
type Effects struct {
	// Durable: the new state is on disk before anything else happens.
	Durable bool
	// NewGeneration: generation and sandbox id are new; nothing of the old one can answer any more (P8).
	NewGeneration bool
	// LookAgain: the evidence that is missing is looked for in the background.
	LookAgain bool
	// ReleaseIDs: the sandbox's host uids may be given to another one.
	ReleaseIDs bool
	// ReleaseWorkspace: another session may have the worktree (P5: only from a state that had evidence).
	ReleaseWorkspace bool
}

type transition struct {
	to      State
	effects Effects
}

// sessionTable is the whole machine; what isn't in it is refused. EXECUTING is not made durable: the intents are.
var sessionTable = map[State]map[Event]transition{
	Idle: {
		EvProvision: {Provisioning, Effects{Durable: true, NewGeneration: true}},
		EvDelete:    {Deleted, Effects{Durable: true, ReleaseWorkspace: true}},
		// Nothing has been made of them yet.
		EvGrantsLost: {GrantsRequired, Effects{Durable: true}},
	},
	GrantsRequired: {
		EvGrantsGiven: {Idle, Effects{Durable: true}},
		EvDelete:      {Deleted, Effects{Durable: true, ReleaseWorkspace: true}},
	},
	Provisioning: {
		EvProved: {Ready, Effects{Durable: true}},
		EvStop:   {Stopping, Effects{Durable: true}},
	},
	Ready: {
		EvExecStart: {Executing, Effects{}},
		EvStop:      {Stopping, Effects{Durable: true}},
	},
	Executing: {
		EvExecEnd: {Ready, Effects{}},
		EvStop:    {Stopping, Effects{Durable: true}},
	},
	Stopping: {
		EvEvidence:     {Idle, Effects{Durable: true, ReleaseIDs: true}},
		EvEvidenceOnly: {GrantsRequired, Effects{Durable: true, ReleaseIDs: true}},
		EvNoEvidence:   {Uncertain, Effects{Durable: true, LookAgain: true}},
		// The agent was killed while it stopped the sandbox.
		EvStop: {Stopping, Effects{}},
	},
	Uncertain: {
		EvStop: {Stopping, Effects{Durable: true}},
	},
}

// Next says where an event leads, or that it can't happen in this state.
func (s State) Next(e Event) (State, Effects, error) {
	t, ok := sessionTable[s][e]
	if !ok {
		return s, Effects{}, fmt.Errorf("%w: a session in state %s can't take %q", ErrPrecondition, s, e)
	}
	return t.to, t.effects, nil
}

// HasSandbox says whether something of a sandbox may be alive in this state.
func (s State) HasSandbox() bool {
	switch s {
	case Provisioning, Ready, Executing, Stopping, Uncertain:
		return true
	default:
		return false
	}
}

// Quiet says whether it is known that nothing writes to the workspace in this state, though a sandbox may be ready.
func (s State) Quiet() bool { return s == Idle || s == GrantsRequired || s == Ready }
