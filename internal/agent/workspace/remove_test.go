package workspace

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestRemovingTakesAWorktreeAwayWhateverACommandDidToItsFolders(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	const uid = 1234
	repo := testkit.Repo(t, uid)
	wt := testkit.Worktree(t, uid, repo, "b")
	closed := filepath.Join(wt, "a", "b")
	require.NoError(t, os.MkdirAll(closed, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(closed, "f"), nil, 0o400))
	outside := filepath.Join(filepath.Dir(repo), "outside")
	require.NoError(t, os.MkdirAll(filepath.Join(outside, "kept"), 0o755))
	require.NoError(t, os.Symlink(outside, filepath.Join(wt, "link")))
	for _, p := range []string{filepath.Join(closed, "f"), closed, filepath.Dir(closed), outside, filepath.Join(outside, "kept")} {
		require.NoError(t, os.Chown(p, uid, uid))
	}
	require.NoError(t, os.Chmod(closed, 0o000))
	require.NoError(t, os.Chmod(filepath.Dir(closed), 0o555))
	require.NoError(t, os.Chmod(filepath.Join(outside, "kept"), 0o555))
	ws := Workspace{Repository: repo, CommonDir: filepath.Join(repo, ".git"), Worktree: wt, MetaDir: filepath.Join(repo, ".git", "worktrees", "wt-b")}

	require.NoError(t, Remove(t.Context(), ws))
	require.NoDirExists(t, wt)
	require.Equal(t, 1, strings.Count(testkit.GitAs(t, uid, repo, "worktree", "list", "--porcelain"), "worktree "))
	require.Contains(t, testkit.GitAs(t, uid, repo, "branch"), "b")
	st, err := os.Stat(filepath.Join(outside, "kept"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o555), st.Mode().Perm(), "no link was followed")
	require.NoError(t, Remove(t.Context(), ws), "a second time is fine")

	require.NoError(t, os.RemoveAll(repo))
	require.NoError(t, Remove(t.Context(), ws), "nothing is left to remove")
	require.NoError(t, os.Mkdir(wt, 0o755))
	require.ErrorContains(t, Remove(t.Context(), ws), "repository "+repo+" is gone")
}
