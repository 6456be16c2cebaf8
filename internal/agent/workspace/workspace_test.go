package workspace

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const uid = 1234

func setUp(t *testing.T) (repo, dir string) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git)
	repo = testkit.Repo(t, uid)
	return repo, filepath.Dir(repo)
}

func head(t *testing.T, repo, ref string) string {
	t.Helper()
	return strings.TrimSpace(testkit.GitAs(t, uid, repo, "rev-parse", ref))
}

func branches(t *testing.T, repo string) string {
	t.Helper()
	return testkit.GitAs(t, uid, repo, "for-each-ref", "--format=%(refname:short)", "refs/heads")
}

func TestAMissingWorktreeIsMadeWithItsBranchForTheRepositorysOwner(t *testing.T) {
	repo, dir := setUp(t)
	require.NoError(t, os.Chown(dir, 0, 0)) // the owner itself can't make a folder here
	wt := filepath.Join(dir, "wt")
	ws, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: "feature/x"})
	require.NoError(t, err)
	require.Equal(t, Workspace{
		Repository: repo, Worktree: wt, Branch: "feature/x", CommonDir: filepath.Join(repo, ".git"),
		MetaDir: filepath.Join(repo, ".git/worktrees/wt"), Owner: Owner{UID: uid, GID: uid}, Created: true,
		BranchStart: head(t, repo, "HEAD"),
	}, ws)
	st, err := os.Stat(filepath.Join(wt, "README"))
	require.NoError(t, err)
	require.EqualValues(t, uid, st.Sys().(*syscall.Stat_t).Uid)
	again, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt})
	require.NoError(t, err)
	require.False(t, again.Created)
	require.Equal(t, "feature/x", again.Branch)
	require.NoError(t, Recheck(again))
}

