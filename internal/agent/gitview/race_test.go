package gitview

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// at runs f once, when a harvest or refresh comes to a point.
func at(t *testing.T, point string, f func()) {
	t.Helper()
	done := false
	step = func(now string) {
		if now == point && !done {
			done = true
			f()
		}
	}
	t.Cleanup(func() {
		step = func(string) {}
		require.True(t, done, "it never came to %q", point)
	})
}

// commitOnHost makes a commit on a branch of the base clone without any worktree.
func (w *world) commitOnHost(branch, message string) string {
	w.Helper()
	id := w.host("commit-tree", "-p", branch, "-m", message, branch+"^{tree}")
	w.host("update-ref", "refs/heads/"+branch, id)
	return id
}

func TestARaceIsANamedConflictAndMergingInsideResolvesIt(t *testing.T) {
	w := newWorld(t)
	before := w.host("rev-parse", "topic")
	require.NoError(t, w.v.Refresh(t.Context()))
	var mine string
	w.inside(func(in *testkit.Inside) {
		mine = in.Must(w.wt, "git commit -q --allow-empty -m Mine && git rev-parse HEAD")
	})
	theirs := w.commitOnHost("topic", "Theirs")
	h := w.v.Harvest(t.Context())
	require.Equal(t, Conflicts, h.Status, h)
	require.Len(t, h.Conflicts, 1)
	c := h.Conflicts[0]
	require.Equal(t, Conflict{Ref: "refs/heads/topic", BaseID: theirs, SessionID: mine, BeforeID: before, Remedy: c.Remedy}, c)
	require.Contains(t, c.Remedy, "git merge "+theirs)
	require.Equal(t, theirs, w.host("rev-parse", "topic"), "the host's commit stays")
	require.Equal(t, mine, w.host("rev-parse", "refs/sandboxes/s1/heads/topic"), "the session's is safe")
	require.Equal(t, mine+"\n", read(t, w.meta+"/HEAD"), "HEAD does not name a branch with another value")
	w.sound()

	out, h := w.command("git rev-parse HEAD")
	require.Equal(t, mine, out)
	require.Equal(t, Unchanged, h.Status, "a conflict is reported once: %+v", h)

	merged := w.harvested("git merge -q -m Merge " + theirs + " && git rev-parse HEAD")
	require.Equal(t, merged, w.host("rev-parse", "topic"))
	require.Equal(t, "ref: refs/heads/topic\n", read(t, w.meta+"/HEAD"))
}

func TestARaceInTheMiddleOfAHarvestLosesNothing(t *testing.T) {
	w := newWorld(t)
	var theirs string
	at(t, "refs decided", func() { theirs = w.commitOnHost("topic", "Theirs") })
	mine, h := w.command("git branch new && git commit -q --allow-empty -m Mine && git rev-parse HEAD")
	require.Equal(t, Conflicts, h.Status, h)
	require.Equal(t, []string{"refs/heads/new"}, h.Refs, "what nobody else touched arrives")
	require.Equal(t, theirs, w.host("rev-parse", "topic"))
	require.Equal(t, mine, w.host("rev-parse", "refs/sandboxes/s1/heads/topic"))
	w.sound()
}

func TestAHostsMoveThatIsAnAncestorIsFastForwarded(t *testing.T) {
	w := newWorld(t)
	w.harvested("git commit -q --allow-empty -m One")
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Two") })
	w.host("update-ref", "refs/heads/topic", "main")
	h := w.v.Harvest(t.Context())
	require.Equal(t, Harvested, h.Status, h)
	require.Equal(t, "Two\nOne\nFirst", w.host("log", "--format=%s", "topic"))
}

func TestANewBranchThatTheHostMadeMeanwhileIsAConflict(t *testing.T) {
	w := newWorld(t)
	var theirs string
	at(t, "refs decided", func() {
		w.host("branch", "new", "main")
		theirs = w.commitOnHost("new", "Theirs")
	})
	mine, h := w.command("git switch -q -c new && git commit -q --allow-empty -m Mine && git rev-parse HEAD")
	require.Equal(t, Conflicts, h.Status, h)
	require.Equal(t, "refs/heads/new", h.Conflicts[0].Ref)
	require.Contains(t, h.Conflicts[0].Remedy, "git branch -m")
	require.Equal(t, theirs, w.host("rev-parse", "new"))
	require.Equal(t, mine, w.host("rev-parse", "refs/sandboxes/s1/heads/new"))
	// It is the host's: neither deleting nor moving it inside reaches it.
	w.command("git switch -q topic && git branch -D new")
	require.Equal(t, theirs, w.host("rev-parse", "new"))
	require.Empty(t, w.host("for-each-ref", "refs/sandboxes"))
	w.sound()
}

