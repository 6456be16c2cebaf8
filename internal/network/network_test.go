package network

import (
	"context"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// remains are the folders and interfaces of sandboxes.
func (l *lab) remains() []string {
	l.t.Helper()
	var out []string
	for _, dir := range []string{string(l.records()), l.namespacesDir(), l.cacheDir(), filepath.Join(l.conf, "ipam", "lab")} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if e.Name() != "lock" && !strings.HasPrefix(e.Name(), "last_reserved_ip") && e.Name() != "results" {
				out = append(out, filepath.Join(dir, e.Name()))
			}
		}
	}
	results, _ := os.ReadDir(filepath.Join(l.cacheDir(), "results"))
	for _, e := range results {
		out = append(out, e.Name())
	}
	for _, name := range l.Links(l.Node) {
		if strings.HasPrefix(name, "sb") || strings.HasPrefix(name, "veth") {
			out = append(out, name)
		}
	}
	return out
}

func TestASandboxIsTakenOffWhateverThereIsOfIt(t *testing.T) {
	for _, mode := range []Mode{Bridge, CNI} {
		t.Run(string(mode), func(t *testing.T) {
			l := newLab(t, true)
			for name, meanwhile := range map[string]func(*Record){
				"all of it": func(*Record) {},
				"its namespace is gone, as after a reboot": func(rec *Record) {
					require.NoError(t, unix.Unmount(rec.Namespace, unix.MNT_DETACH))
				},
				"its interface is gone": func(rec *Record) {
					link, err := netlink.LinkByName(rec.Links[0].Name)
					require.NoError(t, err)
					require.NoError(t, netlink.LinkDel(link))
				},
				"its record was not finished": func(rec *Record) {
					rec.Links, rec.Connected = nil, false
					require.NoError(t, l.records().write(rec))
				},
				"somebody has flushed the rules": func(*Record) { nft(t, "flush ruleset") },
				"the operator has another configuration by now": func(*Record) {
					l.configure(strings.ReplaceAll(bridged, `"lab"`, `"other"`))
				},
			} {
				t.Run(name, func(t *testing.T) {
					l.configure(strings.ReplaceAll(bridged, "DIR", l.conf))
					rec := l.connect("sb-"+strings.ReplaceAll(name, " ", "-")[:6], mode)
					require.NotEmpty(t, l.remains())
					meanwhile(rec)
					require.NoError(t, l.Remove(t.Context(), rec.ID))
					require.Empty(t, l.remains())
					require.NoError(t, l.Remove(t.Context(), rec.ID), "again")
				})
			}
		})
	}
}

