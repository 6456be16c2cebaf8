package workspace

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// fails runs git as the owner, and wants it to fail.
func fails(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("setpriv", append([]string{"--reuid", fmt.Sprint(uid), "--regid", fmt.Sprint(uid), "--clear-groups",
		"git", "-c", "user.name=Tester", "-c", "user.email=tester@example.com"}, args...)...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_EDITOR=:"}
	out, err := cmd.CombinedOutput()
	require.Error(t, err, string(out))
}

// conflict makes a worktree on branch topic in which git ACTION main has stopped.
func conflict(t *testing.T, repo, action string) string {
	t.Helper()
	testkit.Need(t, testkit.Program("setpriv"))
	wt := testkit.Worktree(t, uid, repo, "topic")
	for _, dir := range []string{wt, repo} {
		plant(t, filepath.Join(dir, "README"), dir, 0o644)
		testkit.GitAs(t, uid, dir, "commit", "-q", "-a", "-m", "Changed")
	}
	fails(t, wt, action, "main")
	return wt
}

func chown(t *testing.T, path string, owner int) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(path, func(p string, _ os.DirEntry, err error) error {
		if err == nil {
			err = os.Lchown(p, owner, owner)
		}
		return err
	}))
}

// remove takes a loose object away.
func remove(t *testing.T, repo, rev string) {
	t.Helper()
	id := head(t, repo, rev)
	require.NoError(t, os.Remove(filepath.Join(repo, ".git/objects", id[:2], id[2:])))
}

