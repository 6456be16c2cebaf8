package network

import (
	"context"

	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

const (
	bridge4, bridge6 = "10.231.0.0/24", "fd23:1::/64"
	cni4, cni6       = "10.77.0.0/24", "fd77::/64"
)

// lab is a node with a manager.
type lab struct {
	*netlab.Lab
	*Manager
	t    *testing.T
	conf string // the node's CNI configurations
}

// newLab has real CNI plugins where cni says so.
func newLab(t *testing.T, cni bool) *lab {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("python3"), testkit.Program("nft"))
	testkit.Leaks(t)
	l := &lab{t: t, Lab: netlab.Here(t, cni4, cni6), conf: testkit.StateDir(t)}
	// Where the kernel can't answer at an interface's ingress, the seventh refused datagram of a second has no answer otherwise.
	l.Sysctl(l.Node, "net/ipv4/icmp_ratelimit", "0")
	l.Sysctl(l.Node, "net/ipv6/icmp/ratelimit", "0")
	o := Options{
		StateDir: testkit.StateDir(t), Nameservers: []netip.Addr{netip.MustParseAddr(netlab.Web)},
		Listeners: listeners.List{TCP: []uint16{44772}, UDP: []uint16{5000}},
		Bridge:    BridgeOptions{Subnets: []netip.Prefix{netip.MustParsePrefix(bridge4), netip.MustParsePrefix(bridge6)}},
		CNI:       CNIOptions{ConfDir: l.conf, BinDirs: []string{l.conf}},
	}
	if cni {
		o.CNI.BinDirs = []string{containerd.Folder(t, "cni")}
		l.configure(strings.ReplaceAll(bridged, "DIR", l.conf))
	}
	var err error
	l.Manager, err = New(o)
	require.NoError(t, err)
	t.Cleanup(func() {
		ids, err := l.List()
		require.NoError(t, err)
		require.Empty(t, ids, "networks are left")
		require.NoError(t, l.rules.clear())
		for _, name := range []string{"cni0"} { // CNI's bridge plugin never removes it
			if link, err := netlink.LinkByName(name); err == nil {
				require.NoError(t, netlink.LinkDel(link))
			}
		}
	})
	return l
}

// bridged is a configuration of real plugins with addresses of both families. DIR is a folder of the test's.
const bridged = `{"cniVersion": "1.0.0", "name": "lab", "plugins": [{
  "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "DIR/ipam", "ranges": [[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}
}]}`

func (l *lab) configure(conf string) {
	l.t.Helper()
	require.NoError(l.t, os.WriteFile(filepath.Join(l.conf, "10-lab.conflist"), []byte(conf), 0o600))
}

func (l *lab) restore() Lapses {
	l.t.Helper()
	found, err := l.Restore()
	require.NoError(l.t, err)
	return found
}

// connect connects a namespace as a sandbox's, until the test ends.
func (l *lab) connect(id string, mode Mode) *Record {
	l.t.Helper()
	require.NoError(l.t, l.tryConnect(id, mode))
	rec, err := l.Get(id)
	require.NoError(l.t, err)
	return rec
}

func (l *lab) tryConnect(id string, mode Mode) error {
	l.t.Helper()
	ns := l.namespaceFile()
	defer ns.Close()
	l.t.Cleanup(func() { require.NoError(l.t, l.Remove(context.Background(), id)) })
	_, err := l.Connect(l.t.Context(), id, mode, ns)
	return err
}

// namespaceFile is a new network namespace.
func (l *lab) namespaceFile() *os.File {
	l.t.Helper()
	ns, err := hostkernel.NewNetwork()
	require.NoError(l.t, err)
	return ns
}

// attempts is a client that tries its arguments, "tcp|udp ADDRESS PORT", all at once, and says what came of each. It waits
// for ten seconds: the first packet of a new bridge may take one, and nothing that is refused takes any.
const attempts = `
import concurrent.futures, socket, sys
def attempt(t):
    kind, address, port = t.split()
    s = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET, socket.SOCK_STREAM if kind == 'tcp' else socket.SOCK_DGRAM)
    s.settimeout(10)
    try:
        s.connect((address, int(port)))
        if kind == 'udp': s.send(b'x')
        return 'reached ' + s.recv(100).decode().split()[0]
    except socket.timeout:
        return 'hangs'
    except OSError as e:
        return 'refused'
with concurrent.futures.ThreadPoolExecutor(100) as all:
    print(*all.map(attempt, sys.argv[1:]), sep='\n')
`

