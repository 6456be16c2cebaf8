package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
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
	require.Contains(t, out, "isolated: can be shared, shared: can be shared")
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
		require.Contains(t, out, "isolated: can be shared, shared: REFUSED (1)")
	}
	code, out, _ := runCLI(t.Context(), "guard", "--json", repo)
	require.Equal(t, ExitError, code)
	var r gitguard.Report
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	require.Equal(t, repo, r.Repository)
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
	code, _, stderr := runCLI(t.Context(), "guard", repo)
	require.Equal(t, ExitError, code)
	require.Contains(t, stderr, filepath.Join(repo, ".git/config"))
	require.Contains(t, stderr, "bad config line 3")
	code, _, stderr = runCLI(t.Context(), "guard")
	require.Equal(t, ExitUsage, code)
	require.Contains(t, stderr, "PATH")
}
