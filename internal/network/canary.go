package network

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// Target is a listener of the node that a sandbox must not reach.
type Target struct {
	Network string // "tcp", "udp" or "unix"
	// Address is of IPv4, of IPv6, or an IPv4 address as IPv6 sockets write it.
	Address netip.AddrPort
	// Name is a unix socket's; an abstract one's begins with "@".
	Name string
	// Token is what whoever tries sends, so that the canary knows whom it heard.
	Token string
}

func (t Target) String() string { return t.Network + " " + t.at() }

func (t Target) at() string {
	if t.Network == "unix" {
		return t.Name
	}
	return t.Address.String()
}

// Canaries are listeners on the node that stand for its own while a sandbox proves that it can't reach them. Where a port is
// taken, what listens there is its own canary.
type Canaries struct {
	targets []Target
	// own are those of the targets that this process listens at.
	own     []Target
	sandbox []netip.Addr
	token   string
	closers []func() error
	hearing sync.WaitGroup
	// trusted has an entry for each time that this process itself was heard.
	trusted chan struct{}
	closed  chan struct{}
	// answered: all of them have heard this process.
	answered bool

	mu      sync.Mutex
	reached []string // by the sandbox
}

const (
	// mostAddresses bounds the node's addresses that are tried, of each family.
	mostAddresses = 3
	// trustedWait bounds how long a canary may take to answer the agent itself.
	trustedWait = 2 * time.Second
	// settleWait bounds how long the node's addresses on the sandbox's network may take to be used: the kernel looks for another
	// host with one of IPv6 for about two seconds first (RFC 4862, 5.4).
	settleWait = 4 * time.Second
	settleLook = 20 * time.Millisecond
)

// Canaries opens canaries for a sandbox on the node's addresses: on each listed port, and on one that is on no list. Each has
// answered this process when it returns. The caller closes them. There are no more than three addresses of each family.
func (m *Manager) Canaries(id string) (_ *Canaries, err error) {
	rec, err := m.Get(id)
	if err != nil {
		return nil, err
	}
	on, err := settledAddresses(rec)
	if err != nil {
		return nil, err
	}
	c := newCanaries(rec.Addresses)
	defer func() {
		if err != nil {
			_, closeErr := c.Close()
			err = errors.Join(err, closeErr)
		}
	}()
	if err := c.unix(); err != nil {
		return nil, err
	}
	for _, a := range on {
		for _, p := range slices.Concat(m.opts.Listeners.TCP, listeners.KubeletTCP, []uint16{0}) {
			if err := c.tcp(netip.AddrPortFrom(a, p)); err != nil {
				return nil, err
			}
		}
		for _, p := range slices.Concat(m.opts.Listeners.UDP, []uint16{0}) {
			if err := c.udp(netip.AddrPortFrom(a, p)); err != nil {
				return nil, err
			}
		}
	}
	if err := c.try(); err != nil {
		return nil, err
	}
	c.answered = true
	// Nobody but the cloud can listen there.
	for _, a := range []string{"169.254.169.254:80", "[fd00:ec2::254]:80"} {
		c.targets = append(c.targets, Target{Network: "tcp", Address: netip.MustParseAddrPort(a), Token: c.token})
	}
	c.targets = append(c.targets, mapped(c.targets)...)
	return c, nil
}

// UnixCanary is the canary for a sandbox without a network: a listener on the node with an abstract name. It has answered this
// process. The caller closes it.
func UnixCanary() (*Canaries, error) {
	c := newCanaries(nil)
	err := c.unix()
	if err == nil {
		err = c.try()
	}
	if err != nil {
		_, closeErr := c.Close()
		return nil, errors.Join(err, closeErr)
	}
	c.answered = true
	return c, nil
}

func newCanaries(sandbox []netip.Addr) *Canaries {
	return &Canaries{token: rand.Text(), sandbox: sandbox, trusted: make(chan struct{}), closed: make(chan struct{})}
}

// mapped are those of IPv4 as a socket of IPv6 reaches them (RFC 4038, 4.2).
func mapped(targets []Target) (out []Target) {
	for _, t := range targets {
		if t.Address.Addr().Is4() {
			t.Address = netip.AddrPortFrom(netip.AddrFrom16(t.Address.Addr().As16()), t.Address.Port())
			out = append(out, t)
		}
	}
	return out
}

// Targets are what the sandbox has to try.
func (c *Canaries) Targets() []Target { return c.targets }

// Close closes the canaries and says which ones the sandbox has reached. What has arrived at them is heard first: it is in the
// kernel's queues before what this process sends now.
func (c *Canaries) Close() ([]string, error) {
	var errs []error
	if c.answered {
		errs = append(errs, c.try())
	}
	close(c.closed)
	for _, f := range c.closers {
		errs = append(errs, f())
	}
	c.hearing.Wait()
	return c.reached, errors.Join(errs...)
}

// settledAddresses are nodesAddresses once the node uses those that the sandbox's packets pass. That takes some time on a bridge
// that was made for the sandbox: until then no packet of IPv6 gets past the sandbox's interface, and an attempt proves nothing.
func settledAddresses(rec *Record) ([]netip.Addr, error) {
	timeout := time.After(settleWait)
	tick := time.NewTicker(settleLook)
	defer tick.Stop()
	for {
		on, pending, err := nodesAddresses(rec)
		if err != nil || !pending {
			return on, err
		}
		select {
		case <-timeout:
			return on, nil
		case <-tick.C:
		}
	}
}

