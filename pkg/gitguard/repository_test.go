package gitguard

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// inRepo is a Runner without a jail, for repositories that the test itself made.
func inRepo(t *testing.T, common string) Runner {
	return func(_ context.Context, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir, cmd.Env = common, append(Env(), "GIT_DIR="+common)
		out, err := cmd.Output()
		return string(out), err
	}
}

func check(t *testing.T, repo string) Report {
	t.Helper()
	r, err := CheckRepository(t.Context(), repo, inRepo(t, filepath.Join(repo, ".git")))
	require.NoError(t, err)
	return r
}

func TestAFreshCloneIsClean(t *testing.T) {
	origin := testRepo(t)
	repo := filepath.Join(t.TempDir(), "clone")
	git(t, "/", "-c", "protocol.allow=always", "init", "-q", repo)
	git(t, repo, "remote", "add", "origin", origin)
	git(t, repo, "commit", "-q", "--allow-empty", "-m", "x")
	r := check(t, repo)
	require.Empty(t, r.Findings)
	require.True(t, r.Attributes)
	require.Equal(t, repo, r.Repository)
	require.Equal(t, filepath.Join(repo, ".git"), r.CommonDir)
}

func TestARepositoryIsFoundByEachOfItsFolders(t *testing.T) {
	repo := testRepo(t)
	linked := filepath.Join(t.TempDir(), "linked")
	git(t, repo, "worktree", "add", "-q", linked)
	bare := filepath.Join(t.TempDir(), "bare")
	git(t, "/", "init", "-q", "--bare", bare)
	for path, want := range map[string][2]string{
		repo: {repo, repo + "/.git"}, repo + "/.git": {repo, repo + "/.git"}, linked: {repo, repo + "/.git"}, bare: {bare, bare}, repo + "/": {repo, repo + "/.git"},
	} {
		repository, common, err := FindRepository(path)
		require.NoError(t, err)
		require.Equal(t, want, [2]string{repository, common}, path)
	}
}

func TestP12WhatLooksLikeABareRepositoryInAWorktreeIsNotTakenForIt(t *testing.T) {
	repo := testRepo(t)
	git(t, "/", "init", "-q", "--bare", filepath.Join(repo, "x"))
	require.NoError(t, os.CopyFS(repo, os.DirFS(filepath.Join(repo, "x"))))
	_, common, err := FindRepository(repo)
	require.NoError(t, err)
	require.Equal(t, repo+"/.git", common)
}

func TestWhatIsNoRepositoryIsNamedWithTheRemedy(t *testing.T) {
	repo := testRepo(t)
	empty := t.TempDir()
	link := filepath.Join(empty, "link")
	require.NoError(t, os.Symlink(repo, link))
	separate := filepath.Join(t.TempDir(), "separate")
	git(t, "/", "init", "-q", "--separate-git-dir", separate+".git", separate)
	broken := filepath.Join(t.TempDir(), "broken")
	require.NoError(t, os.MkdirAll(broken, 0o755))
	require.NoError(t, os.WriteFile(broken+"/.git", []byte("gitdir: /nowhere/worktrees/x\n"), 0o644))
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, os.MkdirAll(fifo, 0o755))
	require.NoError(t, unix.Mkfifo(fifo+"/.git", 0o644))
	for path, says := range map[string]string{
		empty: "name a clone", empty + "/none": "no such file", repo + "/a": "not a directory", link: "symbolic link", "relative": "absolute path",
		separate: "submodule", broken: "/nowhere/worktrees/x", fifo: "FIFO",
	} {
		_, err := CheckRepository(t.Context(), path, nil)
		require.ErrorIs(t, err, ErrNoRepository, path)
		require.ErrorContains(t, err, says, path)
	}
}

