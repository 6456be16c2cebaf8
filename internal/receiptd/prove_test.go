package receiptd

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// networked is a sandbox whose loopback interface is up.
func networked(t *testing.T) *sandbox {
	t.Helper()
	testkit.Need(t, testkit.Program("nsenter"), testkit.Program("ip"), testkit.Program("nft"))
	s := startSandbox(t)
	s.command("ip", "link", "set", "lo", "up")
	return s
}

func (s *sandbox) network() string { return fmt.Sprintf("/proc/%d/ns/net", s.cmd.Process.Pid) }

// command runs a command of the node's in the sandbox's network namespace.
func (s *sandbox) command(args ...string) string {
	s.t.Helper()
	out, err := exec.Command("nsenter", append([]string{"--net=" + s.network(), "--"}, args...)...).CombinedOutput()
	require.NoError(s.t, err, string(out))
	return string(out)
}

// listen listens in the sandbox's network namespace until the test ends.
func (s *sandbox) listen(network, address string) net.Listener {
	s.t.Helper()
	var l net.Listener
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		done <- func() error {
			ns, err := os.Open(s.network())
			if err != nil {
				return err
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			plain := net.ListenConfig{} // none of MPTCP, which a command can't have, and which the kernel doesn't destroy
			plain.SetMultipathTCP(false)
			l, err = plain.Listen(s.t.Context(), network, address)
			return err
		}()
	}()
	require.NoError(s.t, <-done)
	s.t.Cleanup(func() { l.Close() })
	return l
}

// proved is what a proof says of connections: whether it holds, and in what detail.
func (s *sandbox) proved(targets ...*receiptdv1.Target) (bool, string) {
	s.t.Helper()
	res, err := s.client.Prove(s.t.Context(), &receiptdv1.ProveRequest{AttachEpoch: s.epoch, Targets: targets})
	require.NoError(s.t, err)
	for _, i := range res.GetItems() {
		if i.GetWhat() == "no connection to a listener of the node" {
			return i.GetHolds(), i.GetDetail()
		}
		require.True(s.t, i.GetHolds(), "%s %s: %s", i.GetPromise(), i.GetWhat(), i.GetDetail())
	}
	require.FailNow(s.t, "nothing was said of connections")
	return false, ""
}

func TestP10AProofSeesAListenerThatACommandReaches(t *testing.T) {
	s := networked(t)
	abstract := "@" + t.Name()
	l, err := net.Listen("unix", abstract)
	require.NoError(t, err)
	defer l.Close()
	holds, detail := s.proved(&receiptdv1.Target{Network: "unix", Address: abstract})
	require.True(t, holds, detail)
	require.Equal(t, "2 tried", detail, "by the shell and by the launcher")
	s.listen("unix", abstract)
	holds, detail = s.proved(&receiptdv1.Target{Network: "unix", Address: abstract})
	require.False(t, holds, "control: it listens in the sandbox's own network namespace")
	require.Equal(t, "reached: unix "+abstract+", connected unix "+abstract, detail)

	port := s.listen("tcp", "127.0.0.1:0").Addr().(*net.TCPAddr).Port
	for _, a := range []string{"127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"} {
		holds, detail = s.proved(&receiptdv1.Target{Network: "tcp", Address: a, Port: uint32(port), Token: "x"})
		require.False(t, holds, "control: nothing keeps the command from it")
		require.Equal(t, fmt.Sprintf("reached: connected tcp %[1]s %[2]d, passed connected tcp %[1]s %[2]d, listened connected tcp %[1]s %[2]d", a, port), detail)
	}
	require.NotNil(t, s.exec(s.request("e1", "true")).done, "the sandbox is of use afterwards")
}

// besides is what the agent sets in a sandbox's network namespace: commands here have the uid 1000, receiptd has 0.
const besides = `table inet lab { chain output { type filter hook output priority -10
	oifname lo meta skuid %s tcp dport 44772 reject with tcp reset
	oifname lo meta skuid %s udp dport 5000 reject
	}
}`

func TestP10AProofOpensCanariesBesideTheSandbox(t *testing.T) {
	s := networked(t)
	tcp, udp := &receiptdv1.Target{Network: "inside-tcp", Port: 44772}, &receiptdv1.Target{Network: "inside-udp", Port: 5000}
	holds, detail := s.proved(tcp, udp)
	require.False(t, holds, "control: without rules a command reaches them")
	for _, want := range []string{"tcp 127.0.0.1 44772", "passed connected tcp 0.0.0.0 44772", "listened connected tcp 0.0.0.0 44772", "tcp ::1 44772", "tcp :: 44772", "tcp ::ffff:127.0.0.1 44772", "udp port 5000"} {
		require.Contains(t, detail, want)
	}
	rules := func(skuid string) {
		s.command("nft", strings.ReplaceAll(besides, "%s", skuid))
	}
	rules("!= 0")
	holds, detail = s.proved(tcp, udp)
	require.True(t, holds, detail)
	s.command("nft", "flush ruleset")
	rules(">= 0")
	_, err := s.client.Prove(t.Context(), &receiptdv1.ProveRequest{AttachEpoch: s.epoch, Targets: []*receiptdv1.Target{tcp}})
	require.ErrorContains(t, err, "does not answer receiptd itself", "what nobody reaches proves nothing")
	s.command("nft", "flush ruleset")

	s.listen("tcp", "127.0.0.1:44772")
	rules("!= 0")
	holds, detail = s.proved(tcp)
	require.True(t, holds, detail)
	s.command("nft", "flush ruleset")
	holds, detail = s.proved(tcp)
	require.False(t, holds, "who listens there already is its own canary")
	require.Contains(t, detail, "tcp 127.0.0.1 44772")
	require.NotContains(t, detail, "tcp ::1 44772", "it is not there")
}

