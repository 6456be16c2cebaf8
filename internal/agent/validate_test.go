package agent

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

func TestABadExecRequestIsRefusedWithItsFieldAndTheRemedy(t *testing.T) {
	c := testConfig("/var/lib/sandbox-agent", "/srv")
	good := func() *sandboxv1.ExecRequest {
		return &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e", Command: "true"}
	}
	require.NoError(t, checkExec(good(), c.Limits))
	labels := map[string]string{}
	for i := range maxLabels + 1 {
		labels[strings.Repeat("k", i+1)] = ""
	}
	for name, x := range map[string]struct {
		change func(*sandboxv1.ExecRequest)
		says   string
	}{
		"no session":         {func(r *sandboxv1.ExecRequest) { r.SessionId = "" }, "session_id"},
		"a dot session":      {func(r *sandboxv1.ExecRequest) { r.SessionId = ".x" }, "not beginning with a dot"},
		"a long session":     {func(r *sandboxv1.ExecRequest) { r.SessionId = strings.Repeat("s", 65) }, "1 to 64"},
		"an exec id with /":  {func(r *sandboxv1.ExecRequest) { r.ExecId = "../x" }, "exec_id"},
		"an exec id ..":      {func(r *sandboxv1.ExecRequest) { r.ExecId = ".." }, "exec_id"},
		"a long exec id":     {func(r *sandboxv1.ExecRequest) { r.ExecId = strings.Repeat("e", 129) }, "1 to 128"},
		"an empty command":   {func(r *sandboxv1.ExecRequest) { r.Command = "" }, "command is empty"},
		"a long command":     {func(r *sandboxv1.ExecRequest) { r.Command = strings.Repeat("x", 131072) }, "at most 131071"},
		"a NUL in it":        {func(r *sandboxv1.ExecRequest) { r.Command = "a\x00b" }, "NUL byte"},
		"a timeout of 0":     {func(r *sandboxv1.ExecRequest) { r.TimeoutSeconds = proto.Float64(0) }, "timeout_seconds is 0"},
		"a negative timeout": {func(r *sandboxv1.ExecRequest) { r.TimeoutSeconds = proto.Float64(-1) }, "timeout_seconds is -1"},
		"a timeout too long": {func(r *sandboxv1.ExecRequest) { r.TimeoutSeconds = proto.Float64(3601) }, "limits.max_timeout"},
		"no number":          {func(r *sandboxv1.ExecRequest) { r.TimeoutSeconds = proto.Float64(math.NaN()) }, "timeout_seconds"},
		"infinity":           {func(r *sandboxv1.ExecRequest) { r.TimeoutSeconds = proto.Float64(math.Inf(1)) }, "timeout_seconds"},
		"too many labels":    {func(r *sandboxv1.ExecRequest) { r.Labels = labels }, "at most 32"},
		"an empty label":     {func(r *sandboxv1.ExecRequest) { r.Labels = map[string]string{"": "x"} }, "labels"},
		"a long label":       {func(r *sandboxv1.ExecRequest) { r.Labels = map[string]string{"k": strings.Repeat("v", 257)} }, "at most 256"},
	} {
		r := good()
		x.change(r)
		err := checkExec(r, c.Limits)
		require.ErrorIs(t, err, ErrInvalid, name)
		require.ErrorContains(t, err, x.says, name)
	}
}

