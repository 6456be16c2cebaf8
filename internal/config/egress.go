package config

import (
	"fmt"
	"math"
	"net/netip"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// Entries are Allow, read; Validate has checked that they can be.
func (e NetworkEgress) Entries() []egress.Entry {
	out := make([]egress.Entry, 0, len(e.Allow))
	for _, a := range e.Allow {
		if parsed, err := a.parse(); err == nil {
			out = append(out, parsed)
		}
	}
	return out
}

// ResolverAddrs are Resolver as addresses; Validate has checked that they parse.
func (e NetworkEgress) ResolverAddrs() []netip.Addr { return addresses(e.Resolver) }

// UpstreamAddrs are Upstream as addresses; Validate has checked that they parse.
func (e NetworkEgress) UpstreamAddrs() []netip.Addr { return addresses(e.Upstream) }

func addresses(all []string) []netip.Addr {
	var out []netip.Addr
	for _, s := range all {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a)
		}
	}
	return out
}

func (e EgressEntry) parse() (egress.Entry, error) {
	return egress.Parse(egress.Spec{To: e.To, Ports: e.Ports, Protocol: e.Protocol, Private: e.Private, Reason: e.Reason})
}

func (c *Config) checkEgress() error {
	e := c.Network.Egress
	for i, a := range e.Allow {
		if _, err := a.parse(); err != nil {
			return fmt.Errorf("%w: network.egress.allow[%d]: %w", ErrInvalid, i, err)
		}
	}
	if err := egress.CheckList(e.Entries()); err != nil {
		return fmt.Errorf("%w: network.egress.allow: %w", ErrInvalid, err)
	}
	families := map[bool]bool{}
	for i, s := range e.Resolver {
		a, err := netip.ParseAddr(s)
		if err != nil || !resolverAddress(a) || families[a.Is4()] {
			return bad(fmt.Sprintf("network.egress.resolver[%d]", i), s, "an address that nobody has, link-local for IPv4 or unique local for IPv6, at most one of each")
		}
		families[a.Is4()] = true
	}
	for i, s := range e.Upstream {
		if a, err := netip.ParseAddr(s); err != nil || a.IsUnspecified() || a.IsMulticast() || a.Is4In6() || a.Zone() != "" {
			return bad(fmt.Sprintf("network.egress.upstream[%d]", i), s, "the address of a recursive nameserver that the node can ask")
		}
	}
	for _, r := range []intRange{
		{key: "network.egress.connections", value: e.Connections, low: 1, high: 1 << 20, unit: "connections"},
		{key: "network.egress.connections_per_second", value: e.ConnectionsPerSecond, low: 1, high: 1 << 20, unit: "connections"},
		{key: "network.egress.bytes_out", value: e.BytesOut, low: 0, high: math.MaxInt64 / 4, unit: "bytes"},
	} {
		if r.value < r.low || r.value > r.high {
			return bad(r.key, r.value, r.text())
		}
	}
	return nil
}

// resolverAddress: a sandbox's packets for it lead to the node, whatever else its network has, and no metadata service is there.
func resolverAddress(a netip.Addr) bool {
	if a.Is4() {
		return a.IsLinkLocalUnicast() && a != netip.MustParseAddr("169.254.169.254")
	}
	return a.IsPrivate() && !netip.MustParsePrefix("fd00:ec2::/32").Contains(a)
}
