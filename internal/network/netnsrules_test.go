package network

import (
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
)

// shared is a sandbox whose network namespace is its user namespace's, as a real one's is.
type shared struct {
	*lab
	rec  *Record
	user string // the path of its user namespace
}

const (
	commandUID = 1000
	// everybodys programs are where every user gets to.
	everybodys = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

func newShared(t *testing.T) *shared {
	t.Helper()
	testkit.Need(t, testkit.Program("setpriv"), testkit.Program("unshare"))
	l := newLab(t, false)
	trueProgram, err := exec.LookPath("true")
	require.NoError(t, err)
	user, ns, err := hostkernel.OwnNamespaces(runtime.IDs{HostBase: 1 << 20, Size: 1 << 16, Pid1UID: 65000, CommandUID: commandUID, CommandGID: commandUID}, trueProgram, true)
	require.NoError(t, err)
	t.Cleanup(func() { user.Close() })
	s := &shared{lab: l, user: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), user.Fd())}
	t.Cleanup(func() { require.NoError(t, l.Remove(t.Context(), "sb-shared")) })
	_, err = l.Connect(t.Context(), "sb-shared", Bridge, ns)
	require.NoError(t, err)
	require.NoError(t, ns.Close())
	s.rec, err = l.Get("sb-shared")
	require.NoError(t, err)
	return s
}

