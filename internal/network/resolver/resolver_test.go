package resolver

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// upstream is a nameserver that answers from a table, and remembers what it was asked.
type upstream struct {
	addr netip.AddrPort

	mu    sync.Mutex
	zone  map[string][]string // "name/TYPE": addresses, or "name" of an alias
	ttl   uint32
	big   bool // answers don't fit into a datagram
	asked []string
}

func newUpstream(t *testing.T, zone map[string][]string) *upstream {
	t.Helper()
	u := &upstream{zone: zone, ttl: 300}
	udp, tcp := sockets(t)
	u.addr = udp.LocalAddr().(*net.UDPAddr).AddrPort()
	go func() {
		for buf := make([]byte, 4096); ; {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(u.reply(buf[:n], u.big), from)
		}
	}()
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			if msg, err := readFramed(c); err == nil {
				_ = writeFramed(c, u.reply(msg, false))
			}
			c.Close()
		}
	}()
	return u
}

// sockets are a datagram socket and a listener with the same port.
func sockets(t *testing.T) (net.PacketConn, net.Listener) {
	t.Helper()
	for {
		udp, err := net.ListenPacket("udp4", "127.0.0.1:0")
		require.NoError(t, err)
		tcp, err := net.Listen("tcp4", udp.LocalAddr().String())
		if err != nil {
			udp.Close()
			continue
		}
		t.Cleanup(func() { udp.Close(); tcp.Close() })
		return udp, tcp
	}
}

func (u *upstream) reply(msg []byte, cut bool) []byte {
	u.mu.Lock()
	defer u.mu.Unlock()
	q, err := parse(msg)
	if err != nil {
		return nil
	}
	name := lower(q.name.String())
	u.asked = append(u.asked, name)
	if cut {
		out, _ := q.build(answer{}, true)
		return out
	}
	a := answer{ttl: time.Duration(u.ttl) * time.Second, code: dnsmessage.RCodeNameError}
	kind := map[dnsmessage.Type]string{dnsmessage.TypeA: "/A", dnsmessage.TypeAAAA: "/AAAA"}[q.kind]
	for hop := name; hop != ""; {
		next := ""
		for k, values := range u.zone {
			if k == hop+kind {
				for _, v := range values {
					a.addrs = append(a.addrs, netip.MustParseAddr(v))
				}
			}
			if owner, _, _ := strings.Cut(k, "/"); owner == hop {
				a.code = dnsmessage.RCodeSuccess
			}
			if k == hop && u.zone[k] != nil {
				next = values[0]
			}
		}
		if next != "" {
			a.aliases = append(a.aliases, next)
		}
		if len(u.zone["lazy"]) > 0 {
			break
		}
		hop = next
	}
	out, err := q.build(a, false)
	if err != nil {
		panic(err)
	}
	return out
}

// lab is a resolver that serves sandboxes by the last byte of their loopback address.
type lab struct {
	t  *testing.T
	up *upstream
	r  *Resolver
	at string

	mu       sync.Mutex
	policies map[string]*egress.Policy
	admitted map[string][]Destination
	holds    []time.Duration
	refused  []string
	broken   error
	closed   []netip.Prefix
}

func newLab(t *testing.T, zone map[string][]string) *lab {
	t.Helper()
	l := &lab{t: t, up: newUpstream(t, zone), policies: map[string]*egress.Policy{}, admitted: map[string][]Destination{}}
	l.r = New(Options{
		Upstreams: []netip.AddrPort{l.up.addr},
		Sandbox: func(a netip.Addr) *Sandbox {
			l.mu.Lock()
			defer l.mu.Unlock()
			if p := l.policies[a.String()]; p != nil {
				return &Sandbox{ID: a.String(), Policy: p}
			}
			return nil
		},
		Closed: func() ([]netip.Prefix, error) { return l.closed, nil },
		Admit: func(id string, d []Destination, hold time.Duration) error {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.admitted[id], l.holds = append(l.admitted[id], d...), append(l.holds, hold)
			return l.broken
		},
		Refused: func(id, name, why string) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.refused = append(l.refused, strings.TrimSpace(id+" "+name+" "+why))
		},
	})
	udp, tcp := sockets(t)
	l.at = udp.LocalAddr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.r.Serve(ctx, udp, tcp) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return l
}

func (l *lab) policy(sandbox string, texts ...string) {
	l.t.Helper()
	var entries []egress.Entry
	for _, s := range texts {
		e, err := egress.ParseText(s)
		require.NoError(l.t, err)
		entries = append(entries, e)
	}
	l.policies[sandbox] = egress.NewPolicy(egress.Allowlist, entries)
}

