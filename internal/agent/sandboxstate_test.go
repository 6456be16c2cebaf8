package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

var allSandboxStates = []SandboxState{NoSandbox, SandboxStarting, SandboxReady, SandboxStopping, SandboxStopped, SandboxUncertain}

func TestEverySandboxTransitionIsTheExpectedOne(t *testing.T) {
	want := map[SandboxState]map[Event]SandboxState{
		NoSandbox:        {EvProvision: SandboxStarting},
		SandboxStarting:  {EvProved: SandboxReady, EvStop: SandboxStopping},
		SandboxReady:     {EvExecStart: SandboxReady, EvExecEnd: SandboxReady, EvStop: SandboxStopping},
		SandboxStopping:  {EvStop: SandboxStopping, EvEvidence: SandboxStopped, EvEvidenceOnly: SandboxStopped, EvNoEvidence: SandboxUncertain},
		SandboxUncertain: {EvStop: SandboxStopping},
	}
	for _, s := range allSandboxStates {
		for _, e := range allEvents {
			to, err := s.Next(e)
			if expected, ok := want[s][e]; ok {
				require.NoError(t, err, "%s %s", s, e)
				require.Equal(t, expected, to, "%s %s", s, e)
				continue
			}
			require.ErrorIs(t, err, ErrPrecondition, "%s %s", s, e)
			require.Equal(t, s, to, "%s %s", s, e)
		}
		if s != NoSandbox {
			require.Contains(t, sandboxv1.Sandbox_State_value, string(s), "the API's name")
		}
	}
}

// Walks through every state that a session and its sandbox can be in together.
func TestP5ASessionAndItsSandboxAgreeInEveryStateThatCanBeReached(t *testing.T) {
	type both struct {
		session State
		sandbox SandboxState
	}
	start := both{Idle, NoSandbox}
	seen, todo := map[both]bool{start: true}, []both{start}
	for len(todo) > 0 {
		at := todo[0]
		todo = todo[1:]
		mayLive := at.sandbox != NoSandbox && at.sandbox != SandboxStopped
		require.Equal(t, at.session.HasSandbox(), mayLive, "%v", at)
		for _, e := range allEvents {
			to, effects, err := at.session.Next(e)
			if err != nil {
				continue
			}
			rec := &sessionRecord{State: at.session}
			if at.sandbox != NoSandbox {
				rec.Sandbox = &sandboxRecord{State: at.sandbox}
			}
			sandbox, err := rec.nextSandbox(e)
			require.NoError(t, err, "%v %s: what a session may do, its sandbox can", at, e)
			require.False(t, mayLive && effects.NewGeneration, "%v %s: two sandboxes on one workspace", at, e)
			require.False(t, mayLive && effects.ReleaseWorkspace, "%v %s: the workspace is given away under a sandbox", at, e)
			require.Equal(t, sandbox == SandboxStopped && mayLive, effects.ReleaseIDs, "%v %s", at, e)
			if next := (both{to, sandbox}); !seen[next] {
				seen[next] = true
				todo = append(todo, next)
			}
		}
	}
	require.Contains(t, seen, both{Uncertain, SandboxUncertain})
	require.Contains(t, seen, both{Deleted, SandboxStopped})
	require.Contains(t, seen, both{GrantsRequired, SandboxStopped})
}