// as gives the words before a command that make somebody of it, in the sandbox's network namespace.
func (s *shared) as(who string) []string {
	in := map[string][]string{
		"a command":                     {"--user=" + s.user, "--", "setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"},
		"a command's nested root":       {"--user=" + s.user, "--", "setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "unshare", "-Ur"},
		"receiptd":                      {"--user=" + s.user, "--"},
		"root of the node":              {"--"},
		"another user of the node":      {"--", "setpriv", "--reuid=1001", "--regid=1001", "--clear-groups"},
		"the command's uid on the node": {"--", "setpriv", fmt.Sprintf("--reuid=%d", 1<<20+commandUID), "--regid=1000", "--clear-groups"},
	}
	require.Contains(s.t, in, who)
	return append([]string{"nsenter", "--net=" + s.rec.Namespace}, in[who]...)
}

func (s *shared) tryAs(who string, targets []string) []string {
	s.t.Helper()
	args := append(append(s.as(who), "python3", "-c", attempts), targets...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = []string{everybodys}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(s.t, err, who)
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func (s *shared) nft(who, command string) (string, error) {
	args := append(append(s.as(who), "nft"), strings.Fields(command)...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = []string{everybodys}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func all(what string, n int) []string {
	return strings.Split(strings.Repeat(what+"\n", n-1)+what, "\n")
}

func TestP10AListenerBesideASandboxIsTheManagementsAlone(t *testing.T) {
	s := newShared(t)
	s.serve(s.rec.Namespace, "tcp :: 44772", "udp :: 5000", "tcp :: 8000", "udp :: 8000")
	closed, open := []string{"tcp 127.0.0.9 44772"}, []string{"tcp 127.0.0.9 8000"}
	for _, a := range append([]string{"127.0.0.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"}, s.rec.Addresses[0].String(), s.rec.Addresses[1].String()) {
		closed = append(closed, "tcp "+a+" 44772", "udp "+a+" 5000")
		open = append(open, "tcp "+a+" 8000", "udp "+a+" 8000")
	}
	_, err := s.nft("receiptd", "delete table inet "+s.rules.routed.Name)
	require.NoError(t, err)
	require.Equal(t, all("reached x", len(closed)), s.tryAs("a command", closed), "control: without rules inside a command reaches it")
	_, err = s.rules.guardInside(s.rec.Namespace)
	require.NoError(t, err)
	for _, who := range []string{"a command", "a command's nested root", "the command's uid on the node"} {
		require.Equal(t, all("refused", len(closed)), s.tryAs(who, closed), who)
		require.Equal(t, all("reached x", len(open)), s.tryAs(who, open), "%s, what is not listed", who)
	}
	for _, who := range []string{"receiptd", "root of the node", "another user of the node"} {
		require.Equal(t, all("reached x", len(closed)), s.tryAs(who, closed), who)
	}
}

// toAll sends to everybody on the link, and to groups that everybody is in.
const toAll = `
import socket
def send(s, to):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    try: s.sendto(b"x", to)
    except OSError: pass
four, six = (socket.socket(f, socket.SOCK_DGRAM) for f in (socket.AF_INET, socket.AF_INET6))
for a in ("224.0.0.1", "255.255.255.255", "127.255.255.255"): send(four, (a, 5000))
send(six, ("ff02::1", 5000, 0, socket.if_nametoindex("eth0"))); send(six, ("ff01::1", 5000, 0, socket.if_nametoindex("lo")))
four.sendto(b"x", ("127.0.0.1", 8000)) # the last
`

func TestP10WhatIsSentToAllDoesNotComeBackToWhatIsBeside(t *testing.T) {
	s := newShared(t)
	beside, last := s.UDP(s.rec.Namespace, "x", "[::]:5000"), s.UDP(s.rec.Namespace, "x", "127.0.0.1:8000")
	heard := func(who string) int {
		t.Helper()
		before, n := len(beside.Peers()), len(last.Peers())
		args := append(s.as(who), "python3", "-c", toAll)
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = []string{everybodys}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Eventually(t, func() bool { return len(last.Peers()) > n }, time.Minute, time.Millisecond)
		args = append(s.as("receiptd"), "python3", "-c", attempts, "udp 127.0.0.1 5000") // answered after all before
		out, err = exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
		require.Equal(t, "reached x\n", string(out))
		return len(beside.Peers()) - before - 1
	}
	require.GreaterOrEqual(t, heard("receiptd"), 3, "control: over both families it comes back to whoever may")
	require.Zero(t, heard("a command"))
	_, err := s.nft("receiptd", "flush ruleset")
	require.NoError(t, err)
	require.GreaterOrEqual(t, heard("a command"), 3, "control: without rules inside")
}

// passing makes a socket as one user and connects it as another: uids before and after.
const passing = `
import os, socket, sys
def become(uid): os.seteuid(0); os.seteuid(int(uid))
become(sys.argv[1]); s = socket.socket(); become(sys.argv[2])
try: s.connect(("127.0.0.1", 44772)); print("reached")
except OSError: print("refused")
`

func TestP10ASocketCountsByWhoMadeIt(t *testing.T) {
	s := newShared(t)
	s.serve(s.rec.Namespace, "tcp 127.0.0.1 44772")
	for ids, want := range map[[2]string]string{{"0", "0"}: "reached", {"1000", "1000"}: "refused", {"1000", "0"}: "refused", {"0", "1000"}: "reached"} {
		args := append(s.as("receiptd"), "python3", "-c", passing, ids[0], ids[1])
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
		require.Equal(t, want+"\n", string(out), "made by %s, connected by %s", ids[0], ids[1])
	}
}

func TestP10TheRulesInsideAreTheOwnersToChange(t *testing.T) {
	s := newShared(t)
	table := "inet " + s.rules.routed.Name
	out, err := s.nft("receiptd", "list table "+table)
	require.NoError(t, err, out)
	require.Contains(t, out, "a management port")
	for _, who := range []string{"a command", "a command's nested root", "another user of the node"} {
		for _, attack := range []string{"flush ruleset", "delete table " + table, "add table inet x"} {
			out, err := s.nft(who, attack)
			require.Error(t, err, "%s: %s", who, attack)
			require.Contains(t, out, "Operation not permitted", "%s: %s", who, attack)
		}
	}
	after, err := s.nft("receiptd", "list table "+table)
	require.NoError(t, err, after)
	require.Contains(t, after, "a management port")
	out, err = s.nft("receiptd", "flush ruleset")
	require.NoError(t, err, "control: whose namespace it is can: %s", out)
}

// finders are who may find that the rules inside are not as they should be.
var finders = map[string]func(*shared) (Lapses, error){
	"by the look": func(s *shared) (Lapses, error) { var seen uint32; return s.look(&seen) },
	"by the next agent": func(s *shared) (Lapses, error) {
		again, err := New(s.opts)
		require.NoError(s.t, err)
		s.Manager = again
		return s.Restore()
	},
}

func TestP10RulesInsideThatSomebodyHasFlushedArePutBack(t *testing.T) {
	s := newShared(t)
	s.serve(s.rec.Namespace, "tcp 127.0.0.1 44772")
	targets := []string{"tcp 127.0.0.1 44772"}
	for name, find := range finders {
		found, err := find(s)
		require.NoError(t, err, name)
		require.Empty(t, found, name)
		_, err = s.nft("root of the node", "add table inet sidecar")
		require.NoError(t, err)
		found, err = find(s)
		require.NoError(t, err, name)
		require.Empty(t, found, "%s: what else is there is nobody's business", name)
		_, err = s.nft("root of the node", "flush ruleset") // as a sidecar that sets up its own
		require.NoError(t, err)
		require.Equal(t, []string{"reached x"}, s.tryAs("a command", targets), "control: without them a command reaches it")
		found, err = find(s)
		require.NoError(t, err, name)
		require.Equal(t, Lapses{Restored: []string{"sb-shared"}}, found, name)
		require.Equal(t, []string{"refused"}, s.tryAs("a command", targets), name)
	}
}

func TestP16RulesInsideAreCountedWithoutAListOfThem(t *testing.T) {
	s := newShared(t)
	want := s.rec.Inside
	require.NotZero(t, want)
	const times, many = 10, 1000
	table := "inet " + s.rules.routed.Name
	batch := strings.Repeat("add rule "+table+" "+insideOutput+" counter\n", many)
	for range times {
		words := append(s.as("receiptd"), "nft", "-f", "-")
		cmd := exec.Command(words[0], words[1:]...)
		cmd.Stdin = strings.NewReader(batch)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	allocated := func(look func()) uint64 {
		var before, after goruntime.MemStats
		goruntime.ReadMemStats(&before)
		look()
		goruntime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	listed := allocated(func() {
		ns, err := openNamespace(s.rec.Namespace)
		require.NoError(t, err)
		defer ns.Close()
		c, err := dialNFT(nftables.WithNetNSFd(int(ns)))
		require.NoError(t, err)
		found, err := c.GetRules(s.rules.insideTable(), &nftables.Chain{Name: insideOutput})
		require.NoError(t, err)
		require.Len(t, found, want+times*many)
	})
	counted := allocated(func() {
		n, err := s.rules.insideSize(s.rec.Namespace)
		require.NoError(t, err)
		require.Equal(t, want+times*many, n)
	})
	require.Less(t, counted, listed/10, "the look takes no more for more of them")
	found, err := finders["by the look"](s)
	require.NoError(t, err)
	require.Equal(t, Lapses{Restored: []string{"sb-shared"}}, found)
	n, err := s.rules.insideSize(s.rec.Namespace)
	require.NoError(t, err)
	require.Equal(t, want, n)
	_, err = s.nft("receiptd", "delete table "+table)
	require.NoError(t, err)
	n, err = s.rules.insideSize(s.rec.Namespace)
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestP10ASandboxThatCantHaveItsRulesInsideIsCutOff(t *testing.T) {
	for name, find := range finders {
		t.Run(name, func(t *testing.T) {
			s := newShared(t)
			beside := []string{"tcp 127.0.0.1 44772", "tcp ::1 44772", "tcp " + s.rec.Addresses[0].String() + " 44772", "tcp " + s.rec.Addresses[1].String() + " 44772"}
			s.serve(s.rec.Namespace, "tcp :: 44772")
			web := s.serve(s.World, "tcp "+netlab.Web+" 80")
			_, err := s.nft("root of the node", "flush ruleset")
			require.NoError(t, err)
			release := s.owned(s.as("root of the node"), "inet "+s.rules.routed.Name)
			require.Equal(t, all("reached x", 5), s.tryAs("a command", append(beside, web...)), "control: without them a command reaches all")
			found, err := find(s)
			require.ErrorIs(t, err, ErrUnavailable)
			require.Equal(t, Lapses{CutOff: []string{"sb-shared"}}, found)
			for i, what := range s.tryAs("a command", []string{beside[0], beside[3], web[0]}) { // some hang
				require.NotContains(t, what, "reached", "%d", i)
			}
			require.ErrorContains(t, s.Recheck(t.Context(), "sb-shared"), "the rules inside, that keep it from what is beside it, could not be set")
			release()
			found, err = find(s)
			require.NoError(t, err)
			require.Empty(t, found)
			require.NotEqual(t, []string{"reached x"}, s.tryAs("a command", beside[:1]), "it stays so")
		})
	}
}

func TestTheNextAgentSetsTheRulesInsideByItsOwnList(t *testing.T) {
	s := newShared(t)
	s.serve(s.rec.Namespace, "tcp 127.0.0.1 44772", "tcp 127.0.0.1 4711")
	targets := []string{"tcp 127.0.0.1 44772", "tcp 127.0.0.1 4711"}
	require.Equal(t, []string{"refused", "reached x"}, s.tryAs("a command", targets))
	o := s.opts
	o.Listeners.TCP = []uint16{4711}
	again, err := New(o)
	require.NoError(t, err)
	s.Manager = again
	require.Empty(t, s.restore(), "that is nobody's attack")
	require.Equal(t, []string{"reached x", "refused"}, s.tryAs("a command", targets))
}

func TestASandboxWhoseRecordCantBeWrittenKeepsItsRulesInsideAndItsNetwork(t *testing.T) {
	s := newShared(t)
	s.serve(s.rec.Namespace, "tcp 127.0.0.1 4711")
	web := s.serve(s.World, "tcp "+netlab.Web+" 80")
	o := s.opts
	o.Listeners.TCP = append(o.Listeners.TCP, 4711) // another number of rules
	again, err := New(o)
	require.NoError(t, err)
	s.Manager = again
	inTheWay := s.records().path("sb-shared") + unfinished
	require.NoError(t, os.Mkdir(inTheWay, 0o700))
	found, err := s.Restore()
	require.NoError(t, err)
	require.Empty(t, found)
	require.Equal(t, []string{"refused", "reached x"}, s.tryAs("a command", append([]string{"tcp 127.0.0.1 4711"}, web...)))
	require.NoError(t, os.Remove(inTheWay))
}