// try says what comes of each attempt of a process in a sandbox.
func (l *lab) try(rec *Record, targets []string) []string {
	l.t.Helper()
	cmd := l.Command(rec.Namespace, append([]string{"python3", "-c", attempts}, targets...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(l.t, err)
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// serve has a server on every target, and gives the targets.
func (l *lab) serve(ns string, targets ...string) []string {
	l.t.Helper()
	for _, t := range targets {
		kind, address, _ := strings.Cut(t, " ")
		host, port, _ := strings.Cut(address, " ")
		if strings.Contains(host, ":") {
			host = "[" + host + "]"
		}
		if kind == "tcp" {
			l.TCP(ns, "x", host+":"+port)
		} else {
			l.UDP(ns, "x", host+":"+port)
		}
	}
	return targets
}

// filterBridges has what bridges carry filtered, or not, and says which of it there is: the kernel may have no br_netfilter.
func (l *lab) filterBridges(on bool) bool {
	value := "0"
	if on {
		value = "1"
	}
	for _, key := range []string{"iptables", "ip6tables"} {
		if _, err := os.Stat("/proc/sys/net/bridge/bridge-nf-call-" + key); err != nil {
			return false
		}
		l.Sysctl(l.Node, "net/bridge/bridge-nf-call-"+key, value)
		l.t.Cleanup(func() { l.Sysctl(l.Node, "net/bridge/bridge-nf-call-"+key, "1") })
	}
	return on
}

func nft(t *testing.T, rules string) {
	t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestP10NothingOfTheNodeIsReachedOverANetwork(t *testing.T) {
	for _, c := range []struct {
		name string
		mode Mode
		// silent: the kernel can't answer at an interface's ingress, as some distributions build it.
		silent bool
		// without is the function that the kernel lacks for what bridges carry.
		without string
	}{
		{"bridge", Bridge, false, ""},
		{"cni", CNI, false, ""},
		{"bridge, no answers at ingress", Bridge, true, ""},
		{"cni, no answers at ingress", CNI, true, ""},
		{"cni, no answers at ingress, no br_netfilter", CNI, true, "br_netfilter"},
		{"cni, no answers at ingress, no rules for bridges", CNI, true, "nf_tables_bridge"},
	} {
		t.Run(c.name, func(t *testing.T) {
			mode := c.mode
			l := newLab(t, mode == CNI)
			if c.silent {
				l.rules.answers = new(bool)
			}
			if c.without == "nf_tables_bridge" {
				l.rules.bridges = new(bool)
			}
			answered := l.filterBridges(c.without != "br_netfilter") // also from port to port
			rec, other := l.connect("sb-one", mode), l.connect("sb-two", mode)
			silent := mode == CNI && !l.rules.answersAtIngress() // on this kernel too
			require.Len(t, rec.Addresses, 2)

			open := append(l.serve(l.World, "tcp "+netlab.Web+" 80", "tcp "+netlab.Web6+" 80", "udp "+netlab.Web+" 4000", "udp "+netlab.Web6+" 4000"),
				l.serve(l.World, "udp "+netlab.Web+" 53", "tcp "+netlab.Web+" 53")...)
			closed := append(l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000", "udp "+netlab.NodeAddr+" 9000", "tcp "+netlab.NodeAddr6+" 9000", "udp "+netlab.NodeAddr6+" 9000",
				"tcp "+netlab.NodeAddr+" 10250", "tcp "+netlab.NodeAddr+" 53"),
				l.serve(l.World, "tcp "+netlab.Metadata+" 80", "udp "+netlab.Metadata+" 53", "tcp "+netlab.Metadata6+" 80",
					"tcp "+netlab.Other+" 44772", "tcp "+netlab.Web6+" 44772", "udp "+netlab.Other+" 5000", "tcp "+netlab.Other+" 10250", "tcp "+netlab.Web+" 10255")...)
			for _, a := range other.Addresses {
				closed = append(closed, l.serve(other.Namespace, "tcp "+a.String()+" 8000", "udp "+a.String()+" 8000")...)
			}
			closed = append(closed, "tcp ::ffff:"+netlab.NodeAddr+" 9000", "udp ::ffff:"+netlab.NodeAddr+" 9000", "tcp ::ffff:"+netlab.Metadata+" 80")
			if mode == CNI { // its gateway is the node
				closed = append(closed, l.serve(l.Node, "tcp 10.77.0.1 9000", "udp 10.77.0.1 9000")...)
			}
			// What kube-proxy does: a service's address leads to the node, or to a kubelet elsewhere.
			nft(t, `table ip lab { chain pre { type nat hook prerouting priority dstnat;
				ip daddr 192.0.2.50 tcp dport 443 dnat to `+netlab.NodeAddr+`:9000
				ip daddr 192.0.2.51 tcp dport 443 dnat to `+netlab.Other+`:10250
				ip daddr 192.0.2.52 tcp dport 443 dnat to `+netlab.Metadata+`:80
				ip daddr 192.0.2.53 tcp dport 443 dnat to `+netlab.Web+`:80
				}
			}`)
			t.Cleanup(func() { nft(t, "delete table ip lab") })
			closed = append(closed, "tcp 192.0.2.50 443", "tcp 192.0.2.51 443", "tcp 192.0.2.52 443")
			open = append(open, "tcp 192.0.2.53 443")

			require.NoError(t, l.rules.clear())
			if mode == Bridge {
				nft(t, "table inet lab2 { chain post { type nat hook postrouting priority srcnat; oifname uplink0 masquerade; }\n}")
			}
			all := append(append([]string(nil), open...), closed...)
			for i, what := range l.try(rec, all) {
				require.Equal(t, "reached x", what, "control: without rules %s answers", all[i])
			}
			if mode == Bridge {
				nft(t, "delete table inet lab2")
			}
			l.restore()
			for i, what := range l.try(rec, open) {
				require.Equal(t, "reached x", what, "%s is open", open[i])
			}
			for i, what := range l.try(rec, closed) {
				beside := strings.Contains(closed[i], " "+other.Addresses[0].String()+" ") || strings.Contains(closed[i], " "+other.Addresses[1].String()+" ")
				if silent && (!l.rules.hasBridged() || beside && !answered) {
					require.NotContains(t, what, "reached", closed[i])
					continue
				}
				require.Equal(t, "refused", what, "%s must be refused at once", closed[i])
			}
			if silent && l.rules.hasBridged() && !answered {
				nft(t, "flush chain bridge "+l.rules.bridged.Name+" "+carried)
				require.Equal(t, []string{"reached x"}, l.try(rec, []string{"tcp " + other.Addresses[0].String() + " 8000"}), "control: without the rules for bridges it is carried on")
				l.restore()
			}
			ok, err := l.rules.intact([]*Record{rec, other})
			require.NoError(t, err)
			require.True(t, ok)
		})
	}
}

func TestAddressesAreGivenInTurnAndNeverTwice(t *testing.T) {
	p := netip.MustParsePrefix("10.0.0.0/29")
	taken := map[netip.Addr]bool{}
	var got []string
	last := netip.Addr{}
	for range 6 {
		a, err := free(p, last, taken)
		require.NoError(t, err)
		taken[a], last = true, a
		got = append(got, strconv.Itoa(int(a.As4()[3])))
	}
	require.Equal(t, "1 2 3 4 5 6", strings.Join(got, " "))
	_, err := free(p, last, taken)
	require.ErrorIs(t, err, ErrUnavailable)
	delete(taken, netip.MustParseAddr("10.0.0.3"))
	a, err := free(p, last, taken)
	require.NoError(t, err)
	require.Equal(t, "10.0.0.3", a.String())
	delete(taken, a)
	delete(taken, last)
	a, err = free(p, netip.MustParseAddr("10.0.0.3"), taken)
	require.NoError(t, err)
	require.Equal(t, "10.0.0.6", a.String(), "one that was given up is not the next to be given")
}

// Calico takes such bits away before anything else of the node sees a packet, and a node port is translated after that.
func TestP10AMarkThatAnotherFirewallChangesOpensNothing(t *testing.T) {
	l := newLab(t, false)
	l.rules.answers = new(bool) // the kernel can't answer at an interface's ingress
	rec := l.connect("sb-one", Bridge)
	l.serve(l.World, "tcp "+netlab.Web+" 80")
	const port = "tcp " + netlab.NodeAddr + " 30080"
	nft(t, `table ip lab2 {
	chain raw { type filter hook prerouting priority raw; meta mark set meta mark and 0xfff0ffff; }
	chain pre { type nat hook prerouting priority dstnat; ip daddr `+netlab.NodeAddr+` tcp dport 30080 dnat to `+netlab.Web+`:80; }
	chain post { type nat hook postrouting priority srcnat; oifname uplink0 masquerade; }
}`)
	t.Cleanup(func() { nft(t, "delete table ip lab2") })
	require.NoError(t, l.rules.clear())
	require.Equal(t, []string{"reached x"}, l.try(rec, []string{port}), "control: without rules the node's port leads there")
	l.restore()
	require.Equal(t, []string{"refused"}, l.try(rec, []string{port}))
}
