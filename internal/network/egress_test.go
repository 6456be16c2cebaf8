package network

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/network/resolver"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

const resolverAddr = "169.254.53.53"

// egressLab is a node with a resolver, and a nameserver in the world.
type egressLab struct {
	*lab
	zone *netlab.Zone

	mu      sync.Mutex
	refused []string
	stop    func()
}

func newEgressLab(t *testing.T) *egressLab {
	l := &egressLab{lab: newLab(t, false)}
	l.zone = l.DNS(l.World, netlab.Web+":53")
	o := l.opts
	o.Egress = EgressOptions{Resolvers: []netip.Addr{netip.MustParseAddr(resolverAddr)}}
	var err error
	l.Manager, err = New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.egress.set(nil)) })
	l.run()
	t.Cleanup(func() { l.stop() })
	return l
}

// run has the manager serve, until stop.
func (l *egressLab) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.Serve(ctx, func(id, what string) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.refused = append(l.refused, id+" "+what)
		})
	}()
	l.stop = func() { cancel(); <-done }
	require.Eventually(l.t, func() bool {
		return l.Command("/proc/self/ns/net", "python3", "-c", `
import socket
s = socket.socket(); s.connect(('`+resolverAddr+`', 53))`).Run() == nil
	}, 20*time.Second, 50*time.Millisecond)
}

func (l *egressLab) under(id string, e Egress) *Record {
	l.t.Helper()
	ns, err := hostkernel.NewNetwork()
	require.NoError(l.t, err)
	defer ns.Close()
	l.t.Cleanup(func() { require.NoError(l.t, l.Remove(context.Background(), id)) })
	_, err = l.ConnectUnder(l.t.Context(), id, Bridge, e, ns)
	require.NoError(l.t, err)
	rec, err := l.Get(id)
	require.NoError(l.t, err)
	return rec
}

func entries(t *testing.T, texts ...string) []egress.Entry {
	t.Helper()
	var out []egress.Entry
	for _, s := range texts {
		e, err := egress.ParseText(s)
		require.NoError(t, err)
		out = append(out, e)
	}
	return out
}

// lookup is a client that asks for names, "NAME" or "NAME@SERVER", and says what it is told.
const lookup = `
import socket, struct, sys
for t in sys.argv[1:]:
    name, _, server = t.partition('@')
    name, _, kind = name.partition('/')
    q = struct.pack('>HHHHHH', 7, 0x100, 1, 0, 0, 0) + b''.join(bytes([len(l)]) + l.encode() for l in name.split('.')) + b'\0' + struct.pack('>HH', 28 if kind == '6' else 1, 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(5)
    try:
        s.connect((server or '` + resolverAddr + `', 53))
        s.send(q)
        r = s.recv(4096)
    except socket.timeout:
        print('hangs'); continue
    except OSError:
        print('refused'); continue
    code, n = r[3] & 15, struct.unpack('>H', r[6:8])[0]
    if code: print('code', code); continue
    if not n: print('none'); continue
    print(socket.inet_ntop(socket.AF_INET6, r[-16:]) if kind == '6' else socket.inet_ntop(socket.AF_INET, r[-4:]))
`

