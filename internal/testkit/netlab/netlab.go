// Package netlab makes a small internet for a test, in network namespaces of its own: a node, and a world behind the node's
// uplink with web servers, a metadata server and a nameserver. Nothing of the machine's own network is changed.
package netlab

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// The addresses (RFC 5737, 3849).
const (
	NodeAddr  = "203.0.113.2"
	NodeAddr6 = "2001:db8:2::2"
	Web       = "198.51.100.10"
	Web6      = "2001:db8:1::10"
	Other     = "198.51.100.20"
	Metadata  = "169.254.169.254"
	Metadata6 = "fd00:ec2::254"

	gateway, gateway6 = "203.0.113.1", "2001:db8:2::1"
	uplink            = "uplink0"
)

// Lab is a node and a world.
type Lab struct {
	T testing.TB
	// Node and World are the paths of their network namespaces.
	Node, World string
	// Sandboxes are ranges that the world reaches through the node.
	Sandboxes []string
}

// New makes a lab, in which the world reaches the ranges of sandboxes through the node.
func New(t testing.TB, sandboxes ...string) *Lab {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("nsenter"))
	dir := testkit.StateDir(t)
	l := &Lab{T: t, Node: filepath.Join(dir, "node"), World: filepath.Join(dir, "world"), Sandboxes: sandboxes}
	for _, path := range []string{l.Node, l.World} {
		makeNamespace(t, path)
	}
	l.wire()
	return l
}

// Here makes a lab whose node is the test process's own network namespace, which is no machine's.
func Here(t testing.TB, sandboxes ...string) *Lab {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("nsenter"))
	l := &Lab{T: t, Node: ownNamespace, World: filepath.Join(testkit.StateDir(t), "world"), Sandboxes: sandboxes}
	makeNamespace(t, l.World)
	node := at(t, l.Node)
	defer node.Close()
	routes, err := node.RouteList(nil, netlink.FAMILY_ALL)
	require.NoError(t, err)
	for _, r := range routes {
		require.False(t, r.Dst == nil || r.Dst.IP.IsUnspecified(), "this process is in a network namespace with a default route: the machine's")
	}
	up(t, node, "lo")
	l.wire()
	t.Cleanup(func() {
		h := at(t, l.Node)
		defer h.Close()
		link, err := h.LinkByName(uplink)
		require.NoError(t, err)
		require.NoError(t, h.LinkDel(link))
	})
	return l
}

const ownNamespace = "/proc/self/ns/net"

// makeNamespace binds a new network namespace to path until the test ends.
func makeNamespace(t testing.TB, path string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	onThread(t, func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	})
	t.Cleanup(func() { require.NoError(t, unix.Unmount(path, unix.MNT_DETACH)) })
	l := at(t, path)
	defer l.Close()
	up(t, l, "lo")
}

// onThread calls f on a thread that ends with it.
func onThread(t testing.TB, f func() error) {
	t.Helper()
	c := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		c <- f()
	}()
	require.NoError(t, <-c)
}

func at(t testing.TB, path string) *netlink.Handle {
	t.Helper()
	ns, err := netns.GetFromPath(path)
	require.NoError(t, err)
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	require.NoError(t, err)
	return h
}

func up(t testing.TB, h *netlink.Handle, name string) netlink.Link {
	t.Helper()
	link, err := h.LinkByName(name)
	require.NoError(t, err)
	require.NoError(t, h.LinkSetUp(link))
	return link
}

// address adds an address at once, without waiting for whether another host has it.
func address(t testing.TB, h *netlink.Handle, link netlink.Link, cidr string) {
	t.Helper()
	a, err := netlink.ParseAddr(cidr)
	require.NoError(t, err)
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	require.NoError(t, h.AddrAdd(link, a))
}

func route(t testing.TB, h *netlink.Handle, to, via string) {
	t.Helper()
	r := &netlink.Route{Gw: net.ParseIP(via)}
	if to != "" {
		_, dst, err := net.ParseCIDR(to)
		require.NoError(t, err)
		r.Dst = dst
	}
	require.NoError(t, h.RouteAdd(r))
}