func TestP12WhatDoesNotBelongInAGitFolderIsFound(t *testing.T) {
	outside := t.TempDir()
	write := func(text string) func(string) error {
		return func(p string) error {
			return errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(text), 0o755))
		}
	}
	fifo := func(p string) error { return errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), unix.Mkfifo(p, 0o644)) }
	link := func(p string) error {
		return errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.RemoveAll(p), os.Symlink(outside, p))
	}
	for _, c := range []struct {
		file string
		make func(string) error
		kind Kind
	}{
		{"commondir", write("/elsewhere\n"), Layout},
		{"FETCH_HEAD", fifo, Layout},
		{"packed-refs", link, Layout},
		{"refs/heads/a/b", fifo, Layout},
		{"refs/heads/d", link, Layout},
		{"worktrees", link, Layout},
		{"worktrees/x", link, Layout},
		{"info", link, Layout},
		{"objects/pack", link, Layout},
		{"objects/info/alternates", fifo, Layout},
		{"objects/00", link, Layout},
		{"logs", link, Layout},
		{"s", func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o644, 0) }, Layout},
		{"objects/info/alternates", write("/elsewhere/objects\n"), Clone},
		{"objects/info/http-alternates", write("http://x/\n"), Clone},
		{"objects/pack/pack-1.promisor", write(""), Clone},
		{"remotes/origin", write("URL: ext::sh\n"), Remote},
		{"branches/origin", write("/x\n"), Remote},
		{"info/attributes", write("# filter=no\n*.x filter=lfs\n"), Attribute},
		{"shallow", write(strings.Repeat("1", 40) + "\n"), Note},
		{"info/grafts", write("x\n"), Note},
		{"hooks", func(p string) error { return write("#!/bin/sh\n")(p + "/pre-commit") }, Note},
	} {
		t.Run(strings.ReplaceAll(c.file, "/", "-")+"-"+string(c.kind), func(t *testing.T) {
			repo := testRepo(t)
			require.Empty(t, check(t, repo).Findings, "control")
			path := filepath.Join(repo, ".git", c.file)
			require.NoError(t, c.make(path))
			r, err := CheckRepository(t.Context(), repo, nil)
			require.NoError(t, err)
			require.Len(t, r.Findings, 1, "%v", r.Findings)
			f := r.Findings[0]
			require.Equal(t, path, f.File)
			require.Equal(t, c.kind, f.Kind)
			require.NotEmpty(t, f.Why)
			require.NotEmpty(t, f.Remedy)
			require.Equal(t, c.file == "info/attributes", f.Line == 2)
		})
	}
}

func TestP12ARepositoryWhoseConfigurationIsNoFileIsRefused(t *testing.T) {
	for name, replace := range map[string]func(string) error{
		"FIFO": func(p string) error { return unix.Mkfifo(p, 0o644) },
		"link": func(p string) error { return os.Symlink("/dev/null", p) },
	} {
		repo := testRepo(t)
		path := filepath.Join(repo, ".git/config")
		require.NoError(t, os.Remove(path))
		require.NoError(t, replace(path))
		_, err := CheckRepository(t.Context(), repo, nil)
		require.ErrorIs(t, err, ErrConfig, name)
		require.ErrorContains(t, err, path)
	}
}

func TestFiltersInTheTreeAreFoundAndSubmodulesNoted(t *testing.T) {
	for _, format := range []string{"sha1", "sha256"} {
		t.Run(format, func(t *testing.T) {
			repo := t.TempDir()
			git(t, repo, "init", "-q", "--object-format="+format)
			files := map[string]string{
				".gitattributes": "*.txt text\n# *.bin filter=lfs\n*.x diff=filter\n", "a/.gitattributes": "*.bin diff=lfs filter=lfs\n",
				"b/c/.gitattributes": "[attr]lfs filter=lfs\n", "binary/.gitattributes": "\x00\n*.x filter=x\n", "filter=.txt": "x filter=y\n",
				"x\n/.gitattributes": "* filter=z", ".gitmodules": "[submodule \"s\"]\n\tpath = s\n\turl = ../s\n",
			}
			for name, text := range files {
				require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(repo, name)), 0o755))
				require.NoError(t, os.WriteFile(filepath.Join(repo, name), []byte(text), 0o644))
			}
			git(t, repo, "add", "-A")
			git(t, repo, "commit", "-q", "-m", "x")
			r := check(t, repo)
			var got []string
			for _, f := range r.Findings {
				got = append(got, string(f.Kind)+" "+f.File)
			}
			slices.Sort(got)
			require.Equal(t, []string{"attribute HEAD:\"x\\n/.gitattributes\"", "attribute HEAD:a/.gitattributes", "attribute HEAD:b/c/.gitattributes",
				"attribute HEAD:binary/.gitattributes", "note HEAD:.gitmodules"}, got)
		})
	}
}

func TestARepositoryWithoutACommitIsChecked(t *testing.T) {
	repo := t.TempDir()
	git(t, repo, "init", "-q")
	r := check(t, repo)
	require.Len(t, r.Findings, 1)
	require.Equal(t, Note, r.Findings[0].Kind)
	require.True(t, r.Attributes)
}

func TestP12GitIsNotRunInARepositoryThatIsRefused(t *testing.T) {
	repo := testRepo(t)
	git(t, repo, "config", "filter.x.clean", "evil")
	r, err := CheckRepository(t.Context(), repo, func(context.Context, ...string) (string, error) {
		t.Error("git was run")
		return "", nil
	})
	require.NoError(t, err)
	require.False(t, r.Attributes)
	require.Len(t, r.Refused("isolated"), 1)
	require.Equal(t, "filter.x.clean", r.Findings[0].Key)
	require.NotZero(t, r.Findings[0].Line)
}

