package agent

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// answering is a runtime that answers whoever waits for it.
type answering struct{ runtime.Runtime }

func (answering) Name() string { return "embedded" }

func (answering) Reachable(ctx context.Context) error { return ctx.Err() }

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
