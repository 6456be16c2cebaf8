package config

import (
	"fmt"
	"net/netip"
	"strings"
)

// The network modes.
const (
	NoNetwork     = "none"
	BridgeNetwork = "bridge"
	CNINetwork    = "cni"
)

// private are the ranges that a network of sandboxes may be in (RFC 1918, 6598, 4193).
var private = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("fc00::/7"),
}

// Prefixes are Subnet and Subnet6, as far as they are set; Validate has checked that they parse.
func (b NetworkBridge) Prefixes() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{b.Subnet, b.Subnet6} {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// NameserverAddrs are Nameservers as addresses; Validate has checked that they parse.
func (n Network) NameserverAddrs() []netip.Addr {
	var out []netip.Addr
	for _, s := range n.Nameservers {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a)
		}
	}
	return out
}

func (c *Config) checkNetwork() error {
	n := c.Network
	for i, s := range n.Nameservers {
		// The sandbox's loopback is its own, and a zone names an interface that it doesn't have.
		if a, err := netip.ParseAddr(s); err != nil || a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.Is4In6() || a.Zone() != "" {
			return bad(fmt.Sprintf("network.nameservers[%d]", i), s, "the address of a nameserver that sandboxes can reach, and no loopback address")
		}
	}
	if len(n.Nameservers) > maxNameservers {
		return bad("network.nameservers", n.Nameservers, fmt.Sprintf("at most %d (resolv.conf(5))", maxNameservers))
	}
	if err := checkSubnet("network.bridge.subnet", n.Bridge.Subnet, true, 16, 30); err != nil {
		return err
	}
	if n.Bridge.Subnet6 != "" {
		if err := checkSubnet("network.bridge.subnet6", n.Bridge.Subnet6, false, 48, 126); err != nil {
			return err
		}
	}
	const abs = "an absolute path without \"..\", doubled or closing slashes"
	if !absClean(n.CNI.ConfDir) || n.CNI.ConfDir == "/" {
		return bad("network.cni.conf_dir", n.CNI.ConfDir, abs)
	}
	if len(n.CNI.BinDirs) == 0 {
		return bad("network.cni.bin_dirs", n.CNI.BinDirs, "at least one absolute path")
	}
	for i, d := range n.CNI.BinDirs {
		if !absClean(d) || d == "/" {
			return bad(fmt.Sprintf("network.cni.bin_dirs[%d]", i), d, abs)
		}
	}
	if strings.ContainsAny(n.CNI.Network, "/\x00") || len(n.CNI.Network) > 255 {
		return bad("network.cni.network", n.CNI.Network, "the name of a CNI configuration, or empty for the first one")
	}
	return nil
}

// maxNameservers is MAXNS of resolv.conf(5): more are ignored.
const maxNameservers = 3

func checkSubnet(key, value string, v4 bool, low, high int) error {
	kind := "IPv6"
	if v4 {
		kind = "IPv4"
	}
	p, err := netip.ParsePrefix(value)
	if err != nil || p.Addr().Is4() != v4 || p.Masked() != p || p.Bits() < low || p.Bits() > high {
		return bad(key, value, fmt.Sprintf("a private %s range of /%d to /%d, written with its first address", kind, low, high))
	}
	for _, r := range private {
		if r.Bits() <= p.Bits() && r.Contains(p.Addr()) {
			return nil
		}
	}
	return bad(key, value, "a range within "+fmt.Sprint(private))
}
