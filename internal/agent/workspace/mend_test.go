package workspace

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP12RemovingTakesAWorktreeAwayWhateverACommandDidToItsGitFolder(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	const uid = 1234
	for name, plant := range map[string]func(meta string) error{
		"a FIFO as HEAD":     func(meta string) error { return unix.Mkfifo(filepath.Join(meta, "HEAD"), 0o644) },
		"a link as HEAD":     func(meta string) error { return os.Symlink("/etc/passwd", filepath.Join(meta, "HEAD")) },
		"a folder as HEAD":   func(meta string) error { return os.Mkdir(filepath.Join(meta, "HEAD"), 0o755) },
		"nonsense as HEAD":   func(meta string) error { return os.WriteFile(filepath.Join(meta, "HEAD"), []byte("x"), 0o644) },
		"a lock":             func(meta string) error { return os.WriteFile(filepath.Join(meta, "locked"), []byte("mine"), 0o644) },
		"a folder as lock":   func(meta string) error { return folderOf(uid, filepath.Join(meta, "locked")) },
		"a FIFO as its lock": func(meta string) error { return unix.Mkfifo(filepath.Join(meta, "locked"), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			repo := testkit.Repo(t, uid)
			wt := testkit.Worktree(t, uid, repo, "b")
			ws := Workspace{Repository: repo, CommonDir: filepath.Join(repo, ".git"), Worktree: wt, MetaDir: filepath.Join(repo, ".git", "worktrees", "wt-b")}
			if strings.HasSuffix(name, "HEAD") {
				require.NoError(t, os.Remove(filepath.Join(ws.MetaDir, "HEAD")))
			}
			require.NoError(t, plant(ws.MetaDir))
			bounded, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			require.Error(t, removeWorktree(bounded, gitFor(t, ws), wt), "the control case: Git fails or hangs")

			require.NoError(t, Remove(t.Context(), ws))
			require.NoDirExists(t, wt)
			require.NoDirExists(t, ws.MetaDir)
			require.NotContains(t, testkit.GitAs(t, uid, repo, "worktree", "list", "--porcelain"), wt)
		})
	}
}

// folderOf makes a folder with a folder in it, as the user would.
func folderOf(uid int, path string) error {
	below := filepath.Join(path, "a")
	return errors.Join(os.MkdirAll(below, 0o755), os.Chown(path, uid, uid), os.Chown(below, uid, uid))
}
