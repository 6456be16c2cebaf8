package workspace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

var theOwner = Owner{UID: uid, GID: uid}

func keep(t *testing.T, wt, name, text string) {
	t.Helper()
	require.NoError(t, KeepOutput(wt, theOwner, name, strings.NewReader(text), int64(len(text)), 1<<20))
}

func TestAnOutputIsTheOwnersFileAndGitDoesNotSeeIt(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	keep(t, wt, "e.stdout", "whole")
	path := OutputPath(wt, "e.stdout")
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "whole", string(b))
	st, err := os.Lstat(path)
	require.NoError(t, err)
	require.EqualValues(t, uid, st.Sys().(*syscall.Stat_t).Uid)
	require.Empty(t, testkit.GitAs(t, uid, wt, "status", "--porcelain"))
}

func TestAnOutputIsRemovedAndNothingElseIs(t *testing.T) {
	repo, dir := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	require.NoError(t, RemoveOutput(wt, theOwner, "e.stdout"), "there is no folder yet")
	keep(t, wt, "e.stdout", "whole")
	keep(t, wt, "other.stdout", "whole")
	require.NoError(t, RemoveOutput(wt, theOwner, "e.stdout"))
	require.NoError(t, RemoveOutput(wt, theOwner, "e.stdout"), "and again")
	require.NoFileExists(t, OutputPath(wt, "e.stdout"))
	require.FileExists(t, OutputPath(wt, "other.stdout"))

	outside := filepath.Join(dir, "outside")
	require.NoError(t, os.Mkdir(outside, 0o777))
	require.NoError(t, os.Chmod(outside, 0o777))
	victim := filepath.Join(outside, "e.stdout")
	require.NoError(t, os.WriteFile(victim, nil, 0o666))
	require.NoError(t, os.RemoveAll(filepath.Dir(OutputPath(wt, "x"))))
	require.NoError(t, os.Symlink(outside, filepath.Dir(OutputPath(wt, "x"))))
	require.FileExists(t, OutputPath(wt, "e.stdout"), "the control case: by path it is reached")
	require.NoError(t, RemoveOutput(wt, theOwner, "e.stdout"))
	require.FileExists(t, victim, "a link is not followed")
}