func TestP3NothingOfAProofWaitsForANeighbourAfterIt(t *testing.T) {
	s := networked(t)
	s.command("sh", "-ec", `ip link add v0 type veth peer name v1; ip link set v0 up; ip link set v1 up
		ip addr add 10.99.0.1/24 dev v0; ip addr add fd99::1/64 dev v0 nodad
		echo 1000 >/proc/sys/net/ipv4/neigh/v0/mcast_solicit; echo 1000 >/proc/sys/net/ipv6/neigh/v0/mcast_solicit`)
	waiting := func() string {
		return s.command("sh", "-ec", "ip -4 neigh show dev v0 nud incomplete; ip -6 neigh show dev v0 nud incomplete")
	}
	s.command("bash", "-c", "for a in 10.99.0.3 fd99::3; do echo >/dev/udp/$a/80; done")
	require.Regexp(t, `(?s)10\.99\.0\.3 .*fd99::3 `, waiting(), "control: nobody answers there")
	var targets []*receiptdv1.Target
	for _, a := range []string{"10.99.0.2", "fd99::2"} {
		targets = append(targets, &receiptdv1.Target{Network: "tcp", Address: a, Port: 80}, &receiptdv1.Target{Network: "udp", Address: a, Port: 80})
	}
	holds, detail := s.proved(targets...)
	require.True(t, holds, detail)
	require.Empty(t, waiting())
}

func TestP10WhatWasNotTriedIsNotProved(t *testing.T) {
	targets := []*receiptdv1.Target{{Network: "tcp", Address: "192.0.2.1", Port: 80}}
	a, err := newAttempts(targets)
	require.NoError(t, err)
	defer a.close()
	good := func() *probe {
		return &probe{flags: map[string]bool{"tried": true}, reached: append([]string(nil), a.needed...)}
	}
	for _, i := range judgeReach(a, good()) {
		require.True(t, i.GetHolds(), i.GetWhat())
	}
	notListened := func(p *probe) {
		p.reached = slices.DeleteFunc(p.reached, func(n string) bool { return strings.HasPrefix(n, wire.Listened) })
		require.Len(t, p.reached, len(a.needed)-1)
	}
	for what, c := range map[string]struct {
		spoil func(*probe)
		want  int
	}{
		"nothing was tried":                 {func(p *probe) { p.flags = nil }, 4},
		"a vsock socket":                    {func(p *probe) { p.reached = append(p.reached, "vsock") }, 1},
		"a ring":                            {func(p *probe) { p.reached = append(p.reached, "io_uring") }, 1},
		"a descriptor":                      {func(p *probe) { p.reached = append(p.reached, "/proc/*/fd") }, 1},
		"a connection by a passed socket":   {func(p *probe) { p.reached = append(p.reached, "passed connected tcp 192.0.2.1 80") }, 1},
		"a connection by one that listened": {func(p *probe) { p.reached = append(p.reached, "listened connected tcp 192.0.2.1 80") }, 1},
		"no control of one that listened":   {notListened, 1},
		"a kernel without that way":         {func(p *probe) { notListened(p); p.flags["cannot"] = true }, 0},
		"another control less there":        {func(p *probe) { p.reached, p.flags["cannot"] = p.reached[1:], true }, 1},
		"a connection":                      {func(p *probe) { p.reached = append(p.reached, "connected tcp 192.0.2.1 80") }, 1},
		"no control":                        {func(p *probe) { p.reached = nil }, 1},
		"one control less":                  {func(p *probe) { p.reached = p.reached[1:] }, 1},
	} {
		p, failed := good(), 0
		c.spoil(p)
		for _, i := range judgeReach(a, p) {
			if !i.GetHolds() {
				failed++
			}
		}
		require.Equal(t, c.want, failed, what)
	}
}

func TestATargetThatWouldBeReadAsSomethingElseIsRefused(t *testing.T) {
	for _, good := range []*receiptdv1.Target{
		{Network: "tcp", Address: "::ffff:192.0.2.1", Port: 80}, {Network: "unix", Address: "/run/a b"}, {Network: "inside-udp", Port: 53},
	} {
		require.NoError(t, checkTargets([]*receiptdv1.Target{good}), "%v", good)
	}
	for _, bad := range []*receiptdv1.Target{
		{Network: "sctp", Address: "192.0.2.1"}, {Network: "tcp", Address: "host"}, {Network: "tcp", Address: "192.0.2.1", Port: 70000}, {Network: "unix"},
		{Network: "unix", Address: "a\nb"}, {Network: "tcp", Address: "192.0.2.1", Token: "a b"}, {Network: "inside-tcp", Address: "192.0.2.1", Port: 80}, {Network: "inside-tcp"},
	} {
		require.Error(t, checkTargets([]*receiptdv1.Target{bad}), "%v", bad)
	}
}
