package agent

import "fmt"

// SandboxState is one sandbox's state, as the API names it; empty: it isn't made yet. The events are the session's: what
// happens to a session happens to its newest sandbox, and a session that may do something its sandbox can't is refused.
type SandboxState string

// The states of a sandbox.
const (
	NoSandbox        SandboxState = ""
	SandboxStarting  SandboxState = "STARTING"
	SandboxReady     SandboxState = "READY"
	SandboxStopping  SandboxState = "STOPPING"
	SandboxStopped   SandboxState = "STOPPED" // with the whole set of evidence; nothing leads from here
	SandboxUncertain SandboxState = "UNCERTAIN"
)

// sandboxTable is the whole machine. A sandbox ends once, by evidence, and is never used again.
var sandboxTable = map[SandboxState]map[Event]SandboxState{
	NoSandbox:        {EvProvision: SandboxStarting},
	SandboxStarting:  {EvProved: SandboxReady, EvStop: SandboxStopping},
	SandboxReady:     {EvExecStart: SandboxReady, EvExecEnd: SandboxReady, EvStop: SandboxStopping},
	SandboxStopping:  {EvStop: SandboxStopping, EvEvidence: SandboxStopped, EvEvidenceOnly: SandboxStopped, EvNoEvidence: SandboxUncertain},
	SandboxUncertain: {EvStop: SandboxStopping},
}

// Next says where an event leads, or that it can't happen in this state.
func (s SandboxState) Next(e Event) (SandboxState, error) {
	to, ok := sandboxTable[s][e]
	if !ok {
		return s, fmt.Errorf("%w: a sandbox in state %q can't take %q", ErrPrecondition, s, e)
	}
	return to, nil
}

// concerns says whether an event is the sandbox's too; the others are between the session and its caller.
func (e Event) concerns() bool {
	switch e {
	case EvDelete, EvGrantsLost, EvGrantsGiven:
		return false
	default:
		return true
	}
}

// nextSandbox is the state of the session's newest sandbox after an event, which for EvProvision is a new one.
func (r *sessionRecord) nextSandbox(e Event) (SandboxState, error) {
	current := NoSandbox
	if r.Sandbox != nil && e != EvProvision {
		current = r.Sandbox.State
	}
	if !e.concerns() {
		return current, nil
	}
	return current.Next(e)
}