func TestWhatCantBeConnectedIsSaidAndLeavesNothing(t *testing.T) {
	l := newLab(t, true)
	good := strings.ReplaceAll(bridged, "DIR", l.conf)
	slow := filepath.Join(l.conf, "bin")
	require.NoError(t, os.Mkdir(slow, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(slow, "silent"), []byte("#!/bin/sh\n[ $CNI_COMMAND = DEL ] || exec sleep 1000\n"), 0o755))
	l.opts.CNI.BinDirs = append(l.opts.CNI.BinDirs, slow)
	for name, c := range map[string]struct{ conf, says string }{
		"no configuration":        {"", "there is no CNI configuration (*.conflist, *.conf) in " + l.conf},
		"one that can't be read":  {"{", "10-lab.conflist"},
		"a plugin that is absent": {strings.ReplaceAll(good, `"type": "bridge"`, `"type": "absent"`), `needs the plugin "absent", which is in none of`},
		"a plugin that fails":     {strings.ReplaceAll(good, "10.77.0.0/24", "10.77.0.0/33"), "invalid CIDR"},
		"no interface at all":     {`{"cniVersion": "1.0.0", "name": "lab", "plugins": [{"type": "loopback"}]}`, "no interface with an address"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(l.conf, "10-lab.conflist")
			require.NoError(t, os.RemoveAll(path))
			if c.conf != "" {
				l.configure(c.conf)
			}
			id := "sb-" + strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), "'", "")
			err := l.tryConnect(id, CNI)
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, c.says)
			require.NoError(t, l.Remove(t.Context(), id))
			require.Empty(t, l.remains())
		})
	}
	t.Run("a plugin that hangs", func(t *testing.T) {
		l.configure(`{"cniVersion": "1.0.0", "name": "lab", "plugins": [{"type": "silent"}]}`)
		ctx, cancel := context.WithCancel(t.Context())
		ns := l.namespaceFile()
		defer ns.Close()
		time.AfterFunc(100*time.Millisecond, cancel)
		_, err := l.Connect(ctx, "sb-hangs", CNI, ns)
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, l.Remove(t.Context(), "sb-hangs"))
		require.Empty(t, l.remains())
	})
	t.Run("the node's own namespace", func(t *testing.T) {
		own, err := os.Open("/proc/self/ns/net")
		require.NoError(t, err)
		defer own.Close()
		for _, mode := range []Mode{Bridge, CNI} {
			_, err = l.Connect(t.Context(), "sb-own", mode, own)
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, "the node's own")
			require.NoError(t, l.Remove(t.Context(), "sb-own"))
		}
	})
	t.Run("an interface without a side on the node", func(t *testing.T) {
		link, err := netlink.LinkByName("lo")
		require.NoError(t, err)
		_, err = nodesSide(link)
		require.ErrorContains(t, err, "lo, an interface of type device, which has no side on the node")
	})
	t.Run("a range that the node uses", func(t *testing.T) {
		l.opts.Bridge.Subnets = []netip.Prefix{netip.MustParsePrefix("203.0.0.0/16")}
		err := l.tryConnect("sb-range", Bridge)
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorContains(t, err, "overlaps with 203.0.0.0/16")
		require.NoError(t, l.Remove(t.Context(), "sb-range"))
	})
}

func TestAConfigurationOfOnePluginIsAListOfOne(t *testing.T) {
	file := filepath.Join(t.TempDir(), "10-one.conf")
	require.NoError(t, os.WriteFile(file, []byte(`{"cniVersion": "0.4.0", "name": "one", "type": "bridge", "bridge": "br9"}`), 0o600))
	list, err := loadCNIFile(file)
	require.NoError(t, err)
	require.Equal(t, "one", list.Name)
	require.Equal(t, "0.4.0", list.CNIVersion)
	require.Len(t, list.Plugins, 1)
	require.Contains(t, string(list.Plugins[0].Bytes), `"bridge":"br9"`)
}

func TestTheConfigurationIsTheFirstOrTheOneThatIsNamed(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"20-second.conflist": `{"cniVersion": "1.0.0", "name": "second", "plugins": [{"type": "ptp"}]}`,
		"10-first.conf":      `{"cniVersion": "1.0.0", "name": "first", "type": "bridge"}`,
		"05-readme.txt":      "no configuration",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	for named, want := range map[string]string{"": "first", "first": "first", "second": "second"} {
		m := &Manager{opts: Options{CNI: CNIOptions{ConfDir: dir, Network: named}}}
		found, err := m.loadCNI()
		require.NoError(t, err, named)
		require.Equal(t, want, found.list.Name, "named: %q", named)
	}
	m := &Manager{opts: Options{CNI: CNIOptions{ConfDir: dir, Network: "third"}}}
	_, err := m.loadCNI()
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, `is called "third" (network.cni.network); there are first, second`)
}

