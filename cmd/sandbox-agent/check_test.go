package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// missing are the lines of a check about what is missing, each with what is said below it.
func missing(text string) (blocks []string) {
	open := false
	for line := range strings.Lines(text) {
		indented := strings.HasPrefix(line, "  ")
		switch {
		case strings.HasPrefix(line, "MISSING "):
			blocks = append(blocks, line)
		case indented && open:
			blocks[len(blocks)-1] += line
		}
		open = strings.HasPrefix(line, "MISSING ") || indented && open
	}
	return blocks
}

// TestServeRefusesANodeThatCantKeepAPromiseInTheWordsOfTheCheck covers a part of /proc, as container runtimes do, in a mount
// namespace of the test's own.
func TestServeRefusesANodeThatCantKeepAPromiseInTheWordsOfTheCheck(t *testing.T) {
	needSandboxes(t)
	testkit.Need(t, testkit.MountAPI, testkit.Program("unshare"))
	testkit.Leaks(t)
	dir := testkit.StateDir(t)
	state, socket := filepath.Join(dir, "state"), filepath.Join(dir, "exec.sock")
	run := func(prepare string, args ...string) (string, int) {
		script := prepare + ` exec "$0" "$@"`
		cmd := exec.Command("unshare", append([]string{"--mount", "bash", "-c", script, filepath.Join(programs(t), "sandbox-agent")}, args...)...)
		out, err := cmd.CombinedOutput()
		if _, exited := err.(*exec.ExitError); !exited {
			require.NoError(t, err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	check := []string{"check", "--state-dir", state, "--workspace-root", dir}
	serve := []string{"serve", "--state-dir", state, "--socket", socket, "--workspace-root", dir}
	const covered = "mount --bind /dev/null /proc/version &&"

	out, code := run("", check...)
	require.NotEqual(t, 2, code, "the control: nothing is missing\n%s", out)
	require.Empty(t, missing(out))
	out, code = run(covered, check...)
	require.Equal(t, 2, code, out)
	blocks := missing(out)
	require.Len(t, blocks, 1, out)
	require.Regexp(t, `(?s)^MISSING +fresh /proc: mount: operation not permitted\n.*for: .*P9.*do: .*/proc/version`, blocks[0])

	refusal, code := run(covered, serve...)
	require.Equal(t, 1, code, refusal)
	require.Equal(t, blocks, missing(refusal+"\n"), "the very same words")
	require.NoDirExists(t, state, "a node that is refused is left as it was")
	require.NoFileExists(t, socket)
}
