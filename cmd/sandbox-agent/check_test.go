package main

import (
	"os"
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

// TestOnANodeOfWhichSomethingIsTakenAwayServeRefusesInTheWordsOfTheCheck takes it away in namespaces of the test's own.
func TestOnANodeOfWhichSomethingIsTakenAwayServeRefusesInTheWordsOfTheCheck(t *testing.T) {
	needSandboxes(t)
	testkit.Need(t, testkit.MountAPI, testkit.Program("unshare"))
	for name, c := range map[string]struct {
		unshare []string
		prepare string
		says    []string
	}{
		"no user namespaces": {
			[]string{"--user", "--map-root-user", "--mount"}, "echo 0 >/proc/sys/user/max_user_namespaces",
			[]string{"rights: root of a user namespace", "user namespaces: ", "user.max_user_namespaces=15000"},
		},
		"a disk that is read-only": {
			[]string{"--mount"}, `mount -t tmpfs -o ro,mode=711 none "$STATE"`, []string{"durable writes"},
		},
		"no process ids to spare": {
			[]string{"--mount"}, `echo 1200 >"$STATE.pid_max" && mount --bind "$STATE.pid_max" /proc/sys/kernel/pid_max`, []string{"process ids: kernel.pid_max is 1200", "kernel.pid_max=32768"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := testkit.StateDir(t)
			state := filepath.Join(dir, "state")
			require.NoError(t, os.Mkdir(state, 0o711))
			run := func(args ...string) (string, int) {
				cmd := exec.Command("unshare", append(append(c.unshare, "bash", "-c", c.prepare+` && exec "$0" "$@"`, filepath.Join(programs(t), "sandbox-agent")), args...)...)
				cmd.Env = append(os.Environ(), "STATE="+state)
				out, err := cmd.CombinedOutput()
				if _, exited := err.(*exec.ExitError); !exited {
					require.NoError(t, err)
				}
				return string(out), cmd.ProcessState.ExitCode()
			}
			out, code := run("check", "--state-dir", state, "--workspace-root", dir)
			require.Equal(t, 2, code, out)
			refusal, code := run("serve", "--state-dir", state, "--socket", filepath.Join(dir, "exec.sock"), "--workspace-root", dir)
			require.Equal(t, 1, code, refusal)
			blocks := missing(refusal + "\n")
			require.NotEmpty(t, blocks, refusal)
			require.Subset(t, missing(out), blocks, "the very same words")
			for _, s := range c.says {
				require.Contains(t, strings.Join(blocks, ""), s)
			}
			require.NoFileExists(t, filepath.Join(dir, "exec.sock"))
		})
	}
}

// TestTheAgentAndTheProgramSayTheSameOfANode: who looks makes no difference, but that the agent says of each runtime whether it can
// host a sandbox as well.
func TestTheAgentAndTheProgramSayTheSameOfANode(t *testing.T) {
	needSandboxes(t)
	repo := testkit.Repo(t, ownerUID)
	a := startAgent(t, repo)
	asked, _ := a.cli("check", "--socket", a.socket)
	looked, _ := a.cli("check", "--state-dir", a.state, "--workspace-root", a.ws, "--workspace-root", filepath.Dir(repo))
	lines := func(text string) (all []string) {
		for line := range strings.Lines(text) {
			for _, measured := range []string{"state disk:", "durable writes:"} { // what was measured is another number each time
				if before, _, found := strings.Cut(line, measured); found {
					line = before + measured
				}
			}
			if !strings.Contains(line, "runtime ") && !strings.Contains(line, "asked the agent") && !strings.Contains(line, "looked at this node") {
				all = append(all, line)
			}
		}
		return all
	}
	require.Greater(t, len(lines(asked)), 40, asked)
	require.Equal(t, lines(looked), lines(asked))
	require.Contains(t, asked, "runtime embedded")
}