// ask asks as a sandbox.
func (l *lab) ask(sandbox, network, name string, kind dnsmessage.Type) dnsmessage.Message {
	l.t.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(sandbox)}, Timeout: 10 * time.Second}
	if network == "tcp" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(sandbox)}
	}
	c, err := d.Dial(network, l.at)
	require.NoError(l.t, err)
	defer c.Close()
	require.NoError(l.t, c.SetDeadline(time.Now().Add(10*time.Second)))
	msg, err := query(4711, name, kind)
	require.NoError(l.t, err)
	reply := make([]byte, maxMessage)
	if network == "tcp" {
		require.NoError(l.t, writeFramed(c, msg))
		reply, err = readFramed(c)
		require.NoError(l.t, err)
	} else {
		_, err = c.Write(msg)
		require.NoError(l.t, err)
		n, err := c.Read(reply)
		require.NoError(l.t, err)
		reply = reply[:n]
	}
	var m dnsmessage.Message
	require.NoError(l.t, m.Unpack(reply))
	require.Equal(l.t, uint16(4711), m.ID)
	return m
}

func addresses(m dnsmessage.Message) []string {
	var out []string
	for _, r := range m.Answers {
		switch b := r.Body.(type) {
		case *dnsmessage.AResource:
			out = append(out, netip.AddrFrom4(b.A).String())
		case *dnsmessage.AAAAResource:
			out = append(out, netip.AddrFrom16(b.AAAA).String())
		}
	}
	return out
}

// told is the extended error.
func told(m dnsmessage.Message) string {
	for _, r := range m.Additionals {
		if o, ok := r.Body.(*dnsmessage.OPTResource); ok && len(o.Options) > 0 {
			return string(o.Options[0].Data[2:])
		}
	}
	return ""
}

const s1, s2 = "127.0.0.11", "127.0.0.12"

func TestAListedNameIsAnsweredAndItsAddressesAreAdmittedFirst(t *testing.T) {
	l := newLab(t, map[string][]string{"web.example/A": {"198.51.100.10", "198.51.100.11"}, "web.example/AAAA": {"2600::10"}})
	l.policy(s1, "web.example:443,80 a", "web.example:123/udp c")
	for _, network := range []string{"udp", "tcp"} {
		require.Equal(t, []string{"198.51.100.10", "198.51.100.11"}, addresses(l.ask(s1, network, "Web.EXAMPLE", dnsmessage.TypeA)))
		require.Equal(t, []string{"2600::10"}, addresses(l.ask(s1, network, "web.example", dnsmessage.TypeAAAA)))
	}
	for _, a := range []string{"198.51.100.10", "198.51.100.11", "2600::10"} {
		for _, d := range []Destination{{Protocol: "tcp", Port: 443}, {Protocol: "tcp", Port: 80}, {Protocol: "udp", Port: 123}} {
			d.Addr = netip.MustParseAddr(a)
			require.Contains(t, l.admitted[s1], d)
		}
	}
	require.Equal(t, []string{"web.example", "web.example"}, l.up.asked, "the second questions are answered from the first")
	require.Empty(t, l.refused)
}

func TestANameThatIsNotListedIsRefusedAtOnceAndGoesNowhere(t *testing.T) {
	l := newLab(t, map[string][]string{"secret.evil.example/A": {"198.51.100.66"}, "web.example/A": {"198.51.100.10"}})
	l.policy(s1, "secret.evil.example x")
	require.Equal(t, []string{"198.51.100.66"}, addresses(l.ask(s1, "udp", "secret.evil.example", dnsmessage.TypeA)), "the control: the upstream would answer")
	l.up.asked = nil

	l.policy(s1, "web.example x", "*.sub.example y")
	for _, name := range []string{"secret.evil.example", "example", "sub.example", "xsub.example", "web.example.evil.example", "a web.example"} {
		m := l.ask(s1, "udp", name, dnsmessage.TypeA)
		require.Equal(t, dnsmessage.RCodeNameError, m.RCode, name)
		require.NotEmpty(t, told(m))
	}
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeTXT, dnsmessage.TypeMX, dnsmessage.TypeNS, dnsmessage.TypeALL, 10 /* NULL */} {
		require.Equal(t, dnsmessage.RCodeRefused, l.ask(s1, "udp", "data.sub.example", kind).RCode)
		require.Equal(t, dnsmessage.RCodeNameError, l.ask(s1, "udp", "data.evil.example", kind).RCode)
	}
	m := l.ask(s1, "udp", "web.example", dnsmessage.TypeHTTPS)
	require.Equal(t, dnsmessage.RCodeSuccess, m.RCode)
	require.Empty(t, m.Answers)
	require.Empty(t, l.up.asked, "nothing was forwarded")
	require.Empty(t, l.admitted[s1][1:])
	require.Contains(t, l.refused, s1+" secret.evil.example")
}

