package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// conntrackTries bounds how often the table is read again that changed while it was read.
const conntrackTries = 10

// forgetConnections has the kernel know of no connection from or to these addresses, in either direction. What belongs to a
// known connection is let through before its destination is looked at, so that a sandbox would go on with the connections of
// the one that had its address before it, whatever its own policy is.
func forgetConnections(addrs []netip.Addr) error {
	for _, four := range []bool{true, false} {
		of := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return a.Is4() != four })
		if len(of) == 0 {
			continue
		}
		if err := forgetFamily(of, four); err != nil {
			return fmt.Errorf("%w: forgetting the connections of %v: %w (kernel option CONFIG_NF_CT_NETLINK)", ErrUnavailable, of, err)
		}
	}
	return nil
}

func forgetFamily(addrs []netip.Addr, four bool) (err error) {
	family := netlink.InetFamily(unix.AF_INET6)
	if four {
		family = unix.AF_INET
	}
	for range conntrackTries {
		if _, err = netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, anyOf(addrs)); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

// anyOf matches connections with one of these addresses at either end, as they were begun or as they are answered.
type anyOf []netip.Addr

// MatchConntrackFlow is netlink's.
func (f anyOf) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	return slices.ContainsFunc([]net.IP{flow.Forward.SrcIP, flow.Forward.DstIP, flow.Reverse.SrcIP, flow.Reverse.DstIP}, func(ip net.IP) bool {
		a, ok := netip.AddrFromSlice(ip)
		return ok && slices.Contains(f, a.Unmap())
	})
}
