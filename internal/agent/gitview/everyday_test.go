package gitview

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// branches are all branches of the base clone.
func (w *world) branches() string {
	w.Helper()
	return w.host("for-each-ref", "--format=%(refname:short)", "refs/heads")
}

func TestAnAmendedCommitReplacesTheOneThatWasHarvested(t *testing.T) {
	w := newWorld(t)
	w.harvested("echo 1 > a && git add a && git commit -q -m First")
	id := w.harvested("echo 2 > a && git commit -q -a --amend -m Better && git rev-parse HEAD")
	require.Equal(t, id, w.host("rev-parse", "topic"))
	require.Equal(t, "Better\nFirst", w.host("log", "--format=%s", "topic"))
	log := w.hostInWorktree("reflog")
	require.Contains(t, log, "HEAD@{0}: commit (amend): Better")
	require.Contains(t, log, "HEAD@{1}: commit: First", "and gc has left it")
}

func TestBranchesThatASessionMakesAreExportedMovedRenamedAndDeleted(t *testing.T) {
	w := newWorld(t)
	w.harvested("git branch one && git switch -q -c two && git commit -q --allow-empty -m Two")
	require.Equal(t, "main\none\ntopic\ntwo", w.branches())
	require.Equal(t, "ref: refs/heads/two\n", read(t, w.meta+"/HEAD"))
	// Renaming also wants to write the configuration, which is sealed; the branch has its new name all the same.
	w.harvested("git branch -f one two && ! git branch -m two three")
	require.Equal(t, "main\none\nthree\ntopic", w.branches())
	require.Equal(t, w.host("rev-parse", "three"), w.host("rev-parse", "one"))
	require.Equal(t, "ref: refs/heads/three\n", read(t, w.meta+"/HEAD"))
	w.harvested("git switch -q topic && git pack-refs --all && git branch -D one three")
	require.Equal(t, "main\ntopic", w.branches())
	require.Empty(t, w.host("for-each-ref", "refs/sandboxes"), "what is kept for a deleted branch goes with it")
}

func TestABranchMakesWayForOneInAFolderOfItsName(t *testing.T) {
	w := newWorld(t)
	w.harvested("git branch a")
	w.harvested("git branch -d a && git branch a/b && git commit -q --allow-empty -m x && git branch -f a/b")
	require.Equal(t, "a/b\nmain\ntopic", w.branches())
	w.harvested("git branch -D a/b && git branch a")
	require.Equal(t, "a\nmain\ntopic", w.branches())
}

func TestABranchThatWasThereStaysAndTheSessionsIsKeptAside(t *testing.T) {
	w := newWorld(t, func(w *world) { w.host("branch", "theirs") })
	before := w.host("rev-parse", "theirs")
	out, h := w.command("git switch -q theirs && git commit -q --allow-empty -m Mine && git rev-parse HEAD")
	require.Equal(t, Harvested, h.Status, h)
	w.sound()
	require.Equal(t, before, w.host("rev-parse", "theirs"))
	require.Equal(t, out, w.host("rev-parse", "refs/sandboxes/s1/heads/theirs"))
	require.Equal(t, out+"\n", read(t, w.meta+"/HEAD"), "HEAD names no branch that is not exported")
	// Back on its own branch, the base clone's HEAD follows.
	w.harvested("git switch -q topic")
	require.Equal(t, "ref: refs/heads/topic\n", read(t, w.meta+"/HEAD"))
	require.Equal(t, out, w.host("rev-parse", "refs/sandboxes/s1/heads/theirs"), "and nothing is lost")
}

func TestAnOperatorsPatternExportsOtherRefs(t *testing.T) {
	w := newWorld(t, func(w *world) { w.host("branch", "theirs") })
	w.o.Export = []string{"refs/tags/v*", "refs/heads/theirs"}
	w.open()
	out := w.harvested("git commit -q --allow-empty -m Mine && git branch -f theirs && git tag v1 && git tag other && git rev-parse HEAD")
	require.Equal(t, "v1", w.host("tag"))
	require.Equal(t, out, w.host("rev-parse", "theirs"))
	require.Equal(t, out, w.host("rev-parse", "refs/sandboxes/s1/tags/other"))
}

func TestP12AfterAConflictedCherryPickTheNextCommitHasItsOwnAuthor(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.host("checkout", "-q", "-b", "other")
		write(t, w.repo+"/README", "theirs\n")
		w.host("commit", "-q", "-a", "-m", "Theirs")
		w.host("checkout", "-q", "main")
	})
	w.harvested("echo mine > README && git commit -q -a -m Mine")
	w.try("git cherry-pick other")
	w.harvested("echo both > README && git add README && git -c core.editor=: cherry-pick --continue")
	w.harvested("echo more > README && git commit -q -a -m Next")
	require.Equal(t, "Agent Next\nTester Theirs\nAgent Mine\nTester First", w.host("log", "--format=%an %s", "topic"))
}