func TestABranchThatIsCheckedOutElsewhereIsNotMovedUnderSomebodysFeet(t *testing.T) {
	w := newWorld(t)
	w.harvested("git branch new")
	w.host("switch", "-q", "new")
	before := w.host("rev-parse", "new")
	_, h := w.command("git commit -q --allow-empty -m Mine && git branch -f new && git switch -q new")
	require.Equal(t, Conflicts, h.Status, h)
	require.Contains(t, h.Conflicts[0].Remedy, w.repo)
	require.Equal(t, before, w.host("rev-parse", "new"))
	require.NotContains(t, read(t, w.meta+"/HEAD"), "ref:")
	w.host("switch", "-q", "main")
	w.harvested("git commit -q --allow-empty -m More")
	require.Equal(t, "More", w.host("log", "-1", "--format=%s", "new"))
	require.Equal(t, "ref: refs/heads/new\n", read(t, w.meta+"/HEAD"))
}

func TestABranchBesideWhichThereCanBeNoOtherIsAConflict(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git branch a/b && git branch fine") })
	w.host("branch", "a")
	h := w.v.Harvest(t.Context())
	require.Equal(t, Conflicts, h.Status, h)
	require.Equal(t, "refs/heads/a/b", h.Conflicts[0].Ref)
	require.Equal(t, []string{"refs/heads/fine"}, h.Refs)
	// The base clone's "a" can't come in beside it: said, and tried again.
	_, h = w.command("true")
	require.Equal(t, Conflicts, h.Status, h)
	require.Contains(t, h.Detail, "could not be brought in")
	w.command("git branch -m a/b c || true")
	w.command("true")
	require.Equal(t, w.host("rev-parse", "c"), w.host("rev-parse", "a"))
	out, h := w.command("git rev-parse a")
	require.Equal(t, w.host("rev-parse", "a"), out)
	require.Equal(t, Unchanged, h.Status, h)
}

func TestAnIndexAndAHeadThatTheHostChangedMeanwhileAreConflictsAndKept(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "echo in > in && git add in && git switch -q -c mine") })
	write(t, w.wt+"/host", "host\n")
	w.hostInWorktree("add", "host")
	w.hostInWorktree("checkout", "-q", "-b", "theirs")
	h := w.v.Harvest(t.Context())
	require.Equal(t, Conflicts, h.Status, h)
	require.Len(t, h.Conflicts, 2)
	require.Equal(t, "HEAD", h.Conflicts[0].Ref)
	require.Contains(t, h.Conflicts[0].Remedy, "refs/heads/theirs")
	require.Equal(t, "index", h.Conflicts[1].Ref)
	require.Equal(t, "A  in\n?? host", w.hostInWorktree("status", "--porcelain"))
	_, path, _ := strings.Cut(h.Conflicts[1].Remedy, "GIT_INDEX_FILE=")
	path, _, _ = strings.Cut(path, " ")
	kept := testkit.Repo(t, 0)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(kept+"/.git/index", b, 0o644))
	require.Contains(t, testkit.GitAs(t, 0, kept, "ls-files"), "host\n")
	require.Equal(t, "ref: refs/heads/mine\n", read(t, w.meta+"/HEAD"))
	w.sound()
}

func TestASessionThatFindsHeadDetachedGoesOnWithTheBranchOfTheOneBefore(t *testing.T) {
	w := newWorld(t)
	w.harvested("git commit -q --allow-empty -m one && git checkout -q --detach")
	w.o.SessionID, w.o.Workspace.Branch = "s2", ""
	w.reopen()
	w.harvested("git switch -q topic && git commit -q --allow-empty -m two")
	require.Equal(t, "two", w.host("log", "-1", "--format=%s", "topic"))
}
