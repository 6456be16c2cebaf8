package agent

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// listing is a node whose operator permits one name and all policies.
func listing() config.Network {
	c := config.Default(1 << 30).Network
	c.Allowed = []string{config.NoNetwork, config.BridgeNetwork}
	c.Egress.Allowed = egress.Modes
	c.Egress.Allow = []config.EgressEntry{{To: "*.web.example", Ports: []int64{80, 443}, Reason: "the web"}}
	return c
}

func TestASessionsNetworkHasItsPolicyFilledIn(t *testing.T) {
	c := listing()
	n, err := checkSessionNetwork(&sandboxv1.Network{}, c)
	require.NoError(t, err)
	require.Equal(t, "none  []", fmt.Sprintf("%s %s %v", n.GetMode(), n.GetEgress(), n.GetAllow()))
	n, err = checkSessionNetwork(&sandboxv1.Network{Mode: "bridge"}, c)
	require.NoError(t, err)
	require.Equal(t, "open", n.GetEgress())
	n, err = checkSessionNetwork(&sandboxv1.Network{Mode: "bridge", Egress: "allowlist", Allow: []string{"a.web.example:80 x"}}, c)
	require.NoError(t, err)
	require.Equal(t, []string{"a.web.example:80 x"}, n.GetAllow())
	for _, bad := range []*sandboxv1.Network{
		{Egress: "open"}, {Allow: []string{"a.web.example:80 x"}}, {Mode: "bridge", Allow: []string{"a.web.example:80 x"}},
		{Mode: "bridge", Egress: "some"}, {Mode: "bridge", Egress: "allowlist", Allow: []string{"web.example x"}},
		{Mode: "bridge", Egress: "allowlist", Allow: []string{"a.web.example:80"}},
	} {
		_, err := checkSessionNetwork(bad, c)
		require.ErrorIs(t, err, ErrInvalid, "%v", bad)
	}
}

func TestTheNextSandboxKeepsToWhatTheOperatorPermitsNow(t *testing.T) {
	a := &Agent{cfg: &config.Config{Network: listing()}}
	rec := &sessionRecord{ID: "s", Network: config.BridgeNetwork, Egress: egress.Allowlist, Allow: []string{"a.web.example:80 x"}}
	e, err := a.egressOf(rec)
	require.NoError(t, err)
	require.Len(t, e.Entries, 1)
	require.Equal(t, "a.web.example:80/tcp x", e.Entries[0].String())
	require.EqualValues(t, 1024, e.Connections)

	old, err := a.egressOf(&sessionRecord{ID: "old", Network: config.BridgeNetwork})
	require.NoError(t, err)
	require.Equal(t, egress.Open, old.Mode, "a session of an agent without policies")

	a.cfg.Network.Egress.Allow[0].Ports = []int64{443}
	_, err = a.egressOf(rec)
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "a.web.example:80/tcp")
	a.cfg.Network.Egress.Allowed = []string{"none"}
	_, err = a.egressOf(rec)
	require.ErrorContains(t, err, "network.egress.allowed")
}

func TestAnAnswerNamesEachRefusedDestinationOnceAndNotTooMany(t *testing.T) {
	u := &networkUse{}
	require.False(t, u.anything())
	require.True(t, u.note("a"))
	require.False(t, u.note("a"))
	for i := range 2 * maxRefused {
		u.note(fmt.Sprint(i))
	}
	u.total = network.Traffic{Refused: 500}
	var r sandboxv1.ExecResult
	u.tell(&r)
	require.Len(t, r.GetRefusedDestinations(), maxRefused)
	require.EqualValues(t, 500, r.GetNetwork().GetRefused())
	require.True(t, u.anything())
	(*networkUse)(nil).tell(&r)
	require.False(t, (*networkUse)(nil).anything())
	require.Equal(t, network.Traffic{BytesOut: 5, Connections: 1}, network.Traffic{BytesOut: 15, Connections: 1}.Since(network.Traffic{BytesOut: 10, Connections: 2}))
}