func (l *egressLab) lookup(rec *Record, names ...string) []string {
	l.t.Helper()
	cmd := l.Command(rec.Namespace, append([]string{"python3", "-c", lookup}, names...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(l.t, err)
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func (l *egressLab) told() []string {
	l.t.Helper()
	require.NoError(l.t, l.Settle(l.t.Context()))
	l.mu.Lock()
	defer l.mu.Unlock()
	out := slices.Clone(l.refused)
	l.refused = nil
	return out
}

func TestASandboxReachesWhatItsListSaysAndNothingElse(t *testing.T) {
	l := newEgressLab(t)
	all := l.serve(l.World, "tcp "+netlab.Web+" 443", "tcp "+netlab.Web6+" 443", "tcp "+netlab.Web+" 80", "tcp "+netlab.Other+" 443", "udp "+netlab.Web+" 4000",
		"udp "+netlab.Web6+" 4000", "tcp "+netlab.Other+" 22", "tcp "+netlab.Metadata+" 443")
	l.zone.Set("web.example", netlab.Web, netlab.Web6)
	l.zone.Set("meta.example", netlab.Metadata)
	l.zone.Set("node.example", netlab.NodeAddr)
	l.zone.Set("alias.example", "other.hidden.example")
	l.zone.Set("other.hidden.example", netlab.Other)

	open := l.under("sb-open", Egress{})
	for i, what := range l.try(open, all[:7]) {
		require.Equal(t, "reached x", what, "control: under no policy %s answers", all[i])
	}
	require.Equal(t, []string{netlab.Other}, l.lookup(open, "other.hidden.example@"+netlab.Web), "control: the nameserver answers")

	one := l.under("sb-one", Egress{Mode: egress.Allowlist, Entries: entries(t, "web.example:443 web", "web.example:4000/udp u", "meta.example m", "node.example n", netlab.Other+":22 git")})
	two := l.under("sb-two", Egress{Mode: egress.Allowlist, Entries: entries(t, "alias.example:443 other")})
	none := l.under("sb-none", Egress{Mode: egress.None})
	require.Equal(t, []netip.Addr{netip.MustParseAddr(resolverAddr)}, one.Nameservers)

	refusedAll := []string{"refused", "refused", "refused", "refused", "refused", "refused", "refused", "refused"}
	require.Equal(t, refusedAll, l.try(none, all))
	require.Equal(t, refusedAll, l.try(two, all))
	require.Equal(t, []string{"refused", "refused", "refused", "refused", "refused", "refused", "reached x", "refused"}, l.try(one, all), "nothing is open before its name was asked for")

	asked := len(l.zone.Asked())
	require.Equal(t, []string{"code 3", "code 3", "refused"}, l.lookup(one, "alias.example", "other.hidden.example", "web.example@"+netlab.Web))
	require.Len(t, l.zone.Asked(), asked, "nothing of it went out")
	require.Equal(t, []string{netlab.Web, netlab.Web6, "none", "none"}, l.lookup(one, "web.example", "web.example/6", "meta.example", "node.example"))
	require.Equal(t, []string{netlab.Other, "code 3"}, l.lookup(two, "alias.example", "web.example"))
	require.Equal(t, []string{"hangs"}, l.lookup(open, "web.example"), "who has no list is not served")
	require.Equal(t, []string{"refused"}, l.lookup(none, "web.example"))

	require.Equal(t, []string{"reached x", "reached x", "refused", "refused", "reached x", "reached x", "reached x", "refused"}, l.try(one, all))
	require.Equal(t, []string{"refused", "refused", "refused", "reached x", "refused", "refused", "refused", "refused"}, l.try(two, all))

	told := l.told()
	for _, want := range []string{
		"sb-one " + netlab.Web + ":80/tcp", "sb-one " + netlab.Other + ":443/tcp", "sb-two " + netlab.Web + ":4000/udp", "sb-two [" + netlab.Web6 + "]:443/tcp",
		"sb-none " + netlab.Other + ":22/tcp", "sb-one " + netlab.Metadata + ":443/tcp", "sb-one other.hidden.example", "sb-one " + netlab.Web + ":53/udp",
		"sb-one meta.example (" + netlab.Metadata + " is no address of another host)",
	} {
		require.Contains(t, told, want)
	}
	for _, of := range []*Record{one, two, none} {
		traffic, err := l.Traffic(of.ID)
		require.NoError(t, err)
		require.NotZero(t, traffic.Refused, of.ID)
	}
	traffic, err := l.Traffic(one.ID)
	require.NoError(t, err)
	require.EqualValues(t, 6, traffic.Connections)
	require.Greater(t, traffic.BytesOut, uint64(500))
}

func TestADestinationClosesAfterItsTimeAndAnEstablishedConnectionGoesOn(t *testing.T) {
	l := newEgressLab(t)
	l.serve(l.World, "tcp "+netlab.Web+" 443")
	rec := l.under("sb-one", Egress{Mode: egress.Allowlist, Entries: entries(t, "web.example:443 web")})
	to := resolver.Destination{Addr: netip.MustParseAddr(netlab.Web), Protocol: egress.TCP, Port: 443}
	probe := []string{"tcp " + netlab.Web + " 443"}
	require.NoError(t, l.egress.admit(rec.ID, []resolver.Destination{to}, time.Hour))
	require.Equal(t, []string{"reached x"}, l.try(rec, probe))
	set := l.egress.destinations(rec.ID, true)
	require.True(t, l.expire(set, to))
	require.Equal(t, []string{"refused"}, l.try(rec, probe))
	delete(l.egress.sandboxes[rec.ID].open, to)
	require.NoError(t, l.egress.admit(rec.ID, []resolver.Destination{to}, time.Hour))
	require.NoError(t, l.egress.admit(rec.ID, []resolver.Destination{to}, 2*time.Hour), "one that is there is prolonged")
	c, err := dialNFT()
	require.NoError(t, err)
	found, err := c.GetSetElements(set)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Greater(t, found[0].Expires, 90*time.Minute)
	// A connection that was begun goes on when its destination is closed.
	require.NoError(t, l.egress.admit(rec.ID, []resolver.Destination{{Addr: to.Addr, Protocol: egress.UDP, Port: 4000}}, time.Hour))
	l.serve(l.World, "udp "+netlab.Web+" 4000")
	cmd := l.Command(rec.Namespace, "python3", "-uc", `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
s.connect(('`+netlab.Web+`', 4000))
for line in sys.stdin:
    s.send(b'x'); print(s.recv(10).decode().strip())
`)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for i := range 3 {
		_, err := in.Write([]byte("\n"))
		require.NoError(t, err)
		require.True(t, lines.Scan())
		require.Equal(t, "x", lines.Text())
		if i == 0 {
			require.True(t, l.expire(set, resolver.Destination{Addr: to.Addr, Protocol: egress.UDP, Port: 4000}))
			require.Equal(t, []string{"refused"}, l.try(rec, []string{"udp " + netlab.Web + " 4000"}), "a new one does not")
		}
	}
	require.NoError(t, in.Close())
	require.NoError(t, cmd.Wait())
}

// expire gives an open destination a time that is over soon, and waits for that.
func (l *egressLab) expire(set *nftables.Set, to resolver.Destination) bool {
	c, err := dialNFT()
	require.NoError(l.t, err)
	e := []nftables.SetElement{element(to, 10*time.Millisecond)}
	require.NoError(l.t, c.SetDeleteElements(set, e))
	require.NoError(l.t, c.SetAddElements(set, e))
	require.NoError(l.t, c.Flush())
	return assert.Eventually(l.t, func() bool {
		found, err := c.GetSetElements(set)
		require.NoError(l.t, err)
		return !slices.ContainsFunc(found, func(f nftables.SetElement) bool { return slices.Equal(f.Key, e[0].Key) })
	}, 10*time.Second, 10*time.Millisecond)
}

func TestARestartOfTheAgentClosesNothing(t *testing.T) {
	l := newEgressLab(t)
	l.serve(l.World, "tcp "+netlab.Web+" 443")
	l.zone.Set("web.example", netlab.Web)
	rec := l.under("sb-one", Egress{Mode: egress.Allowlist, Entries: entries(t, "web.example:443 web")})
	listed, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	require.NoError(t, err, string(listed))
	require.Contains(t, string(listed), "ip daddr . meta l4proto . th dport @open4-sb-one", "an operator can read it")
	probe := []string{"tcp " + netlab.Web + " 443"}
	require.Equal(t, []string{netlab.Web}, l.lookup(rec, "web.example"))
	require.Equal(t, []string{"reached x"}, l.try(rec, probe))
	l.stop()
	require.Equal(t, []string{"reached x"}, l.try(rec, probe), "the kernel keeps it")
	require.Equal(t, []string{"refused"}, l.lookup(rec, "web.example"), "nobody answers for the resolver")

	again, err := New(l.opts)
	require.NoError(t, err)
	l.Manager = again
	l.restore()
	require.Equal(t, []string{"reached x"}, l.try(rec, probe))
	l.run()
	require.Equal(t, []string{netlab.Web}, l.lookup(rec, "web.example"))
	require.Equal(t, []string{"refused"}, l.try(rec, []string{"tcp " + netlab.Other + " 443"}))

	nft(t, "delete table inet "+l.egress.table.Name)
	require.False(t, l.egress.intact([]*Record{rec}))
	l.restore()
	require.Equal(t, []string{"reached x", "refused"}, l.try(rec, append(probe, "tcp "+netlab.Other+" 443")), "with what is open")
}

func TestASandboxKeepsWithinItsBounds(t *testing.T) {
	l := newEgressLab(t)
	l.serve(l.World, "udp "+netlab.Web+" 4000")
	few := l.under("sb-few", Egress{Connections: 3})
	var six []string
	for range 6 {
		six = append(six, "udp "+netlab.Web+" 4000") // each socket's connection is known for a while after it is closed
	}
	reached := func(rec *Record) (n int) {
		for _, what := range l.try(rec, six) {
			require.NotEqual(t, "hangs", what)
			if what == "reached x" {
				n++
			}
		}
		return n
	}
	require.Equal(t, 6, reached(l.under("sb-free", Egress{})), "the control")
	require.Equal(t, 3, reached(few))
	require.Less(t, reached(l.under("sb-slow", Egress{PerSecond: 1})), 6)
	small := l.under("sb-small", Egress{Bytes: 100})
	require.Less(t, reached(small), 6)
	traffic, err := l.Traffic(small.ID)
	require.NoError(t, err)
	require.NotZero(t, traffic.Refused)
	told := l.told()
	for id, why := range map[string]string{"sb-few": beyondConnections, "sb-slow": beyondPerSecond, "sb-small": beyondBytes} {
		require.Contains(t, told, id+" "+netlab.Web+":4000/udp ("+why+")")
	}
	require.Empty(t, l.told())
	all := []*Record{few, small}
	require.True(t, l.egress.intact(all), "the chains of the bounds are looked at too")
	nft(t, "flush chain inet "+l.egress.table.Name+" "+countChain(few.ID))
	require.False(t, l.egress.intact(all))
}

func TestQuestionsForNamesTakeNoConnectionAway(t *testing.T) {
	l := newEgressLab(t)
	l.serve(l.World, "udp "+netlab.Web+" 4000")
	l.zone.Set("web.example", netlab.Web)
	var questions []string
	for range 6 {
		questions = append(questions, "web.example@"+netlab.Web)
	}
	const to = "udp " + netlab.Web + " 4000"
	rec := l.under("sb-few", Egress{Connections: 3})
	for _, answer := range l.lookup(rec, questions...) {
		require.Equal(t, netlab.Web, answer)
	}
	require.Equal(t, []string{"reached x", "reached x", "reached x", "refused"}, l.try(rec, []string{to, to, to, to}), "as many as if it had asked for nothing")
	traffic, err := l.Traffic(rec.ID)
	require.NoError(t, err)
	require.EqualValues(t, 9, traffic.Connections, "they are counted")
	require.Contains(t, l.lookup(l.under("sb-slow", Egress{PerSecond: 1}), questions...), "refused", "and bounded by the second")
}

// ask sends questions to a nameserver, each from a port of its own.
const ask = `
import socket, sys
for i in range(int(sys.argv[2])):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(("", 2000 + i))
    s.sendto(bytes.fromhex("00010100000100000000000003776562076578616d706c650000010001"), (sys.argv[1], 53)) # web.example, A
    s.close()
`

func TestP16QuestionsForNamesDontFillTheNodesTableOfConnections(t *testing.T) {
	l := newEgressLab(t)
	const more = 20
	for _, c := range []struct {
		id, nameserver string
		bounds         Egress
	}{
		{"sb-open", netlab.Web, Egress{}},
		{"sb-listed", resolverAddr, Egress{Mode: egress.Allowlist}},
	} {
		refusedOf := func(id string, e Egress) uint64 {
			rec := l.under(id, e)
			out, err := l.Command(rec.Namespace, "python3", "-c", ask, c.nameserver, strconv.Itoa(fewQuestions+more)).CombinedOutput()
			require.NoError(t, err, "%s", out)
			traffic, err := l.Traffic(id)
			require.NoError(t, err)
			return traffic.Refused
		}
		require.Zero(t, refusedOf(c.id+"-un", c.bounds), "control: all pass without bounds")
		c.bounds.Connections = 3
		require.EqualValues(t, more, refusedOf(c.id, c.bounds), c.id)
	}
}

// many is half of ten thousand.
const many = 5000

// manyAddresses are as many of each family.
func manyAddresses() (all []netip.Addr) {
	for i := range many {
		all = append(all, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 9, 14: byte(i >> 8), 15: byte(i)}))
	}
	return all
}

// The time and the memory of a destination are told.
func TestTenThousandNamesAreOpenAtOnceOutliveAFlushAndCloseAfterTheirTime(t *testing.T) {
	l := newEgressLab(t)
	l.serve(l.World, "tcp "+netlab.Web+" 443")
	l.zone.Set("web.example", netlab.Web)
	rec := l.under("sb-many", Egress{Mode: egress.Allowlist, Entries: entries(t, "web.example:443 web")})
	slab := func() (bytes int64) {
		b, err := os.ReadFile("/proc/meminfo")
		require.NoError(t, err)
		_, rest, _ := strings.Cut(string(b), "Slab:")
		_, err = fmt.Sscan(rest, &bytes)
		require.NoError(t, err)
		return bytes << 10
	}
	before, began := slab(), time.Now()
	for _, a := range manyAddresses() {
		require.NoError(t, l.egress.admit(rec.ID, []resolver.Destination{{Addr: a, Protocol: egress.TCP, Port: 443}}, time.Hour))
	}
	took := time.Since(began)
	t.Logf("%d destinations of each family, one at a time: %s each, %d bytes of the kernel's memory each", many, took/(2*many), (slab()-before)/(2*many))
	inSets := func() (n int) {
		c, err := dialNFT()
		require.NoError(t, err)
		for _, four := range []bool{true, false} {
			found, err := c.GetSetElements(l.egress.destinations(rec.ID, four))
			require.NoError(t, err)
			n += len(found)
		}
		return n
	}
	require.Equal(t, 2*many, inSets())
	require.Len(t, l.egress.sandboxes[rec.ID].open, 2*many, "and known")
	probe := []string{"tcp " + netlab.Web + " 443"}
	require.Equal(t, []string{"refused"}, l.try(rec, probe))
	require.Equal(t, []string{netlab.Web}, l.lookup(rec, "web.example"))
	require.Equal(t, []string{"reached x"}, l.try(rec, probe))

	nft(t, "delete table inet "+l.egress.table.Name)
	began = time.Now()
	l.restore()
	t.Logf("put back in %s", time.Since(began))
	require.Equal(t, 2*many+1, inSets(), "more than fits into one message")
	require.Equal(t, []string{"reached x"}, l.try(rec, probe))

	// All of them get a time that is over soon, and the kernel takes them away.
	soon := map[resolver.Destination]time.Duration{}
	for _, a := range manyAddresses() {
		soon[resolver.Destination{Addr: a, Protocol: egress.TCP, Port: 443}] = 10 * time.Millisecond
	}
	require.NoError(t, l.egress.addElements(rec.ID, soon))
	require.Eventually(t, func() bool { return inSets() == 1 }, 30*time.Second, 50*time.Millisecond)
	require.Equal(t, []string{"reached x"}, l.try(rec, probe))
}

func TestAListOfTenThousandNamesIsLookedUpAsFastAsAShortOne(t *testing.T) {
	l := newEgressLab(t)
	list := entries(t, "web.example:443 web")
	for i := range 2 * many {
		list = append(list, entries(t, fmt.Sprintf("h%d.example:443 one of many", i), fmt.Sprintf("*.p%d.example:443 one of many", i))...)
	}
	list = list[:egress.MaxEntries]
	require.NoError(t, egress.CheckList(list))
	l.zone.Set("h9999.example", netlab.Web)
	l.zone.Set("a.p9998.example", netlab.Web)
	began := time.Now()
	rec := l.under("sb-long", Egress{Mode: egress.Allowlist, Entries: list})
	t.Logf("connected in %s", time.Since(began))
	require.Equal(t, []string{netlab.Web, "code 3"}, l.lookup(rec, "a.p9998.example", "h10000.example"))
	require.Equal(t, []string{netlab.Web}, l.lookup(rec, "h9999.example"))
	restored, err := l.Get(rec.ID)
	require.NoError(t, err)
	require.Equal(t, list, restored.Egress.Entries)
}

func TestNobodyConnectsToASandboxWithAList(t *testing.T) {
	l := newEgressLab(t)
	l.Sandboxes = []string{bridge4}
	open, listed := l.under("sb-open", Egress{}), l.under("sb-listed", Egress{Mode: egress.Allowlist})
	for _, rec := range []*Record{open, listed} {
		l.serve(rec.Namespace, "tcp "+rec.Addresses[0].String()+" 8000")
	}
	out, err := l.Command(l.World, "ip", "route", "add", bridge4, "via", netlab.NodeAddr).CombinedOutput()
	require.NoError(t, err, string(out))
	outside := &Record{Namespace: l.World}
	require.Equal(t, []string{"reached x", "refused"}, l.try(outside, []string{"tcp " + open.Addresses[0].String() + " 8000", "tcp " + listed.Addresses[0].String() + " 8000"}))
}

// flood sends more datagrams than are told, until it is ended, and says when it has sent some.
const flood = `
import socket, sys
to = [(socket.socket(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_DGRAM), a) for a in sys.argv[1:]]
n = 0
while True:
    for s, a in to:
        try: s.sendto(b"x", (a, 4711))
        except OSError: pass
    n += 1
    if n == 2000: print("flooded", flush=True)
`

// flood begins to flood, and returns when more has been sent than is told at once.
func (l *egressLab) flood(rec *Record, to ...string) (stop func()) {
	l.t.Helper()
	cmd := l.Command(rec.Namespace, append([]string{"python3", "-c", flood}, to...)...)
	out, err := cmd.StdoutPipe()
	require.NoError(l.t, err)
	require.NoError(l.t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(l.t, err)
	require.Equal(l.t, "flooded\n", line)
	return func() {
		require.NoError(l.t, cmd.Process.Kill())
		_ = cmd.Wait() // killed
	}
}

func TestP10AFloodOfRefusalsHidesNoneOfAnotherSandbox(t *testing.T) {
	for name, silent := range map[string]bool{"answers at ingress": false, "no answers at ingress": true} {
		t.Run(name, func(t *testing.T) {
			l := newEgressLab(t)
			if silent {
				l.rules.answers = new(bool)
			}
			l.Sandboxes = []string{bridge4}
			noisy, quiet := l.under("sb-noisy", Egress{}), l.under("sb-quiet", Egress{})
			stop := l.flood(noisy, netlab.Metadata, netlab.NodeAddr6)
			l.try(quiet, []string{"tcp " + netlab.Metadata + " 80", "tcp " + netlab.NodeAddr6 + " 9000", "udp " + netlab.Other + " 5000"})
			stop()
			count := map[string]int{}
			for _, what := range l.told() {
				count[what]++
			}
			told := 0
			for _, flooded := range []string{"sb-noisy " + netlab.Metadata + ":4711/udp", "sb-noisy [" + netlab.NodeAddr6 + "]:4711/udp"} {
				require.GreaterOrEqual(t, count[flooded], refusalsAtOnce)
				told += count[flooded]
			}
			require.Less(t, told, 2*2000, "control: there is more of it than is told")
			for _, what := range []string{netlab.Metadata + ":80/tcp", "[" + netlab.NodeAddr6 + "]:9000/tcp", netlab.Other + ":5000/udp"} {
				require.NotZero(t, count["sb-quiet "+what], what)
			}
		})
	}
}

func TestWhatAPacketsHeadersSay(t *testing.T) {
	v4 := []byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 198, 51, 100, 7, 0x80, 0, 1, 187}
	from, to, ok := headers(v4)
	require.True(t, ok)
	require.Equal(t, "10.0.0.1 198.51.100.7:443/tcp", from.String()+" "+to)
	v6 := append(append([]byte{0x60, 0, 0, 0, 0, 8, 58, 64}, netip.MustParseAddr("fd00::1").AsSlice()...), netip.MustParseAddr("2001:db8::1").AsSlice()...)
	_, to, ok = headers(v6)
	require.True(t, ok)
	require.Equal(t, "2001:db8::1/icmp", to)
	for n := range len(v4) {
		_, _, _ = headers(v4[:n])
	}
	for _, bad := range [][]byte{nil, {0x45}, v6[:39], append([]byte{0x4f}, v4[1:]...)} {
		_, _, ok := headers(bad)
		require.False(t, ok)
	}
}
