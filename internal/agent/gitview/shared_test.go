package gitview

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// newSharedWorld is a world in the shared layout.
func newSharedWorld(t *testing.T) *world {
	w := newWorld(t)
	w.o.Layout, w.o.Dir = mounts.Shared, filepath.Join(testkit.StateDir(t), Key(w.wt))
	w.open()
	return w
}

func TestInTheSharedLayoutACommitIsInTheBaseCloneAtOnce(t *testing.T) {
	w := newSharedWorld(t)
	head, h := w.command("git commit -q --allow-empty -m mine && git rev-parse HEAD")
	require.Equal(t, Shared, h.Status)
	require.Equal(t, head, w.host("rev-parse", "topic"))
	require.Empty(t, w.host("for-each-ref", "refs/sandboxes"))
}

func TestP12WhatACommandPlantsBesideASharedRepositoryIsGoneWithTheSession(t *testing.T) {
	w := newSharedWorld(t)
	w.command(`head=$(git rev-parse HEAD) && cd "$(git rev-parse --git-common-dir)" && echo $head > shallow && mkdir remotes && touch gc.pid`)
	require.FileExists(t, filepath.Join(w.v.Private(), "shallow"))
	require.NoFileExists(t, filepath.Join(w.git, "shallow"))
	w.host("checkout", "-q", "-b", "elsewhere")
	w.open()
	for _, name := range []string{"shallow", "remotes", "gc.pid"} {
		require.NoFileExists(t, filepath.Join(w.v.Private(), name))
		require.NoDirExists(t, filepath.Join(w.v.Private(), name))
	}
	out, _ := w.command("git worktree list")
	require.Contains(t, out, "[elsewhere]")
}

func TestARepositoryCanNotChangeItsLayoutWhileItsWorkspaceIsKept(t *testing.T) {
	w := newWorld(t)
	before, err := os.ReadDir(w.v.Private())
	require.NoError(t, err)
	w.o.Layout = mounts.Shared
	_, err = Open(t.Context(), w.o)
	require.ErrorIs(t, err, ErrRefused)
	after, err := os.ReadDir(w.v.Private())
	require.NoError(t, err)
	require.Equal(t, len(before), len(after))
}
