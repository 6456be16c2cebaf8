package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

var (
	allStates = []State{Provisioning, Ready, Executing, Stopping, Idle, GrantsRequired, Uncertain, Deleted}
	allEvents = []Event{EvProvision, EvProved, EvExecStart, EvExecEnd, EvStop, EvEvidence, EvNoEvidence, EvDelete, EvEvidenceOnly, EvGrantsLost, EvGrantsGiven}
)

func TestEverySessionTransitionIsTheExpectedOne(t *testing.T) {
	want := map[State]map[Event]State{
		Idle:           {EvProvision: Provisioning, EvDelete: Deleted, EvGrantsLost: GrantsRequired},
		GrantsRequired: {EvGrantsGiven: Idle, EvDelete: Deleted},
		Provisioning:   {EvProved: Ready, EvStop: Stopping},
		Ready:          {EvExecStart: Executing, EvStop: Stopping},
		Executing:      {EvExecEnd: Ready, EvStop: Stopping},
		Stopping:       {EvEvidence: Idle, EvEvidenceOnly: GrantsRequired, EvNoEvidence: Uncertain, EvStop: Stopping},
		Uncertain:      {EvStop: Stopping},
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
			require.Equal(t, e == EvEvidence || e == EvEvidenceOnly, effects.ReleaseIDs, "%s %s", s, e)
			require.Equal(t, e == EvDelete, effects.ReleaseWorkspace, "%s %s", s, e)
			require.False(t, e == EvDelete && s.HasSandbox(), "%s %s", s, e)
		}
	}
	require.False(t, Idle.HasSandbox())
	require.False(t, Deleted.HasSandbox())
	require.False(t, GrantsRequired.HasSandbox())
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

// reachable are the states that events lead to, without the given one.
func reachable(from State, without Event) map[State]bool {
	reached := map[State]bool{from: true}
	for range allStates {
		for s := range reached {
			for _, e := range allEvents {
				if to, _, err := s.Next(e); err == nil && e != without {
					reached[to] = true
				}
			}
		}
	}
	return reached
}

func TestP15WithoutItsGrantsASessionComesToNoSandbox(t *testing.T) {
	require.Equal(t, map[State]bool{GrantsRequired: true, Deleted: true}, reachable(GrantsRequired, EvGrantsGiven))
	require.True(t, reachable(GrantsRequired, "")[Executing])
}

func TestEveryStateIsOneOfTheApiAndCanBeReached(t *testing.T) {
	reached := reachable(Idle, "")
	for _, s := range allStates {
		require.True(t, reached[s], s)
		require.NotZero(t, sandboxv1.Session_State_value[string(s)], s)
	}
}