func TestRulesThatSomebodyElseHasChangedArePutBack(t *testing.T) {
	l := newEgressLab(t)
	rec := l.under("sb-one", Egress{Mode: egress.None, Bytes: 1000})
	var seen uint32
	look := func() []string {
		found, err := l.look(&seen)
		require.NoError(t, err)
		require.Empty(t, found.CutOff)
		return found.Restored
	}
	require.Empty(t, look(), "nothing has changed")
	nft(t, "table inet stranger {}")
	require.Empty(t, look(), "what is somebody else's is nobody's business here")
	nft(t, "delete table inet stranger")
	name, policy := l.rules.routed.Name, l.egress.table.Name
	l.sendFrom(rec, netlab.Web, "5555")
	before, err := l.Traffic(rec.ID)
	require.NoError(t, err)
	require.NotZero(t, before.Refused)
	require.NotZero(t, before.BytesOut)
	for _, change := range []string{
		"flush ruleset", "delete table netdev " + name, "delete table inet " + name, "flush chain netdev " + name + " common", "flush chain inet " + name + " local",
		"flush set netdev " + name + " sandboxes4", "delete element inet " + name + " sandboxes6 { " + rec.Addresses[1].String() + " }",
		"flush chain netdev " + name + " " + chainOf(rec, rec.Links[0]),
		"delete table inet " + policy, "flush chain inet " + policy + " sent", "flush chain inet " + policy + " inbound", "flush map inet " + policy + " from4", "flush map inet " + policy + " to6",
		"add rule inet " + policy + " out-sb-one accept",
	} {
		nft(t, change)
		require.Equal(t, []string{"sb-one"}, look(), change)
		ok, err := l.rules.intact([]*Record{rec})
		require.NoError(t, err)
		require.True(t, ok, change)
		require.True(t, l.egress.intact([]*Record{rec}), change)
		require.Empty(t, look())
		now, err := l.Traffic(rec.ID)
		require.NoError(t, err)
		require.Equal(t, before, now, "what was counted stays, after %q", change)
	}
}

func (l *lab) recorded() []*Record {
	l.t.Helper()
	all, err := l.all()
	require.NoError(l.t, err)
	return all
}

func TestRulesThatWereChangedWhileThereWasNoAgentAreToldOf(t *testing.T) {
	l := newLab(t, false)
	l.connect("sb-one", Bridge)
	restart := func() Lapses {
		var err error
		l.Manager, err = New(l.opts)
		require.NoError(t, err)
		return l.restore()
	}
	require.Empty(t, restart())
	l.opts.Listeners.TCP = append(l.opts.Listeners.TCP, 12345)
	require.Empty(t, restart(), "the operator has another list now, which is nobody's attack")
	l.opts.Egress.Resolvers = []netip.Addr{netip.MustParseAddr(resolverAddr)}
	require.Empty(t, restart(), "and another resolver")
	for _, change := range []string{
		"flush ruleset", "flush chain netdev " + l.rules.ingress.Name + " common", "delete table inet " + l.egress.table.Name, "insert rule inet " + l.egress.table.Name + " out-sb-one accept",
	} {
		nft(t, change)
		require.Equal(t, Lapses{Restored: []string{"sb-one"}}, restart(), change)
		require.Empty(t, restart())
	}
	// An earlier agent made other rules: they are as it left them, and are remade.
	nft(t, "insert rule inet "+l.egress.table.Name+" out-sb-one accept")
	l.egress.made["out-sb-one"]++
	l.egress.keep()
	was := l.egress.made["out-sb-one"]
	require.Empty(t, restart())
	require.Equal(t, was-1, l.egress.made["out-sb-one"])
	require.True(t, l.egress.intact(connected(l.recorded())))
	// Another sandbox's rules are set while there are none: its own begin does not hide that.
	nft(t, "flush ruleset")
	l.connect("sb-two", Bridge)
	var seen uint32
	found, err := l.look(&seen)
	require.NoError(t, err)
	require.Equal(t, []string{"sb-one"}, found.Restored)
	nft(t, "flush ruleset")
	require.NoError(t, l.Remove(t.Context(), "sb-two"))
	found, err = l.look(&seen)
	require.NoError(t, err)
	require.Equal(t, []string{"sb-one"}, found.Restored)
}

// own has another program own a table, which nobody else can change then (NFT_TABLE_F_OWNER), until release.
func (l *lab) own(table string) (release func()) { return l.owned(nil, table) }