func TestABadCreateSessionIsRefusedWithItsFieldAndTheRemedy(t *testing.T) {
	c := testConfig("/var/lib/sandbox-agent", "/srv")
	good := func() *sandboxv1.CreateSessionRequest {
		return &sandboxv1.CreateSessionRequest{SessionId: "s", Workspace: &sandboxv1.Workspace{Repository: "/srv/repo", Worktree: "/srv/wt"}}
	}
	c.Caches = map[string]config.Cache{"pip": {Source: "/srv/pip", Path: ".cache/pip"}}
	filled, err := checkCreate(good(), &c, embeddedOnly)
	require.NoError(t, err)
	require.Equal(t, "isolated", filled.GetWorkspace().GetGitLayout(), "the default: commands write nothing of the base clone")
	require.Equal(t, "embedded", filled.GetRuntime())
	require.Equal(t, "none", filled.GetNetwork().GetMode())
	require.Equal(t, c.Limits.MemoryBytes, filled.GetResources().GetMemoryBytes())
	for name, x := range map[string]struct {
		change func(*sandboxv1.CreateSessionRequest)
		kind   error
		says   string
	}{
		"a session id with /":    {func(r *sandboxv1.CreateSessionRequest) { r.SessionId = "a/b" }, ErrInvalid, "session_id"},
		"grants":                 {func(r *sandboxv1.CreateSessionRequest) { r.Grants = []*sandboxv1.Grant{{}} }, ErrInvalid, "grants"},
		"a cache without a name": {func(r *sandboxv1.CreateSessionRequest) { r.Caches = []*sandboxv1.Cache{{Path: "x"}} }, ErrInvalid, "caches: name"},
		"a cache above HOME":     {func(r *sandboxv1.CreateSessionRequest) { r.Caches = []*sandboxv1.Cache{{Name: "x", Path: "../x"}} }, ErrInvalid, "relative to HOME"},
		"a cache that is HOME":   {func(r *sandboxv1.CreateSessionRequest) { r.Caches = []*sandboxv1.Cache{{Name: "x", Path: "."}} }, ErrInvalid, "relative to HOME"},
		"caches in each other": {func(r *sandboxv1.CreateSessionRequest) {
			r.Caches = []*sandboxv1.Cache{{Name: "x", Path: "a/b"}, {Name: "y", Path: "a"}}
		}, ErrInvalid, "in each other"},
		"a cache twice": {func(r *sandboxv1.CreateSessionRequest) {
			r.Caches = []*sandboxv1.Cache{{Name: "x", Path: "a"}, {Name: "x", Path: "b"}}
		}, ErrInvalid, "twice"},
		"too many caches":                {func(r *sandboxv1.CreateSessionRequest) { r.Caches = make([]*sandboxv1.Cache, 17) }, ErrInvalid, "at most 16"},
		"a shared cache that nobody has": {func(r *sandboxv1.CreateSessionRequest) { r.Caches = []*sandboxv1.Cache{{Name: "x", ReadOnly: true}} }, ErrInvalid, "no shared cache"},
		"a shared cache elsewhere": {func(r *sandboxv1.CreateSessionRequest) {
			r.Caches = []*sandboxv1.Cache{{Name: "pip", Path: "x", ReadOnly: true}}
		}, ErrInvalid, ".cache/pip"},
		"an unknown runtime":    {func(r *sandboxv1.CreateSessionRequest) { r.Runtime = "kata" }, ErrInvalid, "runtime.allowed"},
		"too much isolation":    {func(r *sandboxv1.CreateSessionRequest) { r.MinIsolation = sandboxv1.Isolation_SEPARATE_KERNEL }, ErrPrecondition, "runtime.allowed"},
		"an unknown isolation":  {func(r *sandboxv1.CreateSessionRequest) { r.MinIsolation = 9 }, ErrInvalid, "min_isolation"},
		"an unknown network":    {func(r *sandboxv1.CreateSessionRequest) { r.Network = &sandboxv1.Network{Mode: "bridge"} }, ErrInvalid, "network.allowed"},
		"too much memory":       {func(r *sandboxv1.CreateSessionRequest) { r.Resources = &sandboxv1.Resources{MemoryBytes: 1 << 50} }, ErrInvalid, "limits.memory_bytes"},
		"negative memory":       {func(r *sandboxv1.CreateSessionRequest) { r.Resources = &sandboxv1.Resources{MemoryBytes: -1} }, ErrInvalid, "resources.memory_bytes"},
		"too many pids":         {func(r *sandboxv1.CreateSessionRequest) { r.Resources = &sandboxv1.Resources{Pids: 100000} }, ErrInvalid, "limits.pids"},
		"negative cpus":         {func(r *sandboxv1.CreateSessionRequest) { r.Resources = &sandboxv1.Resources{Cpus: -2} }, ErrInvalid, "resources.cpus"},
		"no repository":         {func(r *sandboxv1.CreateSessionRequest) { r.Workspace.Repository = "" }, ErrInvalid, "workspace.repository"},
		"a relative worktree":   {func(r *sandboxv1.CreateSessionRequest) { r.Workspace.Worktree = "wt" }, ErrInvalid, "not absolute"},
		"one outside":           {func(r *sandboxv1.CreateSessionRequest) { r.Workspace.Worktree = "/opt/wt" }, ErrInvalid, "workspace.roots"},
		"the repository itself": {func(r *sandboxv1.CreateSessionRequest) { r.Workspace.Worktree = "/srv/repo" }, ErrInvalid, "base clone"},
		"a folder around it":    {func(r *sandboxv1.CreateSessionRequest) { r.Workspace.Repository = "/srv/wt/repo" }, ErrInvalid, "base clone"},
		"an unknown layout":     {func(r *sandboxv1.CreateSessionRequest) { r.Workspace.GitLayout = "x" }, ErrInvalid, "git_layout"},
	} {
		r := good()
		x.change(r)
		_, err := checkCreate(r, &c, embeddedOnly)
		require.ErrorIs(t, err, x.kind, name)
		require.ErrorContains(t, err, x.says, name)
	}
}

