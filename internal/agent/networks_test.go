package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
)

func TestAnAllowedNetworkModeThatCannotBeHadIsMissingInTheNodeCheck(t *testing.T) {
	none := t.TempDir()
	m, err := network.New(network.Options{StateDir: t.TempDir(), CNI: network.CNIOptions{ConfDir: none}})
	require.NoError(t, err)
	cfg := config.Default(8 << 30)
	a := &Agent{cfg: &cfg, networks: m}
	cfg.Network.Allowed = []string{config.NoNetwork}
	require.Empty(t, a.networkChecks(t.Context()), "nothing is needed for it")

	cfg.Network.Allowed = []string{config.NoNetwork, config.CNINetwork}
	checks := a.networkChecks(t.Context())
	require.Len(t, checks, 1)
	c := checks[0]
	require.Equal(t, sandboxv1.CheckOutcome_CHECK_NO, c.GetOutcome())
	require.Equal(t, sandboxv1.CheckVerdict_CHECK_MISSING, c.GetVerdict())
	require.Contains(t, c.GetRemedy(), none)
	resp := &sandboxv1.CheckNodeResponse{Verdict: sandboxv1.CheckVerdict_CHECK_OK}
	nodecheck.Add(resp, c)
	require.Equal(t, 2, nodecheck.ExitCode(resp.GetVerdict()))
	require.Contains(t, nodecheck.Text(c), "network cni: it can't connect a sandbox now")
}