// owned is own, in the network namespace that these words lead to.
func (l *lab) owned(words []string, table string) (release func()) {
	l.t.Helper()
	program := func(args ...string) *exec.Cmd {
		args = append(slices.Clone(words), args...)
		return exec.Command(args[0], args[1:]...)
	}
	cmd := program("nft", "-i")
	in, err := cmd.StdinPipe()
	require.NoError(l.t, err)
	require.NoError(l.t, cmd.Start())
	_, err = in.Write([]byte("table " + table + " { flags owner; }\n"))
	require.NoError(l.t, err)
	require.Eventually(l.t, func() bool {
		out, err := program("nft", "list", "tables").Output()
		return err == nil && strings.Contains(string(out), table)
	}, 20*time.Second, 20*time.Millisecond)
	return func() {
		require.NoError(l.t, in.Close())
		require.NoError(l.t, cmd.Wait()) // the table goes with it
	}
}

func TestP10ASandboxWhoseRulesCantBeSetIsNotConnected(t *testing.T) {
	l := newLab(t, false)
	for what, table := range map[string]string{
		"where it sends":     "netdev " + l.rules.ingress.Name,
		"where it is routed": "inet " + l.rules.routed.Name,
		"of its egress":      "inet " + l.egress.table.Name,
	} {
		t.Run("rules "+what, func(t *testing.T) {
			id := "sb-" + strings.ReplaceAll(what, " ", "-")
			release := l.own(table)
			err := l.tryConnect(id, Bridge)
			release()
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, "CONFIG_NF", "and what a kernel needs for them")
			require.NoError(t, l.Remove(t.Context(), id))
			require.Empty(t, l.remains())
			require.NoError(t, l.tryConnect(id, Bridge), "control: nothing else keeps it from that")
			require.NoError(t, l.Remove(t.Context(), id))
		})
	}
}

func TestP10ASandboxWhoseRulesCantBeHadIsCutOff(t *testing.T) {
	for name, find := range map[string]func(*lab) (Lapses, error){
		"by the look": func(l *lab) (Lapses, error) { var seen uint32; return l.look(&seen) },
		"by the next agent": func(l *lab) (Lapses, error) {
			again, err := New(l.opts)
			require.NoError(l.t, err)
			l.Manager = again
			return l.Restore()
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, false)
			rec := l.connect("sb-one", Bridge)
			targets := l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000")
			require.Equal(t, []string{"refused"}, l.try(rec, targets))
			nft(t, "flush ruleset")
			release := l.own("inet " + l.rules.routed.Name)
			require.Equal(t, []string{"reached x"}, l.try(rec, targets), "control: without rules the node answers")

			found, err := find(l)
			require.ErrorIs(t, err, ErrUnavailable)
			require.Equal(t, Lapses{CutOff: []string{"sb-one"}}, found, "and nothing was put back")
			require.NotEqual(t, []string{"reached x"}, l.try(rec, targets))
			require.ErrorContains(t, l.Recheck(t.Context(), rec.ID), "cut off from the network")
			release()
			require.Empty(t, l.restore())
			require.NotEqual(t, []string{"reached x"}, l.try(rec, targets), "it stays so")
			require.Equal(t, []string{"refused"}, l.try(l.connect("sb-two", Bridge), targets), "others are connected again")
		})
	}
}

func TestP10ASandboxWhoseRecordCantBeReadIsCutOffAndTheOthersAreKept(t *testing.T) {
	l := newLab(t, false)
	lost, kept := l.connect("sb-lost", Bridge), l.connect("sb-kept", Bridge)
	closed, open := l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000"), l.serve(l.World, "tcp "+netlab.Web+" 80")
	path := l.records().path("sb-lost")
	good, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	nft(t, "flush ruleset")
	require.Equal(t, []string{"reached x", "reached x"}, append(l.try(lost, closed), l.try(kept, closed)...), "control")
	found, err := l.Restore()
	require.ErrorContains(t, err, "reading the network record of sandbox sb-lost")
	require.Equal(t, Lapses{Restored: []string{"sb-kept"}, CutOff: []string{"sb-lost"}}, found)
	require.NotEqual(t, []string{"reached x"}, l.try(lost, closed))
	require.Equal(t, []string{"refused", "reached x"}, l.try(kept, append(closed, open...)))
	require.NoError(t, os.WriteFile(path, good, 0o600))
}

