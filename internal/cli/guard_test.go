package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

const guardUID = 1234

func TestGuardCallsAFreshRepositoryClean(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, guardUID)
	code, out, stderr := runCLI(t.Context(), "guard", repo)
	require.Zero(t, code, out+stderr)
	require.Contains(t, out, "\": 0 findings\nisolated: can be shared\nshared: can be shared\n")
	require.NotContains(t, out, "not looked at")
}

func TestGuardNamesKeyFileLineAndRemedy(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, guardUID)
	linked := testkit.Worktree(t, guardUID, repo, "b")
	testkit.GitAs(t, guardUID, repo, "config", "core.fsmonitor", "/tmp/x")
	file := filepath.Join(repo, ".git/config")
	for _, path := range []string{repo, linked, file + "/.."} {
		code, out, stderr := runCLI(t.Context(), "guard", path)
		require.Equal(t, ExitError, code, stderr)
		require.Contains(t, out, "core.fsmonitor\n  "+file+":6: refused in shared, left out in isolated")
		require.Contains(t, out, "git config --file "+file+" --unset-all core.fsmonitor")
		require.Contains(t, out, "\": 1 finding\nisolated: can be shared, with 1 left out\nshared: REFUSED (1)\n")
	}
	code, out, _ := runCLI(t.Context(), "guard", "--json", repo)
	require.Equal(t, ExitError, code)
	var r guardReport
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	require.Equal(t, repo, r.Path)
	require.Equal(t, repo, r.Repository)
	require.Equal(t, map[string]string{"isolated": "left out 1", "shared": "refused"}, r.Layouts)
	require.True(t, r.Attributes)
	require.Len(t, r.Findings, 1)
	require.Equal(t, gitguard.Program, r.Findings[0].Kind)
	require.Equal(t, 6, r.Findings[0].Line)
}

func TestP12GuardLooksAtAttributesInAJail(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, guardUID)
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".gitattributes"), []byte("*.bin filter=lfs\n"), 0o644))
	testkit.GitAs(t, guardUID, repo, "add", ".gitattributes")
	testkit.GitAs(t, guardUID, repo, "commit", "-q", "-m", "x")
	code, out, _ := runCLI(t.Context(), "guard", repo)
	require.Equal(t, ExitError, code)
	require.Contains(t, out, "HEAD:.gitattributes: refused in both layouts")
	require.Contains(t, out, "isolated: REFUSED (1)")
}

func TestGuardOfANoteAloneIsClean(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, guardUID)
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".git/hooks/pre-commit"), []byte("#!/bin/sh\n"), 0o755))
	code, out, _ := runCLI(t.Context(), "guard", repo)
	require.Zero(t, code)
	require.Contains(t, out, "pre-commit")
	require.Contains(t, out, "not refused")
}

func TestGuardTellsWhatIsNoRepositoryFromWhatIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	dir := testkit.StateDir(t)
	for _, path := range []string{dir, filepath.Join(dir, "none")} {
		code, out, stderr := runCLI(t.Context(), "guard", path)
		require.Equal(t, ExitUsage, code)
		require.Empty(t, out)
		require.Contains(t, stderr, path)
	}
	repo := testkit.Repo(t, guardUID)
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".git/config"), []byte("[core]\n\tbare = false\n[oops\n"), 0o644))
	code, out, stderr := runCLI(t.Context(), "guard", repo)
	require.Equal(t, ExitError, code)
	require.Empty(t, stderr)
	require.Contains(t, out, filepath.Join(repo, ".git/config"))
	require.Contains(t, out, "bad config line 3")
	require.Contains(t, out, "isolated: REFUSED (1)\nshared: REFUSED (1)\n")
	code, _, stderr = runCLI(t.Context(), "guard")
	require.Equal(t, ExitUsage, code)
	require.Contains(t, stderr, "PATH")
}

func guardJSON(t *testing.T, path string) (int, guardReport) {
	t.Helper()
	code, out, stderr := runCLI(t.Context(), "guard", "--json", path)
	require.Empty(t, stderr)
	var r guardReport
	require.NoError(t, json.Unmarshal([]byte(out), &r), out)
	return code, r
}

