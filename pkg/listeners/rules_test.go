package listeners

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// packet is what rules look at.
type packet struct {
	arp, notIP bool
	tagged     bool
	from, to   netip.Addr
	claim      netip.Addr // what a neighbour advertises
	protocol   uint8
	port       uint16
	icmpType   uint8
	fragment   bool
	local      bool // to the node
	sandbox    bool // to another sandbox
	opens      bool
	by         uint32
}

// matches is what a rule says of a packet, apart from the kernel's words for it.
func (r Rule) matches(p packet) bool {
	family := FamilyOf(p.to)
	if p.to.Is4In6() {
		family = IPv6
	}
	inNone := func(a netip.Addr) bool {
		return !slices.ContainsFunc(r.NotFrom, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	inOne := slices.ContainsFunc(r.To, func(to netip.Prefix) bool { return to.Contains(p.to) })
	switch {
	case r.ARP != p.arp && r.ARP, r.NotIP && !p.notIP && !p.arp:
		return false
	case (p.arp || p.notIP) && !r.ARP && !r.NotIP && !r.Tagged:
		return false
	case r.Family != AnyFamily && r.Family != family,
		len(r.Protocols) > 0 && !slices.Contains(r.Protocols, p.protocol),
		slices.Contains(r.NotProtocols, p.protocol),
		r.Fragment && !p.fragment,
		len(r.ICMPTypes) > 0 && !slices.Contains(r.ICMPTypes, p.icmpType),
		len(r.Ports) > 0 && !slices.Contains(r.Ports, p.port),
		len(r.To) > 0 && !inOne,
		r.Foreign && !inNone(p.from),
		r.Claim && !inNone(p.claim),
		r.Tagged && !p.tagged,
		r.Local && !p.local,
		r.NotUnicast && !p.local,
		r.ToSandbox && !p.sandbox,
		r.Opens && !p.opens,
		len(r.MadeBy) > 0 && !slices.Contains(r.MadeBy, p.by):
		return false
	}
	return true
}

// decide is what becomes of a packet: the first rule that matches.
func decide(rules []Rule, p packet) Action {
	for _, r := range rules {
		if r.matches(p) {
			return r.Action
		}
	}
	return Admit
}

var (
	own  = []netip.Addr{netip.MustParseAddr("10.231.0.5"), netip.MustParseAddr("fd23::5")}
	list = List{TCP: []uint16{44772, 18080}, UDP: []uint16{5000}, Nameservers: []netip.Addr{netip.MustParseAddr("169.254.20.10"), netip.MustParseAddr("9.9.9.9")}}
)

func sent(to string, protocol uint8, port uint16) packet {
	a := netip.MustParseAddr(to)
	from := own[0]
	if a.Is6() {
		from = own[1]
	}
	return packet{from: from, to: a, protocol: protocol, port: port}
}

func TestP10WhatASandboxSendsIsRefusedOrNot(t *testing.T) {
	ingress := append(Source(own), list.Ingress()...)
	to := func(p packet, change func(*packet)) packet { change(&p); return p }
	for name, c := range map[string]struct {
		p    packet
		want Action
	}{
		"a web server":                                      {sent("198.51.100.10", TCP, 443), Admit},
		"a web server over IPv6":                            {sent("2001:db8::1", TCP, 443), Admit},
		"a datagram":                                        {sent("198.51.100.10", UDP, 443), Admit},
		"a ping":                                            {sent("198.51.100.10", ICMP, 0), Admit},
		"the node":                                          {to(sent("203.0.113.2", TCP, 443), func(p *packet) { p.local = true }), Refuse},
		"the node's nameserver, named":                      {to(sent("169.254.20.10", UDP, 53), func(p *packet) { p.local = true }), Admit},
		"the named nameserver's other ports":                {to(sent("169.254.20.10", UDP, 54), func(p *packet) { p.local = true }), Refuse},
		"the node's nameserver, not named":                  {to(sent("203.0.113.2", UDP, 53), func(p *packet) { p.local = true }), Refuse},
		"metadata":                                          {sent("169.254.169.254", TCP, 80), Refuse},
		"metadata's nameserver":                             {sent("169.254.169.254", UDP, 53), Refuse},
		"metadata over IPv6":                                {sent("fd00:ec2::254", TCP, 80), Refuse},
		"metadata of Google over IPv6":                      {sent("fd20:ce::254", TCP, 80), Refuse},
		"metadata through NAT64":                            {sent("64:ff9b::169.254.169.254", TCP, 80), Refuse},
		"loopback through NAT64":                            {sent("64:ff9b::127.0.0.1", TCP, 80), Refuse},
		"Alibaba's metadata through NAT64":                  {sent("64:ff9b::100.100.100.200", TCP, 80), Refuse},
		"Azure's WireServer through NAT64":                  {sent("64:ff9b::168.63.129.16", TCP, 80), Refuse},
		"a web server through NAT64":                        {sent("64:ff9b::198.51.100.10", TCP, 443), Admit},
		"an IPv4-mapped address on the wire":                {sent("::ffff:198.51.100.10", TCP, 80), Refuse},
		"the link":                                          {sent("fe80::1", TCP, 80), Refuse},
		"loopback":                                          {sent("127.0.0.1", TCP, 80), Refuse},
		"an operator's port anywhere":                       {sent("198.51.100.10", TCP, 44772), Refuse},
		"an operator's port over IPv6":                      {sent("2001:db8::1", TCP, 18080), Refuse},
		"its number in UDP":                                 {sent("198.51.100.10", UDP, 44772), Admit},
		"an operator's UDP port":                            {sent("198.51.100.10", UDP, 5000), Refuse},
		"another node's kubelet":                            {sent("198.51.100.20", TCP, 10250), Refuse},
		"another sandbox":                                   {to(sent("10.231.0.6", TCP, 80), func(p *packet) { p.sandbox = true }), Refuse},
		"another sandbox over IPv6":                         {to(sent("fd23::6", UDP, 80), func(p *packet) { p.sandbox = true }), Refuse},
		"somebody else's source":                            {to(sent("198.51.100.10", TCP, 443), func(p *packet) { p.from = netip.MustParseAddr("10.231.0.6") }), Drop},
		"somebody else's source over IPv6":                  {to(sent("2001:db8::1", TCP, 443), func(p *packet) { p.from = netip.MustParseAddr("fd23::6") }), Drop},
		"a fragment of TCP":                                 {to(sent("198.51.100.10", TCP, 0), func(p *packet) { p.fragment = true }), Drop},
		"a fragment of UDP":                                 {to(sent("198.51.100.10", UDP, 443), func(p *packet) { p.fragment = true }), Admit},
		"a fragment of IPv6":                                {to(sent("2001:db8::1", UDP, 443), func(p *packet) { p.fragment = true }), Drop},
		"SCTP":                                              {sent("198.51.100.10", 132, 443), Refuse},
		"IPv6 in IPv4":                                      {sent("198.51.100.10", 41, 0), Refuse},
		"address resolution":                                {packet{arp: true, from: own[0]}, Admit},
		"a probe for an address":                            {packet{arp: true, from: netip.IPv4Unspecified()}, Admit},
		"address resolution for somebody else":              {packet{arp: true, from: netip.MustParseAddr("10.231.0.6")}, Drop},
		"a frame of a VLAN":                                 {to(sent("198.51.100.10", TCP, 443), func(p *packet) { p.tagged = true }), Drop},
		"ARP in a VLAN":                                     {packet{arp: true, from: own[0], tagged: true}, Drop},
		"something else than IP":                            {packet{notIP: true}, Drop},
		"a neighbour's question":                            {packet{from: netip.MustParseAddr("fe80::5"), to: netip.MustParseAddr("ff02::1:ff00:1"), protocol: ICMPv6, icmpType: 135, local: true}, Admit},
		"a neighbour's question before there is an address": {packet{from: netip.IPv6Unspecified(), to: netip.MustParseAddr("ff02::1:ff00:1"), protocol: ICMPv6, icmpType: 135, local: true}, Admit},
		"a neighbour's answer to the node":                  {to(sent("fd23::1", ICMPv6, 0), func(p *packet) { p.icmpType, p.local, p.claim = 136, true, own[1] }), Admit},
		"a neighbour's answer for another":                  {to(sent("ff02::1", ICMPv6, 0), func(p *packet) { p.icmpType, p.local, p.claim = 136, true, netip.MustParseAddr("fd23::6") }), Drop},
		"a neighbour's question as another":                 {packet{from: netip.MustParseAddr("fd23::6"), to: netip.MustParseAddr("ff02::1"), protocol: ICMPv6, icmpType: 135, local: true}, Drop},
		"a neighbour's question to metadata":                {to(sent("fd00:ec2::254", ICMPv6, 0), func(p *packet) { p.icmpType = 135 }), Refuse},
		"a neighbour's question to another sandbox":         {to(sent("fd23::6", ICMPv6, 0), func(p *packet) { p.icmpType, p.sandbox = 135, true }), Refuse},
		"a neighbour's question as anybody to anywhere":     {packet{from: netip.MustParseAddr("fe80::5"), to: netip.MustParseAddr("2001:db8::1"), protocol: ICMPv6, icmpType: 135}, Drop},
		"a router's advertisement":                          {packet{from: netip.MustParseAddr("fe80::5"), to: netip.MustParseAddr("ff02::1"), protocol: ICMPv6, icmpType: 134, local: true}, Drop},
		"a redirect":                                        {packet{from: own[1], to: netip.MustParseAddr("fe80::1"), protocol: ICMPv6, icmpType: 137, local: true}, Refuse},
		"a sandbox with one family, the other":              {packet{from: netip.MustParseAddr("fd23::5"), to: netip.MustParseAddr("2001:db8::1"), protocol: TCP, port: 443}, Admit},
	} {
		require.Equal(t, c.want, decide(ingress, c.p), name)
	}
	four := append(Source(own[:1]), list.Ingress()...)
	require.Equal(t, Drop, decide(four, sent("2001:db8::1", TCP, 443)), "without an address of IPv6 nothing of IPv6 gets out")
}

func TestP10WhatWasTranslatedIsRefusedAsWell(t *testing.T) {
	require.Equal(t, Refuse, decide(list.Local(), sent("203.0.113.2", TCP, 6443)))
	require.Equal(t, Admit, decide(list.Local(), sent("169.254.20.10", UDP, 53)))
	require.Equal(t, Refuse, decide(list.Forwarded(), sent("198.51.100.20", TCP, 10250)))
	require.Equal(t, Refuse, decide(list.Forwarded(), sent("169.254.169.254", TCP, 80)))
	require.Equal(t, Admit, decide(list.Forwarded(), sent("198.51.100.20", TCP, 443)))
}

func TestP10WithinASandboxAListedPortIsTheManagementsAlone(t *testing.T) {
	const management, command = 0, 1000
	inside := list.Inside([]uint32{management})
	for name, c := range map[string]struct {
		p    packet
		want Action
	}{
		"a command":                         {packet{protocol: TCP, port: 44772, opens: true, by: command}, Refuse},
		"a command over IPv6":               {packet{to: netip.IPv6Loopback(), protocol: TCP, port: 18080, opens: true, by: command}, Refuse},
		"a command's datagram":              {packet{protocol: UDP, port: 5000, by: command}, Refuse},
		"the management":                    {packet{protocol: TCP, port: 44772, opens: true, by: management}, Admit},
		"the management's datagram":         {packet{protocol: UDP, port: 5000, by: management}, Admit},
		"an answer to a port of the number": {packet{protocol: TCP, port: 44772, by: command}, Admit},
		"a command's own port":              {packet{protocol: TCP, port: 10250, opens: true, by: command}, Admit},
		"the same number of UDP":            {packet{protocol: UDP, port: 44772, by: command}, Admit},
	} {
		c.p.local = true
		require.Equal(t, c.want, decide(inside, c.p), name)
		c.p.local = false
		require.Equal(t, Admit, decide(inside, c.p), "%s, on its way out of the sandbox, where other rules are", name)
	}
	require.Len(t, List{}.Inside([]uint32{management}), 1, "without ports nothing is refused")
}

// Whatever a sandbox sends: what reaches the node, another sandbox or a closed address or port is never admitted, but for a named
// nameserver's port 53 and what a link needs.
func TestP10NothingClosedIsEverAdmitted(t *testing.T) {
	ingress := append(Source(own), list.Ingress()...)
	rapid.Check(t, func(t *rapid.T) {
		var p packet
		if rapid.Bool().Draw(t, "four") {
			p.to = netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "to")))
		} else {
			p.to = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "to")))
		}
		p.protocol = rapid.OneOf(rapid.Byte(), rapid.SampledFrom([]uint8{TCP, UDP, ICMP, ICMPv6})).Draw(t, "protocol")
		p.port = rapid.OneOf(rapid.Uint16(), rapid.SampledFrom(slices.Concat(list.tcpPorts(), list.udpPorts(), []uint16{53}))).Draw(t, "port")
		p.icmpType = rapid.OneOf(rapid.Byte(), rapid.SampledFrom(neighbours)).Draw(t, "type")
		p.claim = rapid.SampledFrom([]netip.Addr{own[1], netip.MustParseAddr("fd23::6")}).Draw(t, "claim")
		// One thing closes it mostly: a rule that is missing shows only where no other one does its work.
		switch rapid.SampledFrom([]string{"the node", "a sandbox", "address", "TCP port", "UDP port", "all"}).Draw(t, "closed") {
		case "the node":
			p.local = true
		case "a sandbox":
			p.sandbox = true
		case "address":
			p.to = rapid.SampledFrom(Management).Draw(t, "prefix").Addr()
		case "TCP port":
			p.protocol, p.port = TCP, rapid.SampledFrom(list.tcpPorts()).Draw(t, "TCP port")
		case "UDP port":
			p.protocol, p.port = UDP, rapid.SampledFrom(list.udpPorts()).Draw(t, "UDP port")
		case "all":
			p.local, p.sandbox, p.fragment = rapid.Bool().Draw(t, "local"), rapid.Bool().Draw(t, "sandbox"), rapid.Bool().Draw(t, "fragment")
		}
		if p.from = own[0]; p.to.Is6() {
			p.from = own[1]
		}
		closed := p.local || p.sandbox || slices.ContainsFunc(Management, func(m netip.Prefix) bool { return m.Contains(p.to) }) ||
			p.protocol == TCP && slices.Contains(list.tcpPorts(), p.port) || p.protocol == UDP && slices.Contains(list.udpPorts(), p.port)
		excused := p.port == 53 && slices.Contains(list.Nameservers, p.to) || p.to.Is6() && p.protocol == ICMPv6 && slices.Contains(neighbours, p.icmpType) && (p.local || linkLocal.Contains(p.to)) && (p.icmpType != advertisement || p.claim == own[1])
		if closed && !excused {
			require.NotEqual(t, Admit, decide(ingress, p))
		}
	})
}
