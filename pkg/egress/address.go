package egress

import (
	"fmt"
	"net/netip"
)

// never are addresses that no name and no entry opens: the node's loopback, the link, and what is not one host's. The
// metadata services elsewhere are in package listeners, whose rules hold in every mode.
var never = prefixes(
	"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4",
	"::/96", "::ffff:0:0/96", "fe80::/10", "fec0::/10", "ff00::/8", "fd00:ec2::/32",
)

// private are addresses that mean something else in each network (IANA's registries of special-purpose addresses): an answer
// from outside that leads there is a name turned against who asks (DNS rebinding).
var private = prefixes(
	"10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15",
	"64:ff9b:1::/48", "100::/64", "fc00::/7",
)

// global is all of IPv6 that is assigned to hosts of the internet.
var global = netip.MustParsePrefix("2000::/3")

// Ranges of IPv6 that carry an IPv4 address to which a gateway translates (RFC 6052, 3056, 4380).
var (
	nat64  = netip.MustParsePrefix("64:ff9b::/96")
	sixTo4 = netip.MustParsePrefix("2002::/16")
	teredo = netip.MustParsePrefix("2001::/32")
)

func prefixes(all ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range all {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// overlapping is the first of the ranges that has an address in common with p; the zero Prefix if none has.
func overlapping(ranges []netip.Prefix, p netip.Prefix) netip.Prefix {
	for _, r := range ranges {
		if r.Overlaps(p) {
			return r
		}
	}
	return netip.Prefix{}
}

func in(ranges []netip.Prefix, a netip.Addr) bool {
	return overlapping(ranges, netip.PrefixFrom(a, a.BitLen())).IsValid()
}

// CheckAnswer says why an address may not stand in an answer to the entry's name; nil if it may. closed are ranges that stay
// closed on this node whatever an entry says: the addresses of metadata services, of the node, of sandboxes.
func (e Entry) CheckAnswer(a netip.Addr, closed []netip.Prefix) error {
	switch {
	case a.Zone() != "" || a.Is4In6() || in(never, a):
		return fmt.Errorf("%s is no address of another host", a)
	case in(closed, a):
		return fmt.Errorf("%s is closed to sandboxes on this node", a)
	case in(e.Private, a):
		return nil
	case in(private, a):
		return fmt.Errorf("%s is a private address, and the entry for %s has no private range with it", a, e.Name)
	case a.Is4():
		return nil
	case nat64.Contains(a):
		b := a.As16()
		return e.CheckAnswer(netip.AddrFrom4([4]byte(b[12:])), closed)
	case sixTo4.Contains(a), teredo.Contains(a), !global.Contains(a):
		return fmt.Errorf("%s is no address of a host on the internet", a)
	}
	return nil
}