func TestASessionCannotSetWhatDecidesWhichProgramsRun(t *testing.T) {
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "TMP", "TEMP", "BASH_ENV", "ENV", "GIT_DIR", "GIT_CONFIG_COUNT", "LD_PRELOAD",
		"LD_LIBRARY_PATH", "SHELLOPTS", "BASHOPTS", "BASH_FUNC_ls%%", "A B", "1A", ""} {
		require.ErrorIs(t, checkEnv(map[string]string{name: "x"}, nil), ErrInvalid, name)
	}
	require.NoError(t, checkEnv(map[string]string{"CI": "true", "LANG": "de_DE.UTF-8", "_x": ""}, nil))
	require.NoError(t, checkEnv(map[string]string{"GIT_AUTHOR_DATE": "x"}, []string{"GIT_AUTHOR_DATE"}), "an operator may allow more")
	require.ErrorContains(t, checkEnv(map[string]string{"A": "x\x00"}, nil), "NUL")
	require.ErrorContains(t, checkEnv(map[string]string{"A": strings.Repeat("x", maxEnvBytes)}, nil), "at most")
}

func TestTheEnvironmentOfACommandIsFixedAndSmall(t *testing.T) {
	w := config.Workspace{Hooks: "off", Identity: config.Identity{Name: "N", Email: "n@x"}}
	common := map[string]string{
		"PATH": commandPath, "HOME": "/home/sandbox", "LANG": "C.UTF-8",
		"TMPDIR": "/srv/wt/.sandbox-tmp", "TMP": "/srv/wt/.sandbox-tmp", "TEMP": "/srv/wt/.sandbox-tmp",
		"GIT_AUTHOR_NAME": "N", "GIT_AUTHOR_EMAIL": "n@x", "GIT_COMMITTER_NAME": "N", "GIT_COMMITTER_EMAIL": "n@x",
		"GIT_TERMINAL_PROMPT": "0", "CI": "1",
	}
	settings := []string{"user.name=N", "user.email=n@x", "commit.gpgSign=false", "tag.gpgSign=false"}
	for layout, more := range map[string][]string{
		"isolated": nil, // it has a configuration of its own
		"shared":   {"gc.writeCommitGraph=false", "fetch.writeCommitGraph=false", "core.commitGraph=false", "repack.updateServerInfo=false", "core.hooksPath=/dev/null"},
	} {
		want := maps.Clone(common)
		all := slices.Concat(settings, more)
		want["GIT_CONFIG_COUNT"] = strconv.Itoa(len(all))
		for i, kv := range all {
			key, value, _ := strings.Cut(kv, "=")
			want[fmt.Sprintf("GIT_CONFIG_KEY_%d", i)], want[fmt.Sprintf("GIT_CONFIG_VALUE_%d", i)] = key, value
		}
		got := map[string]string{}
		for _, v := range commandEnv("/srv/wt", layout, w, map[string]string{"CI": "1"}) {
			require.NotContains(t, got, v.GetName(), "no variable twice")
			got[v.GetName()] = v.GetValue()
		}
		require.Equal(t, want, got, layout)
	}
}
