package network

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// hear prints what it hears of frames that say "try-NAME.", on any interface, until it hears "try-end".
const hear = `
import re, socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print('ready', flush=True)
while True:
    m = re.search(rb'try-([a-z-]+)[.]', s.recv(2048))
    if m: print(m.group(1).decode(), flush=True)
    if m and m.group(1) == b'end': break
`

// send sends frames.
const send = `
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(('eth0', 0))
for f in sys.argv[1:]: s.send(bytes.fromhex(f))
`

// frame is one of Ethernet, in hexadecimal.
func frame(to, from net.HardwareAddr, kind uint16, payload []byte) string {
	return hex.EncodeToString(slices.Concat(to, from, []byte{byte(kind >> 8), byte(kind)}, payload))
}

// neighbourPacket is a message of neighbour discovery about an address.
func neighbourPacket(from, to string, kind byte, about, says string) []byte {
	body := slices.Concat([]byte{kind, 0, 0, 0, 0, 0, 0, 0}, netip.MustParseAddr(about).AsSlice(), []byte("try-"+says+"."))
	return slices.Concat([]byte{0x60, 0, 0, 0, 0, byte(len(body)), 58, 255}, netip.MustParseAddr(from).AsSlice(), netip.MustParseAddr(to).AsSlice(), body)
}

func arpPacket(mac net.HardwareAddr, sender, says string) []byte {
	ip := netip.MustParseAddr(sender).AsSlice()
	return slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 2}, mac, ip, mac, ip, []byte("try-"+says+"."))
}

func TestP10WhatKeepsALinkGoingCarriesNothingElsewhere(t *testing.T) {
	l := newLab(t, true)
	for _, key := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		l.Sysctl(l.Node, "net/bridge/"+key, "1")
	}
	ns := l.namespaceFile()
	defer ns.Close()
	t.Cleanup(func() { require.NoError(t, l.Remove(context.Background(), "sb-one")) })
	_, err := l.ConnectUnder(t.Context(), "sb-one", CNI, Egress{Mode: egress.None}, ns)
	require.NoError(t, err)
	rec, err := l.Get("sb-one")
	require.NoError(t, err)
	run(t, exec.Command("ip", "link", "add", "pod0", "master", "cni0", "up", "type", "veth", "peer", "name", "pod1", "netns", l.World))
	defer func() { run(t, exec.Command("ip", "link", "del", "pod0")) }()
	run(t, l.Command(l.World, "ip", "link", "set", "pod1", "up"))

	// What the node would carry on is not to wait until the node knows its neighbour, for the end is carried by the bridge alone.
	run(t, l.Command(l.Node, "python3", "-c", "import socket; socket.socket(socket.AF_INET6).connect_ex(('"+netlab.Web6+"', 9))"))

	bridge, err := netlink.LinkByName("cni0")
	require.NoError(t, err)
	h, err := inside(rec.Namespace)
	require.NoError(t, err)
	defer h.Close()
	eth0, err := h.LinkByName(ifName)
	require.NoError(t, err)
	node, mac, all := bridge.Attrs().HardwareAddr, eth0.Attrs().HardwareAddr, net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	own4, own6 := rec.Addresses[0].String(), rec.Addresses[1].String()
	const six = 0x86dd
	attacks := []string{
		frame(node, mac, six, neighbourPacket(own6, netlab.Web6, 135, netlab.Web6, "question-to-the-world")),
		frame(node, mac, six, neighbourPacket("fd77::99", netlab.Web6, 136, "fd77::99", "answer-to-the-world-as-another")),
		frame(all, mac, six, neighbourPacket(own6, "ff02::1", 136, "fd77::1", "answer-for-the-gateway")),
		frame(all, mac, six, neighbourPacket("fd77::99", "ff02::1", 135, "fd77::1", "question-as-another")),
		frame(all, mac, 0x0806, arpPacket(mac, "10.77.0.1", "arp-as-the-gateway")),
		frame(all, mac, 0x8100, slices.Concat([]byte{0, 5, 0x86, 0xdd}, neighbourPacket(own6, "ff02::1", 135, own6, "in-a-vlan"))),
	}
	names := []string{"question-to-the-world", "answer-to-the-world-as-another", "answer-for-the-gateway", "question-as-another", "arp-as-the-gateway", "in-a-vlan"}
	ordinary := []string{
		frame(all, mac, six, neighbourPacket(own6, "ff02::1", 136, own6, "own-answer")),
		frame(all, mac, six, neighbourPacket("::", "ff02::1", 135, own6, "question-without-an-address")),
		frame(all, mac, 0x0806, arpPacket(mac, own4, "end")),
	}
	heard := func() []string {
		cmd := l.Command(l.World, "python3", "-c", hear)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(out)
		require.True(t, lines.Scan())
		run(t, l.Command(rec.Namespace, append([]string{"python3", "-c", send}, slices.Concat(attacks, ordinary)...)...))
		var all []string
		for lines.Scan() {
			if !slices.Contains(all, lines.Text()) {
				all = append(all, lines.Text())
			}
		}
		require.NoError(t, cmd.Wait())
		return all
	}
	require.Equal(t, []string{"own-answer", "question-without-an-address", "end"}, heard())
	require.NoError(t, errors.Join(l.rules.clear(), l.egress.set(nil)))
	require.Subset(t, heard(), names, "control: without rules each of them arrives")
	l.restore()
	require.Equal(t, []string{"own-answer", "question-without-an-address", "end"}, heard())
}