func TestStashesAreKeptUntilTheyAreDropped(t *testing.T) {
	w := newWorld(t)
	w.harvested("echo 1 > README && git stash -q && echo 2 > README && git stash -q")
	require.Equal(t, "refs/sandboxes/s1/stash/0\nrefs/sandboxes/s1/stash/1", w.host("for-each-ref", "--format=%(refname)", "refs/sandboxes"))
	require.Equal(t, "1", w.host("show", "refs/sandboxes/s1/stash/1:README"))
	out := w.harvested("git stash drop -q && git stash pop -q && cat README")
	require.Equal(t, "1", out)
	require.Empty(t, w.host("for-each-ref", "refs/sandboxes"))
}

func TestARebaseWithAConflictIsHarvestedInItsMiddleAndAtItsEnd(t *testing.T) {
	w := newWorld(t, func(w *world) {
		write(t, w.repo+"/README", "theirs\n")
		w.host("commit", "-q", "-a", "-m", "Theirs")
	})
	before := w.harvested("git commit -q --allow-empty -m Empty && echo mine > README && git commit -q -a -m Mine && git rev-parse HEAD")
	out, h := w.try("git rebase -q main")
	require.Contains(t, out, "CONFLICT")
	require.NotEqual(t, Failed, h.Status)
	w.sound()
	require.Equal(t, before, w.host("rev-parse", "topic"))
	// A new agent and a new session go on with it.
	w.o.SessionID = "s2"
	w.open()
	w.harvested("git status | grep -q 'rebase in progress' && echo both > README && git add README && GIT_EDITOR=: git rebase --continue")
	require.Equal(t, "Mine\nEmpty\nTheirs\nFirst", w.host("log", "--format=%s", "topic"))
	require.Equal(t, "ref: refs/heads/topic\n", read(t, w.meta+"/HEAD"))
}

func TestMaintenanceInsideWorksAndHurtsNothing(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.host("tag", "packed")
		w.host("branch", "packed-branch")
		w.host("pack-refs", "--all")
	})
	all := w.host("show-ref")
	w.harvested("git tag -d packed && git branch -D packed-branch && echo x > README && git commit -q -a -m X && git pack-refs --all && git gc -q && git gc -q --prune=now && git fsck")
	for line := range strings.Lines(all) {
		if !strings.Contains(line, "refs/heads/topic") {
			require.Contains(t, w.host("show-ref")+"\n", line, "what was there already stays")
		}
	}
	require.Equal(t, "X", w.host("log", "-1", "--format=%s", "topic"))
	w.harvested("git commit -q --allow-empty -m Y")
}

func TestADetachedHeadAndAnOrphanBranch(t *testing.T) {
	w := newWorld(t)
	out := w.harvested("git switch -q --detach && git commit -q --allow-empty -m Detached && git rev-parse HEAD")
	require.Equal(t, out+"\n", read(t, w.meta+"/HEAD"))
	_, h := w.command("git switch -q --orphan fresh")
	require.Contains(t, h.Detail, "refs/heads/fresh, which has no commit yet")
	require.Equal(t, out+"\n", read(t, w.meta+"/HEAD"))
	w.harvested("echo x > x && git add x && git commit -q -m Root")
	require.Equal(t, "Root", w.host("log", "--format=%s", "fresh"))
	require.Equal(t, "ref: refs/heads/fresh\n", read(t, w.meta+"/HEAD"))
}

func TestWhatOnlyTheIndexHasSurvivesTheBaseClonesGc(t *testing.T) {
	w := newWorld(t)
	w.harvested("echo staged > staged && git add staged && rm staged")
	w.sound()
	require.Equal(t, "staged", w.hostInWorktree("show", ":staged"))
	require.Equal(t, "AD staged", w.hostInWorktree("status", "--porcelain"))
	w.harvested("git rm -q --cached staged")
	require.Empty(t, w.hostInWorktree("status", "--porcelain"))
}

func TestAnEmptyIndexAndAConflictedOneArrive(t *testing.T) {
	w := newWorld(t)
	w.harvested("git rm -q README")
	require.Equal(t, "D  README", w.hostInWorktree("status", "--porcelain"))
	w.harvested("git reset -q --hard && git switch -q -c other && echo a > README && git commit -q -a -m A && git switch -q topic && echo b > README && git commit -q -a -m B")
	_, h := w.try("git merge other")
	require.Equal(t, Harvested, h.Status, h)
	w.sound()
	require.Equal(t, "UU README", w.hostInWorktree("status", "--porcelain"))
}

func TestManyObjectsArriveAsAPack(t *testing.T) {
	w := newWorld(t)
	w.harvested("for i in $(seq 150); do echo $i > f$i; done; git add . && git commit -q -m Many")
	require.Equal(t, "Many", w.host("log", "-1", "--format=%s", "topic"))
	require.Contains(t, w.host("ls-tree", "--name-only", "topic"), "f150")
}