func TestUnusualRepositoriesWorkLikeAnyOther(t *testing.T) {
	g := func(t *testing.T, dir string, args ...string) { t.Helper(); testkit.GitAs(t, uid, dir, args...) }
	for name, make := range map[string]func(t *testing.T, repo, dir string) (repository, worktree string){
		"a bare one": func(t *testing.T, repo, dir string) (string, string) {
			g(t, dir, "clone", "-q", "--bare", repo, dir+"/bare")
			return dir + "/bare", dir + "/wt"
		},
		"one with a detached HEAD": func(t *testing.T, repo, dir string) (string, string) {
			g(t, repo, "checkout", "-q", "--detach")
			return repo, dir + "/wt"
		},
		"a shallow clone": func(t *testing.T, repo, dir string) (string, string) {
			g(t, repo, "commit", "-q", "--allow-empty", "-m", "Second")
			g(t, dir, "clone", "-q", "--depth=1", "file://"+repo, dir+"/shallow")
			require.FileExists(t, dir+"/shallow/.git/shallow")
			return dir + "/shallow", dir + "/wt"
		},
		"one with a submodule": func(t *testing.T, repo, dir string) (string, string) {
			g(t, dir, "clone", "-q", repo, dir+"/sub")
			g(t, repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", dir+"/sub", "sub")
			g(t, repo, "commit", "-q", "-m", "Submodule")
			return repo, dir + "/wt"
		},
		"one with SHA-256 ids": func(t *testing.T, repo, dir string) (string, string) {
			g(t, dir, "init", "-q", "-b", "main", "--object-format=sha256", dir+"/long")
			plant(t, dir+"/long/README", "hello\n", 0o644)
			g(t, dir+"/long", "add", "README")
			g(t, dir+"/long", "commit", "-q", "-m", "First")
			require.Len(t, head(t, dir+"/long", "HEAD"), 64)
			return dir + "/long", dir + "/wt"
		},
		"one with refs in a reftable": func(t *testing.T, repo, dir string) (string, string) {
			if out, err := exec.Command("git", "init", "-q", "--ref-format=reftable", filepath.Join(t.TempDir(), "x")).CombinedOutput(); err != nil {
				t.Skipf("the installed git has no reftable format (2.45 brought it): %s", out)
			}
			g(t, dir, "init", "-q", "-b", "main", "--ref-format=reftable", dir+"/tables")
			g(t, dir+"/tables", "fetch", "-q", repo, "main:other")
			g(t, dir+"/tables", "reset", "-q", "--hard", "other")
			return dir + "/tables", dir + "/wt"
		},
		"a worktree on another file system": func(t *testing.T, repo, dir string) (string, string) {
			at := fileSystem(t, "tmpfs", "tmpfs", "mode=755", 0)
			var a, b unix.Stat_t
			require.NoError(t, unix.Stat(at, &a))
			require.NoError(t, unix.Stat(repo, &b))
			require.NotEqual(t, a.Dev, b.Dev)
			return repo, filepath.Join(at, "wt")
		},
		"one that sparse checkout without a configuration per worktree is on in": func(t *testing.T, repo, dir string) (string, string) {
			g(t, repo, "config", "core.sparseCheckout", "true")
			return repo, dir + "/wt"
		},
		"one whose files are said to lie elsewhere": func(t *testing.T, repo, dir string) (string, string) {
			g(t, repo, "config", "core.worktree", "/etc")
			return repo, dir + "/wt"
		},
		"one whose worktrees have relative pointers": func(t *testing.T, repo, dir string) (string, string) {
			g(t, repo, "config", "worktree.useRelativePaths", "true") // since Git 2.48; an older one doesn't know it
			return repo, dir + "/wt"
		},
		"one with a lock of another branch left": func(t *testing.T, repo, dir string) (string, string) {
			plant(t, repo+"/.git/refs/heads/x.lock", "", 0o644)
			return repo, dir + "/wt"
		},
		"paths of a blank":               renamed(" "),
		"paths with all that is unusual": renamed("-a b:c\"d'e\\f$(x)`x`;*?ä"),
	} {
		t.Run(name, func(t *testing.T) {
			repo, dir := setUp(t)
			repository, worktree := make(t, repo, dir)
			ws, err := Open(t.Context(), Wanted{Repository: repository, Worktree: worktree, Branch: "b"})
			require.NoError(t, err)
			require.True(t, ws.Created)
			require.Equal(t, "b", ws.Branch)
			b, err := os.ReadFile(filepath.Join(worktree, "README"))
			require.NoError(t, err)
			require.Equal(t, "hello\n", string(b))
			require.Equal(t, "## b\n", testkit.GitAs(t, uid, worktree, "status", "--porcelain", "-b"))
			again, err := Open(t.Context(), Wanted{Repository: repository, Worktree: worktree, Branch: "b"})
			require.NoError(t, err, "and it is adopted later")
			require.Equal(t, ws.MetaDir, again.MetaDir)
			require.NoError(t, Recheck(again))
			require.NoError(t, Undo(t.Context(), ws))
			require.NoDirExists(t, worktree)
			require.NotContains(t, testkit.GitAs(t, uid, repository, "branch"), "b\n")
		})
	}
}

// renamed moves the repository to a path with a name twice in it, and puts the worktree beside it.
func renamed(name string) func(t *testing.T, repo, dir string) (string, string) {
	return func(t *testing.T, repo, dir string) (string, string) {
		in := filepath.Join(dir, name)
		require.NoError(t, os.Mkdir(in, 0o755))
		require.NoError(t, os.Chown(in, uid, uid))
		require.NoError(t, os.Rename(repo, filepath.Join(in, name)))
		return filepath.Join(in, name), filepath.Join(in, name+"wt")
	}
}

func TestRepositoriesThatCantBeSharedAreRefusedWithTheRemedy(t *testing.T) {
	g := func(t *testing.T, dir string, args ...string) { t.Helper(); testkit.GitAs(t, uid, dir, args...) }
	for name, x := range map[string]struct {
		make func(t *testing.T, repo, dir string) (repository string)
		says []string
	}{
		"without a commit": {func(t *testing.T, _, dir string) string {
			g(t, dir, "init", "-q", dir+"/new")
			return dir + "/new"
		}, []string{"/new names no commit", "git commit", "--base"}},
		"with its commit missing": {func(t *testing.T, repo, _ string) string {
			remove(t, repo, "HEAD")
			return repo
		}, []string{"names no commit that is there", "fsck"}},
		"with its tree missing": {func(t *testing.T, repo, _ string) string {
			remove(t, repo, "HEAD^{tree}")
			return repo
		}, []string{"unable to read tree", "fsck"}},
		"a partial clone": {func(t *testing.T, repo, dir string) string {
			g(t, repo, "config", "uploadpack.allowFilter", "true")
			g(t, dir, "clone", "-q", "--filter=blob:none", "--no-checkout", "file://"+repo, dir+"/partial")
			return dir + "/partial"
		}, []string{"/partial", "promisor remote", "fsck"}},
		"one that borrows objects": {func(t *testing.T, repo, dir string) string {
			g(t, dir, "clone", "-q", "--shared", repo, dir+"/borrowing")
			return dir + "/borrowing"
		}, []string{"/borrowing/.git/objects/info/alternates", "repack -a -d"}},
		"one that borrows objects through a link": {func(t *testing.T, repo, _ string) string {
			require.NoError(t, os.Symlink("/dev/null", repo+"/.git/objects/info/alternates"))
			return repo
		}, []string{"objects/info/alternates"}},
		"with sparse checkout": {func(t *testing.T, repo, _ string) string {
			g(t, repo, "sparse-checkout", "set", "x")
			return repo
		}, []string{"extensions.worktreeConfig", "sparse-checkout", "--unset"}},
		"of a format that this git does not know": {func(t *testing.T, repo, _ string) string {
			g(t, repo, "config", "core.repositoryFormatVersion", "1")
			g(t, repo, "config", "extensions.fromTheFuture", "true")
			return repo
		}, []string{"not one that Git can read", "fromthefuture"}},
		"with a .git of somebody else's": {func(t *testing.T, repo, _ string) string {
			chown(t, repo+"/.git", uid+1)
			return repo
		}, []string{"belongs to uid 1234", ".git to uid 1235", "chown -R"}},
		"with references of somebody else's": {func(t *testing.T, repo, _ string) string {
			chown(t, repo+"/.git/refs", uid+1)
			return repo
		}, []string{"/.git/refs", "permission denied", "chown -R"}},
		"with some objects of somebody else's": {func(t *testing.T, repo, _ string) string {
			chown(t, filepath.Join(repo, ".git/objects", head(t, repo, "HEAD")[:2]), uid+1)
			return repo
		}, []string{"/.git/objects/", "permission denied", "chown -R"}},
		"with a lock of the branch left": {func(t *testing.T, repo, _ string) string {
			plant(t, repo+"/.git/refs/heads/b.lock", "", 0o644)
			return repo
		}, []string{"b.lock': File exists", "remove the .lock file"}},
	} {
		t.Run(name, func(t *testing.T) {
			repo, dir := setUp(t)
			repository := x.make(t, repo, dir)
			wt := filepath.Join(dir, "wt")
			_, err := Open(t.Context(), Wanted{Repository: repository, Worktree: wt, Branch: "b"})
			require.ErrorIs(t, err, ErrRefused)
			for _, want := range x.says {
				require.ErrorContains(t, err, want)
			}
			require.NotContains(t, err.Error(), "left is", "nothing that it made")
			require.NotContains(t, err.Error(), "left are")
			require.NoDirExists(t, wt)
			require.NoFileExists(t, filepath.Join(repository, ".git/refs/heads/b"))
			require.NoDirExists(t, filepath.Join(repository, ".git/worktrees/wt"))
		})
	}
}

func TestAPathThatCantBeWrittenDownIsRefused(t *testing.T) {
	repo, dir := setUp(t)
	for name, says := range map[string]string{"a\nb": "control character", "a\xffb": "not valid UTF-8", "a\x1bb": "control character"} {
		for _, w := range []Wanted{{Repository: repo, Worktree: filepath.Join(dir, name)}, {Repository: filepath.Join(dir, name), Worktree: filepath.Join(dir, "wt")}} {
			w.Branch = "b"
			_, err := Open(t.Context(), w)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, says)
			require.NotContains(t, err.Error(), name, "the message itself is one line of text")
		}
	}
	// A name of the worktree's Git folder: not the caller's, but whoever can write to the repository's.
	wt := testkit.Worktree(t, uid, repo, "b")
	meta := filepath.Join(repo, ".git/worktrees", filepath.Base(wt))
	require.NoError(t, os.Rename(meta, meta+"\xff"))
	plant(t, filepath.Join(wt, ".git"), "gitdir: "+meta+"\xff\n", 0o644)
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "not valid UTF-8")
}

