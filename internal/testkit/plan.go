package testkit

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview/skeleton"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Workspace describes a linked worktree of repo, both uid's, with what the agent keeps for it made by hand: enough for a
// sandbox to be mounted and for git to work in it.
func Workspace(t testing.TB, uid int, repo, worktree, layout string) mounts.Workspace {
	t.Helper()
	common := filepath.Join(repo, ".git")
	w := mounts.Workspace{
		Worktree: worktree, CommonDir: common, MetaDir: filepath.Join(common, "worktrees", filepath.Base(worktree)),
		OwnerUID: uint32(uid), OwnerGID: uint32(uid), Layout: layout, Private: filepath.Join(StateDir(t), "git"),
	}
	if layout == mounts.Shared {
		require.NoError(t, skeleton.Make(w.Private, common, hostfs.Owner{UID: uint32(uid), GID: uint32(uid)}))
		return w
	}
	privateGit(t, uid, repo, w)
	return w
}

// Plan is the plan of such a workspace.
func Plan(t testing.TB, uid int, repo, worktree, layout string) mounts.Plan {
	t.Helper()
	p, err := mounts.New(Workspace(t, uid, repo, worktree, layout), mounts.Exists)
	require.NoError(t, err)
	return p
}

// privateGit makes the least of a private Git folder with which git works.
func privateGit(t testing.TB, uid int, repo string, w mounts.Workspace) {
	t.Helper()
	write := func(name, text string) {
		path := filepath.Join(w.Private, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	meta := filepath.Join("worktrees", filepath.Base(w.MetaDir))
	require.NoError(t, os.CopyFS(filepath.Join(w.Private, meta), os.DirFS(w.MetaDir)))
	for _, dir := range []string{"base-objects", "hooks", "info", "logs", "refs/heads", "refs/tags", "objects/info"} {
		require.NoError(t, os.MkdirAll(filepath.Join(w.Private, dir), 0o755))
	}
	write(filepath.Join(meta, "config.worktree"), "")
	write("HEAD", "ref: refs/heads/main\n")
	write("config", "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tcommitGraph = false\n"+
		"[gc]\n\twriteCommitGraph = false\n[fetch]\n\twriteCommitGraph = false\n[repack]\n\tupdateServerInfo = false\n") // info is sealed
	write("objects/info/alternates", "../base-objects\n")
	write("packed-refs", GitAs(t, uid, repo, "for-each-ref", "--format=%(objectname) %(refname)"))
	require.NoError(t, filepath.WalkDir(w.Private, func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, uid, uid))
	}))
}
