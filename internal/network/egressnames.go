package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/network/resolver"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// EgressOptions say how lists of destinations are kept.
type EgressOptions struct {
	// Resolvers are addresses, at most one of each family, that the agent's resolver has on the node: nobody else's, and such
	// that sandboxes send to their default route. Empty: no sandbox can have an allowlist.
	Resolvers []netip.Addr
	// Upstreams are the nameservers that the resolver asks; none: Options.Nameservers, or else the node's own.
	Upstreams []netip.Addr
}

// again is how long the resolver waits before it begins anew after a failure.
const again = time.Second

// Serve serves names to sandboxes and hears what is refused, until ctx ends. refused is told of what a sandbox was refused: a
// destination ADDRESS:PORT/PROTOCOL, or a name, with the reason where it is not that it isn't listed. What it waits for is
// waited for by who asked for the name, and by Settle.
func (m *Manager) Serve(ctx context.Context, refused func(id, what string)) {
	for ctx.Err() == nil {
		if err := m.serve(ctx, refused); err != nil {
			m.log.Error("sandboxes with an allowlist resolve no names for now, and refusals are not told", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(again):
			}
		}
	}
}

func (m *Manager) serve(ctx context.Context, refused func(id, what string)) error {
	w, err := watch(m.egress.group, func(source netip.Addr, to string) {
		if g := m.egress.at(source); g != nil {
			refused(g.rec.ID, to)
		}
	})
	if err != nil {
		return err
	}
	m.watcher.Store(w)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- w.listen(); cancel() }()
	err = m.serveNames(ctx, refused)
	m.watcher.Store(nil)
	return errors.Join(err, w.close(), <-ended)
}

// Settle waits until everything that has been refused so far is told.
func (m *Manager) Settle(ctx context.Context) error {
	if w := m.watcher.Load(); w != nil {
		return w.settle(ctx)
	}
	return nil
}

// Traffic is what has been counted of a connected sandbox.
func (m *Manager) Traffic(id string) (Traffic, error) { return m.egress.traffic(id) }

// Policy is what a connected sandbox may reach; nil for one that isn't.
func (m *Manager) Policy(id string) *Egress {
	m.egress.mu.Lock()
	defer m.egress.mu.Unlock()
	if g := m.egress.sandboxes[id]; g != nil {
		return &g.rec.Egress
	}
	return nil
}

// serveNames serves at each of the resolver's addresses until ctx ends.
func (m *Manager) serveNames(ctx context.Context, refused func(id, what string)) error {
	if len(m.opts.Egress.Resolvers) == 0 {
		<-ctx.Done()
		return nil
	}
	r := resolver.New(resolver.Options{
		Upstreams: m.upstreams(), Sandbox: m.asker, Closed: m.closedRanges, Admit: m.egress.admit, Log: m.log,
		Refused: func(id, name, why string) {
			if why != "" {
				name += " (" + why + ")"
			}
			refused(id, name)
		},
	})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(m.opts.Egress.Resolvers))
	for _, a := range m.opts.Egress.Resolvers {
		go func() { errs <- m.serveNamesAt(ctx, r, a) }()
	}
	var all []error
	for range m.opts.Egress.Resolvers {
		all = append(all, <-errs)
		cancel()
	}
	return errors.Join(all...)
}

func (m *Manager) serveNamesAt(ctx context.Context, r *resolver.Resolver, a netip.Addr) (err error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking at the node's loopback interface: %w", err)
	}
	own := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Scope: unix.RT_SCOPE_HOST}
	if a.Is6() {
		own.Flags = unix.IFA_F_NODAD
	}
	if err := netlink.AddrReplace(lo, own); err != nil {
		return fmt.Errorf("giving the node the resolver's address %s: %w", a, err)
	}
	defer func() {
		if delErr := netlink.AddrDel(lo, own); delErr != nil && !errors.Is(delErr, syscall.EADDRNOTAVAIL) {
			err = errors.Join(err, fmt.Errorf("taking the resolver's address %s off the node: %w", a, delErr))
		}
	}()
	at := netip.AddrPortFrom(a, dnsPort).String()
	var listen net.ListenConfig
	udp, err := listen.ListenPacket(ctx, "udp", at)
	if err != nil {
		return fmt.Errorf("listening for questions at %s (has another agent or nameserver this address? network.egress.resolver names another one): %w", at, err)
	}
	tcp, err := listen.Listen(ctx, "tcp", at)
	if err != nil {
		udp.Close()
		return fmt.Errorf("listening for questions at %s: %w", at, err)
	}
	m.log.Info("sandboxes with an allowlist ask for names here", "address", at)
	return r.Serve(ctx, udp, tcp)
}

func (m *Manager) upstreams() []netip.AddrPort {
	addrs := m.opts.Egress.Upstreams
	if len(addrs) == 0 {
		addrs = m.opts.Nameservers
	}
	if len(addrs) == 0 {
		addrs = allNameservers(nodeResolvConf) // the agent is on the node, where loopback is the node's
	}
	var out []netip.AddrPort
	for _, a := range addrs {
		out = append(out, netip.AddrPortFrom(a, dnsPort))
	}
	return out
}

// asker is the sandbox that has this address and an allowlist.
func (m *Manager) asker(a netip.Addr) *resolver.Sandbox {
	g := m.egress.at(a)
	if g == nil || g.policy.Mode() != egress.Allowlist {
		return nil
	}
	return &resolver.Sandbox{ID: g.rec.ID, Policy: g.policy}
}

// closedRanges are the addresses that no name leads to: those of the rules, of sandboxes, and of the node as it is now.
func (m *Manager) closedRanges() ([]netip.Prefix, error) {
	out := slices.Concat(listeners.Management, m.opts.Bridge.Subnets)
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("looking at the node's addresses: %w", err)
	}
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			ip = ip.Unmap()
			out = append(out, netip.PrefixFrom(ip, ip.BitLen()))
		}
	}
	return out, nil
}

// resolversOf are those of the resolver's addresses that a sandbox can reach.
func (m *Manager) resolversOf(rec *Record) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, r := range m.opts.Egress.Resolvers {
		if slices.ContainsFunc(rec.Addresses, func(a netip.Addr) bool { return a.Is4() == r.Is4() }) {
			out = append(out, r)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: the resolver has no address (%v) that a sandbox with the addresses %v could ask: set network.egress.resolver",
			ErrUnavailable, m.opts.Egress.Resolvers, rec.Addresses)
	}
	return out, nil
}

// nameserversOf gives a sandbox that is plugged the nameservers of its policy.
func (m *Manager) nameserversOf(rec *Record) (err error) {
	switch rec.Egress.mode() {
	case egress.None:
		rec.Nameservers = nil
	case egress.Allowlist:
		rec.Nameservers, err = m.resolversOf(rec)
	default:
		return nil
	}
	if rec.CNI != nil {
		rec.CNI.Search = "" // with it each name would be asked for several times
	}
	return err
}

// restoreEgress has the table as these sandboxes need it. One that is whole stays: its sets, counters and bounds are of use.
func (m *Manager) restoreEgress(all []*Record) error {
	all = plugged(all)
	for _, rec := range all {
		m.egress.track(rec)
	}
	if len(all) > 0 && m.egress.intact(all) && m.egress.current(all) {
		return nil
	}
	return m.egress.set(all)
}

// plugged are those of which it is known what they have.
func plugged(all []*Record) []*Record {
	return slices.DeleteFunc(slices.Clone(all), func(rec *Record) bool { return len(rec.Links) == 0 })
}
