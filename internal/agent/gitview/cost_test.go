package gitview

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// Time is the machine's; what an operation makes is the same everywhere.

// made is how many jails were made and Gits run in them meanwhile.
func made(f func()) (jails, runs int64) {
	jails, runs = gitjail.Made()
	f()
	jailsNow, runsNow := gitjail.Made()
	return jailsNow - jails, runsNow - runs
}

// create does what a session's creation does with Git, and gives the view.
func (w *world) create(worktree, branch string) *View {
	w.Helper()
	owner := workspace.Owner{UID: uid, GID: uid}
	base := workspace.BaseGit(w.Context(), w.repo, w.git, owner)
	defer base.Close()
	_, err := gitguard.CheckRepository(w.Context(), w.repo, base.Run)
	require.NoError(w, err)
	o := w.o
	o.Dir, o.SessionID, o.Base = filepath.Join(testkit.StateDir(w), Key(worktree)), "created", base
	o.Workspace, err = workspace.Open(w.Context(), workspace.Wanted{Repository: w.repo, Worktree: worktree, Branch: branch, BaseRef: "main", Base: base})
	require.NoError(w, err)
	v, err := Open(w.Context(), o)
	require.NoError(w, err)
	return v
}

func TestASessionsCreationMakesTwoJails(t *testing.T) {
	w := newWorld(t)
	var v *View
	jails, runs := made(func() { v = w.create(w.repo+"/wt-created", "created") })
	require.LessOrEqual(t, jails, int64(2), "of the base clone, and of it with the worktree")
	require.LessOrEqual(t, runs, int64(12))

	// What was made is known to be the base clone's: the first command pays nothing for it.
	require.NotEmpty(t, v.state.BaseIndex)
	require.Equal(t, Unchanged, v.Harvest(t.Context()).Status)
	jails, _ = made(func() { require.NoError(t, v.bringInWorktree(t.Context(), v.jails(t.Context()))) })
	require.Zero(t, jails)
}

func TestAnotherSessionOnAWorktreeMakesTwoJails(t *testing.T) {
	w := newWorld(t)
	jails, runs := made(w.open)
	require.LessOrEqual(t, jails, int64(2))
	require.LessOrEqual(t, runs, int64(4))
}

func TestACommitsHarvestMakesTwoJailsAndTheNextCommandNone(t *testing.T) {
	w := newWorld(t)
	for range 2 {
		require.NoError(t, w.v.Refresh(t.Context()))
		w.inside(func(in *testkit.Inside) { in.Must(w.wt, "date +%N >> README && git commit -q -a -m x") })
		var h Harvest
		jails, runs := made(func() { h = w.v.Harvest(t.Context()) })
		require.Equal(t, Harvested, h.Status, h)
		require.LessOrEqual(t, jails, int64(2), "of the base clone and of the session")
		require.LessOrEqual(t, runs, int64(9))
		jails, _ = made(func() { require.NoError(t, w.v.Refresh(t.Context())) })
		require.Zero(t, jails, "nobody else changed anything")
	}
	w.host("branch", "else")
	jails, _ := made(func() { require.NoError(t, w.v.Refresh(t.Context())) })
	require.NotZero(t, jails, "the control case: somebody else did")
}

// privateRefs are all that a command sees.
func (w *world) privateRefs() (list string) {
	w.inside(func(in *testkit.Inside) { list = in.Must(w.wt, "git for-each-ref refs/heads refs/tags") })
	return list
}

