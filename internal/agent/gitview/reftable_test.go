package gitview

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// withTables puts the refs of a world's repository, and of its worktree, into reftables.
func withTables(w *world) {
	w.Helper()
	w.host("worktree", "remove", w.wt)
	testkit.Reftable(w, uid, w.repo)
	w.host("worktree", "add", "-q", w.wt, "topic")
	require.FileExists(w, w.meta+"/reftable/tables.list")
}

func TestAnUnfinishedOperationInATableGoesOnInside(t *testing.T) {
	w := newWorld(t, withTables, func(w *world) {
		write(w, w.wt+"/README", "picked\n")
		w.hostInWorktree("commit", "-qam", "To be picked", "--author=Picked <picked@example.com>")
		w.hostInWorktree("branch", "picked")
		w.hostInWorktree("reset", "-q", "--hard", "HEAD~1")
		write(w, w.wt+"/README", "mine\n")
		w.hostInWorktree("commit", "-qam", "Mine")
		w.hostInWorktree("update-ref", "refs/worktree/mine", "HEAD")
		out, err := run(w.wt, "git", "cherry-pick", "picked")
		require.Error(w, err, out)
		require.NoFileExists(w, w.meta+"/CHERRY_PICK_HEAD", "it is in the table")
	})
	out := w.harvested("git rev-parse -q --verify refs/worktree/mine >/dev/null && git status | grep -o 'cherry-picking' && echo both > README && git add README && git commit -q --no-edit && " +
		"echo more >> README && git commit -q -am Next && git log -2 --format='%an: %s'")
	require.Equal(t, "cherry-picking\nAgent: Next\nPicked: To be picked", out)
	require.Equal(t, "Next", w.host("log", "-1", "--format=%s", "topic"))
}

func TestWhatChangesInATableOfTheBaseCloneIsSeenInside(t *testing.T) {
	w := newWorld(t, withTables)
	w.harvested("git commit -q --allow-empty -m Inside && git branch made")
	w.host("update-ref", "refs/heads/of-the-host", "topic")
	w.hostInWorktree("switch", "-q", "of-the-host")
	out, h := w.command("git symbolic-ref HEAD && git rev-parse -q --verify made >/dev/null && git log -1 --format=%s of-the-host")
	require.Equal(t, "refs/heads/of-the-host\nInside", out)
	require.Equal(t, Unchanged, h.Status, h)
	w.host("pack-refs")
	_, h = w.command("git branch -D of-the-host 2>&1 || true; git branch -D made")
	require.Equal(t, Harvested, h.Status, h)
	require.NotContains(t, w.host("branch", "--list"), "made")
}

func TestP12Attack35InTheSharedLayoutTheLocksOfTablesAreRemovedOrTold(t *testing.T) {
	w := newWorld(t, withTables)
	w.o.Layout, w.o.Dir = mounts.Shared, filepath.Join(testkit.StateDir(t), Key(w.wt))
	w.open()
	own, common := w.meta+"/reftable/tables.list.lock", w.git+"/reftable/tables.list.lock"
	_, h := w.command("touch " + own + " " + common)
	require.Equal(t, []string{own}, h.StaleLocks)
	require.Contains(t, h.Detail, common)
	require.FileExists(t, common, "it may be somebody else's")
	_, h = w.command("rm " + common + "; git symbolic-ref HEAD refs/heads/another && git commit -q --allow-empty -m Works")
	require.Empty(t, h.Detail)
	require.Equal(t, "Works", w.host("log", "-1", "--format=%s", "another"))

	// What isn't a folder there any more is the session's own loss, and stops neither the next command nor its end.
	w.command("mv " + w.meta + "/reftable " + w.meta + "/moved && ln -s / " + w.meta + "/reftable")
	_, h = w.command("rm " + w.meta + "/reftable && mv " + w.meta + "/moved " + w.meta + "/reftable && git status")
	require.Equal(t, Shared, h.Status)
}
