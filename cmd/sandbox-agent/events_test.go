package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

type toldEvent struct{ Cursor, SessionID, Kind, ExecID, Detail string }

func decodeEvent(t *testing.T, line []byte) toldEvent {
	t.Helper()
	var e toldEvent
	require.NoError(t, json.Unmarshal(line, &e), string(line))
	return e
}

// One follower, from before the first session to after the last, over an agent that is killed and one that is stopped.
func TestAFollowerOfEventsMissesNothingAcrossAKilledAndAStoppedAgent(t *testing.T) {
	needSandboxes(t)
	testkit.Leaks(t)
	repo := testkit.Repo(t, ownerUID)
	a := startAgent(t, repo)
	follow := exec.Command(filepath.Join(a.bin, "sandbox-agent"), "events", "--follow", "--json")
	follow.Env = append(os.Environ(), "SANDBOX_AGENT_SOCKET="+a.socket)
	follow.Stderr = os.Stderr
	out, err := follow.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, follow.Start())
	t.Cleanup(func() { follow.Process.Kill(); follow.Wait() })
	lines := bufio.NewScanner(out)
	var seen []toldEvent
	until := func(kind, execID string) toldEvent {
		t.Helper()
		for lines.Scan() {
			e := decodeEvent(t, lines.Bytes())
			if len(seen) > 0 {
				require.Greater(t, e.Cursor, seen[len(seen)-1].Cursor)
			}
			if seen = append(seen, e); e.Kind == kind && e.ExecID == execID {
				return e
			}
		}
		require.Fail(t, "the follower ended", "before %s %s", kind, execID)
		return toldEvent{}
	}
	run := func(id string) {
		t.Helper()
		text, err := a.cli("exec", "--exec-id", id, "s", "--", "true")
		require.NoError(t, err, text)
		require.Equal(t, "EXITED 0", until("exec.result", id).Detail)
	}
	text, err := a.cli("session", "create", "--repo", repo, "--branch", "b", "--session", "s")
	require.NoError(t, err, text)
	run("e1")
	require.Equal(t, -1, a.stop(syscall.SIGKILL))
	a.start()
	until("gap", "")
	until("agent.started", "")
	run("e2")
	a.stop(syscall.SIGTERM)
	a.start()
	until("agent.started", "")
	run("e3")
	require.NoError(t, follow.Process.Signal(syscall.SIGINT))
	require.False(t, lines.Scan(), lines.Text())
	require.NoError(t, follow.Wait(), "Ctrl-C is how following ends")

	// Whoever reads it all at once sees the same chain, less what a crash took (nothing here: there was a durable event
	// after each).
	text, err = a.cli("events", "--json")
	require.NoError(t, err, text)
	var all []toldEvent
	for line := range strings.Lines(text) {
		all = append(all, decodeEvent(t, []byte(line)))
	}
	require.Subset(t, seen, all, "the follower saw every one of them")
}