func TestRulesThatStandAreNoReasonToCutOff(t *testing.T) {
	l := newLab(t, false)
	rec := l.connect("sb-one", Bridge)
	closed, open := l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000"), l.serve(l.World, "tcp "+netlab.Web+" 80")
	l.rules.ingress.Name = strings.Repeat("x", 1000) // what the kernel never takes
	found, err := l.bringBack([]*Record{rec}, []*Record{rec}, whole)
	require.Error(t, err)
	require.Empty(t, found)
	require.Equal(t, []string{"refused", "reached x"}, l.try(rec, append(closed, open...)))
	l.rules = newRules(l.opts.StateDir, l.opts.Listeners, l.opts.Bridge.Subnets, l.log)
}

func TestP10AnInterfaceKeepsItsRulesUnderAnotherName(t *testing.T) {
	l := newLab(t, false)
	rec := l.connect("sb-one", Bridge)
	var seen uint32
	_, err := l.look(&seen)
	require.NoError(t, err)
	link, err := netlink.LinkByIndex(rec.Links[0].Index)
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetName(link, "renamed0"))
	targets := l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000")
	found, err := l.look(&seen)
	require.NoError(t, err)
	require.Equal(t, []string{"sb-one"}, found.Restored)
	require.Equal(t, []string{"refused"}, l.try(rec, targets))
	out, err := exec.Command("nft", "list", "chain", "netdev", l.rules.ingress.Name, chainOf(rec, rec.Links[0])).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), `device "renamed0"`)
	require.NoError(t, netlink.LinkSetName(link, rec.Links[0].Name))
}

func TestARuleStandsOnceWhoeverAddsItFirst(t *testing.T) {
	l := newEgressLab(t)
	one := l.under("sb-one", Egress{Connections: 3})
	rules := func() string {
		out, err := exec.Command("nft", "--stateless", "list", "ruleset").CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	before := rules()
	// Another sandbox's end or a look has set the rules of all, also of one whose interface was recorded a moment ago.
	require.NoError(t, l.guard(one))
	require.Equal(t, before, rules())
	ok, err := l.rules.intact([]*Record{one})
	require.NoError(t, err)
	require.True(t, ok)
}

func TestCanariesHearTheSandboxThatReachesThem(t *testing.T) {
	l := newLab(t, false)
	rec := l.connect("sb-one", Bridge)
	l.TCP(l.Node, "kubelet", netlab.NodeAddr+":10250")
	attempt := func() []string {
		c, err := l.Canaries(rec.ID)
		require.NoError(t, err)
		var targets []string
		for _, a := range c.Targets() {
			if a.Network == "unix" || a.Address.Addr().Unmap().String() == netlab.Metadata || a.Address.Addr().String() == netlab.Metadata6 {
				continue // no shell's, and the cloud's
			}
			targets = append(targets, a.Network+" "+a.Address.Addr().String()+" "+strconv.Itoa(int(a.Address.Port()))+" "+a.Token)
		}
		require.Contains(t, strings.Join(targets, "\n"), "tcp "+netlab.NodeAddr+" 10250 ", "what listens already is its own canary")
		require.Contains(t, strings.Join(targets, "\n"), "udp "+netlab.NodeAddr6+" 5000 ")
		require.Contains(t, strings.Join(targets, "\n"), "tcp ::ffff:"+netlab.NodeAddr+" 10250 ", "and as a socket of IPv6 reaches it")
		script := `while read -r k a p t; do { echo $t >&9; } 9<>/dev/$k/$a/$p; done 2>/dev/null`
		cmd := l.Command(rec.Namespace, "bash", "-c", script)
		cmd.Stdin = strings.NewReader(strings.Join(targets, "\n") + "\n")
		_ = cmd.Run()
		reached, err := c.Close()
		require.NoError(t, err)
		return reached
	}
	require.Empty(t, attempt())
	require.NoError(t, l.rules.clear())
	reached := strings.Join(attempt(), "\n")
	for _, want := range []string{"tcp " + netlab.NodeAddr + ":44772", "udp " + netlab.NodeAddr + ":5000", "tcp [" + netlab.NodeAddr6 + "]:10255"} {
		require.Contains(t, reached, want, "without rules")
	}
	l.restore()
	_, err := l.Canaries("sb-none")
	require.ErrorIs(t, err, ErrNotFound)
}

func TestCanariesWaitForTheGatewayOfANewBridge(t *testing.T) {
	l := newLab(t, true)
	rec := l.connect("sb-one", CNI)
	const gateway = "fd77::1"
	// As after a bridge is made, but from now on and for two or three seconds: connecting takes as long as the machine is loaded.
	out, err := exec.Command("sh", "-ec", `echo 2 >/proc/sys/net/ipv6/conf/cni0/dad_transmits
		ip address del `+gateway+`/64 dev cni0; ip address add `+gateway+`/64 dev cni0; ip -6 address show dev cni0 tentative`).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), gateway, "control: nobody answers there yet")
	c, err := l.Canaries(rec.ID)
	require.NoError(t, err)
	_, err = c.Close()
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(c.Targets(), func(a Target) bool { return a.Address.Addr().String() == gateway }))
}

