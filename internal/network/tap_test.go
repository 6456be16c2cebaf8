package network

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
)

// tap makes a tap interface in a network namespace. Each read and each write of the file is a frame.
func tap(t *testing.T, namespace, name string) *os.File {
	t.Helper()
	type made struct {
		fd  int
		err error
	}
	ch := make(chan made)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the namespace
		fd, err := tapIn(namespace, name)
		ch <- made{fd, err}
	}()
	m := <-ch
	require.NoError(t, m.err)
	f := os.NewFile(uintptr(m.fd), name)
	t.Cleanup(func() { f.Close() })
	return f
}

func tapIn(namespace, name string) (int, error) {
	ns, err := netns.GetFromPath(namespace)
	if err != nil {
		return -1, err
	}
	defer ns.Close()
	if err := netns.Set(ns); err != nil {
		return -1, err
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		return -1, err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	return fd, unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
}

// pump carries frames from one to the other until either is closed.
func pump(to, from *os.File) {
	frame := make([]byte, 1<<16)
	for {
		n, err := from.Read(frame)
		if err != nil {
			return
		}
		_, _ = to.Write(frame[:n]) // an interface that is not up yet takes none
	}
}

// behindTap gives a sandbox's network to a machine as Kata does: a tap beside eth0, whose packets are redirected to eth0 and
// eth0's to it, with addresses, routes and link address of eth0 for the machine. What stands for the machine is a network stack of
// its own, on which everything may be tried. The answer is the sandbox's record with the machine's namespace.
func (l *lab) behindTap(rec *Record) *Record {
	l.t.Helper()
	ns := l.namespaceFile()
	l.t.Cleanup(func() { ns.Close() })
	machine := *rec
	machine.Namespace = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd())
	vmm, nic := tap(l.t, rec.Namespace, "tap0_kata"), tap(l.t, machine.Namespace, ifName)
	go pump(vmm, nic)
	go pump(nic, vmm)
	run(l.t, l.Command(rec.Namespace, "ip", "link", "set", "tap0_kata", "up"))
	for from, to := range map[string]string{ifName: "tap0_kata", "tap0_kata": ifName} {
		run(l.t, l.Command(rec.Namespace, "tc", "qdisc", "add", "dev", from, "ingress"))
		run(l.t, l.Command(rec.Namespace, "tc", "filter", "add", "dev", from, "parent", "ffff:", "protocol", "all", "u32", "match", "u8", "0", "0",
			"action", "mirred", "egress", "redirect", "dev", to))
	}
	l.copyLink(rec.Namespace, machine.Namespace)
	return &machine
}

// copyLink gives the eth0 of one namespace what that of another has.
func (l *lab) copyLink(from, to string) {
	l.t.Helper()
	source, err := inside(from)
	require.NoError(l.t, err)
	defer source.Close()
	target, err := inside(to)
	require.NoError(l.t, err)
	defer target.Close()
	eth0, err := source.LinkByName(ifName)
	require.NoError(l.t, err)
	nic, err := target.LinkByName(ifName)
	require.NoError(l.t, err)
	require.NoError(l.t, target.LinkSetHardwareAddr(nic, eth0.Attrs().HardwareAddr))
	require.NoError(l.t, target.LinkSetMTU(nic, eth0.Attrs().MTU))
	require.NoError(l.t, target.LinkSetUp(nic))
	addresses, err := source.AddrList(eth0, netlink.FAMILY_ALL)
	require.NoError(l.t, err)
	for _, a := range addresses {
		if !a.IP.IsLinkLocalUnicast() {
			require.NoError(l.t, target.AddrReplace(nic, &netlink.Addr{IPNet: a.IPNet, Flags: unix.IFA_F_NODAD, Scope: a.Scope}))
		}
	}
	neighbours, err := source.NeighList(eth0.Attrs().Index, netlink.FAMILY_ALL)
	require.NoError(l.t, err)
	for _, n := range neighbours {
		if n.State&netlink.NUD_PERMANENT != 0 {
			n.LinkIndex = nic.Attrs().Index
			require.NoError(l.t, target.NeighSet(&n))
		}
	}
	routes, err := source.RouteList(eth0, netlink.FAMILY_ALL)
	require.NoError(l.t, err)
	slices.SortFunc(routes, func(a, b netlink.Route) int { return len(a.Gw) - len(b.Gw) }) // a gateway needs the route to it
	for _, r := range routes {
		if r.Protocol != unix.RTPROT_KERNEL {
			r.LinkIndex = nic.Attrs().Index
			require.NoError(l.t, target.RouteReplace(&r))
		}
	}
}

// udpPacket is a packet of IPv4 that says something.
func udpPacket(from, to netip.Addr, port uint16, says string) []byte {
	text := []byte("try-" + says + ".")
	udp := slices.Concat(binary.BigEndian.AppendUint16(nil, 4000), binary.BigEndian.AppendUint16(nil, port), binary.BigEndian.AppendUint16(nil, uint16(8+len(text))), []byte{0, 0}, text)
	ip := slices.Concat([]byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.AsSlice(), to.AsSlice())
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum))
	return append(ip, udp...)
}

