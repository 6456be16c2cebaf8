package listeners

import (
	"net/netip"
	"slices"
)

// Family is an address family, or none in particular.
type Family int

// Families.
const (
	AnyFamily Family = iota
	IPv4
	IPv6
)

// FamilyOf is the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// Protocols as IP headers number them.
const (
	TCP    = 6
	UDP    = 17
	ICMP   = 1
	ICMPv6 = 58
)

// Action is what becomes of a packet that a rule matches.
type Action int

const (
	// Admit ends the search: the packet goes on.
	Admit Action = iota + 1
	// Refuse answers and drops: TCP with a reset, all else with ICMP's "administratively prohibited".
	Refuse
	// Drop says nothing: for what no ordinary program sends.
	Drop
)

func (a Action) String() string {
	return map[Action]string{Admit: "admit", Refuse: "refuse", Drop: "drop"}[a]
}

// Rule matches a packet that fulfils each condition that is set; the first rule that matches decides. A condition that is
// not set holds for every packet.
type Rule struct {
	// Why is what the rule is for, in a few words: it is written beside it into the kernel, and counted under it.
	Why    string
	Family Family
	// NotIP: neither IPv4 nor IPv6. ARP counts as neither.
	NotIP, ARP bool
	// Tagged: the frame is one of a VLAN.
	Tagged bool
	// Protocols is one of these.
	Protocols []uint8
	// NotProtocols: none of these.
	NotProtocols []uint8
	// Fragment: a part of a datagram.
	Fragment bool
	// ICMPTypes is one of these types of ICMPv6.
	ICMPTypes []uint8
	// Ports: the destination's port is one of these. Protocols says of what.
	Ports []uint16
	// To: the destination is in one of these.
	To []netip.Prefix
	// Foreign: the source is in none of NotFrom, which are of Family; of ARP: the sender's protocol address.
	Foreign bool
	NotFrom []netip.Prefix
	// Claim: ICMPTypes is a neighbour's advertisement, and what it advertises is in none of NotFrom.
	Claim bool
	// Local: the destination is an address of the node, as its routing tables say.
	Local bool
	// NotUnicast: the destination is the node itself, a broadcast, multicast or anycast address, or nothing that the node
	// has a route to, as the node's own routing tables say. Inside a sandbox those of its network namespace say it.
	NotUnicast bool
	// ToSandbox: the destination is another sandbox's.
	ToSandbox bool
	// Opens: it begins a connection. Protocols says of what.
	Opens bool
	// MadeBy: the socket that sends it was made by one of these users, as the network namespace's user namespace numbers them.
	// Who has it now does not matter.
	MadeBy []uint32
	Action Action
}

// neighbours are the types of ICMPv6 without which there is no IPv6: router and neighbour solicitation, neighbour
// advertisement, multicast listener reports (RFC 4861, 2710, 3810). Not router advertisements and redirects, with which a
// guest could become the node's router.
var neighbours = []uint8{131, 132, 133, 135, 136, 143}

const advertisement = 136

var (
	linkLocal   = netip.MustParsePrefix("fe80::/10")
	linkGroups  = netip.MustParsePrefix("ff02::/16")
	unspecified = hosts([]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()})
)

// Neighbours admit what keeps IPv6 going between a sandbox and its link: to the link's own addresses, and to the node, whose
// questions may come from any address of it. Elsewhere such a message is one of ICMP as any other.
func Neighbours() []Rule {
	rule := Rule{Why: "neighbour discovery", Family: IPv6, Protocols: []uint8{ICMPv6}, ICMPTypes: neighbours, Action: Admit}
	onLink, toNode := rule, rule
	onLink.To, toNode.Local = []netip.Prefix{linkLocal, linkGroups}, true
	return []Rule{onLink, toNode}
}

// Source are the first rules for what a sandbox with these addresses sends, as it leaves the sandbox; Ingress are the rest,
// the same for every sandbox.
func Source(own []netip.Addr) []Rule {
	four, six := hosts(addrs(own, IPv4)), hosts(addrs(own, IPv6))
	// Before an interface has an address, it asks without one (RFC 5227, 4862).
	onLink := slices.Concat(six, unspecified[1:], []netip.Prefix{linkLocal})
	rules := []Rule{
		{Why: "a frame of a VLAN", Tagged: true, Action: Drop},
		{Why: "a sender that is not the sandbox", ARP: true, Foreign: true, NotFrom: slices.Concat(four, unspecified[:1]), Action: Drop},
		{Why: "address resolution", ARP: true, Action: Admit},
		{Why: "neither IPv4 nor IPv6", NotIP: true, Action: Drop},
		{Why: "a sender that is not the sandbox", Family: IPv6, Protocols: []uint8{ICMPv6}, ICMPTypes: neighbours, Foreign: true, NotFrom: onLink, Action: Drop},
		{Why: "a neighbour that is not the sandbox", Family: IPv6, Protocols: []uint8{ICMPv6}, ICMPTypes: []uint8{advertisement}, Claim: true, NotFrom: onLink, Action: Drop},
	}
	// The rules that follow, and the routed ones, know a sandbox by its address.
	return append(append(rules, Neighbours()...),
		Rule{Why: "a source that is not the sandbox's", Family: IPv4, Foreign: true, NotFrom: four, Action: Drop},
		Rule{Why: "a source that is not the sandbox's", Family: IPv6, Foreign: true, NotFrom: six, Action: Drop})
}