// That nobody in a sandbox reaches a canary proves nothing where the node itself doesn't.
func TestP10CanariesThatDoNotHearTheAgentProveNothing(t *testing.T) {
	l := newLab(t, false)
	rec := l.connect("sb-one", Bridge)
	for what, c := range map[string]struct{ rule, says string }{
		"datagrams are lost":      {"udp dport 5000 drop", "hear the agent itself: a firewall keeps the node from its own addresses"},
		"connections are refused": {"tcp dport 44772 reject with tcp reset", "trying the canary tcp " + netlab.NodeAddr + ":44772"},
	} {
		t.Run(what, func(t *testing.T) {
			nft(t, "table ip lab3 { chain in { type filter hook input priority 10; iifname lo ip daddr "+netlab.NodeAddr+" "+c.rule+"; }\n}")
			_, err := l.Canaries(rec.ID)
			nft(t, "delete table ip lab3")
			require.ErrorContains(t, err, c.says)
			again, err := l.Canaries(rec.ID)
			require.NoError(t, err, "control: all of them are closed, and without that rule they hear")
			_, err = again.Close()
			require.NoError(t, err)
		})
	}
}

func TestAnAbstractCanaryIsHeardOfInItsOwnNetworkNamespaceOnly(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Program("python3"), testkit.Program("unshare"))
	const dial = `import socket, sys
s = socket.socket(socket.AF_UNIX)
try: s.connect("\0" + sys.argv[1][1:]); s.send(sys.argv[2].encode()); print("reached")
except OSError as e: print(e.strerror)`
	for within, want := range map[string]string{"the node's": "reached\n", "another": "Connection refused\n"} {
		c, err := UnixCanary()
		require.NoError(t, err)
		require.Len(t, c.Targets(), 1)
		args := []string{"python3", "-c", dial, c.Targets()[0].Name, c.Targets()[0].Token}
		if within == "another" {
			args = append([]string{"unshare", "-n"}, args...)
		}
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
		require.Equal(t, want, string(out), within)
		reached, err := c.Close()
		require.NoError(t, err)
		if within == "another" {
			require.Empty(t, reached)
		} else {
			require.Equal(t, []string{c.Targets()[0].String()}, reached)
		}
	}
}

func TestCanariesHearWhatHasArrivedWhenTheyAreClosed(t *testing.T) {
	l := newLab(t, false)
	rec := l.connect("sb-one", Bridge)
	c, err := l.Canaries(rec.ID)
	require.NoError(t, err)
	udp := slices.DeleteFunc(slices.Clone(c.own), func(a Target) bool { return a.Network != "udp" })
	const each = 5
	c.mu.Lock() // the canaries are slow
	for _, to := range udp {
		conn, err := net.Dial("udp", to.Address.String())
		require.NoError(t, err)
		for range each {
			_, err := conn.Write([]byte(to.Token))
			require.NoError(t, err)
		}
		require.NoError(t, conn.Close())
	}
	time.AfterFunc(50*time.Millisecond, c.mu.Unlock)
	reached, err := c.Close()
	require.NoError(t, err)
	require.Len(t, reached, each*len(udp))
}
