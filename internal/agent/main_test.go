package agent

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestMain(m *testing.M) {
	embedded.Init()
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		agentProcess(os.Args[2:])
		return
	}
	code := m.Run()
	testkit.Clean()
	os.Exit(code)
}

// bound ends a test that hangs; no test's outcome depends on it otherwise.
const bound = 60 * time.Second

// pollEvery is for states that nothing announces.
const pollEvery = 2 * time.Millisecond

const owner = 1234

// node is one agent on the embedded runtime, with folders of its own. It has a second one beside it, just as real, under
// the name "runc", for tests that allow it.
type node struct {
	t      *testing.T
	state  string
	parent string
	cfg    config.Config
	agent  *Agent
	// wrap, if set, gets between the agent and its runtimes.
	wrap func(map[string]runtime.Runtime)
}

func testConfig(state, root string) config.Config {
	mem, err := config.NodeMemory()
	if err != nil {
		panic(err)
	}
	c := config.Default(mem)
	c.StateDir = state
	c.Workspace.Roots = []string{root}
	c.Limits.MemoryBytes = 512 << 20
	return c
}

func testLog() *slog.Logger {
	if os.Getenv("SANDBOX_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}

func newAgent(cfg config.Config, parent, receiptd, pid1 string, wrap ...func(map[string]runtime.Runtime)) (*Agent, error) {
	runtimes := map[string]runtime.Runtime{}
	for name, dir := range map[string]string{"embedded": "runtime", "runc": "runtime-2"} {
		dir = filepath.Join(cfg.StateDir, dir)
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, err
		}
		rt, err := embedded.New(embedded.Options{Name: name, StateDir: dir, CgroupParent: parent, Log: testLog()})
		if err != nil {
			return nil, err
		}
		runtimes[name] = rt
	}
	for _, f := range wrap {
		f(runtimes)
	}
	m := metrics.New("test")
	a, err := New(Options{
		Config: cfg, Runtimes: runtimes, Receiptd: receiptd, Pid1: pid1,
		Version: "test", Log: testLog(), Metrics: m,
	})
	if err == nil {
		m.Watch(a.Figures)
	}
	return a, err
}

// newNode starts an agent; whatever it still has at the test's end is deleted with evidence.
func newNode(t *testing.T, change ...func(*config.Config)) *node {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git, testkit.Bash)
	n := &node{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}
	n.cfg = testConfig(n.state, "/var/tmp")
	for _, f := range change {
		f(&n.cfg)
	}
	require.NoError(t, n.cfg.Validate())
	n.start()
	t.Cleanup(n.end)
	return n
}

func (n *node) start() {
	n.t.Helper()
	receiptd, pid1 := testkit.Binaries(n.t)
	wrap := func(runtimes map[string]runtime.Runtime) {
		if n.wrap != nil {
			n.wrap(runtimes)
		}
	}
	var err error
	n.agent, err = newAgent(n.cfg, n.parent, receiptd, pid1, wrap)
	require.NoError(n.t, err)
}

func (n *node) end() {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	sessions, _, err := n.agent.ListSessions(ctx, &sandboxv1.ListSessionsRequest{PageSize: maxPage})
	require.NoError(n.t, err)
	for _, s := range sessions {
		_, err := n.agent.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: s.GetSessionId()})
		require.NoError(n.t, err)
	}
	require.NoError(n.t, n.agent.Close())
}

func (n *node) ctx() context.Context {
	ctx, cancel := context.WithTimeout(n.t.Context(), bound)
	n.t.Cleanup(cancel)
	return ctx
}

// session makes a repository with a worktree and a session on it.
func (n *node) session(id string) *sandboxv1.Session {
	n.t.Helper()
	repo := testkit.Repo(n.t, owner)
	s, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{
		SessionId: id,
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt-"+id), Branch: "work"},
	})
	require.NoError(n.t, err)
	return s
}

func (n *node) exec(session, id, command string) *sandboxv1.ExecResult {
	n.t.Helper()
	r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: session, ExecId: id, Command: command, Text: true})
	require.NoError(n.t, err)
	return r
}