func TestABadWorkspaceIsRefusedWithItsPathAndTheRemedy(t *testing.T) {
	repo, dir := setUp(t)
	other := testkit.Repo(t, uid)
	foreign := testkit.Worktree(t, uid, other, "foreign")
	mine := testkit.Worktree(t, uid, repo, "mine")
	tree := head(t, repo, "HEAD^{tree}")
	testkit.GitAs(t, uid, repo, "branch", "ahead", strings.TrimSpace(testkit.GitAs(t, uid, repo, "commit-tree", "-p", "HEAD", "-m", "Ahead", tree)))
	stranger := testkit.Repo(t, uid+1)
	theirs := testkit.Worktree(t, uid+1, stranger, "theirs")
	pointing := filepath.Join(dir, "pointing")
	require.NoError(t, os.Mkdir(pointing, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(pointing, ".git"), []byte("gitdir: "+stranger+"/.git/worktrees/wt-theirs\n"), 0o644))
	require.NoError(t, os.Chown(pointing, uid, uid))
	require.NoError(t, os.Chown(filepath.Join(pointing, ".git"), uid, uid))
	plain := filepath.Join(dir, "plain")
	require.NoError(t, os.Mkdir(plain, 0o755))
	require.NoError(t, os.Chown(plain, uid, uid))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(mine, link))
	linkedParent := filepath.Join(dir, "parent")
	require.NoError(t, os.Symlink(dir, linkedParent))
	inside := filepath.Join(mine, "sub")
	require.NoError(t, os.Mkdir(inside, 0o755))
	require.NoError(t, os.Chown(inside, uid, uid))
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	bare := filepath.Join(dir, "empty")
	require.NoError(t, os.Mkdir(bare, 0o755))
	for name, x := range map[string]struct {
		w    Wanted
		says string
	}{
		"no branch for a missing one":      {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new")}, "name workspace.branch"},
		"a bad branch name":                {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "a..b"}, "no valid branch name"},
		"a branch that is an option":       {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "--force"}, "begins with a dash"},
		"a base_ref that is an option":     {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "b", BaseRef: "--all"}, "begins with a dash"},
		"a base_ref that isn't there":      {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "b", BaseRef: "nope"}, "names no commit"},
		"a branch that exists, and a base": {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "ahead", BaseRef: "HEAD"}, "exists already"},
		"the base clone's own branch":      {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "main"}, "the base clone itself; choose another branch"},
		"a branch that is checked out":     {Wanted{Repository: repo, Worktree: filepath.Join(dir, "new"), Branch: "mine"}, "choose another branch (--branch), or adopt that worktree (--worktree " + mine + ")"},
		"a worktree of another branch":     {Wanted{Repository: repo, Worktree: mine, Branch: "other"}, "is on branch mine, not on \"other\""},
		"one that base_ref is ahead of":    {Wanted{Repository: repo, Worktree: mine, BaseRef: "ahead"}, "does not come from base_ref \"ahead\""},
		"one with a base_ref that's wrong": {Wanted{Repository: repo, Worktree: mine, BaseRef: "nope"}, "names no commit"},
		"a path inside the Git folder":     {Wanted{Repository: repo, Worktree: filepath.Join(repo, ".git/new"), Branch: "b"}, "inside the repository's Git folder"},
		"a parent that isn't there":        {Wanted{Repository: repo, Worktree: filepath.Join(dir, "no/new"), Branch: "b"}, "does not exist"},
		"a symlink as worktree":            {Wanted{Repository: repo, Worktree: link}, "symlink"},
		"a symlink above the worktree":     {Wanted{Repository: repo, Worktree: filepath.Join(linkedParent, "wt-mine")}, "symlink"},
		"a symlink above the repository":   {Wanted{Repository: filepath.Join(linkedParent, "repo"), Worktree: mine}, "symlink"},
		"a symlink above a missing one":    {Wanted{Repository: repo, Worktree: filepath.Join(linkedParent, "new"), Branch: "b"}, "symlink"},
		"a file as worktree":               {Wanted{Repository: repo, Worktree: file}, "not a folder"},
		"a plain folder":                   {Wanted{Repository: repo, Worktree: plain}, "not a linked worktree"},
		"another repository's worktree":    {Wanted{Repository: repo, Worktree: foreign}, "not a linked worktree of " + repo + " (it is one of \"" + other + "\")"},
		"one of another owner's":           {Wanted{Repository: repo, Worktree: theirs}, "not a linked worktree of " + repo + " (it is one of \"" + stranger + "\")"},
		"one that points to another's":     {Wanted{Repository: repo, Worktree: pointing}, "not a linked worktree of " + repo + " (it is one of \"" + stranger + "\")"},
		"a folder inside a worktree":       {Wanted{Repository: repo, Worktree: inside}, "not a linked worktree"},
		"the base clone as worktree":       {Wanted{Repository: repo, Worktree: repo}, "not a linked worktree"},
		"a missing repository":             {Wanted{Repository: filepath.Join(dir, "none"), Worktree: mine}, "does not exist"},
		"no repository":                    {Wanted{Repository: bare, Worktree: mine}, "no Git repository"},
		"a worktree as repository":         {Wanted{Repository: mine, Worktree: filepath.Join(dir, "new"), Branch: "b"}, "name the base clone"},
	} {
		x.w.AllowRootOwned = true
		_, err := Open(t.Context(), x.w)
		require.ErrorIs(t, err, ErrRefused, name)
		require.ErrorContains(t, err, x.says, name)
		require.NotContains(t, err.Error(), "safe.directory", name)
		require.NoDirExists(t, filepath.Join(dir, "new"), name)
		require.NoDirExists(t, filepath.Join(repo, ".git/new"), name)
	}
	require.Equal(t, "ahead\nmain\nmine\n", branches(t, repo), "a refused call leaves no branch behind")
}

func TestARootOwnedWorkspaceNeedsPermission(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, 0)
	w := Wanted{Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "b"}
	_, err := Open(t.Context(), w)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "workspace.allow_root_owned")
	w.AllowRootOwned = true
	ws, err := Open(t.Context(), w)
	require.NoError(t, err)
	require.Zero(t, ws.Owner.UID)
}

func TestOwnersThatDifferAreRefused(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	require.NoError(t, os.Chown(wt, uid+1, uid+1))
	require.NoError(t, os.Chown(filepath.Join(wt, ".git"), uid+1, uid+1))
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "one owner")
	require.Error(t, Recheck(Workspace{Worktree: wt, CommonDir: filepath.Join(repo, ".git"), MetaDir: repo, Owner: Owner{UID: uid, GID: uid}}))
}

func TestTheRepositorysConfigurationRunsNoProgramWhenItIsLookedAt(t *testing.T) {
	repo, dir := setUp(t)
	canary := filepath.Join(dir, "canary")
	hook := filepath.Join(repo, ".git/hooks/post-checkout")
	require.NoError(t, os.MkdirAll(filepath.Dir(hook), 0o755))
	require.NoError(t, os.WriteFile(hook, []byte("#!/bin/sh\ntouch "+canary+"\n"), 0o755))
	testkit.GitAs(t, uid, repo, "config", "core.fsmonitor", "touch "+canary)
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "b"})
	require.NoError(t, err)
	require.NoFileExists(t, canary)
}