// Ingress are the rules for what any sandbox sends, after those of Source.
func (l List) Ingress() []Rule {
	rules := []Rule{
		// A first fragment can end before the port, and be put together behind these rules. No sender of TCP makes
		// fragments, and of IPv6 only large datagrams are cut.
		{Why: "a fragment", Family: IPv4, Protocols: []uint8{TCP}, Fragment: true, Action: Drop},
		{Why: "a fragment", Family: IPv6, Fragment: true, Action: Drop},
		{Why: "a protocol that is neither TCP, UDP nor ICMP", NotProtocols: []uint8{TCP, UDP, ICMP, ICMPv6}, Action: Refuse},
	}
	rules = append(rules, l.nameservers()...)
	rules = append(rules, Rule{Why: "an address of the node, or none that a packet could be routed to", NotUnicast: true, Action: Refuse})
	return append(rules, l.closed()...)
}

// Forwarded are the rules for what comes from a sandbox and is about to be forwarded.
func (l List) Forwarded() []Rule { return append(l.nameservers(), l.closed()...) }

// Local are the rules for what comes from a sandbox and is about to be taken in by the node.
func (l List) Local() []Rule {
	rules := append(Neighbours(), l.nameservers()...)
	return append(rules, Rule{Why: "the node itself", Action: Refuse})
}

// Inside are the rules for what is sent within a sandbox's own network namespace, where a management listener may be beside the
// sandbox: its listed ports are for sockets that one of these users made. The kubelet's ports are not among them: it is never
// there, and a command may serve itself at any other port. What goes to all hosts of a link, or to a group, comes back to
// those who listen here.
func (l List) Inside(management []uint32) []Rule {
	rules := []Rule{{Why: "the management itself", NotUnicast: true, MadeBy: management, Action: Admit}}
	if ports := sorted(l.TCP); len(ports) > 0 {
		// What answers a connection may go to a port of this number: it was given to a client.
		rules = append(rules, Rule{Why: "a management port", NotUnicast: true, Protocols: []uint8{TCP}, Opens: true, Ports: ports, Action: Refuse})
	}
	if ports := sorted(l.UDP); len(ports) > 0 {
		rules = append(rules, Rule{Why: "a management port", NotUnicast: true, Protocols: []uint8{UDP}, Ports: ports, Action: Refuse})
	}
	return rules
}

func (l List) nameservers() []Rule {
	var rules []Rule
	for _, family := range []Family{IPv4, IPv6} {
		if of := addrs(l.Nameservers, family); len(of) > 0 {
			rules = append(rules, Rule{Why: "a nameserver", Family: family, Protocols: []uint8{TCP, UDP}, Ports: []uint16{53}, To: hosts(of), Action: Admit})
		}
	}
	return rules
}

// closed are the destinations that are refused wherever they are.
func (l List) closed() []Rule {
	var rules []Rule
	for _, family := range []Family{IPv4, IPv6} {
		var of []netip.Prefix
		for _, p := range Management {
			if p.Addr().Is4() == (family == IPv4) {
				of = append(of, p)
			}
		}
		rules = append(rules, Rule{Why: "metadata, link-local and loopback", Family: family, To: of, Action: Refuse},
			Rule{Why: "another sandbox", Family: family, ToSandbox: true, Action: Refuse})
	}
	rules = append(rules, Rule{Why: "a management port", Protocols: []uint8{TCP}, Ports: l.tcpPorts(), Action: Refuse})
	if ports := l.udpPorts(); len(ports) > 0 {
		rules = append(rules, Rule{Why: "a management port", Protocols: []uint8{UDP}, Ports: ports, Action: Refuse})
	}
	return rules
}

func addrs(all []netip.Addr, family Family) []netip.Addr {
	var out []netip.Addr
	for _, a := range all {
		if FamilyOf(a) == family {
			out = append(out, a.Unmap())
		}
	}
	return out
}

func hosts(all []netip.Addr) []netip.Prefix {
	var out []netip.Prefix
	for _, a := range all {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	return out
}
