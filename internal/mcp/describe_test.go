package mcp

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func testSession() *sandboxv1.Session {
	return &sandboxv1.Session{
		State: sandboxv1.Session_READY, Network: &sandboxv1.Network{Mode: "none"},
		Workspace: &sandboxv1.Workspace{Worktree: "/srv/w", Branch: "topic", GitLayout: "isolated"},
		Resources: &sandboxv1.Resources{MemoryBytes: 4 << 30, Pids: 512, Cpus: 1.5},
		Conditions: &sandboxv1.CommandConditions{
			Scratch: "/srv/w/.sandbox-tmp", Home: "/home/sandbox", TmpBytes: 1 << 30, HomeBytes: 1 << 20,
			Timeout: durationpb.New(2 * time.Minute), MaxTimeout: durationpb.New(time.Hour), SpillBytes: 16 << 20,
		},
	}
}

func TestTheDescriptionSaysWhatHoldsInThisSession(t *testing.T) {
	text := describe(testSession(), nil, 32<<10)
	for _, want := range []string{
		"in the Git worktree /srv/w,", "fresh shell", "No standard input", "Time: 120 seconds, or timeout_seconds, at most 3600 seconds",
		"Network: none", "$TMPDIR (/srv/w/.sandbox-tmp)", "/tmp (1 GiB)", "HOME (/home/sandbox, 1 MiB)", "on branch topic: hooks are off",
		"Commits go to the repository at the end of each command", "Limits: 4 GiB of memory, 512 processes and threads, 1.5 CPUs.",
		"at most 32 KiB are shown", "its first 16 MiB", "NOT_STARTED: it certainly did not run",
	} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "Caches")
	require.NotContains(t, text, "Credentials")
	require.NotContains(t, text, "Now no command can run")
}

func TestTheDescriptionFollowsTheRecord(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*sandboxv1.Session)
		want   string
	}{
		"allowed hosts": {func(s *sandboxv1.Session) {
			s.Network = &sandboxv1.Network{Mode: "bridge", Egress: "allowlist", Allow: []string{"a:443", "b"}}
		}, "Network: bridge, only to a:443, b;"},
		"the node's list": {func(s *sandboxv1.Session) { s.Network = &sandboxv1.Network{Mode: "cni", Egress: "allowlist"} }, "Network: cni, only to the destinations that this node's operator has listed"},
		"no allowed host": {func(s *sandboxv1.Session) { s.Network = &sandboxv1.Network{Mode: "cni", Egress: "none"} }, "Network: cni, and no destination is allowed"},
		"an open network": {func(s *sandboxv1.Session) { s.Network = &sandboxv1.Network{Mode: "cni", Egress: "open"} }, "Network: cni, to everything but the node itself"},
		"hooks":           {func(s *sandboxv1.Session) { s.Conditions.Hooks = true }, "hooks run"},
		"shared layout":   {func(s *sandboxv1.Session) { s.Workspace.GitLayout = "shared" }, "go to the repository at once"},
		"caches": {func(s *sandboxv1.Session) {
			s.Caches = []*sandboxv1.Cache{{Path: ".cache/pip"}, {Path: "go", ReadOnly: true}}
		}, "Caches that outlast the sandbox: /home/sandbox/.cache/pip, /home/sandbox/go (read-only)."},
		"grants":           {func(s *sandboxv1.Session) { s.GrantNames = []string{"npm"} }, "Credentials of this session, as read-only files in /run/grants/NAME and in the environment: npm."},
		"no files":         {func(s *sandboxv1.Session) { s.Conditions.SpillBytes = 0 }, "What is left out is not kept"},
		"grants are gone":  {func(s *sandboxv1.Session) { s.State, s.Reason = sandboxv1.Session_GRANTS_REQUIRED, "Give them." }, "Now no command can run: GRANTS_REQUIRED. Give them."},
		"uncertain":        {func(s *sandboxv1.Session) { s.State = sandboxv1.Session_UNCERTAIN }, "Now no command can run: UNCERTAIN."},
		"no limits at all": {func(s *sandboxv1.Session) { s.Resources = nil }, "Limits: the node's own."},
	} {
		s := testSession()
		c.change(s)
		require.Contains(t, describe(s, nil, 1), c.want, name)
	}
	text := describe(nil, errors.New("no agent listens at /run/x"), 1)
	require.Contains(t, text, "Now it can't be used: no agent listens at /run/x")
	require.NotContains(t, text, "Network", "what is not known is not said")
}

func TestSizesAreWordsOfAReader(t *testing.T) {
	for n, want := range map[int64]string{0: "0 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1536: "1.5 KiB", 1 << 20: "1 MiB", 3 << 30: "3 GiB"} {
		require.Equal(t, want, size(n))
	}
}
