package escape

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/attack"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// Every attack that an operator's self-test makes is made here, by the same runner. That each one breaks something where there is
// no sandbox is shown beside the table (internal/attack).
func TestEachAttackOfTheSelfTestIsHeld(t *testing.T) {
	a := newAgent(t, "")
	self, err := os.Executable()
	require.NoError(t, err)
	root := testkit.StateDir(t)
	r, err := attack.Start(t.Context(), attack.Options{
		Client: client.New(a.Socket, client.Options{}), Socket: a.Socket, StateDir: a.State, Root: root, UID: owner, GID: owner, Program: self,
	})
	require.NoError(t, err, a.LogText())
	res := r.Run(t.Context(), attack.Attack{Promise: "P9", Name: "looking at the folders above the worktree", Command: "{helper} look " + filepath.Dir(root)})
	require.Equal(t, attack.Held, res.Verdict, "%s: a folder of the node may be above the workspaces, as /var/lib is by default", res.Why)
	for _, row := range attack.Table {
		t.Run("Test"+row.Promise+" "+row.Name, func(t *testing.T) {
			if row.Shared && !r.Shared() {
				t.Logf("it says nothing where commands don't run on the node's own kernel")
				return
			}
			res := r.Run(t.Context(), row)
			if row.Concession != "" && res.Verdict == attack.Conceded {
				t.Logf("the runtime concedes it: %s", res.Why)
				return
			}
			require.Equal(t, attack.Held, res.Verdict, res.Why)
		})
	}
	require.NoError(t, r.Close(context.WithoutCancel(t.Context())))
}

func TestTheSelfTestIsAStaticProgramThatSaysWhatHeldAndLeavesNothing(t *testing.T) {
	a := newAgent(t, "")
	dir, root := testkit.StateDir(t), testkit.StateDir(t)
	program := filepath.Join(dir, "sandbox-agent-selftest")
	require.NoError(t, testkit.BuildStatic("./cmd/sandbox-agent-selftest", program))
	f, err := elf.Open(program)
	require.NoError(t, err)
	defer f.Close()
	for _, p := range f.Progs {
		require.NotEqual(t, elf.PT_INTERP, p.Type, "it needs a loader")
	}

	run := func(args ...string) (code int, report attack.Report) {
		cmd := exec.CommandContext(t.Context(), program, append([]string{"-socket", a.Socket, "-state-dir", a.State, "-workspace-root", root, "-json"}, args...)...)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if exit := (*exec.ExitError)(nil); err != nil {
			require.True(t, errors.As(err, &exit), "%v", err)
		}
		if len(out) > 0 {
			require.NoError(t, json.Unmarshal(out, &report), "%s", out)
		}
		return cmd.ProcessState.ExitCode(), report
	}
	code, report := run("-only", "P9")
	require.Zero(t, code, "%+v", report)
	require.Len(t, report.Suites, 1)
	require.Greater(t, len(report.Suites[0].Results), 5)

	code, report = run("-only", "P9", "-runtime", "no-such-runtime")
	require.Equal(t, 2, code, "what could not be run is no pass")
	require.Equal(t, attack.NotRun, report.Verdict)
	require.Contains(t, report.Suites[0].Results[0].Why, "no-such-runtime")

	code, _ = run("-only", "no such attack")
	require.Equal(t, 125, code)
	code, _ = run("-socket", filepath.Join(dir, "nobody.sock"))
	require.Equal(t, 125, code)

	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	require.Empty(t, entries)
	list, err := a.Client.Sessions.ListSessions(t.Context(), &sandboxv1.ListSessionsRequest{})
	require.NoError(t, err)
	require.Empty(t, list.GetSessions())
	kept, err := os.ReadDir(filepath.Join(a.State, "workspaces"))
	require.NoError(t, err)
	require.Empty(t, kept, "what the agent keeps for a worktree")
}
