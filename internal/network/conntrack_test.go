package network

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// from is a client that sends a datagram to an address from each of these ports, and says what came of it.
const from = `
import socket, sys
for port in sys.argv[2:]:
    six = ':' in sys.argv[1]
    s = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(('::' if six else '0.0.0.0', int(port)))
    s.settimeout(2)
    try:
        s.connect((sys.argv[1], 4000))
        s.send(b'x')
        print('reached', s.recv(10).decode().strip())
    except socket.timeout:
        print('hangs')
    except OSError:
        print('refused')
`

func (l *lab) sendFrom(rec *Record, to string, ports ...string) []string {
	l.t.Helper()
	cmd := l.Command(rec.Namespace, append([]string{"python3", "-c", from, to}, ports...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(l.t, err)
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func TestConnectionsOfASandboxArePassedOnToNobody(t *testing.T) {
	l := newEgressLab(t)
	l.serve(l.World, "udp "+netlab.Web+" 4000", "udp "+netlab.Web6+" 4000")
	for name, end := range map[string]func(*Record){
		"removed": func(rec *Record) {
			require.NoError(t, l.Remove(t.Context(), rec.ID))
			for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
				known, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
				require.NoError(t, err)
				for _, flow := range known {
					require.False(t, anyOf(rec.Addresses).MatchConntrackFlow(flow), flow.String())
				}
			}
		},
		"lost, and taken away by somebody else": func(rec *Record) {
			require.NoError(t, delBridge(rec))
			require.NoError(t, unbind(rec.Namespace))
			require.NoError(t, l.egress.remove(rec))
			require.NoError(t, l.records().remove(rec.ID))
		},
	} {
		t.Run(name, func(t *testing.T) {
			first := l.under("sb-first", Egress{})
			for _, to := range []string{netlab.Web, netlab.Web6} {
				require.Equal(t, []string{"reached x"}, l.sendFrom(first, to, "5555"))
			}
			was := first.Egress
			first.Egress = Egress{Mode: egress.None}
			require.NoError(t, l.egress.set([]*Record{first}))
			for _, to := range []string{netlab.Web, netlab.Web6} {
				require.Equal(t, []string{"reached x", "refused"}, l.sendFrom(first, to, "5555", "5556"), "control: no policy ends a connection that is known")
			}
			first.Egress = was
			end(first)

			clear(l.last)
			next := l.under("sb-next", Egress{Mode: egress.None})
			require.Equal(t, first.Addresses, next.Addresses, "the same addresses")
			for _, to := range []string{netlab.Web, netlab.Web6} {
				require.Equal(t, []string{"refused", "refused"}, l.sendFrom(next, to, "5555", "5556"))
			}
			require.NoError(t, l.Remove(t.Context(), next.ID))
			clear(l.last)
		})
	}
}

func TestAnAddressIsNotGivenAgainAtOnceByTheNextAgent(t *testing.T) {
	l := newLab(t, false)
	first := l.connect("sb-first", Bridge)
	require.NoError(t, l.Remove(t.Context(), first.ID))
	again, err := New(l.opts)
	require.NoError(t, err)
	l.Manager = again
	next := l.connect("sb-next", Bridge)
	require.NotEqual(t, first.Addresses, next.Addresses)
	require.Equal(t, []netip.Addr{first.Addresses[0].Next(), first.Addresses[1].Next()}, next.Addresses)
}
