package gitwork

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// unfinished is work that Git keeps in every place it has: commits, stashes, the index with a conflict, dirty and
// untracked files, and a rebase that waits for somebody.
var unfinished = []string{
	"echo first >> b; git stash push -qm First", "echo second > fresh; git stash push -qu -m Second",
	"git checkout -q -b topic side", "echo kept > kept; git add kept; git commit -qm Kept",
	"git rebase main", "echo dirty >> b", "echo staged > staged; git add staged", "echo untracked > untracked; echo '*.ignored' >> .gitignore; touch x.ignored",
}

// finished goes on with it.
var finished = []string{
	"git status", "echo resolved > a; git add a", "git rebase --continue", "git log --format='%an: %s' -4", "git stash list", "git checkout -q -f work; git stash pop -q stash@{1}; git diff", "ls",
}

func TestP11AWorkspaceOutlivesItsSandbox(t *testing.T) {
	for _, f := range []format{packedFormat, reftableFormat} {
		for _, layout := range layouts {
			t.Run(layout+", "+f.name, func(t *testing.T) {
				f.need(t)
				a := newAgent(t, "")
				p := newPair(t, a, clone(t, f), layout)
				said := p.both(t, unfinished...)
				require.Contains(t, said, "exit code 1\n", "the rebase waits")
				first := p.inside.newest.GetSandboxId()

				p.inside.retire(t)
				p.both(t, "git status")
				require.NotEqual(t, first, p.inside.newest.GetSandboxId(), "another sandbox")

				a.Restart()
				p.both(t, "git status")

				p.inside.forget(t)
				p.inside = a.open(t, p.base.dir, p.worktree, "", layout)
				p.both(t, finished...)
				p.arrived(t, "refs/heads/work", "refs/heads/topic")
				p.sound(t)
			})
		}
	}
}

func TestP11DeletingAWorkspaceKeepsUnsavedWorkUnlessForced(t *testing.T) {
	a := newAgent(t, "")
	from := clone(t, packedFormat)
	for _, layout := range layouts {
		t.Run(layout, func(t *testing.T) {
			p := newPair(t, a, from, layout)
			p.both(t, "echo more >> a; git commit -qam Committed", "echo stashed >> a; git stash push -q", "echo dirty >> b")
			del := func(force bool) error {
				_, err := a.Client.Sessions.DeleteWorkspace(context.Background(), &sandboxv1.DeleteWorkspaceRequest{SessionId: p.inside.id, Force: force})
				return err
			}
			err := del(false)
			require.ErrorContains(t, err, "failed_precondition")
			require.ErrorContains(t, err, "b")
			p.both(t, "git stash list") // nothing of it is gone

			require.NoError(t, del(true))
			require.NoDirExists(t, p.worktree)
			require.Empty(t, must(t, p.base, "git for-each-ref refs/sandboxes"))
			require.NotContains(t, must(t, p.base, "git worktree list"), p.worktree)
			require.Equal(t, must(t, p.ordinaryClone, "git rev-parse work"), must(t, p.base, "git rev-parse work"), "what was committed stays")
			left, err := os.ReadDir(filepath.Join(a.State, "workspaces"))
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}
