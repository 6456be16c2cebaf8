package agent

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// answering is a runtime that answers whoever waits for it.
type answering struct{ runtime.Runtime }

func (answering) Name() string { return "embedded" }

func (answering) Reachable(ctx context.Context) error { return ctx.Err() }

// counts waits until the agent's metrics have these lines, as who scrapes them sees them: what is counted is counted beside the answer.
func (n *node) counts(lines ...string) {
	n.t.Helper()
	none := func(context.Context) error { return nil }
	s, err := metrics.Serve(metrics.Options{Metrics: n.agent.metrics, Address: "127.0.0.1:0", Healthy: none, Ready: none})
	require.NoError(n.t, err)
	defer s.Close()
	for _, line := range lines {
		require.Eventually(n.t, func() bool {
			req, err := http.NewRequestWithContext(n.ctx(), http.MethodGet, "http://"+s.Addr()+"/metrics", nil)
			require.NoError(n.t, err)
			res, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
			require.NoError(n.t, err)
			defer res.Body.Close()
			text, err := io.ReadAll(res.Body)
			require.NoError(n.t, err)
			return strings.Contains(string(text), "\nsandbox_agent_"+line+"\n")
		}, bound, pollEvery, line)
	}
}

func TestWhoHangsUpWhileAskingForHealthMakesNoRuntimeUnreachable(t *testing.T) {
	j, err := journal.Open(t.TempDir(), testLog())
	require.NoError(t, err)
	defer j.Close()
	cfg := &config.Config{Runtime: config.Runtime{Default: "embedded", Allowed: []string{"embedded"}}}
	a := &Agent{
		cfg: cfg, journal: j, ctx: t.Context(), closing: make(chan struct{}),
		hosts: newHosts(map[string]runtime.Runtime{"embedded": answering{}}, cfg.Runtime),
	}
	gone, hangUp := context.WithCancel(t.Context())
	hangUp()
	require.NoError(t, a.Ready(gone))
	require.NoError(t, a.hosts.reachable(t.Context(), answering{}), "what the next one to ask is told, a moment later")
}