func TestP12TheQuestionAboutTheTreeRunsNothingThatTheRepositoryNames(t *testing.T) {
	repo := testRepo(t)
	canary := filepath.Join(t.TempDir(), "canary")
	script := filepath.Join(t.TempDir(), "script")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\necho >>"+canary+"\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".gitattributes"), []byte("* diff=x\n"), 0o644))
	git(t, repo, "add", "-A")
	git(t, repo, "commit", "-q", "-m", "x")
	for _, key := range []string{"diff.external", "diff.x.command", "diff.x.textconv", "core.fsmonitor", "core.pager"} {
		git(t, repo, "config", key, script)
	}
	tryGit(t, repo, "diff", "HEAD~1")
	require.FileExists(t, canary, "control: Git runs it when it is not told otherwise")
	require.NoError(t, os.Remove(canary))
	r := check(t, repo)
	require.True(t, r.Attributes)
	require.Len(t, r.Findings, 5)
	require.NoFileExists(t, canary)
}

func TestWhatGitSaysOfARepositoryThatItCannotReadIsPassedOn(t *testing.T) {
	repo := testRepo(t)
	_, err := CheckRepository(t.Context(), repo, func(context.Context, ...string) (string, error) { return "", os.ErrPermission })
	require.ErrorIs(t, err, os.ErrPermission)
	require.ErrorContains(t, err, repo)
}

// A worktree is not always made from HEAD.
func TestTheTreesOfOtherCommitsAreLookedAtToo(t *testing.T) {
	repo := testRepo(t)
	git(t, repo, "checkout", "-q", "-b", "lfs")
	require.NoError(t, os.WriteFile(repo+"/.gitattributes", []byte("*.bin filter=lfs\n"), 0o644))
	git(t, repo, "add", ".gitattributes")
	git(t, repo, "commit", "-q", "-m", "Large files")
	git(t, repo, "checkout", "-q", "-")
	linked := filepath.Join(t.TempDir(), "linked")
	git(t, repo, "worktree", "add", "-q", linked, "lfs")
	require.Equal(t, "worktrees/linked/HEAD", WorktreeHead(linked))
	require.Empty(t, WorktreeHead(repo))
	git, runs := inRepo(t, repo+"/.git"), 0
	run := func(ctx context.Context, args ...string) (string, error) {
		runs++
		return git(ctx, args...)
	}
	look := func(path string, more ...string) []Finding {
		r, err := CheckRepository(t.Context(), path, run, more...)
		require.NoError(t, err)
		require.True(t, r.Attributes)
		return r.Findings
	}
	for _, none := range []string{"", "HEAD", "nothing", "-h", "^lfs", "HEAD..lfs", "\xff"} {
		require.Empty(t, look(repo, none), none)
	}
	for _, name := range []string{"lfs", "refs/heads/lfs", "lfs^0", "worktrees/linked/HEAD"} {
		found := look(repo, name, name)
		require.Len(t, found, 1, name)
		require.Equal(t, Attribute, found[0].Kind)
		require.Equal(t, name+":.gitattributes", found[0].File)
	}
	require.Equal(t, "worktrees/linked/HEAD:.gitattributes", look(linked)[0].File)
	runs = 0
	look(repo, "HEAD^0", "HEAD", "lfs", "lfs^0")
	require.Equal(t, 3, runs, "each tree is looked at once: its name, and two trees")
}

func TestTheRemedyForAConfigurationThatIsNoFileIsNotGit(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"FIFO":         func(p string) error { return unix.Mkfifo(p, 0o644) },
		"link":         func(p string) error { return os.Symlink("/etc/hostname", p) },
		"folder":       func(p string) error { return os.Mkdir(p, 0o755) },
		"too long":     func(p string) error { return os.WriteFile(p, bytes.Repeat([]byte("# x\n"), maxConfig/4+1), 0o644) },
		"a NUL byte":   func(p string) error { return os.WriteFile(p, []byte("[core]\n\x00"), 0o644) },
		"not there":    func(string) error { return nil },
		"Git's matter": func(p string) error { return os.WriteFile(p, []byte("[core"), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			repo := testRepo(t)
			config := repo + "/.git/config"
			require.NoError(t, os.Remove(config))
			require.NoError(t, make(config))
			r, err := CheckRepository(t.Context(), repo, nil)
			require.ErrorIs(t, err, ErrConfig)
			f := r.Findings[len(r.Findings)-1]
			require.Equal(t, Unreadable, f.Kind)
			require.NotContains(t, f.Why, f.Remedy, "it is said once")
			require.Equal(t, name == "Git's matter", strings.Contains(f.Remedy, "git config --file"), f.Remedy)
		})
	}
}
