package inside

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The folders above the worktree are in every sandbox, also where they are the node's own on the node (/var/lib, where workspaces
// are by default). What else is in them has to be seen.
func TestP9AFolderAboveTheWorktreeIsNothingAndWhatLiesBesideTheWayIsSeen(t *testing.T) {
	top := t.TempDir()
	worktree := filepath.Join(top, "roots", "job", "worktree")
	for _, d := range []string{worktree, filepath.Join(top, "roots", "job", "repo")} {
		require.NoError(t, os.MkdirAll(d, 0o755))
	}
	for _, prefix := range []string{"", "/proc/self/root"} {
		require.Empty(t, content(prefix, top, worktree))
		require.Empty(t, content(prefix, filepath.Join(top, "roots"), worktree))
		require.Equal(t, "a folder with job", content(prefix, filepath.Join(top, "roots"), filepath.Join(top, "elsewhere", "worktree")), "the control case")
	}

	require.NoError(t, os.WriteFile(filepath.Join(top, "roots", "another session's"), nil, 0o600))
	require.Equal(t, "a folder with roots/another session's", content("", top, worktree))
	require.NoError(t, os.Mkdir(filepath.Join(top, "another folder of the node"), 0o700))
	require.Equal(t, "a folder with another folder of the node", content("", top, worktree))
}