func TestOneSandboxHasNothingOfAnothersList(t *testing.T) {
	l := newLab(t, map[string][]string{"one.example/A": {"198.51.100.1"}, "two.example/A": {"198.51.100.2"}})
	l.policy(s1, "one.example x")
	l.policy(s2, "two.example x")
	require.NotEmpty(t, addresses(l.ask(s1, "udp", "one.example", dnsmessage.TypeA)))
	require.Equal(t, dnsmessage.RCodeNameError, l.ask(s2, "udp", "one.example", dnsmessage.TypeA).RCode, "although it is known by now")
	require.NotEmpty(t, addresses(l.ask(s2, "udp", "two.example", dnsmessage.TypeA)))
	require.Equal(t, []Destination{{netip.MustParseAddr("198.51.100.1"), "tcp", 443}}, l.admitted[s1])
	require.Equal(t, []Destination{{netip.MustParseAddr("198.51.100.2"), "tcp", 443}}, l.admitted[s2])
	msg, err := query(1, "one.example", dnsmessage.TypeA)
	require.NoError(t, err)
	require.Nil(t, l.r.respond(t.Context(), netip.MustParseAddr("127.0.0.99"), msg, 0), "who is no sandbox is not answered")
}

func TestAnAnswerThatLeadsInsideIsLeftOut(t *testing.T) {
	l := newLab(t, map[string][]string{
		"rebound.example/A": {"10.1.2.3", "169.254.169.254", "127.0.0.1"}, "half.example/A": {"192.168.0.1", "198.51.100.7"},
		"node.example/A": {"203.0.113.2"}, "inner.example/A": {"10.1.2.3"}, "mapped.example/AAAA": {"::ffff:198.51.100.1", "fe80::1", "fd00::1"},
	})
	l.closed = []netip.Prefix{netip.MustParsePrefix("203.0.113.2/32")}
	l.policy(s1, "rebound.example x", "half.example x", "node.example x", "mapped.example x")
	inner, err := egress.Parse(egress.Spec{To: "inner.example", Reason: "x", Private: []string{"10.1.0.0/16"}})
	require.NoError(t, err)
	l.policies[s1] = egress.NewPolicy(egress.Allowlist, append(l.policies[s1].Entries(), inner))

	require.Equal(t, []string{"10.1.2.3"}, addresses(l.ask(s1, "udp", "inner.example", dnsmessage.TypeA)), "the control: an entry that says so")
	for name, kind := range map[string]dnsmessage.Type{"rebound.example": dnsmessage.TypeA, "node.example": dnsmessage.TypeA, "mapped.example": dnsmessage.TypeAAAA} {
		m := l.ask(s1, "udp", name, kind)
		require.Equal(t, dnsmessage.RCodeSuccess, m.RCode)
		require.Empty(t, m.Answers, name)
		require.NotEmpty(t, told(m))
	}
	require.Equal(t, []string{"198.51.100.7"}, addresses(l.ask(s1, "udp", "half.example", dnsmessage.TypeA)))
	require.Equal(t, []Destination{
		{netip.MustParseAddr("10.1.2.3"), "tcp", 443}, {netip.MustParseAddr("198.51.100.7"), "tcp", 443},
	}, l.admitted[s1])
	require.True(t, slices.ContainsFunc(l.refused, func(s string) bool { return strings.HasPrefix(s, s1+" rebound.example 169.254.169.254") }), l.refused)
}

func TestAliasesAreFollowedAndOnlyTheAskedNameHasToBeListed(t *testing.T) {
	for name, lazy := range map[string][]string{"by the upstream": nil, "by us": {"yes"}} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, map[string][]string{
				"www.example": {"a.cdn.example"}, "a.cdn.example": {"b.cdn.example"}, "b.cdn.example/A": {"198.51.100.5"},
				"loop.example": {"pool.example"}, "pool.example": {"loop.example"},
				"inside.example": {"meta.example"}, "meta.example/A": {"169.254.169.254"}, "lazy": lazy,
			})
			if lazy == nil {
				delete(l.up.zone, "loop.example") // the table would never end
			}
			l.policy(s1, "www.example x", "loop.example x", "inside.example x")
			m := l.ask(s1, "udp", "www.example", dnsmessage.TypeA)
			require.Equal(t, []string{"198.51.100.5"}, addresses(m))
			require.Len(t, m.Answers, 3)
			require.Equal(t, "b.cdn.example.", m.Answers[2].Header.Name.String())
			require.Equal(t, dnsmessage.RCodeNameError, l.ask(s1, "udp", "b.cdn.example", dnsmessage.TypeA).RCode)
			require.Empty(t, l.ask(s1, "udp", "inside.example", dnsmessage.TypeA).Answers)
			if lazy != nil {
				require.Equal(t, dnsmessage.RCodeServerFailure, l.ask(s1, "udp", "loop.example", dnsmessage.TypeA).RCode)
			}
		})
	}
}

