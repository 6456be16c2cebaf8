package egress

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
)

const (
	mostConnections = 3
	mostPerSecond   = 30
	mostBytes       = 300000
)

func TestASessionKeepsWithinItsBoundsAndSaysWhich(t *testing.T) {
	w := newWorlds(t, fmt.Sprintf("    connections: %d\n    connections_per_second: %d\n    bytes_out: %d\n", mostConnections, mostPerSecond, mostBytes))
	w.TCP(w.World, "web", netlab.Web+":80")
	w.UDP(w.World, "sink", netlab.Web+":4000")
	top := t
	for _, k := range w.kinds {
		top.Run(k.String(), func(t *testing.T) {
			w.t = t
			defer func() { w.t = top }()
			_, err := w.sessionOf(k, k.String(), &sandboxv1.Network{Egress: "open"})
			require.NoError(t, err)
			w.bounded(k.String())
		})
	}
}

// bounded reaches each of the three bounds.
func (w *world) bounded(session string) {
	t := w.t
	t.Helper()
	beyond := func(r *sandboxv1.ExecResult, key, proto string) {
		t.Helper()
		require.NotZero(t, r.GetNetwork().GetRefused())
		told := strings.Join(r.GetRefusedDestinations(), "\n")
		require.Regexp(t, proto+` \(more .*`+key+`\)`, told)
	}
	r := w.run(session, "for i in {1..5}; do exec {fd}<>/dev/tcp/"+netlab.Web+"/80 && echo $i; done; true")
	require.Equal(t, "1\n2\n3\n", r.GetStdoutText(), r.GetStderrText())
	require.Contains(t, r.GetStderrText(), "Connection refused")
	require.EqualValues(t, mostConnections, r.GetNetwork().GetConnections())
	beyond(r, `network\.egress\.connections`, "/tcp")

	// The kernel looks once in a clock tick which connections are over, so that some of a tick can be too many at once as well.
	const spaced = 2 * mostConnections
	over := "exec 3<>/dev/tcp/" + netlab.Web + "/80 && { read -ru3; read -ru3; exec 3>&-; }"
	r = w.run(session, fmt.Sprintf("sleep 0.1; for i in {1..%d}; do %s; sleep 0.1; done; true", spaced, over))
	require.EqualValues(t, spaced, r.GetNetwork().GetConnections(), "those that are over don't count: %s", r.GetStderrText())

	r = w.run(session, "for i in {1..500}; do "+over+"; done 2>/dev/null; true")
	require.Less(t, r.GetNetwork().GetConnections(), uint64(500))
	beyond(r, `network\.egress\.connections_per_second`, "/tcp")

	// By then the next connection is none too many; without an answer each datagram would be one.
	r = w.run(session, "sleep 0.5; exec 3<>/dev/udp/"+netlab.Web+"/4000 && echo >&3 && head -n1 <&3 && dd if=/dev/zero bs=1000 count=2000 status=none >&3")
	require.Equal(t, "sink\n", r.GetStdoutText(), r.GetStderrText())
	require.NotZero(t, r.GetExitCode(), "it is not sent into the void")
	beyond(r, `network\.egress\.bytes_out`, "/udp")
	require.Greater(t, r.GetNetwork().GetBytesOut(), uint64(mostBytes/2), "the control: most of it went")
	require.Greater(t, r.GetUsage().GetNetworkSentBytes(), uint64(mostBytes/2))
	require.Less(t, r.GetUsage().GetNetworkSentBytes(), uint64(2000*1000))
	r = w.run(session, dial(netlab.Web, 80))
	require.Contains(t, r.GetStderrText(), "Connection refused")
	beyond(r, `network\.egress\.bytes_out`, "/tcp")
}
