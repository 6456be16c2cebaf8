package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	allStates = []State{Provisioning, Ready, Executing, Stopping, Idle, Uncertain, Deleted}
	allEvents = []Event{EvProvision, EvProved, EvExecStart, EvExecEnd, EvStop, EvEvidence, EvNoEvidence, EvDelete}
)

func TestEverySessionTransitionIsTheExpectedOne(t *testing.T) {
	want := map[State]map[Event]State{
		Idle:         {EvProvision: Provisioning, EvDelete: Deleted},
		Provisioning: {EvProved: Ready, EvStop: Stopping},
		Ready:        {EvExecStart: Executing, EvStop: Stopping},
		Executing:    {EvExecEnd: Ready, EvStop: Stopping},
		Stopping:     {EvEvidence: Idle, EvNoEvidence: Uncertain, EvStop: Stopping},
		Uncertain:    {EvStop: Stopping},
	}
	for _, s := range allStates {
		for _, e := range allEvents {
			to, _, err := s.Next(e)
			if expected, ok := want[s][e]; ok {
				require.NoError(t, err, "%s %s", s, e)
				require.Equal(t, expected, to, "%s %s", s, e)
				continue
			}
			require.ErrorIs(t, err, ErrPrecondition, "%s %s", s, e)
			require.Equal(t, s, to, "%s %s", s, e)
		}
	}
}

func TestP5AWorkspaceAndItsIdsAreReleasedOnEvidenceOnly(t *testing.T) {
	for _, s := range allStates {
		for _, e := range allEvents {
			_, effects, err := s.Next(e)
			if err != nil {
				continue
			}
			require.Equal(t, e == EvEvidence, effects.ReleaseIDs, "%s %s", s, e)
			require.Equal(t, s == Idle && e == EvDelete, effects.ReleaseWorkspace, "%s %s", s, e)
		}
	}
	require.False(t, Idle.HasSandbox())
	require.False(t, Deleted.HasSandbox())
	require.True(t, Uncertain.HasSandbox())
}

func TestEveryChangeButThoseOfAnExecIsDurable(t *testing.T) {
	for _, s := range allStates {
		for _, e := range allEvents {
			to, effects, err := s.Next(e)
			if err != nil || to == s || e == EvExecStart || e == EvExecEnd {
				continue
			}
			require.True(t, effects.Durable, "%s %s", s, e)
		}
	}
}