func TestHowLongAnAnswerHolds(t *testing.T) {
	l := newLab(t, map[string][]string{"short.example/A": {"198.51.100.1"}, "long.example/A": {"198.51.100.2"}, "never.example/A": {"198.51.100.3"}})
	l.policy(s1, "*.example.com x", "short.example x", "long.example x", "never.example x")
	for _, c := range []struct {
		name       string
		ttl        uint32
		told, hold time.Duration
	}{
		{"short.example", 5, 5 * time.Second, DefaultMinHold}, {"long.example", 1 << 20, DefaultMaxTTL, DefaultMaxTTL},
		{"never.example", 1 << 31, 0, DefaultMinHold},
	} {
		l.up.ttl = c.ttl
		m := l.ask(s1, "udp", c.name, dnsmessage.TypeA)
		require.Len(t, m.Answers, 1)
		require.Equal(t, uint32(c.told/time.Second), m.Answers[0].Header.TTL, c.name)
		require.Equal(t, c.hold, l.holds[len(l.holds)-1], c.name)
	}
	a, ok := l.r.cache.get(key{"short.example", dnsmessage.TypeA}, time.Now().Add(2*time.Second))
	require.True(t, ok)
	require.Less(t, a.ttl, 3*time.Second+time.Millisecond)
	_, ok = l.r.cache.get(key{"short.example", dnsmessage.TypeA}, time.Now().Add(5*time.Second))
	require.False(t, ok, "its time is over")
}

func TestNoAnswerLeavesThatIsNotAdmitted(t *testing.T) {
	l := newLab(t, map[string][]string{"web.example/A": {"198.51.100.10"}})
	l.policy(s1, "web.example x")
	l.broken = errors.New("no room")
	m := l.ask(s1, "udp", "web.example", dnsmessage.TypeA)
	require.Equal(t, dnsmessage.RCodeServerFailure, m.RCode)
	require.Empty(t, m.Answers)
	l.broken = nil
	require.NotEmpty(t, addresses(l.ask(s1, "udp", "web.example", dnsmessage.TypeA)))
}

func TestALongAnswerComesOverTCP(t *testing.T) {
	var many []string
	for i := range 40 {
		many = append(many, fmt.Sprintf("2600::%x:1234:5678:9abc", i+0x1000))
	}
	l := newLab(t, map[string][]string{"many.example/AAAA": many})
	l.policy(s1, "many.example x")
	l.up.big = true
	m := l.ask(s1, "tcp", "many.example", dnsmessage.TypeAAAA)
	require.Equal(t, many[:maxAddresses], addresses(m))
	// Without EDNS a datagram has 512 bytes.
	msg, err := query(1, "many.example", dnsmessage.TypeAAAA)
	require.NoError(t, err)
	binary.BigEndian.PutUint16(msg[10:], 0)
	var short dnsmessage.Message
	require.NoError(t, short.Unpack(l.r.respond(t.Context(), netip.MustParseAddr(s1), msg[:len(msg)-11], 0)))
	require.True(t, short.Truncated)
	require.Empty(t, short.Answers)
}

func TestTheNextUpstreamIsAskedWhenOneFails(t *testing.T) {
	l := newLab(t, map[string][]string{"web.example/A": {"198.51.100.10"}})
	dead, _ := sockets(t)
	gone := dead.LocalAddr().(*net.UDPAddr).AddrPort()
	dead.Close()
	l.r.opts.Upstreams = []netip.AddrPort{gone, l.up.addr}
	l.policy(s1, "web.example x", "other.example x")
	require.NotEmpty(t, addresses(l.ask(s1, "udp", "web.example", dnsmessage.TypeA)))
	l.r.opts.Upstreams = []netip.AddrPort{gone}
	require.Equal(t, dnsmessage.RCodeServerFailure, l.ask(s1, "udp", "other.example", dnsmessage.TypeA).RCode)
}

