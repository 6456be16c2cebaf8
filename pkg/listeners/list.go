package listeners

import (
	"cmp"
	"net/netip"
	"slices"
)

// List names what no command may reach, besides every address of the node itself.
type List struct {
	// TCP and UDP are ports that are refused at every address, such as an operator's execd on 44772.
	TCP, UDP []uint16
	// Nameservers answer DNS (port 53, TCP and UDP) although the rest of the rules would refuse their addresses. Nothing
	// else of them is let through.
	Nameservers []netip.Addr
}

// KubeletTCP are the kubelet's ports, and kube-proxy's health port: authenticated API, healthz, read-only API, metrics.
var KubeletTCP = []uint16{10248, 10249, 10250, 10255, 10256}

// management4 are the addresses of IPv4 at which clouds and nodes answer questions that are not a command's to ask.
var management4 = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),     // link-local; metadata of AWS, Azure, Google, DigitalOcean, OpenStack
	netip.MustParsePrefix("100.100.100.200/32"), // metadata of Alibaba Cloud
	netip.MustParsePrefix("168.63.129.16/32"),   // Azure's WireServer
	netip.MustParsePrefix("192.0.0.192/32"),     // metadata of Oracle Cloud, the older one
}

// Management are the addresses at which clouds and nodes answer questions that are not a command's to ask, and those that
// lead there: link-local as a whole, the metadata services that are elsewhere, the node's loopback, and IPv6's ways of
// writing an IPv4 address of these.
var Management = slices.Concat(management4, nat64(management4), []netip.Prefix{
	netip.MustParsePrefix("::/96"),            // unspecified, loopback, IPv4-compatible
	netip.MustParsePrefix("::ffff:0:0/96"),    // IPv4-mapped: never on a wire (RFC 4291)
	netip.MustParsePrefix("fe80::/10"),        // link-local
	netip.MustParsePrefix("fd00:ec2::/32"),    // metadata and time of AWS
	netip.MustParsePrefix("fd20:ce::254/128"), // metadata of Google Cloud
})

// nat64 are ranges of IPv4 as a gateway of the well-known prefix 64:ff9b::/96 translates to them (RFC 6052).
func nat64(four []netip.Prefix) []netip.Prefix {
	const bits = 96
	var out []netip.Prefix
	for _, p := range four {
		a := [16]byte{0x00, 0x64, 0xff, 0x9b}
		copy(a[bits/8:], p.Addr().AsSlice())
		out = append(out, netip.PrefixFrom(netip.AddrFrom16(a), bits+p.Bits()))
	}
	return out
}

// tcpPorts and udpPorts are all refused ports, each once, in order.
func (l List) tcpPorts() []uint16 { return sorted(slices.Concat(l.TCP, KubeletTCP)) }
func (l List) udpPorts() []uint16 { return sorted(l.UDP) }

func sorted[T cmp.Ordered](in []T) []T {
	out := slices.Clone(in)
	slices.Sort(out)
	return slices.Compact(out)
}
