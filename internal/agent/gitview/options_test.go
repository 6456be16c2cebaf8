package gitview

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

func TestTrustedGitReadsAndWritesInTheSessionsJail(t *testing.T) {
	w := newWorld(t)
	w.harvested("echo staged > staged && git add staged && echo more >> README && echo new > new")
	git := func(writes bool, args ...string) string {
		t.Helper()
		require.NoError(t, w.v.Refresh(t.Context()))
		r, err := w.v.Git(t.Context(), gitguard.GitCommand{Args: args, Writes: writes}, 0, 0)
		require.NoError(t, err)
		require.Zero(t, r.ExitCode, "%s", r.Stderr)
		return string(r.Stdout)
	}
	require.Equal(t, " M README\nA  staged\n?? new\n", git(false, "status", "--porcelain"))
	r, err := w.v.Git(t.Context(), gitguard.GitCommand{Args: []string{"update-ref", "refs/heads/x", "HEAD"}}, 0, 0)
	require.NoError(t, err)
	require.NotZero(t, r.ExitCode, "what only reads can't write")
	git(true, "add", "-A")
	git(true, "-c", "user.name=T", "-c", "user.email=t@example.com", "commit", "-q", "-m", "Trusted")
	require.Equal(t, Harvested, w.v.Harvest(t.Context()).Status)
	require.Equal(t, "Trusted", w.host("log", "-1", "--format=%s", "topic"))
	require.Equal(t, "README\nnew\nstaged", w.host("ls-tree", "--name-only", "topic"))
	require.Empty(t, w.hostInWorktree("status", "--porcelain"))
}

func TestUnsavedNamesWhatDeletingWouldLoseAndNothingElse(t *testing.T) {
	w := newWorld(t, func(w *world) { w.host("branch", "theirs") })
	unsaved := func() string {
		t.Helper()
		out, err := w.v.Unsaved(t.Context())
		require.NoError(t, err)
		return strings.Join(out, "\n")
	}
	w.command("git commit -q --allow-empty -m Saved")
	require.Empty(t, unsaved())
	w.command("echo x > untracked && echo x >> README && git stash -q && echo y >> README")
	require.Contains(t, unsaved(), "Not committed: 2 files (README, untracked).")
	require.Contains(t, unsaved(), "stashes")
	w.command("rm untracked && git reset -q --hard && git stash drop -q && git branch -f theirs $(git commit-tree -p HEAD -m Aside HEAD^{tree})")
	require.Contains(t, unsaved(), "the session's refs/heads/theirs")
	w.command("git branch -q -f theirs main && git switch -q --detach && git commit -q --allow-empty -m Detached")
	require.Contains(t, unsaved(), "the session's HEAD")
	w.command("git switch -q topic && touch " + w.meta + "/MERGE_HEAD")
	require.Equal(t, "A merge is not finished.", unsaved())
}

func TestRemoveTakesAwayExactlyWhatTheWorkspaceHad(t *testing.T) {
	w := newWorld(t)
	w.command("git tag mine && echo x > README && git stash -q")
	w.o.SessionID = "a..b.lock" // no name of a ref, but one of a session
	w.open()
	_, h := w.command("git tag other $(git commit-tree -m x HEAD^{tree})")
	require.Equal(t, Harvested, h.Status, h)
	w.host("update-ref", "refs/sandboxes/foreign/x", "main")
	cache := filepath.Join(w.o.Dir, "caches/go")
	require.NoError(t, os.MkdirAll(cache, 0o755))
	removed, err := w.v.Remove(t.Context())
	require.NoError(t, err)
	require.Contains(t, strings.Join(removed, "\n"), "refs/sandboxes/s1/ (")
	require.Equal(t, "refs/sandboxes/foreign/x", w.host("for-each-ref", "--format=%(refname)", "refs/sandboxes"))
	left, err := os.ReadDir(w.o.Dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "caches are the agent's")
	again, err := w.v.Remove(t.Context())
	require.NoError(t, err)
	require.Empty(t, again)
	require.NoError(t, os.RemoveAll(w.o.Dir))
}

