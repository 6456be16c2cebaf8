package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
)

// BridgeOptions say where sandboxes of the mode "bridge" have their addresses from: one range of IPv4, and at most one of IPv6.
type BridgeOptions struct{ Subnets []netip.Prefix }

// There is no Linux bridge in it. Each sandbox has a veth pair of its own, and the node routes to its one address: no two
// sandboxes share a link, the node needs no address in their range, and each interface of the node is one sandbox's.
//
// Inside, the way out leads through an address that is nobody's. No one answers for it either: both sides know each other's
// link address from the start, so that nothing has to be asked on the link.
var (
	via4 = net.IPv4(169, 254, 1, 1).To4()
	via6 = net.ParseIP("fe80::1")
)

// addrGenNone is IN6_ADDR_GEN_MODE_NONE of linux/if_link.h.
const addrGenNone = 1

// hostName is the name of the node's side: at most 15 bytes (IFNAMSIZ).
func hostName(id string) string {
	plain := strings.ReplaceAll(id, "-", "")
	return "sb" + plain[max(0, len(plain)-13):]
}

// addBridge makes a pair, and what belongs to it.
func (m *Manager) addBridge(rec *Record) error {
	if err := m.checkBridge(); err != nil {
		return err
	}
	if err := m.allocate(rec); err != nil {
		return err
	}
	crashpoint.At("network.allocated")
	if err := m.forward(); err != nil {
		return err
	}
	node, err := m.makePair(rec)
	if err != nil {
		return err
	}
	crashpoint.At("network.plugged")
	rec.Links = []Link{{Name: node.Attrs().Name, Index: node.Attrs().Index}}
	if err := m.records().write(rec); err != nil {
		return err
	}
	// Before anything can be sent.
	if err := m.guard(rec); err != nil {
		return err
	}
	return route(rec, node)
}

// allocate gives the sandbox addresses that no other one has. They are recorded before another one is looked for, and stay
// recorded until everything of the sandbox is gone.
func (m *Manager) allocate(rec *Record) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	all, err := m.all()
	if err != nil {
		return err
	}
	taken := map[netip.Addr]bool{}
	for _, other := range all {
		for _, a := range other.Addresses {
			taken[a] = true
		}
	}
	for _, p := range m.opts.Bridge.Subnets {
		a, err := free(p, m.last[p], taken)
		if err != nil {
			return err
		}
		m.last[p] = a
		rec.Addresses = append(rec.Addresses, a)
	}
	if err := writeState(m.lastFile(), m.last); err != nil {
		return err
	}
	rec.Nameservers = m.opts.Nameservers
	if len(rec.Nameservers) == 0 {
		rec.Nameservers = nodesNameservers(nodeResolvConf)
	}
	return m.records().write(rec)
}

// free is the next address of a range that nobody has, after the one that was given last: what is still on its way to a
// sandbox that is gone does not meet the next one. A range's first address and IPv4's last are left out, as some programs
// take them for the network and the broadcast. It is pure.
func free(p netip.Prefix, last netip.Addr, taken map[netip.Addr]bool) (netip.Addr, error) {
	if !p.Contains(last) {
		last = p.Addr()
	}
	for a, begun := last.Next(), false; ; a = a.Next() {
		if !p.Contains(a) || p.Addr().Is4() && !p.Contains(a.Next()) {
			if begun { // all around
				break
			}
			begun, a = true, p.Addr()
			continue
		}
		if !taken[a] {
			return a, nil
		}
		if begun && a == last {
			break
		}
	}
	return netip.Addr{}, fmt.Errorf("%w: no address of %s is free: end sandboxes, or give network.bridge a larger range", ErrUnavailable, p)
}

// checkBridge refuses ranges that the node uses otherwise.
func (m *Manager) checkBridge() error {
	if len(m.opts.Bridge.Subnets) == 0 {
		return fmt.Errorf("%w: network.bridge.subnet is not set", ErrUnavailable)
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("looking at the node's routes: %w", err)
	}
	own, err := m.ownLinks()
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.Dst == nil || own[r.LinkIndex] {
			continue
		}
		a, _ := netip.AddrFromSlice(r.Dst.IP)
		bits, _ := r.Dst.Mask.Size()
		used := netip.PrefixFrom(a.Unmap(), bits)
		for _, p := range m.opts.Bridge.Subnets {
			if bits > 0 && used.Overlaps(p) {
				return fmt.Errorf("%w: the node has a route to %s, which overlaps with %s: give network.bridge another range", ErrUnavailable, used, p)
			}
		}
	}
	return nil
}

// ownLinks are the interfaces of sandboxes.
func (m *Manager) ownLinks() (map[int]bool, error) {
	all, err := m.all()
	if err != nil {
		return nil, err
	}
	own := map[int]bool{}
	for _, rec := range all {
		for _, l := range rec.Links {
			own[l.Index] = true
		}
		if rec.Mode == Bridge { // one that is not recorded yet
			if l, err := netlink.LinkByName(hostName(rec.ID)); err == nil {
				own[l.Attrs().Index] = true
			}
		}
	}
	return own, nil
}

