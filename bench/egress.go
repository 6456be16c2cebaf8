package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

const (
	nameNoNetwork  = "true, no network"
	nameOpen       = "true, open"
	nameListed     = "true, allowlist"
	nameShut       = "true, egress none"
	nameBareConns  = "connections, bare"
	nameOpenConns  = "connections, open"
	nameListedConn = "connections, allowlist"
	nameOpenNamed  = "connections by name, open"
	nameListNamed  = "connections by name, allowlist"

	// The world's addresses (RFC 5737), and what one sample of connections is.
	worldAddr, nodeAddr, siteAddr = "203.0.113.1", "203.0.113.2", "198.51.100.10"
	siteName                      = "site.example"
	connections                   = 64
)

// connect makes connections to $TO one after the other, and says how many microseconds that took. They are counted where they are
// made, without the start of the program, and without the first by the name, which opens the address to a list.
var connect = fmt.Sprintf("exec 3<>/dev/tcp/$FIRST/80; t=${EPOCHREALTIME/./}; for i in {1..%d}; do exec 3<>/dev/tcp/$TO/80 || exit 1; done; echo $((${EPOCHREALTIME/./}-t))", connections)

// egressCases are a command that uses no network, and connections, under each policy: with an agent of their own in a network
// namespace of their own, so that nothing of this machine's network is changed.
func egressCases(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	commands := []policyCase{{nameNoNetwork, "none", ""}, {nameOpen, "bridge", "open"}, {nameListed, "bridge", "allowlist"}, {nameShut, "bridge", "none"}}
	conns := []policyCase{{nameOpenConns, "bridge", "open"}, {nameListedConn, "bridge", "allowlist"}, {nameOpenNamed, "bridge", "open"}, {nameListNamed, "bridge", "allowlist"}}
	if !wantsAny(o, append(append([]policyCase{{name: nameBareConns}}, commands...), conns...)) {
		return nil, nil
	}
	w, err := newWorld(p)
	if err != nil {
		return nil, fmt.Errorf("making a network for the cases of egress: %w", err)
	}
	a, err := startAgentOn(ctx, p, "egress", w.enter("sandbox-agent"), "--config", w.config)
	if err != nil {
		return nil, err
	}
	var cases []testCase
	for _, c := range commands {
		if !o.wants(c.name) {
			continue
		}
		in, err := a.connected(ctx, c)
		if err != nil {
			return nil, err
		}
		cases = append(cases, testCase{group: groupPolicy, series: []string{c.name}, baseline: c.name == nameNoNetwork, sample: one(timed(in, "true"))})
	}
	if o.wants(nameBareConns) {
		cases = append(cases, testCase{group: groupConnections, series: []string{nameBareConns}, baseline: true, sample: one(w.bare)})
	}
	for _, c := range conns {
		if !o.wants(c.name) {
			continue
		}
		in, err := a.connected(ctx, c)
		if err != nil {
			return nil, err
		}
		to := siteAddr
		if c.name == nameOpenNamed || c.name == nameListNamed {
			to = siteName
		}
		sample := one(func(ctx context.Context) (time.Duration, error) { return in.connections(ctx, to) })
		cases = append(cases, testCase{group: groupConnections, series: []string{c.name}, baseline: c.name == nameOpenConns || c.name == nameOpenNamed, sample: sample})
	}
	return cases, nil
}

// policyCase is a session of a network mode and an egress policy.
type policyCase struct{ name, mode, egress string }

func wantsAny(o options, cases []policyCase) bool {
	for _, c := range cases {
		if o.wants(c.name) {
			return true
		}
	}
	return false
}

func (a *agent) connected(ctx context.Context, c policyCase) (*session, error) {
	worktree, _, err := a.place.worktree(ctx)
	if err != nil {
		return nil, err
	}
	res, err := a.client.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: a.place.repo, Worktree: worktree}, Network: &sandboxv1.Network{Mode: c.mode, Egress: c.egress},
	})
	if err != nil {
		return nil, a.client.Explain("creating a session for "+c.name, err)
	}
	return &session{client: a.client, id: res.GetSession().GetSessionId(), sandbox: res.GetSession().GetSandbox(), worktree: worktree}, nil
}

func (s *session) connections(ctx context.Context, to string) (time.Duration, error) {
	r, err := s.exec(ctx, "FIRST="+siteName+" TO="+to+"; "+connect)
	if err != nil {
		return 0, err
	}
	return microseconds(r.GetStdout())
}

