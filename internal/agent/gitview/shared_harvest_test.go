package gitview

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestP12Attack35InTheSharedLayoutOnlyTheCommandsOwnLocksAreRemoved(t *testing.T) {
	w := newSharedWorld(t)
	write(t, w.meta+"/HEAD.lock", "")
	_, h := w.command("touch " + w.meta + "/index.lock " + w.git + "/packed-refs.lock")
	require.Equal(t, Shared, h.Status)
	require.ElementsMatch(t, []string{w.meta + "/index.lock", w.git + "/packed-refs.lock"}, h.StaleLocks)
	require.FileExists(t, w.meta+"/HEAD.lock", "it was there before: somebody else's")
	out, _ := w.command("echo x > x && git add x && git status --porcelain")
	require.Equal(t, "A  x", out)
}

func TestP12Attack8InTheSharedLayoutAPlantedConfigWorktreeIsRemoved(t *testing.T) {
	w := newSharedWorld(t)
	_, h := w.command("echo '[alias] x = !false' > " + w.meta + "/config.worktree")
	require.Contains(t, h.Detail, "config.worktree")
	require.NoFileExists(t, w.meta+"/config.worktree")
}