func TestAHangingGitEndsWithItsContext(t *testing.T) {
	repo, dir := setUp(t)
	head := filepath.Join(repo, ".git/HEAD")
	require.NoError(t, os.Remove(head))
	require.NoError(t, syscall.Mkfifo(head, 0o666))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := Open(ctx, Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "b"})
	require.Error(t, err)
}

func TestAWorktreeThatCouldNotBeFilledIsTakenAwayAgain(t *testing.T) {
	repo, dir := setUp(t)
	// The tree of HEAD names an object that isn't there: the checkout fails in its middle.
	blob := strings.TrimSpace(testkit.GitAs(t, uid, repo, "rev-parse", "HEAD:README"))
	require.NoError(t, os.Remove(filepath.Join(repo, ".git/objects", blob[:2], blob[2:])))
	wt := filepath.Join(dir, "wt")
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: "b"})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, wt)
	require.NoDirExists(t, wt)
	require.NotContains(t, testkit.GitAs(t, uid, repo, "worktree", "list"), wt)
	require.Equal(t, "main\n", branches(t, repo), "and so is its new branch")
	require.NotContains(t, err.Error(), "hint:", "Git's advice on how to do without grafts is no part of the reason")
}

func TestUndoTakesAwayExactlyWhatOpenMade(t *testing.T) {
	repo, dir := setUp(t)
	wt := filepath.Join(dir, "wt")
	testkit.GitAs(t, uid, repo, "branch", "old")
	for name, x := range map[string]struct {
		branch string
		before func(ws Workspace)
		left   string
	}{
		"a new branch":           {"new", func(Workspace) {}, "main\nold\n"},
		"one that was there":     {"old", func(Workspace) {}, "main\nold\n"},
		"files that nobody adds": {"new", func(ws Workspace) { require.NoError(t, MakeScratch(ws.Worktree, ws.Owner)) }, "main\nold\n"},
	} {
		ws, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: x.branch})
		require.NoError(t, err, name)
		x.before(ws)
		require.NoError(t, Undo(t.Context(), ws), name)
		require.NoDirExists(t, wt, name)
		require.Equal(t, x.left, branches(t, repo), name)
		require.NotContains(t, testkit.GitAs(t, uid, repo, "worktree", "list"), wt, name)
	}
	mine := testkit.Worktree(t, uid, repo, "mine")
	ws, err := Open(t.Context(), Wanted{Repository: repo, Worktree: mine, Branch: "mine", BaseRef: "main"})
	require.NoError(t, err)
	require.NoError(t, Undo(t.Context(), ws))
	require.DirExists(t, mine, "what was adopted is not taken away")
	require.Contains(t, branches(t, repo), "mine")
}

func TestTheSameWishesAreFulfilledAgainByWhatAnInterruptedCallLeft(t *testing.T) {
	repo, dir := setUp(t)
	w := Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "b", BaseRef: "main"}
	testkit.GitAs(t, uid, repo, "branch", "b", "main")
	ws, err := Open(t.Context(), w)
	require.NoError(t, err, "the branch was made and the worktree was not")
	require.Empty(t, ws.BranchStart, "it may be somebody else's")
	again, err := Open(t.Context(), w)
	require.NoError(t, err, "both were made")
	require.False(t, again.Created)
	require.Equal(t, "b", again.Branch)
}

func TestUndoKeepsABranchThatHasMovedAndSaysSo(t *testing.T) {
	repo, dir := setUp(t)
	wt := filepath.Join(dir, "wt")
	ws, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: "b"})
	require.NoError(t, err)
	testkit.GitAs(t, uid, wt, "commit", "-q", "--allow-empty", "-m", "Work")
	err = Undo(t.Context(), ws)
	require.ErrorContains(t, err, "left is the new branch \"b\"")
	require.Contains(t, branches(t, repo), "b\n")
}

func TestAWorktreeWhoseGitFolderIsSomeoneElsesSaysWhoseItIs(t *testing.T) {
	repo, _ := setUp(t)
	wt := testkit.Worktree(t, uid, repo, "b")
	require.NoError(t, os.Chown(filepath.Join(repo, ".git/worktrees/wt-b"), uid+1, uid+1))
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "give both to one owner")
	require.NotContains(t, err.Error(), "safe.directory")
}