func TestAHostsCommitIsSeenByTheNextCommand(t *testing.T) {
	w := newWorld(t)
	w.harvested("git commit -q --allow-empty -m Mine")
	write(t, w.wt+"/README", "host\n")
	w.hostInWorktree("commit", "-q", "-a", "-m", "Host")
	w.host("branch", "news")
	out, _ := w.command("git status --porcelain && git log --format=%s && git rev-parse -q --verify news")
	require.Equal(t, "Host\nMine\nFirst\n"+w.host("rev-parse", "news"), out)
	w.harvested("git commit -q --allow-empty -m Again")
	require.Equal(t, "Again\nHost\nMine\nFirst", w.host("log", "--format=%s", "topic"))
	w.host("branch", "-D", "news")
	w.hostInWorktree("switch", "-q", "--detach")
	out, _ = w.command("git branch --format='%(refname:short)' --list news topic && git rev-parse --abbrev-ref HEAD && git status --porcelain")
	require.Equal(t, "topic\nHEAD", out)
}

func TestManyRefsOfTheHostAreBroughtInAtOnce(t *testing.T) {
	w := newWorld(t)
	w.harvested("git branch mine && git pack-refs --all && git tag loose")
	id := w.host("rev-parse", "main")
	lines := []string{"# pack-refs with: \n"}
	for line := range strings.Lines(w.host("show-ref")) {
		lines = append(lines, strings.TrimSuffix(line, "\n")+"\n")
	}
	for i := range manyRefs + 1 {
		lines = append(lines, fmt.Sprintf("%s refs/tags/t%d\n", id, i))
	}
	write(t, w.git+"/packed-refs", strings.Join(lines, ""))
	out, h := w.command("git tag | wc -l && git branch --format='%(refname:short)'")
	require.Equal(t, "502\nmain\nmine\ntopic", out)
	require.Equal(t, Unchanged, h.Status, h)
	require.NoFileExists(t, w.v.Private()+"/refs/tags/t1", "a file for each would take long")
	require.Empty(t, h.Detail)
}

func TestTheIndexIsTakenAsItIsWhenGitOnlyNotedTimes(t *testing.T) {
	w := newWorld(t)
	w.harvested("echo x > x && git add x")
	w.hostInWorktree("status")
	w.hostInWorktree("update-index", "--refresh")
	_, h := w.command("git update-index --refresh; git add x")
	require.Empty(t, h.Conflicts)
	w.inside(func(in *testkit.Inside) { require.Equal(t, "A  x", in.Must(w.wt, "git status --porcelain")) })
}

func TestABranchThatTheHostDeletedAndPrunedIsGoneInsideToo(t *testing.T) {
	w := newWorld(t)
	w.host("branch", "news", w.host("commit-tree", "-p", "main", "-m", "News", "main^{tree}"))
	out, _ := w.command("git log -1 --format=%s news")
	require.Equal(t, "News", out)
	w.host("branch", "-D", "news")
	w.host("reflog", "expire", "--expire=now", "--all")
	w.sound()
	out, h := w.command("git for-each-ref 2>&1; git gc -q --prune=now 2>&1 && git fsck")
	require.NotContains(t, out, "news")
	require.NotEqual(t, Failed, h.Status, h)
}

// submodule puts one into the base clone's branch, so that the worktree begins with it.
func submodule(w *world) {
	sub := testkit.Repo(w, uid)
	testkit.GitAs(w, uid, w.wt, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", sub, "sub")
	testkit.GitAs(w, uid, w.wt, "commit", "-q", "-m", "a submodule")
	testkit.GitAs(w, uid, w.wt, "submodule", "--quiet", "deinit", "-f", "sub")
	require.NoError(w, os.RemoveAll(filepath.Join(w.meta, "modules")))
}

func TestP12TheBaseClonesSubmodulesAreNoObstacleAndMadeUpOnesDoNotReachIt(t *testing.T) {
	w := newWorld(t, submodule)
	w.harvested("echo x > new && git add new && git commit -q -m new")
	require.Contains(t, w.hostInWorktree("ls-files", "--stage"), "160000 ")
	r, err := w.v.Git(t.Context(), gitguard.GitCommand{Args: []string{"status", "--porcelain", "--ignore-submodules=all"}}, 0, 0)
	require.NoError(t, err)
	require.Zero(t, r.ExitCode, string(r.Stderr))
	unsaved, err := w.v.Unsaved(t.Context())
	require.NoError(t, err)
	require.Empty(t, unsaved)

	_, h := w.command(`git update-index --add --cacheinfo "160000,$(git rev-parse HEAD),evil"`)
	require.Contains(t, h.Detail, "evil")
	require.NotContains(t, w.hostInWorktree("ls-files", "--stage"), "evil")
}
