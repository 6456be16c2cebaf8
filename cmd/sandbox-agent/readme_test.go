package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// TestTheReadmesQuickStartWorksFromTopToBottom runs its three blocks as they stand, as root and on a clone that root
// owns, with the machine's own folders replaced by the test's.
func TestTheReadmesQuickStartWorksFromTopToBottom(t *testing.T) {
	needSandboxes(t)
	testkit.Need(t, testkit.Program("curl"))
	testkit.Leaks(t)
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	require.NoError(t, err)
	_, section, found := strings.Cut(string(readme), "\n## Quick start\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := regexp.MustCompile("(?s)\n```\n(.*?)```").FindAllStringSubmatch(section, -1)
	require.Len(t, blocks, 3, "serve, the command line, curl")

	dir := testkit.StateDir(t)
	a := &realAgent{t: t, bin: programs(t), state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "run", "exec.sock"),
		log: filepath.Join(dir, "log"), ws: filepath.Join(dir, "ws")}
	here := strings.NewReplacer(
		"bin/sandbox-agent", filepath.Join(a.bin, "sandbox-agent"),
		"/var/lib/sandbox-agent", a.state, "/var/lib/sandbox-workspaces", a.ws,
		"/run/sandbox-agent/exec.sock", a.socket, "/srv", filepath.Join(dir, "srv"),
		"git clone -q . ", "git clone -q "+testkit.Repo(t, 0)+" ", "make build\n", "",
	)
	bash := func(script string) string {
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", script)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "SANDBOX_AGENT_SOCKET="+a.socket, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", script, out)
		return string(out)
	}

	before, serve, found := strings.Cut(here.Replace(blocks[0][1]), filepath.Join(a.bin, "sandbox-agent")+" ")
	require.True(t, found)
	bash(before)
	a.args = append(strings.Fields(serve), "--state-dir", a.state, "--socket", a.socket)
	for i, arg := range a.args {
		if arg == "agent.yaml" {
			a.args[i] = filepath.Join(dir, arg)
		}
	}
	a.start()
	t.Cleanup(func() {
		for _, id := range a.sessions() {
			out, err := a.cli("session", "delete", id)
			require.NoError(t, err, out)
		}
		a.stop(syscall.SIGTERM)
	})

	out := bash(here.Replace(blocks[1][1]))
	require.Contains(t, out, "On branch try-it")
	require.Contains(t, out, `"status": "EXITED"`)
	require.Contains(t, out, "3 receipts, verified")
	out = bash(here.Replace(blocks[2][1]))
	require.NotContains(t, out, `"code"`)
	require.Equal(t, 2, strings.Count(out, "On branch try-json"))

	project := filepath.Join(dir, "srv", "project")
	require.Equal(t, 1, strings.Count(testkit.GitAs(t, 0, project, "worktree", "list", "--porcelain"), "worktree "))
	require.NotContains(t, testkit.GitAs(t, 0, project, "for-each-ref"), "try-")
	left, err := os.ReadDir(a.ws)
	require.NoError(t, err)
	require.Empty(t, left)
}