func TestWhateverTheHostDoesBesideAHarvestIsSeenByTheNextCommand(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.host("branch", "packed")
		w.host("pack-refs", "--all")
		w.host("branch", "other")
	})
	id := func() string { return w.host("commit-tree", "-p", "main", "-m", "Host", "main^{tree}") }
	for _, c := range []struct {
		name string
		do   func()
	}{
		{"a new branch", func() { w.host("branch", "fresh") }},
		{"a branch is moved", func() { w.host("update-ref", "refs/heads/other", id()) }},
		{"one is deleted", func() { w.host("branch", "-D", "other") }},
		{"a packed one is", func() { w.host("branch", "-D", "packed") }},
		{"a tag in a folder", func() { w.host("tag", "deep/er/tag") }},
		{"a symbolic ref", func() { w.host("symbolic-ref", "refs/heads/alias", "refs/heads/main") }},
		{"all are packed", func() { w.host("pack-refs", "--all") }},
		{"the session's own is moved on", func() {
			w.host("update-ref", "refs/heads/topic", w.host("commit-tree", "-p", "topic", "-m", "Host", "main^{tree}"))
		}},
		{"one of the session's is deleted", func() { w.host("update-ref", "-d", "refs/heads/made") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.NoError(t, w.v.Refresh(t.Context()))
			w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Mine && git branch -f made") })
			at(t, "refs moved", c.do)
			h := w.v.Harvest(t.Context())
			require.Equal(t, Harvested, h.Status, h)
			require.NotNil(t, w.v.own, "what was written can be told from what others did")
			require.NoError(t, w.v.Refresh(t.Context()))
			require.Equal(t, w.host("for-each-ref", "refs/heads", "refs/tags"), w.privateRefs())
		})
	}
}

func TestWhatTheHostDoesBeforeAHarvestWritesIsSeenByTheNextCommand(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Mine") })
	at(t, "refs decided", func() { w.host("branch", "fresh") })
	require.Equal(t, Harvested, w.v.Harvest(t.Context()).Status)
	require.Nil(t, w.v.own, "a list of all refs is needed")
	require.NoError(t, w.v.Refresh(t.Context()))
	require.Equal(t, w.host("for-each-ref", "refs/heads", "refs/tags"), w.privateRefs())
}

func TestManyLooseRefsAreListedAgain(t *testing.T) {
	w := newWorld(t, func(w *world) {
		out, err := run(w.repo, "bash", "-c", fmt.Sprintf("for i in {0..%d}; do echo create refs/heads/many/b$i main; done | git update-ref --stdin", mostBaseFiles))
		require.NoError(w, err, out)
	})
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Mine") })
	require.Equal(t, Harvested, w.v.Harvest(t.Context()).Status)
	require.Nil(t, w.v.own, "not each file was looked at")
	w.host("update-ref", "refs/heads/many/b7", w.host("rev-parse", "topic"))
	require.NoError(t, w.v.Refresh(t.Context()))
	require.Contains(t, w.privateRefs(), w.host("rev-parse", "topic")+" commit\trefs/heads/many/b7")
}

func TestP12AFloodOfLooseRefsIsLookedAtOnce(t *testing.T) {
	w := newWorld(t)
	_, h := w.command(fmt.Sprintf(`I=$(git rev-parse HEAD); cd "$(git rev-parse --git-common-dir)"
seq -f "$I refs/x/%%08.0f" %d >> packed-refs; mkdir refs/heads/many && cd refs/heads/many && for i in $(seq %d); do echo $I > $i; done; sleep 0.1`, moreRefs, mostRefs))
	require.Contains(t, h.Detail, errFlood.Error())
	now, err := w.v.printPrivate()
	require.NoError(t, err)
	require.True(t, now.Racy, "the control case: there are more files than are looked at")
	require.NoError(t, w.v.Refresh(t.Context()))
	_, runs := made(func() { h = w.v.Harvest(t.Context()) })
	require.Contains(t, h.Detail, errFlood.Error())
	require.Zero(t, runs)

	out, h := w.command(`cd "$(git rev-parse --git-common-dir)" && rm -r refs/heads/many && git update-ref refs/heads/topic $(git commit-tree -p topic -m More topic^{tree}) && git rev-parse topic`)
	require.Equal(t, out, w.host("rev-parse", "topic"), h)
}