// wire connects node and world.
func (l *Lab) wire() {
	t := l.T
	node, world := at(t, l.Node), at(t, l.World)
	defer node.Close()
	defer world.Close()
	peer, err := netns.GetFromPath(l.World)
	require.NoError(t, err)
	defer peer.Close()
	require.NoError(t, node.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: uplink}, PeerName: "node0", PeerNamespace: netlink.NsFd(int(peer))}))
	n, w, lo := up(t, node, uplink), up(t, world, "node0"), up(t, world, "lo")
	address(t, node, n, NodeAddr+"/24")
	address(t, node, n, NodeAddr6+"/64")
	address(t, world, w, gateway+"/24")
	address(t, world, w, gateway6+"/64")
	for _, a := range []string{Web, Other, Metadata, Web6, Metadata6} {
		ip := netip.MustParseAddr(a)
		address(t, world, lo, netip.PrefixFrom(ip, ip.BitLen()).String())
	}
	route(t, node, "0.0.0.0/0", gateway)
	route(t, node, "::/0", gateway6)
	for _, s := range l.Sandboxes {
		via := NodeAddr
		if netip.MustParsePrefix(s).Addr().Is6() {
			via = NodeAddr6
		}
		route(t, world, s, via)
	}
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		l.Sysctl(l.Node, key, "1")
	}
}

// Sysctl sets a sysctl of a namespace.
func (l *Lab) Sysctl(ns, key, value string) {
	l.T.Helper()
	l.inside(ns, func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0o644) })
}

// inside calls f on a thread in a namespace.
func (l *Lab) inside(ns string, f func() error) {
	l.T.Helper()
	onThread(l.T, func() error {
		handle, err := netns.GetFromPath(ns)
		if err != nil {
			return err
		}
		defer handle.Close()
		if err := netns.Set(handle); err != nil {
			return err
		}
		return f()
	})
}

// Program is a program that runs another one on the node.
func (l *Lab) Program(path string) string {
	l.T.Helper()
	script := filepath.Join(filepath.Dir(l.Node), "on-node-"+filepath.Base(path))
	require.NoError(l.T, os.WriteFile(script, []byte(fmt.Sprintf("#!/bin/sh\nexec nsenter --net=%s -- %s \"$@\"\n", l.Node, path)), 0o755))
	return script
}

// Command is a command in a namespace.
func (l *Lab) Command(ns string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--net=" + ns, "--"}, args...)...)
}

// Server counts who reached it.
type Server struct {
	Name    string
	Address netip.AddrPort

	mu    sync.Mutex
	peers []netip.AddrPort
}

// Peers are the addresses from which it was reached.
func (s *Server) Peers() []netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]netip.AddrPort(nil), s.peers...)
}

func (s *Server) note(a net.Addr) {
	if p, err := netip.ParseAddrPort(a.String()); err == nil {
		s.mu.Lock()
		s.peers = append(s.peers, netip.AddrPortFrom(p.Addr().Unmap(), p.Port()))
		s.mu.Unlock()
	}
}

// Listen is a TCP listener at an address of a namespace. The caller closes it.
func (l *Lab) Listen(ns, address string) (ln net.Listener) {
	l.T.Helper()
	l.inside(ns, func() (err error) {
		ln, err = net.Listen("tcp", address)
		return err
	})
	return ln
}

// TCP serves on an address of a namespace until the test ends: it says its name, and the address of who came.
func (l *Lab) TCP(ns, name, address string) *Server {
	l.T.Helper()
	ln := l.Listen(ns, address)
	s := &Server{Name: name, Address: ln.Addr().(*net.TCPAddr).AddrPort()}
	l.T.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.note(c.RemoteAddr())
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			fmt.Fprintf(c, "%s to %s\n", name, host)
			c.Close()
		}
	}()
	return s
}

// Silent takes the first connection to an address of a namespace, and neither reads nor writes.
func (l *Lab) Silent(ns, address string) <-chan net.Conn {
	l.T.Helper()
	ln := l.Listen(ns, address)
	l.T.Cleanup(func() { ln.Close() })
	got := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		ln.Close()
		if err == nil {
			got <- c
		}
	}()
	return got
}

// UDP answers each datagram with its name until the test ends.
func (l *Lab) UDP(ns, name, address string) *Server {
	l.T.Helper()
	var conn net.PacketConn
	l.inside(ns, func() (err error) {
		conn, err = net.ListenPacket("udp", address)
		return err
	})
	s := &Server{Name: name, Address: conn.LocalAddr().(*net.UDPAddr).AddrPort()}
	l.T.Cleanup(func() { conn.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			_, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			s.note(from)
			_, _ = conn.WriteTo([]byte(name+"\n"), from) // who is gone gets no answer
		}
	}()
	return s
}

// Links names the interfaces of a namespace.
func (l *Lab) Links(ns string) []string {
	l.T.Helper()
	h := at(l.T, ns)
	defer h.Close()
	links, err := h.LinkList()
	require.NoError(l.T, err)
	var out []string
	for _, link := range links {
		out = append(out, link.Attrs().Name)
	}
	return out
}