// forward has the node forward packets. For IPv4 that is switched on where it is off, and stays on: by then somebody else may
// need it. For IPv6 it also changes whether the node believes router advertisements, from which it may have its own route;
// that is left to the operator.
func (m *Manager) forward() error {
	const four, six = "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"
	for _, p := range m.opts.Bridge.Subnets {
		key := six
		if p.Addr().Is4() {
			key = four
		}
		b, err := os.ReadFile(key)
		if err != nil {
			return fmt.Errorf("%w: looking whether the node forwards packets: %w", ErrUnavailable, err)
		}
		switch on := strings.TrimSpace(string(b)) != "0"; {
		case on:
		case key == six:
			return fmt.Errorf("%w: the node does not forward IPv6: set the sysctl net.ipv6.conf.all.forwarding to 1 (and accept_ra of the uplink to 2, if it has its route from router advertisements), or leave network.bridge.subnet6 empty", ErrUnavailable)
		default:
			if err := os.WriteFile(key, []byte("1"), 0o644); err != nil {
				return fmt.Errorf("%w: having the node forward packets: %w", ErrUnavailable, err)
			}
			m.log.Warn("the node forwards IPv4 from now on, for sandboxes with a network: net.ipv4.ip_forward was 0 and is 1; it is not set back")
		}
	}
	return nil
}

// makePair makes both sides, with the sandbox's in its namespace; both are down.
func (m *Manager) makePair(rec *Record) (netlink.Link, error) {
	ns, err := openNamespace(rec.Namespace)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	name := hostName(rec.ID)
	pair := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name, MTU: uplinkMTU()}, PeerName: ifName, PeerNamespace: netlink.NsFd(int(ns)), PeerMTU: uint32(uplinkMTU()),
	}
	if err := netlink.LinkAdd(pair); err != nil {
		return nil, fmt.Errorf("%w: making the pair of interfaces %s: %w (kernel option CONFIG_VETH)", ErrUnavailable, name, err)
	}
	node, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("looking at the interface %s: %w", name, err)
	}
	return node, nil
}

const (
	defaultMTU = 1500
	leastMTU   = 1280 // IPv6 needs it (RFC 8200, 5)
)

// uplinkMTU is the MTU of where the node's default route leads, so that nothing has to be cut on the way.
func uplinkMTU() int {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return defaultMTU
	}
	for _, r := range routes {
		if r.Dst != nil && !r.Dst.IP.IsUnspecified() {
			continue
		}
		if l, err := netlink.LinkByIndex(r.LinkIndex); err == nil && l.Attrs().MTU >= leastMTU {
			return min(l.Attrs().MTU, defaultMTU)
		}
	}
	return defaultMTU
}

// route sets both sides up and has them know each other.
func route(rec *Record, node netlink.Link) error {
	h, err := inside(rec.Namespace)
	if err != nil {
		return err
	}
	defer h.Close()
	sandbox, err := h.LinkByName(ifName)
	if err != nil {
		return fmt.Errorf("looking at the sandbox's interface: %w", err)
	}
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening the node's network: %w", err)
	}
	defer host.Close()
	// The node needs no link-local address there, which would be one more to be reached at. A kernel without IPv6 gives none.
	if err := host.LinkSetIP6AddrGenMode(node, addrGenNone); err != nil && !errors.Is(err, syscall.EOPNOTSUPP) && !errors.Is(err, syscall.EAFNOSUPPORT) {
		return fmt.Errorf("setting up the interface %s: %w", node.Attrs().Name, err)
	}
	for _, side := range []struct {
		h *netlink.Handle
		l netlink.Link
	}{{host, node}, {h, sandbox}} {
		if err := side.h.LinkSetUp(side.l); err != nil {
			return fmt.Errorf("setting up the interface %s: %w", side.l.Attrs().Name, err)
		}
	}
	for _, a := range rec.Addresses {
		if err := routeAddress(host, node, h, sandbox, a); err != nil {
			return fmt.Errorf("routing %s to the sandbox: %w", a, err)
		}
	}
	return nil
}

func routeAddress(host *netlink.Handle, node netlink.Link, h *netlink.Handle, sandbox netlink.Link, a netip.Addr) error {
	whole := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
	via, everything := via4, &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	own := &netlink.Addr{IPNet: whole}
	if a.Is6() {
		via, everything = via6, &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
		own.Flags = unix.IFA_F_NODAD // nobody else can have it
	}
	in, out := sandbox.Attrs().Index, node.Attrs().Index
	return errors.Join(
		h.AddrAdd(sandbox, own),
		h.NeighSet(neighbour(in, via, node)),
		h.RouteReplace(&netlink.Route{LinkIndex: in, Dst: everything, Gw: via, Flags: int(netlink.FLAG_ONLINK)}),
		host.NeighSet(neighbour(out, a.AsSlice(), sandbox)),
		host.RouteReplace(&netlink.Route{LinkIndex: out, Dst: whole, Scope: netlink.SCOPE_LINK}),
	)
}

func neighbour(link int, ip net.IP, at netlink.Link) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: link, IP: ip, HardwareAddr: at.Attrs().HardwareAddr, State: netlink.NUD_PERMANENT}
}

// delBridge takes the pair away; its routes and neighbours go with it.
func delBridge(rec *Record) error {
	name := hostName(rec.ID)
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err == nil && link.Type() != "veth" {
		return fmt.Errorf("the interface %s is no veth, so it is not the agent's: rename it", name)
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("removing the interface %s: %w", name, err)
	}
	return nil
}

// guard puts the rules for a sandbox into the kernel.
func (m *Manager) guard(rec *Record) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.egress.add(rec) == nil && m.rules.add(rec) == nil {
		crashpoint.At("network.guarded")
		return nil
	}
	// The first one; or somebody has taken the tables away.
	all, err := m.all()
	if err != nil {
		return err
	}
	others := slices.DeleteFunc(all, func(o *Record) bool { return o.ID == rec.ID })
	running := connected(others)
	ok, _ := m.rules.intact(running) // what can't be looked at may as well be gone
	ok = ok && m.egress.intact(running)
	if err := m.set(append(others, rec)); err != nil {
		return err
	}
	if !ok {
		m.lapsed = append(m.lapsed, idsOf(running)...)
	}
	crashpoint.At("network.guarded")
	return nil
}