func TestAnotherWorktreeAtTheSamePathOrAnotherLayoutIsRefusedWithTheRemedy(t *testing.T) {
	w := newWorld(t)
	o := w.o
	o.Layout = mounts.Shared
	_, err := Open(t.Context(), o)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "layout isolated")
	o.Layout = "other"
	_, err = Open(t.Context(), o)
	require.ErrorIs(t, err, ErrRefused)

	w.host("worktree", "remove", "--force", w.wt)
	keeper := filepath.Join(filepath.Dir(w.repo), "keeper") // takes the inode that is free now
	w.host("worktree", "add", "-q", "--detach", keeper)
	w.host("worktree", "add", "-q", w.wt, "topic")
	_, err = Open(t.Context(), w.o)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "sandbox-agent workspace delete "+w.wt)
	_, err = Discard(t.Context(), w.o.Dir)
	require.NoError(t, err)
	require.NoDirExists(t, w.o.Dir)
	w.reopen()
	w.harvested("git commit -q --allow-empty -m Anew")
}

func TestNoObjectIsCopiedAndTheConfigurationIsTheSanitisedOne(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.host("config", "alias.x", "!touch /canary")
		write(t, w.git+"/info/exclude", "ignored\n")
	})
	objects := 0
	require.NoError(t, filepath.WalkDir(filepath.Join(w.v.Private(), "objects"), func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			objects++
		}
		return err
	}))
	require.Equal(t, 1, objects, "info/alternates alone")
	require.NotEmpty(t, w.v.LeftOut())
	out, h := w.command("git config alias.x || echo none; touch ignored; git status --porcelain; cat " + w.meta + "/config.worktree")
	require.Equal(t, "none", out)
	require.Equal(t, Unchanged, h.Status)
}

func TestHooksRunInsideOnlyWhenTheOperatorSaysSo(t *testing.T) {
	w := newWorld(t, func(w *world) {
		require.NoError(t, os.MkdirAll(w.git+"/hooks", 0o755))
		require.NoError(t, os.WriteFile(w.git+"/hooks/pre-commit", []byte("#!/bin/sh\ntouch ran\n"), 0o755))
	})
	out, _ := w.command("git commit -q --allow-empty -m x; ls")
	require.NotContains(t, out, "ran")
	w.o.Hooks = true
	w.open()
	out, _ = w.command("git commit -q --allow-empty -m y; ls; rm ran")
	require.Contains(t, out, "ran")
	w.o.Hooks = false
	w.open()
	out, _ = w.command("git commit -q --allow-empty -m z; ls")
	require.NotContains(t, out, "ran")
}

// formats are what a repository can be made with; one that the installed Git does not know is skipped, by name.
func TestOtherFormatsOfARepository(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	for _, format := range []string{"--object-format=sha256", "--ref-format=reftable"} {
		t.Run(format, func(t *testing.T) {
			top := filepath.Dir(testkit.Repo(t, uid))
			repo := filepath.Join(top, `a repo, "quoted" and with ä`)
			if out, err := run(top, "git", "init", "-q", "-b", "main", format, repo); err != nil {
				said, _, _ := strings.Cut(out, "\n")
				t.Skipf("this test needs a Git that knows %s: %s", format, said)
			}
			w := &world{TB: t, repo: repo, git: repo + "/.git", wt: filepath.Join(top, "wt ä")}
			testkit.GitAs(t, uid, repo, "commit", "-q", "--allow-empty", "-m", "First")
			w.host("worktree", "add", "-q", "-b", "topic", w.wt)
			w.meta = w.git + "/worktrees/" + filepath.Base(w.wt)
			var err error
			w.o = Options{Dir: filepath.Join(testkit.StateDir(t), Key(w.wt)), SessionID: "s1", Layout: mounts.Isolated}
			w.o.Workspace, err = workspace.Open(t.Context(), workspace.Wanted{Repository: repo, Worktree: w.wt})
			require.NoError(t, err)
			w.meta = w.o.Workspace.MetaDir
			w.reopen()
			out := w.harvested("echo x > x && git add x && git commit -q -m X && git branch new && git tag t && git rev-parse HEAD")
			require.Equal(t, out, w.host("rev-parse", "topic"))
			require.Equal(t, out, w.host("rev-parse", "new"))
			require.Equal(t, "First\nX", w.host("log", "--reverse", "--format=%s", "topic"))
			testkit.GitAs(t, uid, w.wt, "commit", "-q", "--allow-empty", "-m", "Host")
			out, h := w.command("git log -1 --format=%s && git status --porcelain")
			require.Equal(t, "Host", out)
			require.Equal(t, Unchanged, h.Status, h)
			w.harvested("git switch -q --detach && git commit -q --allow-empty -m D")
			require.Equal(t, "D", w.hostInWorktree("log", "-1", "--format=%s"))
		})
	}
}
