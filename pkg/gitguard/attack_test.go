package gitguard

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// hostile is a repository whose configuration runs a script that leaves a file, the canary, in every way that a session
// would meet soon.
func hostile(t *testing.T) (repo, canary string) {
	t.Helper()
	repo, dir := testRepo(t), t.TempDir()
	canary = filepath.Join(dir, "canary")
	script := filepath.Join(dir, "script")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\necho ran >>"+canary+"\n"), 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "hooks"), 0o755))
	require.NoError(t, os.Symlink(script, filepath.Join(dir, "hooks/pre-commit")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "included"), []byte("[core]\n\teditor = "+script+"\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".git/info/attributes"), []byte("* diff=x\n*.f filter=x\n"), 0o644))
	for key, value := range map[string]string{
		"core.fsmonitor": script, "core.hooksPath": dir + "/hooks", "include.path": dir + "/included", "diff.x.textconv": script,
		"filter.x.clean": script, "alias.st": "!" + script, "core.sshCommand": script,
	} {
		git(t, repo, "config", key, value)
	}
	return repo, canary
}

// plainGit is Git as a person would run it: with none of trusted Git's environment.
func plainGit(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + Path, "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org",
		"GIT_COMMITTER_NAME=c", "GIT_COMMITTER_EMAIL=c@example.org"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		require.IsType(t, &exec.ExitError{}, err)
	}
	return string(out)
}

// ways are what a person does that makes the hostile configuration run something.
var ways = map[string][]string{
	"a monitor":    {"status"},
	"a hook":       {"-c", "core.fsmonitor=false", "commit", "--allow-empty", "-m", "x"},
	"an include":   {"-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "commit", "--allow-empty"},
	"a conversion": {"-c", "core.fsmonitor=false", "diff", "HEAD~1"},
	"a filter":     {"-c", "core.fsmonitor=false", "add", "x.f"},
	"an alias":     {"st"},
	"a transport":  {"-c", "core.fsmonitor=false", "ls-remote", "ssh://nowhere.invalid/x"},
}

func TestP12ASanitisedConfigurationRunsNothing(t *testing.T) {
	for name, args := range ways {
		t.Run(name, func(t *testing.T) {
			repo, canary := hostile(t)
			require.NoError(t, os.WriteFile(filepath.Join(repo, "x.f"), []byte("x\n"), 0o644))
			plainGit(t, repo, args...)
			require.FileExists(t, canary, "control: it runs without the guard")
			require.NoError(t, os.Remove(canary))
			git(t, repo, "read-tree", "HEAD")
			path := filepath.Join(repo, ".git/config")
			c, err := ReadConfig(t.Context(), path)
			require.NoError(t, err)
			text, leftOut, err := c.Sanitise(SanitiseOptions{})
			require.NoError(t, err)
			require.Len(t, leftOut, 7)
			require.NoError(t, os.WriteFile(path, text, 0o644))
			plainGit(t, repo, args...)
			require.NoFileExists(t, canary)
		})
	}
}

func TestP12AnAllowedCommandRunsNothingThatTheConfigurationNamesForIt(t *testing.T) {
	repo, canary := hostile(t)
	git(t, repo, "config", "core.fsmonitor", "false")
	git(t, repo, "config", "diff.external", filepath.Join(filepath.Dir(canary), "script"))
	for _, c := range []struct{ asked, unguarded []string }{
		{[]string{"diff", "HEAD~1"}, []string{"diff", "HEAD~1"}},
		{[]string{"log", "-p"}, []string{"log", "-p"}},
		{[]string{"show"}, []string{"show"}},
		{[]string{"blame", "a"}, []string{"blame", "a"}},
		{[]string{"stash", "show", "-p"}, []string{"stash", "show", "--ext-diff", "-p"}},
		{[]string{"diff-tree", "-p", "HEAD~1", "HEAD"}, []string{"diff-tree", "-p", "--textconv", "HEAD~1", "HEAD"}},
	} {
		plainGit(t, repo, c.unguarded...)
		require.FileExists(t, canary, "control: %q", c.unguarded)
		require.NoError(t, os.Remove(canary))
		allowed, err := AllowGit(c.asked)
		require.NoError(t, err)
		plainGit(t, repo, allowed.Args...)
		require.NoFileExists(t, canary, "%q", allowed.Args)
	}
}

func TestP12AnAllowedDiffReadsNothingOutsideOfTheWorktree(t *testing.T) {
	repo := testRepo(t)
	outside := filepath.Join(t.TempDir(), "outside")
	require.NoError(t, os.WriteFile(outside, []byte("canary\n"), 0o644))
	for _, args := range [][]string{{"diff", outside, "/dev/null"}, {"diff", "--", outside, "a"}, {"diff", "--no-index", outside, "a"}} {
		require.Contains(t, plainGit(t, repo, args...), "canary", "control: %q", args)
		_, err := AllowGit(args)
		require.ErrorIs(t, err, ErrNotAllowed, "%q", args)
	}
}
