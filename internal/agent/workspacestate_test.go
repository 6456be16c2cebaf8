package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryWorkspaceTransitionIsTheExpectedOne(t *testing.T) {
	want := map[WorkspaceState]map[WorkspaceEvent]WorkspaceState{
		WorkspaceReserved: {WsUse: WorkspaceReserved, WsDelete: WorkspaceDeleting},
		WorkspaceDeleting: {WsDelete: WorkspaceDeleting, WsDeleted: WorkspaceReserved},
	}
	for _, s := range []WorkspaceState{WorkspaceReserved, WorkspaceDeleting} {
		for _, e := range []WorkspaceEvent{WsUse, WsDelete, WsDeleted} {
			to, effects, err := s.Next(e)
			rec := workspaceRecord{Deleting: s == WorkspaceDeleting}
			stepped, stepErr := rec.step(e)
			expected, ok := want[s][e]
			if !ok {
				require.ErrorIs(t, err, ErrPrecondition, "%s %s", s, e)
				require.ErrorIs(t, stepErr, ErrPrecondition, "%s %s", s, e)
				require.Equal(t, s, to, "%s %s", s, e)
				require.Equal(t, s, rec.state(), "%s %s", s, e)
				continue
			}
			require.NoError(t, err, "%s %s", s, e)
			require.NoError(t, stepErr, "%s %s", s, e)
			require.Equal(t, expected, to, "%s %s", s, e)
			require.Equal(t, expected, rec.state(), "%s %s", s, e)
			require.Equal(t, effects, stepped, "%s %s", s, e)
			require.Equal(t, e != WsUse, effects.Durable, "%s %s: nothing is removed before the mark is durable", s, e)
		}
	}
	require.Equal(t, WorkspaceReserved, (*workspaceRecord)(nil).state())
	require.Equal(t, WorkspaceReserved, (&workspaceRecord{}).state())
	require.Equal(t, WorkspaceDeleting, (&workspaceRecord{Deleting: true}).state())
}