func TestAWorktreeInTheMiddleOfSomethingIsTakenAsItIs(t *testing.T) {
	for _, action := range []string{"rebase", "merge"} {
		t.Run(action, func(t *testing.T) {
			repo, _ := setUp(t)
			wt := conflict(t, repo, action)
			before := testkit.GitAs(t, uid, wt, "status")
			ws, err := Open(t.Context(), Wanted{Repository: repo, Worktree: wt})
			require.NoError(t, err)
			require.Equal(t, before, testkit.GitAs(t, uid, wt, "status"))
			require.Contains(t, before, "both modified")
			if action == "merge" {
				require.Equal(t, "topic", ws.Branch)
				return
			}
			require.Empty(t, ws.Branch, "Git detaches HEAD for as long as it rebases")
			_, err = Open(t.Context(), Wanted{Repository: repo, Worktree: wt, Branch: "topic"})
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, "in the middle of a rebase")
		})
	}
}

func TestABranchThatIsRebasedElsewhereIsRefused(t *testing.T) {
	repo, dir := setUp(t)
	other := conflict(t, repo, "rebase")
	_, err := Open(t.Context(), Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "topic"})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, other)
	require.NoDirExists(t, filepath.Join(dir, "wt"))
	require.Contains(t, testkit.GitAs(t, uid, other, "status"), "rebase in progress")
}