func microseconds(out []byte) (time.Duration, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading how long connections took: %w", err)
	}
	return time.Duration(n) * time.Microsecond, nil
}

// world is a network namespace for an agent, and one behind it with a site and a nameserver.
type world struct {
	dir, config string
}

func newWorld(p *place) (*world, error) {
	w := &world{dir: p.path("egress"), config: p.path("egress", "config.yaml")}
	if err := os.Mkdir(w.dir, 0o711); err != nil {
		return nil, err
	}
	for _, name := range []string{"node", "world"} {
		if err := makeNamespace(w.path(name)); err != nil {
			return nil, err
		}
		p.onClose(func(context.Context) error { return unix.Unmount(w.path(name), unix.MNT_DETACH) })
	}
	if err := w.wire(); err != nil {
		return nil, err
	}
	if err := w.serve(p); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(w.dir, "sandbox-agent"), []byte(fmt.Sprintf("#!/bin/sh\nexec nsenter --net=%s -- %s \"$@\"\n", w.path("node"), filepath.Join(p.bin, "sandbox-agent"))), 0o755); err != nil {
		return nil, err
	}
	return w, os.WriteFile(w.config, []byte(fmt.Sprintf(`network:
  allowed: [none, bridge]
  nameservers: [%s]
  bridge: {subnet: 10.231.0.0/16}
  egress:
    allowed: [none, open, allowlist]
    connections_per_second: 1000000
    allow: [{to: %s, ports: [80], reason: the benchmark's site}]
`, siteAddr, siteName)), 0o600)
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

// enter is a program that runs another one of this run's on the node.
func (w *world) enter(program string) string { return w.path(program) }

// inside calls f on a thread of its own in a network namespace.
func inside(path string, f func() error) error {
	c := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		c <- func() error {
			ns, err := netns.GetFromPath(path)
			if err != nil {
				return err
			}
			defer ns.Close()
			if err := netns.Set(ns); err != nil {
				return err
			}
			return f()
		}()
	}()
	return <-c
}

func makeNamespace(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	c := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		c <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}()
	}()
	return <-c
}

// wire connects node and world.
func (w *world) wire() error {
	peer, err := netns.GetFromPath(w.path("world"))
	if err != nil {
		return err
	}
	defer peer.Close()
	if err := inside(w.path("node"), func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink0"}, PeerName: "node0", PeerNamespace: netlink.NsFd(int(peer))}
		return errors.Join(netlink.LinkAdd(veth), up("lo", ""), up("uplink0", nodeAddr+"/24"),
			netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(worldAddr)}))
	}); err != nil {
		return err
	}
	return inside(w.path("world"), func() error {
		return errors.Join(up("lo", siteAddr+"/32"), up("node0", worldAddr+"/24"))
	})
}

// up sets an interface up, with an address if there is one.
func up(name, address string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if address != "" {
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// serve takes connections to the site, and answers every question for names with its address.
func (w *world) serve(p *place) error {
	var ln net.Listener
	var dns net.PacketConn
	err := inside(w.path("world"), func() (err error) {
		if ln, err = net.Listen("tcp", siteAddr+":80"); err != nil {
			return err
		}
		dns, err = net.ListenPacket("udp", siteAddr+":53")
		return err
	})
	if ln != nil {
		p.onClose(func(context.Context) error { return ln.Close() })
	}
	if err != nil {
		return err
	}
	p.onClose(func(context.Context) error { return dns.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	go answer(dns)
	return nil
}

func answer(dns net.PacketConn) {
	for b := make([]byte, 4096); ; {
		n, from, err := dns.ReadFrom(b)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(b[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		m.Response, m.Additionals = true, nil
		if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 3600},
				Body:   &dnsmessage.AResource{A: [4]byte(net.ParseIP(siteAddr).To4())},
			}}
		}
		if reply, err := m.Pack(); err == nil {
			_, _ = dns.WriteTo(reply, from) // who is gone gets no answer
		}
	}
}

// bare makes the connections on the node, without a sandbox.
func (w *world) bare(ctx context.Context) (time.Duration, error) {
	out, err := exec.CommandContext(ctx, "nsenter", "--net="+w.path("node"), "--", "bash", "-c", "FIRST="+siteAddr+" TO="+siteAddr+"; "+connect).Output()
	if err != nil {
		return 0, fmt.Errorf("connecting without a sandbox: %w", err)
	}
	return microseconds(out)
}