// The agent is root outside; what a command left on the way must not make it write anywhere else.
func TestP12NothingThatACommandLeavesTurnsAnOutputElsewhere(t *testing.T) {
	repo, dir := setUp(t)
	outside := filepath.Join(dir, "outside")
	require.NoError(t, os.Mkdir(outside, 0o777))
	require.NoError(t, os.Chmod(outside, 0o777))
	victim := filepath.Join(outside, "e.stdout")
	reset := func(t *testing.T) {
		require.NoError(t, os.WriteFile(victim, []byte("keep"), 0o666))
		require.NoError(t, os.Chmod(victim, 0o666))
	}
	folder := func(wt string) string { return filepath.Dir(OutputPath(wt, "x")) }
	inFolder := func(do func(folder string) error) func(string) error {
		return func(wt string) error { return errors.Join(os.MkdirAll(folder(wt), 0o700), do(folder(wt))) }
	}
	for name, plant := range map[string]func(wt string) error{
		"a link to a folder instead of the folder": func(wt string) error {
			return errors.Join(os.Mkdir(filepath.Join(wt, ScratchName), 0o700), os.Symlink(outside, folder(wt)))
		},
		"a link instead of the scratch folder": func(wt string) error { return os.Symlink(outside, filepath.Join(wt, ScratchName)) },
		"a file instead of the folder": func(wt string) error {
			return errors.Join(os.Mkdir(filepath.Join(wt, ScratchName), 0o700), os.WriteFile(folder(wt), nil, 0o600))
		},
		"a link of the file's name":      inFolder(func(f string) error { return os.Symlink(victim, f+"/e.stdout") }),
		"a hard link of the file's name": inFolder(func(f string) error { return os.Link(victim, f+"/e.stdout") }),
		"a fifo of the file's name":      inFolder(func(f string) error { return unix.Mkfifo(f+"/e.stdout", 0o666) }),
		"a folder of the file's name":    inFolder(func(f string) error { return os.MkdirAll(f+"/e.stdout/x", 0o700) }),
		"no right to the folder":         inFolder(func(f string) error { return os.Chmod(f, 0) }),
		"links among the old ones": inFolder(func(f string) error {
			var err error
			for i := range mostOutputs + 4 {
				err = errors.Join(err, os.Symlink(victim, fmt.Sprintf("%s/%d.stdout", f, i)))
			}
			return err
		}),
		"more names than can be listed": inFolder(func(f string) error {
			var err error
			for i := range mostListed {
				err = errors.Join(err, os.WriteFile(fmt.Sprintf("%s/%d", f, i), nil, 0o600))
			}
			return err
		}),
	} {
		t.Run(name, func(t *testing.T) {
			wt := filepath.Join(testkit.Worktree(t, uid, repo, "b"+strings.ReplaceAll(name, " ", "-")))
			reset(t)
			require.NoError(t, plant(wt))
			require.NoError(t, filepath.WalkDir(filepath.Join(wt, ScratchName), func(p string, _ os.DirEntry, err error) error {
				if err != nil || strings.HasPrefix(p, outside) {
					return err
				}
				if st, err := os.Lstat(p); err == nil && st.Sys().(*syscall.Stat_t).Nlink > 1 && !st.IsDir() {
					return nil // the victim's other name
				}
				return os.Lchown(p, uid, uid)
			}))
			keep(t, wt, "e.stdout", "whole")
			st, err := os.Lstat(OutputPath(wt, "e.stdout"))
			require.NoError(t, err)
			require.True(t, st.Mode().IsRegular())
			b, err := os.ReadFile(OutputPath(wt, "e.stdout"))
			require.NoError(t, err)
			require.Equal(t, "whole", string(b))
			b, err = os.ReadFile(victim)
			require.NoError(t, err)
			require.Equal(t, "keep", string(b))
			names, err := os.ReadDir(outside)
			require.NoError(t, err)
			require.Len(t, names, 1, "nothing came to lie outside")
		})
	}

	// The control case: written by path, it goes where the link leads.
	wt := testkit.Worktree(t, uid, repo, "control")
	require.NoError(t, os.MkdirAll(folder(wt), 0o700))
	require.NoError(t, os.Symlink(victim, OutputPath(wt, "e.stdout")))
	require.NoError(t, os.WriteFile(OutputPath(wt, "e.stdout"), []byte("lost"), 0o600))
	b, err := os.ReadFile(victim)
	require.NoError(t, err)
	require.Equal(t, "lost", string(b))
}

func TestOldOutputsMakeRoomAndNothingElseDoes(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	folder := filepath.Dir(OutputPath(wt, "x"))
	keep(t, wt, "0.stdout", "")
	require.NoError(t, os.WriteFile(filepath.Join(folder, "notes"), []byte("mine"), 0o600))
	for i := range mostOutputs + 3 {
		name := fmt.Sprintf("%d.stdout", i)
		keep(t, wt, name, "0123456789")
		at := time.Unix(int64(1000+i), 0)
		require.NoError(t, os.Chtimes(filepath.Join(folder, name), at, at))
	}
	left := func() (names []string) {
		entries, err := os.ReadDir(folder)
		require.NoError(t, err)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	require.Len(t, left(), mostOutputs+1)
	require.NotContains(t, left(), "2.stdout", "the oldest go")
	require.Contains(t, left(), "3.stdout")
	require.Contains(t, left(), "notes")
	require.NoError(t, KeepOutput(wt, theOwner, "big.stderr", strings.NewReader("0123456789"), 10, 25))
	require.ElementsMatch(t, []string{"notes", "18.stdout", "big.stderr"}, left(), "25 bytes have room for two of 10")
}

func TestAnOutputThatEndsTooSoonIsNone(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	require.ErrorContains(t, KeepOutput(wt, theOwner, "e.stdout", strings.NewReader("short"), 10, 100), OutputPath(wt, "e.stdout"))
	require.NoFileExists(t, OutputPath(wt, "e.stdout"))
}