// fifo puts a FIFO in the place of a file.
func fifo(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, os.Remove(path))
	require.NoError(t, unix.Mkfifo(path, 0o666))
	require.NoError(t, os.Chown(path, uid, uid))
}

func TestP12AFileThatGitWaitsForIsNamed(t *testing.T) {
	for name, what := range map[string]func(t *testing.T, repo string) string{
		"an object": func(t *testing.T, repo string) string {
			id := head(t, repo, "HEAD")
			return filepath.Join(repo, ".git/objects", id[:2], id[2:])
		},
		"a reference": func(_ *testing.T, repo string) string { return filepath.Join(repo, ".git/refs/heads/main") },
	} {
		t.Run(name, func(t *testing.T) {
			repo, dir := setUp(t)
			path := what(t, repo)
			fifo(t, path)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			_, err := Open(ctx, Wanted{Repository: repo, Worktree: filepath.Join(dir, "wt"), Branch: "b"})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, path+": look at it, and remove it")
			require.NotContains(t, err.Error(), "names no commit", "no answer is not the answer no")
			require.NoDirExists(t, filepath.Join(dir, "wt"))
		})
	}
}

func TestALookForWhatGitWaitedForIsBoundedAndSaysSo(t *testing.T) {
	repo, _ := setUp(t)
	common := filepath.Join(repo, ".git")
	odd, all := oddFiles(common)
	require.Empty(t, odd)
	require.True(t, all)
	require.ErrorContains(t, explainHang(common, context.DeadlineExceeded), "see that its storage answers")

	deep := filepath.Join(common, "refs", strings.Repeat("d/", maxDepth+1))
	require.NoError(t, os.MkdirAll(deep, 0o755))
	odd, all = oddFiles(common)
	require.Empty(t, odd)
	require.False(t, all, "too deep")
	require.ErrorContains(t, explainHang(common, context.DeadlineExceeded), "-type p")

	for i := range maxNamed + 5 {
		require.NoError(t, unix.Mkfifo(filepath.Join(common, "refs", fmt.Sprintf("fifo-%02d", i)), 0o644))
	}
	require.NoError(t, os.Symlink("/etc/passwd", filepath.Join(common, "refs", "link")))
	odd, _ = oddFiles(common)
	require.Len(t, odd, maxNamed)
	require.Contains(t, odd[0], filepath.Join(common, "refs"))
}
