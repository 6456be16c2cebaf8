package gitview

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

func TestAWorktreeOfRelativePointersIsLikeAnyOther(t *testing.T) {
	for _, layout := range []string{mounts.Isolated, mounts.Shared} {
		t.Run(layout, func(t *testing.T) {
			w := newWorld(t, func(w *world) {
				w.host("worktree", "remove", w.wt)
				w.host("config", "worktree.useRelativePaths", "true")
				w.host("worktree", "add", "-q", w.wt, "topic")
				if strings.HasPrefix(read(w, w.wt+"/.git"), "gitdir: /") {
					w.Skip("this test needs a Git that makes relative pointers (2.48 and newer)")
				}
			})
			if layout == mounts.Shared {
				w.o.Layout, w.o.Dir = layout, testkit.StateDir(t)+"/"+Key(w.wt)
				w.open()
			}
			out, h := w.command("echo more >> README && git commit -q -am More && git status --porcelain && git rev-parse HEAD && git worktree list --porcelain | head -1")
			require.Empty(t, h.Detail)
			require.Equal(t, w.host("rev-parse", "topic")+"\nworktree "+w.repo, out)
			require.Contains(t, w.host("worktree", "list"), "[topic]")
			w.sound()
		})
	}
}
