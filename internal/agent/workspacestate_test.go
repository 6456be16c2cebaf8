package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryWorkspaceTransitionIsTheExpectedOne(t *testing.T) {
	want := map[WorkspaceState]map[WorkspaceEvent]WorkspaceState{
		WorkspaceFree:     {WsReserve: WorkspaceReserved},
		WorkspaceReserved: {WsUse: WorkspaceReserved, WsRelease: WorkspaceFree, WsDelete: WorkspaceDeleting},
		WorkspaceDeleting: {WsDelete: WorkspaceDeleting, WsDeleted: WorkspaceReserved, WsRelease: WorkspaceHalf},
		WorkspaceHalf:     {WsReserve: WorkspaceDeleting},
	}
	for _, s := range []WorkspaceState{WorkspaceFree, WorkspaceReserved, WorkspaceDeleting, WorkspaceHalf} {
		for _, e := range []WorkspaceEvent{WsReserve, WsUse, WsRelease, WsDelete, WsDeleted} {
			to, effects, err := s.Next(e)
			expected, ok := want[s][e]
			if !ok {
				require.ErrorIs(t, err, ErrPrecondition, "%s %s", s, e)
				require.Equal(t, s, to, "%s %s", s, e)
				continue
			}
			require.NoError(t, err, "%s %s", s, e)
			require.Equal(t, expected, to, "%s %s", s, e)
			require.Equal(t, e == WsDelete, effects.Remove, "%s %s", s, e)
			require.False(t, effects.Remove && !effects.Durable, "%s %s: nothing is removed before the mark is durable", s, e)
		}
	}
	require.Equal(t, WorkspaceReserved, (*workspaceRecord)(nil).state())
	require.Equal(t, WorkspaceReserved, (&workspaceRecord{}).state())
	require.Equal(t, WorkspaceDeleting, (&workspaceRecord{Deleting: true}).state())
}