func TestGuardPrintsAnObjectWithAVerdictPerLayoutWhateverItFinds(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, guardUID)
	file := filepath.Join(repo, ".git/config")
	plain, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, c := range []struct {
		config, isolated, shared string
		code                     int
		kinds                    []gitguard.Kind
	}{
		{string(plain), "ok", "ok", 0, nil},
		{string(plain) + "[alias]\n\tx = y\n[made]\n\tup = 1\n", "left out 2", "refused", ExitError, []gitguard.Kind{gitguard.Program, gitguard.Unknown}},
		{string(plain) + "[made]\n\tup = 1\n", "left out 1", "ok", ExitError, []gitguard.Kind{gitguard.Unknown}},
		{string(plain) + "[include]\n\tpath = x\n", "refused", "refused", ExitError, []gitguard.Kind{gitguard.Include}},
		{string(plain) + "[oops\n", "refused", "refused", ExitError, []gitguard.Kind{gitguard.Unreadable}},
		{string(plain) + "\x00", "refused", "refused", ExitError, []gitguard.Kind{gitguard.Unreadable}},
		{"", "refused", "refused", ExitError, []gitguard.Kind{gitguard.Unreadable}},
	} {
		require.NoError(t, os.WriteFile(file, []byte(c.config), 0o644))
		if c.config == "" {
			require.NoError(t, os.Remove(file))
		}
		code, r := guardJSON(t, repo)
		require.Equal(t, c.code, code, c.config)
		require.Equal(t, map[string]string{"isolated": c.isolated, "shared": c.shared}, r.Layouts, c.config)
		var kinds []gitguard.Kind
		for _, f := range r.Findings {
			require.Equal(t, file, f.File)
			require.NotEmpty(t, f.Why)
			require.NotEmpty(t, f.Remedy)
			require.NotContains(t, f.Why, "openat2")
			kinds = append(kinds, f.Kind)
		}
		require.Equal(t, c.kinds, kinds, c.config)
		require.Equal(t, []string{repo, repo, repo + "/.git"}, []string{r.Path, r.Repository, r.CommonDir})
	}
	_, r := guardJSON(t, repo)
	require.Contains(t, r.Findings[0].Why, "it is not there")
	require.Contains(t, r.Findings[0].Remedy, "restore it, or have Git write a new one (git init "+repo+")")
}

// No message to an agent can name such a repository, and no JSON its path.
func TestAPathThatIsNotUTF8IsNamedWithTheRemedy(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	plain := testkit.Repo(t, guardUID)
	repo := filepath.Join(filepath.Dir(plain), "bad\xff")
	testkit.GitAs(t, guardUID, filepath.Dir(plain), "clone", "-q", plain, repo)
	quoted := strconv.Quote(repo)
	code, out, stderr := runCLI(t.Context(), "guard", repo)
	require.Equal(t, ExitError, code, stderr)
	require.Contains(t, out, quoted+": refused in both layouts")
	require.Contains(t, out, "not UTF-8")
	require.Contains(t, out, "rename it")
	code, r := guardJSON(t, repo)
	require.Equal(t, ExitError, code)
	require.Equal(t, quoted, r.Path)
	require.Equal(t, gitguard.Name, r.Findings[0].Kind)
	require.Equal(t, "refused", r.Layouts["isolated"])
	_, _, stderr = runCLI(t.Context(), "guard", repo+"/none")
	require.Contains(t, stderr, strconv.Quote(repo+"/none")+": no such file or directory")

	for flag, args := range map[string][]string{
		"--repo": {"--repo", repo, "--branch", "x"}, "--worktree": {"--repo", "/x", "--worktree", repo}, "--branch": {"--repo", "/x", "--branch", "b\xff"},
		"--base": {"--repo", "/x", "--branch", "b", "--base", "b\xff"},
	} {
		code, out, stderr = runCLI(t.Context(), append([]string{"session", "create", "--socket", "/nonexistent/sock"}, args...)...)
		require.Equal(t, ExitUsage, code)
		require.Empty(t, out)
		require.Regexp(t, "^sandbox-agent: "+flag+` ".*\\xff" is not UTF-8, and .*: rename it\n$`, stderr)
	}
	code, _, stderr = runCLI(t.Context(), "workspace", "delete", "--socket", "/nonexistent/sock", repo)
	require.Equal(t, ExitUsage, code)
	require.Contains(t, stderr, quoted+" is not UTF-8")
	code, _, stderr = runCLI(t.Context(), "git", "--socket", "/nonexistent/sock", "s", "--", "log", "b\xff")
	require.Equal(t, ExitRefused, code)
	require.Contains(t, stderr, `"b\xff" is not UTF-8`)
}