func TestAnAnswerOfSomebodyElseIsNotTaken(t *testing.T) {
	msg, err := query(7, "web.example", dnsmessage.TypeA)
	require.NoError(t, err)
	q, err := parse(msg)
	require.NoError(t, err)
	good := answer{addrs: []netip.Addr{netip.MustParseAddr("198.51.100.10")}, ttl: time.Minute}
	reply, err := q.build(good, false)
	require.NoError(t, err)
	a, _, err := response(reply, 7, "web.example", dnsmessage.TypeA, time.Hour)
	require.NoError(t, err)
	require.Equal(t, good, a)
	for _, c := range []struct {
		id   uint16
		name string
		kind dnsmessage.Type
	}{{8, "web.example", dnsmessage.TypeA}, {7, "other.example", dnsmessage.TypeA}, {7, "web.example", dnsmessage.TypeAAAA}} {
		_, _, err := response(reply, c.id, c.name, c.kind, time.Hour)
		require.ErrorIs(t, err, errNotOurs)
	}
	_, _, err = response(msg, 7, "web.example", dnsmessage.TypeA, time.Hour)
	require.ErrorIs(t, err, errNotOurs, "a question is no answer")
	// An address that the answer has of another name is not the asked one's.
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 7, Response: true})
	require.NoError(t, errors.Join(b.StartQuestions(), b.Question(dnsmessage.Question{Name: q.name, Type: q.kind, Class: q.class}),
		b.StartAnswers(), answers(&b, dnsmessage.MustNewName("other.example."), good)))
	foreign, err := b.Finish()
	require.NoError(t, err)
	a, _, err = response(foreign, 7, "web.example", dnsmessage.TypeA, time.Hour)
	require.NoError(t, err)
	require.Empty(t, a.addrs)
}

func TestTenThousandNames(t *testing.T) {
	zone, texts := map[string][]string{}, []string{}
	const n = 10000
	for i := range n {
		name := fmt.Sprintf("h%d.many.example", i)
		zone[name+"/A"] = []string{netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}).String()}
		texts = append(texts, name+" x")
	}
	l := newLab(t, nil)
	l.policy(s1, texts...)
	p := l.policies[s1]
	l.r.opts.Upstreams = nil
	for name, addrs := range zone {
		host, _, _ := strings.Cut(name, "/")
		l.r.cache.put(key{host, dnsmessage.TypeA}, answer{addrs: []netip.Addr{netip.MustParseAddr(addrs[0])}, ttl: time.Minute}, time.Now())
		require.Len(t, p.Match(host), 1)
	}
	require.Len(t, l.r.cache.entries, n)
	require.Len(t, addresses(l.ask(s1, "udp", "h9999.many.example", dnsmessage.TypeA)), 1)
	require.Equal(t, dnsmessage.RCodeNameError, l.ask(s1, "udp", "h10000.many.example", dnsmessage.TypeA).RCode)
	for i := range maxCached {
		l.r.cache.put(key{fmt.Sprint(i), dnsmessage.TypeA}, answer{ttl: time.Minute}, time.Now())
	}
	require.LessOrEqual(t, len(l.r.cache.entries), maxCached)
}

func TestASandboxCantTakeTheWholeResolver(t *testing.T) {
	l := load{of: map[string]int{}}
	for range maxBusyOfOne {
		require.True(t, l.begin("a"))
	}
	require.False(t, l.begin("a"))
	require.True(t, l.begin("b"))
	l.end("a")
	require.True(t, l.begin("a"))
}

func FuzzRespond(f *testing.F) {
	msg, err := query(1, "web.example", dnsmessage.TypeA)
	require.NoError(f, err)
	f.Add(msg)
	e, err := egress.ParseText("web.example x")
	require.NoError(f, err)
	r := New(Options{
		Sandbox: func(netip.Addr) *Sandbox {
			return &Sandbox{ID: "s", Policy: egress.NewPolicy(egress.Allowlist, []egress.Entry{e})}
		},
		Refused: func(string, string, string) {}, Closed: func() ([]netip.Prefix, error) { return nil, nil },
	})
	f.Fuzz(func(t *testing.T, b []byte) {
		reply := r.respond(t.Context(), netip.Addr{}, b, 0)
		require.LessOrEqual(t, len(reply), mostUDP)
		if reply != nil {
			var p dnsmessage.Parser
			h, err := p.Start(reply)
			require.NoError(t, err)
			require.True(t, h.Response)
		}
		_, _, _ = response(b, 1, "web.example", dnsmessage.TypeA, time.Hour)
	})
}
