package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestADrainedNodeHasNoSandboxAndItsWorkspacesStay(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	a := startAgent(t, testkit.Repo(t, ownerUID))
	repo := a.args[len(a.args)-1] + "/repo"
	for _, s := range []string{"one", "two"} {
		out, err := a.cli("session", "create", "--repo", repo, "--branch", s, "--session", s)
		require.NoError(t, err, out)
	}
	out, err := a.cli("exec", "one", "--exec-id", "before", "--", "echo work | tee file")
	require.NoError(t, err, out)
	out, err = a.cli("drain", "--timeout", "0s")
	require.Error(t, err)
	require.Contains(t, out, "drain_grace")
	out, err = a.cli("drain", "--timeout", "1s")
	require.NoError(t, err, out)
	require.Regexp(t, `(?m)^one +complete +The node is drained\.$`, out)
	require.Regexp(t, `(?m)^two +complete`, out)
	out, err = a.cli("exec", "one", "--", "touch never")
	require.Error(t, err)
	require.Contains(t, out, "unavailable: this node is drained")
	out, err = a.cli("exec", "one", "--exec-id", "before", "--", "echo work | tee file")
	require.NoError(t, err, out)
	require.Equal(t, "work\n", out, "what is known is answered")
	out, err = a.cli("session", "create", "--repo", repo, "--branch", "three", "--session", "three")
	require.Error(t, err)
	require.Contains(t, out, "unavailable: this node is drained")
	worktree := filepath.Join(a.ws, "one")
	require.FileExists(t, filepath.Join(worktree, "file"))
	require.NoFileExists(t, filepath.Join(worktree, "never"))
	sandboxes, err := os.ReadDir(filepath.Join(a.state, "sandboxes"))
	require.NoError(t, err)
	require.Empty(t, sandboxes)
	out, err = a.cli("drain")
	require.NoError(t, err, out)
	require.Regexp(t, `(?m)^one +complete +The node is drained\.$`, out) // the same call again answers the same
	out, err = a.cli("drain", "--json")
	require.NoError(t, err, out)
	require.Contains(t, out, `"complete": true`)
}