// A machine's own kernel may send whatever it likes: the rules are on the node's side of eth0.
func TestP10TheRulesHoldWhatAMachineSendsThroughATap(t *testing.T) {
	for _, mode := range []Mode{Bridge, CNI} {
		t.Run(string(mode), func(t *testing.T) {
			l := newLab(t, mode == CNI)
			rec, other := l.connect("sb-one", mode), l.connect("sb-two", mode)
			machine := l.behindTap(rec)
			open := l.serve(l.World, "tcp "+netlab.Web+" 80", "tcp "+netlab.Web6+" 80", "udp "+netlab.Web+" 4000")
			closed := slices.Concat(
				l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000", "udp "+netlab.NodeAddr+" 9000", "tcp "+netlab.NodeAddr6+" 9000", "tcp "+netlab.NodeAddr+" 10250"),
				l.serve(l.World, "tcp "+netlab.Metadata+" 80", "tcp "+netlab.Other+" 44772", "udp "+netlab.Other+" 5000"),
				l.serve(other.Namespace, "tcp "+other.Addresses[0].String()+" 8000"))

			require.NoError(t, l.rules.clear())
			if mode == Bridge {
				nft(t, "table inet lab2 { chain post { type nat hook postrouting priority srcnat; oifname uplink0 masquerade; }\n}")
			}
			all := slices.Concat(open, closed)
			for i, what := range l.try(machine, all) {
				require.Equal(t, "reached x", what, "control: without rules %s answers the machine", all[i])
			}
			if mode == Bridge {
				nft(t, "delete table inet lab2")
			}
			l.restore()
			for i, what := range l.try(machine, open) {
				require.Equal(t, "reached x", what, "%s is open", open[i])
			}
			for i, what := range l.try(machine, closed) {
				require.Equal(t, "refused", what, "%s must be refused at once", closed[i])
			}
		})
	}
}

func TestP10AMachineBehindATapSpeaksForItselfAlone(t *testing.T) {
	l := newLab(t, false)
	rec, other := l.connect("sb-one", Bridge), l.connect("sb-two", Bridge)
	machine := l.behindTap(rec)
	h, err := inside(rec.Namespace)
	require.NoError(t, err)
	defer h.Close()
	eth0, err := h.LinkByName(ifName)
	require.NoError(t, err)
	gateways, err := h.NeighList(eth0.Attrs().Index, netlink.FAMILY_V4)
	require.NoError(t, err)
	i := slices.IndexFunc(gateways, func(n netlink.Neigh) bool { return n.State&netlink.NUD_PERMANENT != 0 })
	require.GreaterOrEqual(t, i, 0)
	node, mac, web := gateways[i].HardwareAddr, eth0.Attrs().HardwareAddr, netip.MustParseAddr(netlab.Web)
	strange := net.HardwareAddr{2, 0, 0, 0, 0, 0x66}
	const four = 0x0800
	frames := []string{
		frame(node, mac, four, udpPacket(other.Addresses[0], web, 4000, "as-the-other")),
		frame(node, mac, four, udpPacket(netip.MustParseAddr(netlab.NodeAddr), web, 4000, "as-the-node")),
		frame(node, strange, four, udpPacket(other.Addresses[0], web, 4000, "as-the-other-by-another-card")),
		frame(node, mac, 0x8100, slices.Concat([]byte{0, 5, 8, 0}, udpPacket(rec.Addresses[0], web, 4000, "in-a-vlan"))),
		frame(node, mac, four, udpPacket(rec.Addresses[0], web, 5000, "to-a-listener")),
		frame(node, mac, four, udpPacket(rec.Addresses[0], web, 4000, "end")),
	}
	heard := func() []string { return l.hearFrom(machine, frames) }
	require.Equal(t, []string{"end"}, heard())
	require.NoError(t, l.rules.clear())
	require.Subset(t, heard(), []string{"as-the-other", "as-the-other-by-another-card", "to-a-listener"}, "control: without rules they arrive")
	l.restore()
	require.Equal(t, []string{"end"}, heard())
}

// hearFrom is what the world hears of frames that a sandbox sends.
func (l *lab) hearFrom(rec *Record, frames []string) []string {
	l.t.Helper()
	cmd := l.Command(l.World, "python3", "-c", hear)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(l.t, err)
	require.NoError(l.t, cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(l.t, lines.Scan(), "it is ready")
	run(l.t, l.Command(rec.Namespace, append([]string{"python3", "-c", send}, frames...)...))
	var all []string
	for lines.Scan() {
		if !slices.Contains(all, lines.Text()) {
			all = append(all, lines.Text())
		}
	}
	require.NoError(l.t, cmd.Wait())
	return all
}