// nodesAddresses are addresses of the node, at most mostAddresses of each family that the sandbox has; those on its own
// network, which are its gateway's, come first. pending says that there is one of these that the node doesn't use yet.
func nodesAddresses(rec *Record) (out []netip.Addr, pending bool, err error) {
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, false, fmt.Errorf("listing the node's addresses: %w", err)
	}
	var near, far []netip.Addr
	for _, l := range list {
		a, ok := netip.AddrFromSlice(l.IP)
		if a = a.Unmap(); !ok || a.IsLoopback() || a.IsLinkLocalUnicast() || l.Flags&unix.IFA_F_DADFAILED != 0 {
			continue
		}
		bits, _ := l.Mask.Size()
		here := slices.ContainsFunc(rec.Addresses, netip.PrefixFrom(a, bits).Contains)
		switch {
		case l.Flags&unix.IFA_F_TENTATIVE != 0:
			pending = pending || here
		case here:
			near = append(near, a)
		default:
			far = append(far, a)
		}
	}
	for _, four := range []bool{true, false} {
		n := 0
		for _, a := range slices.Concat(near, far) {
			if a.Is4() == four && n < mostAddresses && slices.ContainsFunc(rec.Addresses, func(b netip.Addr) bool { return b.Is4() == four }) {
				out, n = append(out, a), n+1
			}
		}
	}
	return out, pending, nil
}

// tcp opens a canary, or takes what listens there for one.
func (c *Canaries) tcp(at netip.AddrPort) error {
	l, err := net.Listen("tcp", at.String()) //nolint:forbidigo // for the moments of a proof, and it answers nobody
	if errors.Is(err, unix.EADDRINUSE) {
		// Somebody listens there, or on another address with this port.
		if conn, err := net.DialTimeout("tcp", at.String(), trustedWait); err == nil {
			c.targets = append(c.targets, Target{Network: "tcp", Address: at, Token: c.token})
			return conn.Close()
		}
		return nil
	}
	if errors.Is(err, unix.EADDRNOTAVAIL) {
		return nil // the node has lost the address meanwhile
	}
	if err != nil {
		return fmt.Errorf("opening a canary at %s: %w", at, err)
	}
	c.accept(l, c.add(Target{Network: "tcp", Address: l.Addr().(*net.TCPAddr).AddrPort()}))
	return nil
}

// unix opens a canary with an abstract name, which holds in this process's network namespace (unix(7)).
func (c *Canaries) unix() error {
	name := "@sandbox-agent-canary-" + rand.Text()
	l, err := net.Listen("unix", name)
	if err != nil {
		return fmt.Errorf("opening a canary at %s: %w", name, err)
	}
	c.accept(l, c.add(Target{Network: "unix", Name: name}))
	return nil
}

func (c *Canaries) accept(l net.Listener, t Target) {
	c.closers = append(c.closers, l.Close)
	c.hearing.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			c.hearing.Go(func() { c.listen(t, conn) })
		}
	})
}

// add makes a target of a canary of this process's own.
func (c *Canaries) add(t Target) Target {
	t.Token = c.token
	c.targets, c.own = append(c.targets, t), append(c.own, t)
	return t
}

func (c *Canaries) listen(t Target, conn net.Conn) {
	defer conn.Close()
	if from, err := netip.ParseAddrPort(conn.RemoteAddr().String()); err == nil && slices.Contains(c.sandbox, from.Addr().Unmap()) {
		c.hear(t, c.token) // it is connected, whatever it says
		return
	}
	_ = conn.SetDeadline(time.Now().Add(trustedWait))
	line, _ := bufio.NewReaderSize(conn, 128).ReadString('\n') // what came before an error counts as well
	c.hear(t, line)
}

func (c *Canaries) udp(at netip.AddrPort) error {
	conn, err := net.ListenPacket("udp", at.String()) //nolint:forbidigo // as above
	if errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL) {
		return nil // what listens there answers nobody whom it doesn't know; or the node has lost the address meanwhile
	}
	if err != nil {
		return fmt.Errorf("opening a canary at %s: %w", at, err)
	}
	c.closers = append(c.closers, conn.Close)
	t := c.add(Target{Network: "udp", Address: conn.LocalAddr().(*net.UDPAddr).AddrPort()})
	c.hearing.Go(func() {
		b := make([]byte, 128)
		for {
			n, _, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			c.hear(t, string(b[:n]))
		}
	})
	return nil
}

// hear notes who was heard. What a stranger says, who may be anybody on the node's network, is nothing.
func (c *Canaries) hear(t Target, line string) {
	switch strings.TrimSpace(line) {
	case c.token:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.reached = append(c.reached, t.String())
	case c.trustedToken():
		select {
		case c.trusted <- struct{}{}:
		case <-c.closed:
		}
	}
}

func (c *Canaries) trustedToken() string { return "trusted-" + c.token }

// try reaches each of its own canaries from here: one that doesn't hear this process would prove nothing.
func (c *Canaries) try() error {
	for _, t := range c.own {
		conn, err := net.DialTimeout(t.Network, t.at(), trustedWait)
		if err != nil {
			return fmt.Errorf("trying the canary %s: %w", t, err)
		}
		_, err = conn.Write([]byte(c.trustedToken() + "\n"))
		if err = errors.Join(err, conn.Close()); err != nil {
			return fmt.Errorf("trying the canary %s: %w", t, err)
		}
	}
	timeout := time.After(trustedWait)
	for i := range c.own {
		select {
		case <-c.trusted:
		case <-timeout:
			return fmt.Errorf("only %d of %d canaries on the node hear the agent itself: a firewall keeps the node from its own addresses", i, len(c.own))
		}
	}
	return nil
}
