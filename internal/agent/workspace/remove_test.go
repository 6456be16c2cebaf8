package workspace

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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

// nest makes folders in each other, one for each name, too deep for any path.
func nest(t *testing.T, top string, uid, deep int) {
	t.Helper()
	fd, err := unix.Open(top, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for range deep {
		require.NoError(t, err)
		require.NoError(t, unix.Mkdirat(fd, "q", 0o755))
		require.NoError(t, unix.Fchownat(fd, "q", uid, uid, unix.AT_SYMLINK_NOFOLLOW))
		below, openErr := unix.Openat(fd, "q", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		require.NoError(t, unix.Close(fd))
		fd, err = below, openErr
	}
	require.NoError(t, err)
	require.NoError(t, unix.Fchmod(fd, 0))
	require.NoError(t, unix.Close(fd))
}

func TestP12RemovingTakesAWorktreeAwayHoweverDeepItIs(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	const uid, deep = 1234, 5000
	for name, in := range map[string]func(ws Workspace) string{
		"the worktree":   func(ws Workspace) string { return ws.Worktree },
		"its Git folder": func(ws Workspace) string { return ws.MetaDir },
	} {
		t.Run(name, func(t *testing.T) {
			repo := testkit.Repo(t, uid)
			wt := testkit.Worktree(t, uid, repo, "b")
			ws := Workspace{Repository: repo, CommonDir: filepath.Join(repo, ".git"), Worktree: wt, MetaDir: filepath.Join(repo, ".git", "worktrees", "wt-b")}
			nest(t, in(ws), uid, deep)
			require.Error(t, removeWorktree(t.Context(), gitFor(t, ws), wt), "the control case: it is too deep for Git")

			require.NoError(t, Remove(t.Context(), ws))
			require.NoDirExists(t, wt)
			require.NoDirExists(t, ws.MetaDir)
			require.NotContains(t, testkit.GitAs(t, uid, repo, "worktree", "list", "--porcelain"), wt)
		})
	}
}

func TestRemovingNamesWhatItCannotRemoveAndRemovesTheRest(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	const uid = 1234
	repo := testkit.Repo(t, uid)
	wt := testkit.Worktree(t, uid, repo, "b")
	ws := Workspace{Repository: repo, CommonDir: filepath.Join(repo, ".git"), Worktree: wt, MetaDir: filepath.Join(repo, ".git", "worktrees", "wt-b")}
	nest(t, wt, uid, 3)
	// Another user's folder is closed to the owner of the worktree.
	foreign := filepath.Join(wt, "foreign")
	require.NoError(t, os.MkdirAll(filepath.Join(foreign, "kept"), 0o700))

	require.ErrorContains(t, Remove(t.Context(), ws), foreign)
	require.DirExists(t, filepath.Join(foreign, "kept"))
	left, err := os.ReadDir(wt)
	require.NoError(t, err)
	require.Len(t, left, 1, "all else is gone")

	require.NoError(t, os.RemoveAll(foreign))
	require.NoError(t, Remove(t.Context(), ws), "the remedy")
	require.NoDirExists(t, wt)
}
