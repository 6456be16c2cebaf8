package workspace

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestTheScratchFolderIgnoresItselfAndBelongsToTheOwner(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	for range 2 {
		require.NoError(t, MakeScratch(wt, Owner{UID: uid, GID: uid}))
	}
	for _, p := range []string{ScratchName, ScratchName + "/.gitignore"} {
		st, err := os.Lstat(filepath.Join(wt, p))
		require.NoError(t, err)
		require.EqualValues(t, uid, st.Sys().(*syscall.Stat_t).Uid)
		require.EqualValues(t, uid, st.Sys().(*syscall.Stat_t).Gid)
	}
	require.Empty(t, testkit.GitAs(t, uid, wt, "status", "--porcelain"))
}

func TestWhateverACommandDoesToTheScratchFolderTheNextSandboxHasOne(t *testing.T) {
	repo, dir := setUp(t)
	outside := filepath.Join(dir, "outside")
	require.NoError(t, os.Mkdir(outside, 0o777))
	require.NoError(t, os.Chmod(outside, 0o777))
	victim := filepath.Join(dir, "victim")
	require.NoError(t, os.WriteFile(victim, []byte("keep"), 0o666))
	require.NoError(t, os.Chmod(victim, 0o666))
	// then makes the scratch folder with a file, and does something to it.
	then := func(do func(s string) error) func(string) error {
		return func(s string) error {
			return errors.Join(os.Mkdir(s, 0o700), os.WriteFile(filepath.Join(s, "work"), []byte("work"), 0o600), do(s))
		}
	}
	for name, command := range map[string]struct {
		does func(scratch string) error
		// kept is a pattern of what must be in the scratch folder afterwards.
		kept string
	}{
		"a link to a folder in its place": {func(s string) error { return os.Symlink(outside, s) }, "replaced-*"},
		"a link to a file in its place":   {func(s string) error { return os.Symlink(victim, s) }, "replaced-*"},
		"a link to nothing in its place":  {func(s string) error { return os.Symlink(dir+"/none", s) }, "replaced-*"},
		"a link to itself in its place":   {func(s string) error { return os.Symlink(ScratchName, s) }, "replaced-*"},
		"a file in its place":             {func(s string) error { return os.WriteFile(s, nil, 0) }, "replaced-*"},
		"a fifo in its place":             {func(s string) error { return unix.Mkfifo(s, 0o644) }, "replaced-*"},
		"no right to it":                  {then(func(s string) error { return os.Chmod(s, 0) }), "work"},
		"no right to write to it":         {then(func(s string) error { return os.Chmod(s, 0o555) }), "work"},
		"a link as its .gitignore":        {then(func(s string) error { return os.Symlink(victim, s+"/.gitignore") }), "work"},
		"a fifo as its .gitignore":        {then(func(s string) error { return unix.Mkfifo(s+"/.gitignore", 0o644) }), "work"},
		"a folder as its .gitignore": {then(func(s string) error {
			return errors.Join(os.MkdirAll(s+"/.gitignore/full", 0o700), os.Chmod(s+"/.gitignore", 0))
		}), "replaced-*"},
	} {
		t.Run(name, func(t *testing.T) {
			wt := testkit.Worktree(t, uid, repo, strings.ReplaceAll(name, " ", "-"))
			s := filepath.Join(wt, ScratchName)
			require.NoError(t, hostfs.AsOwner(Owner{UID: uid, GID: uid}, func() error { return command.does(s) }))
			for range 2 {
				require.NoError(t, MakeScratch(wt, Owner{UID: uid, GID: uid}))
			}
			var st unix.Stat_t
			require.NoError(t, unix.Lstat(s, &st))
			require.EqualValues(t, unix.S_IFDIR, st.Mode&unix.S_IFMT)
			require.EqualValues(t, 0o700, st.Mode&0o700)
			require.EqualValues(t, uid, st.Uid)
			b, err := os.ReadFile(filepath.Join(s, ".gitignore"))
			require.NoError(t, err)
			require.Equal(t, "*\n", string(b))
			kept, err := filepath.Glob(filepath.Join(s, command.kept))
			require.NoError(t, err)
			require.Len(t, kept, 1, "what was in the way is kept")
			require.Empty(t, testkit.GitAs(t, uid, wt, "status", "--porcelain"), "and nothing of it shows in the worktree")
			left, err := os.ReadDir(outside)
			require.NoError(t, err)
			require.Empty(t, left)
			require.NoError(t, unix.Stat(victim, &st))
			require.EqualValues(t, 0o666, st.Mode&0o777)
			b, err = os.ReadFile(victim)
			require.NoError(t, err)
			require.Equal(t, "keep", string(b))
		})
	}
}

func TestAScratchFolderThatTheOwnerCannotMakeIsNamedWithTheRemedy(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	require.NoError(t, os.Chmod(wt, 0o555))
	err := MakeScratch(wt, Owner{UID: uid, GID: uid})
	require.ErrorIs(t, err, unix.EACCES)
	require.ErrorContains(t, err, filepath.Join(wt, ScratchName))
	require.ErrorContains(t, err, "chmod u+rwx")
}
