package network

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/network/resolver"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// Egress is what a sandbox may reach, besides what none may.
type Egress struct {
	// Mode: empty is egress.Open.
	Mode    egress.Mode    `json:"mode"`
	Entries []egress.Entry `json:"entries,omitempty"`
	// Connections bounds those that are open at once (of UDP: that were used within some seconds); PerSecond the new
	// ones, with a burst of as many; Bytes what the sandbox sends, headers included. 0: no bound.
	Connections uint32 `json:"connections,omitempty"`
	PerSecond   uint32 `json:"per_second,omitempty"`
	Bytes       uint64 `json:"bytes,omitempty"`
}

func (e Egress) mode() egress.Mode {
	if e.Mode == "" {
		return egress.Open
	}
	return e.Mode
}

// Traffic is what has been counted of a sandbox since it was connected.
type Traffic struct {
	// BytesOut is what it sent, headers included; Connections how many it began; Refused how many packets were refused.
	BytesOut, Connections, Refused uint64
}

// Since is what has been counted since an earlier reading. A counter that was lost meanwhile begins anew.
func (t Traffic) Since(before Traffic) Traffic {
	since := func(now, then uint64) uint64 {
		if now < then {
			return now
		}
		return now - then
	}
	return Traffic{
		BytesOut: since(t.BytesOut, before.BytesOut), Connections: since(t.Connections, before.Connections), Refused: since(t.Refused, before.Refused),
	}
}

// egressRules are the agent's table for what each sandbox may reach. It is apart from that of the listeners: the sets, the
// counters and the connections in it outlive a restart of the agent, and what is refused there is refused whatever this one
// says.
type egressRules struct {
	table     *nftables.Table
	group     uint16
	resolvers []netip.Addr
	log       *slog.Logger
	// made is how many rules each chain was given, by this agent or an earlier one, and file keeps it over a restart. Callers
	// hold Manager.changing.
	made    chainSizes
	file    string
	commits *commits

	// opening is held while destinations enter the kernel's sets and are noted, and while the table is made anew: so that what
	// is noted as open is. It comes before mu.
	opening sync.Mutex

	mu        sync.Mutex
	sandboxes map[string]*governed
	byAddress map[netip.Addr]*governed
}

// governed is a sandbox under a policy.
type governed struct {
	rec    *Record
	policy *egress.Policy
	// counted is the last reading of its counters, from which they go on when the table is made anew.
	counted Traffic
	// open are the destinations that are in the sandbox's sets, with the time until which they are.
	open map[resolver.Destination]time.Time
}

const (
	// maxOpen bounds the destinations of one sandbox.
	maxOpen = 1 << 16
	// noBound is a quota that nothing exceeds. The kernel takes no larger one.
	noBound = 1 << 62
	// newest is a destination's time that is not worth a transaction for so little more.
	newest = time.Second
	// elementsAtOnce are the destinations of one message: the kernel's lists of elements have at most 64 KiB.
	elementsAtOnce = 500
)

// beyond are the bounds of a sandbox, as a refusal is told.
const (
	beyondConnections = "more connections at once than network.egress.connections"
	beyondPerSecond   = "more new connections in a second than network.egress.connections_per_second"
	beyondBytes       = "more bytes than network.egress.bytes_out"
)

func newEgressRules(stateDir string, resolvers []netip.Addr, k *commits, log *slog.Logger) *egressRules {
	sum := sha256.Sum256([]byte(stateDir))
	r := &egressRules{
		table:     &nftables.Table{Name: fmt.Sprintf("sandbox-agent-egress-%x", sum[:4]), Family: nftables.TableFamilyINet},
		group:     groupOf(stateDir),
		resolvers: resolvers, log: log, commits: k, file: filepath.Join(stateDir, "egress.json"),
		sandboxes: map[string]*governed{}, byAddress: map[netip.Addr]*governed{},
	}
	if err := readState(r.file, &r.made); err != nil {
		log.Warn("whether the egress rules of sandboxes are as the last agent left them can't be said", "error", err)
	}
	if r.made == nil {
		r.made = chainSizes{}
	}
	return r
}

// keep keeps made. The rules themselves don't depend on it.
func (r *egressRules) keep() {
	if err := writeState(r.file, r.made); err != nil {
		r.log.Warn("whether the egress rules of sandboxes are as this agent leaves them can't be kept for the next one", "error", err)
	}
}

// groupOf is the agent's group of the packet log. The groups are the node's; low ones stand in other people's configurations.
func groupOf(stateDir string) uint16 {
	sum := sha256.Sum256([]byte(stateDir))
	return 1024 + binary.BigEndian.Uint16(sum[4:])%(1<<15)
}

// The maps from a sandbox's address to its chain.
func (r *egressRules) chains(name string, four bool) *nftables.Set {
	s := &nftables.Set{Table: r.table, Name: name + "6", IsMap: true, KeyType: nftables.TypeIP6Addr, DataType: nftables.TypeVerdict}
	if four {
		s.Name, s.KeyType = name+"4", nftables.TypeIPAddr
	}
	return s
}

// destinations is the set of what a sandbox's resolved names have opened.
func (r *egressRules) destinations(id string, four bool) *nftables.Set {
	s := &nftables.Set{Table: r.table, Name: open6 + id, HasTimeout: true, Concatenation: true, Size: maxOpen, KeyType: destination6}
	if four {
		s.Name, s.KeyType = open4+id, destination4
	}
	return s
}

// open4 and open6 begin the names of such sets.
const open4, open6 = "open4-", "open6-"

func isOpenSet(name string) bool {
	return strings.HasPrefix(name, open4) || strings.HasPrefix(name, open6)
}

var (
	destination4 = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)
	destination6 = nftables.MustConcatSetType(nftables.TypeIP6Addr, nftables.TypeInetProto, nftables.TypeInetService)
)

const (
	fromSandbox, toSandbox = "from", "to"
	sentHook, reachedHook  = "sent", "reached"
	inbound                = "inbound"
	firstRegister          = 8 // NFT_REG32_00: registers of four bytes, of which a concatenation takes as many as it needs
)

func outChain(id string) string    { return "out-" + id }
func boundsChain(id string) string { return "bounds-" + id }
func refuseChain(id string) string { return "refuse-" + id }
func countChain(id string) string  { return "count-" + id } // beyond Connections
func rateChain(id string) string   { return "rate-" + id }  // beyond PerSecond
func quotaChain(id string) string  { return "quota-" + id } // beyond Bytes
func bytesObject(id string) string { return "bytes-" + id }
func connsObject(id string) string { return "connections-" + id }
func refusals(id string) string    { return "refused-" + id }

// track makes the sandbox known, before anything of it is in the kernel.
func (r *egressRules) track(rec *Record) *governed {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.sandboxes[rec.ID]
	if g == nil {
		g = &governed{open: map[resolver.Destination]time.Time{}}
		r.sandboxes[rec.ID] = g
	}
	g.rec, g.policy = rec, egress.NewPolicy(rec.Egress.mode(), rec.Egress.Entries)
	for _, a := range rec.Addresses {
		r.byAddress[a] = g
	}
	return g
}

// chainsOf are a sandbox's own chains, each after those that lead to it.
func chainsOf(rec *Record) []string {
	id, e := rec.ID, rec.Egress
	list := []string{outChain(id), boundsChain(id), refuseChain(id)}
	for _, bound := range boundsOf(e) {
		list = append(list, bound.chain(id))
	}
	return list
}

// bound is one that a sandbox has, with the chain that refuses what is beyond it.
type bound struct {
	chain func(id string) string
	why   string
}

func boundsOf(e Egress) (list []bound) {
	if e.PerSecond > 0 {
		list = append(list, bound{rateChain, beyondPerSecond})
	}
	if e.Connections > 0 {
		list = append(list, bound{countChain, beyondConnections})
	}
	if e.Bytes > 0 {
		list = append(list, bound{quotaChain, beyondBytes})
	}
	return list
}

func (r *egressRules) forget(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.byAddress, func(_ netip.Addr, g *governed) bool { return g.rec.ID == id })
	delete(r.sandboxes, id)
}

// at is the sandbox with this address.
func (r *egressRules) at(a netip.Addr) *governed {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byAddress[a]
}

// set makes the table anew for these sandboxes, with what their names have opened as far as this process knows. Callers hold
// Manager.changing, as those of add and remove.
func (r *egressRules) set(all []*Record) error {
	r.opening.Lock()
	defer r.opening.Unlock()
	c, err := dialNFT()
	if err != nil {
		return err
	}
	c.AddTable(r.table)
	c.DelTable(r.table)
	clear(r.made)
	if len(all) > 0 {
		for _, rec := range all {
			r.track(rec)
			_, _ = r.traffic(rec.ID) // the last reading, if there is anything left to be read
		}
		if err := r.addAll(c, all); err != nil {
			return err
		}
	}
	if err := r.commits.flushed(c); err != nil {
		return err
	}
	r.keep()
	for _, rec := range all {
		r.reopen(r.track(rec))
	}
	return nil
}

// reopen fills the empty sets of a sandbox with what is open to it for some time yet. They are filled after the rules stand:
// there may be more of them than one transaction takes. Those that can't be had are open no more, until their names are asked
// for again. Callers hold opening.
func (r *egressRules) reopen(g *governed) {
	now := time.Now()
	r.mu.Lock()
	open := maps.Clone(g.open)
	r.mu.Unlock()
	holds := map[resolver.Destination]time.Duration{}
	for d, until := range open {
		if until.After(now) {
			holds[d] = until.Sub(now)
		}
	}
	if err := r.addElements(g.rec.ID, holds); err != nil {
		r.log.Warn("what a sandbox's names had opened is closed until it asks for them again", "sandbox", g.rec.ID, "error", err)
		r.mu.Lock()
		clear(g.open)
		r.mu.Unlock()
	}
}

// addElements adds destinations to a sandbox's sets, for these times.
func (r *egressRules) addElements(id string, holds map[resolver.Destination]time.Duration) error {
	c, err := dialNFT()
	if err != nil {
		return err
	}
	for _, four := range []bool{true, false} {
		set := r.destinations(id, four)
		var all []nftables.SetElement
		for d, hold := range holds {
			if d.Addr.Is4() == four {
				all = append(all, element(d, hold))
			}
		}
		for some := range slices.Chunk(all, elementsAtOnce) {
			// The time of one that is there does not change by adding it again, and one that is not there can't be deleted.
			err := errors.Join(c.SetAddElements(set, some), c.SetDeleteElements(set, some), c.SetAddElements(set, some), r.commits.flush(c))
			if err != nil {
				return fmt.Errorf("opening destinations to sandbox %s: %w", id, err)
			}
		}
	}
	return nil
}

func (r *egressRules) addAll(c *nftables.Conn, all []*Record) error {
	c.AddTable(r.table)
	if err := r.addHooks(c); err != nil {
		return err
	}
	for _, rec := range all {
		if err := r.addSandbox(c, r.track(rec)); err != nil {
			return err
		}
	}
	return nil
}

// current says whether the sandboxes' rules are those that this agent would give them. An earlier one may have given others.
func (r *egressRules) current(all []*Record) bool {
	c, err := dialNFT()
	if err != nil {
		return false
	}
	made := r.made
	r.made = chainSizes{}
	err = r.addAll(c, all) // nothing of it is sent
	want := r.made
	r.made = made
	if err != nil {
		return false
	}
	for chain, n := range want {
		if made[chain] != n {
			return false
		}
	}
	return true
}

// add adds one sandbox to a table that is there.
func (r *egressRules) add(rec *Record) error {
	c, err := dialNFT()
	if err != nil {
		return err
	}
	if err := r.addSandbox(c, r.track(rec)); err != nil {
		return err
	}
	if err := r.commits.flushed(c); err != nil {
		return err
	}
	r.keep()
	return nil
}

// addHooks adds what leads to the sandboxes' chains. What they send is looked at when its connection is known and before a
// service's address is translated: what they asked for is what counts. Where it leads then is the listeners' rules' to see.
func (r *egressRules) addHooks(c *nftables.Conn) error {
	for _, name := range []string{fromSandbox, toSandbox} {
		for _, four := range []bool{true, false} {
			if err := c.AddSet(r.chains(name, four), nil); err != nil {
				return fmt.Errorf("making a map of sandboxes: %w", err)
			}
		}
	}
	in := c.AddChain(&nftables.Chain{Table: r.table, Name: inbound})
	// A connection from outside would be a way out for what the command has ready for it.
	r.rule(c, in, slices.Concat(ctState(expr.CtStateBitNEW), rejectWith(unix.NFT_REJECT_ICMPX_UNREACH, icmpxAdminProhibited))...)
	policy := nftables.ChainPolicyAccept
	sent := c.AddChain(&nftables.Chain{
		Table: r.table, Name: sentHook, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle, Policy: &policy,
	})
	reached := c.AddChain(&nftables.Chain{
		Table: r.table, Name: reachedHook, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityRef(-9), Policy: &policy,
	})
	for _, four := range []bool{true, false} {
		r.rule(c, sent, r.byAddressOf(fromSandbox, four, false)...)
		r.rule(c, reached, r.byAddressOf(toSandbox, four, true)...)
	}
	return nil
}

// emptyChain is a chain without rules, also where a change for another sandbox has made it already.
func (r *egressRules) emptyChain(c *nftables.Conn, name string) *nftables.Chain {
	chain := c.AddChain(&nftables.Chain{Table: r.table, Name: name})
	c.FlushChain(chain)
	r.made[name] = 0
	return chain
}

func (r *egressRules) rule(c *nftables.Conn, chain *nftables.Chain, e ...expr.Any) {
	c.AddRule(&nftables.Rule{Table: r.table, Chain: chain, Exprs: e})
	r.made[chain.Name]++
}

// byAddressOf goes where a map says for a packet's source or destination.
func (r *egressRules) byAddressOf(name string, four, destination bool) []expr.Any {
	family, a := listeners.IPv6, netip.IPv6Unspecified()
	if four {
		family, a = listeners.IPv4, netip.IPv4Unspecified()
	}
	offset := sourceOffset(a)
	if destination {
		offset = destinationOffset(a)
	}
	return append(ofFamily(family, routedLayer),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
		&expr.Lookup{SourceRegister: 1, SetName: r.chains(name, four).Name, IsDestRegSet: true})
}

// addSandbox adds what is a sandbox's own.
func (r *egressRules) addSandbox(c *nftables.Conn, g *governed) error {
	id, e := g.rec.ID, g.rec.Egress
	quota := e.Bytes
	if quota == 0 {
		quota = noBound
	}
	r.mu.Lock()
	counted := g.counted
	r.mu.Unlock()
	c.AddObj(&nftables.QuotaObj{Table: r.table, Name: bytesObject(id), Bytes: quota, Consumed: counted.BytesOut, Over: true})
	c.AddObj(&nftables.CounterObj{Table: r.table, Name: connsObject(id), Packets: counted.Connections})
	c.AddObj(&nftables.CounterObj{Table: r.table, Name: refusals(id), Packets: counted.Refused})
	for _, four := range []bool{true, false} {
		if err := c.AddSet(r.destinations(id, four), nil); err != nil {
			return fmt.Errorf("making the set of destinations of sandbox %s: %w", id, err)
		}
	}
	r.addRefusal(c, refuseChain(id), id, "")
	for _, bound := range boundsOf(e) {
		r.addRefusal(c, bound.chain(id), id, bound.why)
	}
	bounds := r.emptyChain(c, boundsChain(id))
	r.addBounds(c, bounds, g.rec)
	out := r.emptyChain(c, outChain(id))
	r.addOut(c, out, g)
	for _, a := range g.rec.Addresses {
		elements := map[string]string{fromSandbox: outChain(id)}
		if e.mode() != egress.Open {
			elements[toSandbox] = inbound
		}
		for name, chain := range elements {
			if err := c.SetAddElements(r.chains(name, a.Is4()), []nftables.SetElement{{
				Key: a.AsSlice(), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain},
			}}); err != nil {
				return fmt.Errorf("adding sandbox %s to the map of sandboxes: %w", id, err)
			}
		}
	}
	return nil
}

// addOut adds the rules for what the sandbox sends.
func (r *egressRules) addOut(c *nftables.Conn, chain *nftables.Chain, g *governed) {
	id, mode := g.rec.ID, g.rec.Egress.mode()
	for _, t := range neighbours() {
		r.rule(c, chain, append(t, &expr.Verdict{Kind: expr.VerdictAccept})...)
	}
	if mode == egress.Allowlist {
		for _, e := range r.toResolvers() {
			if g.rec.Egress.Connections > 0 {
				r.rule(c, chain, slices.Concat(e, tooManyQuestions(g.rec))...)
			}
			r.rule(c, chain, append(e, &expr.Verdict{Kind: expr.VerdictAccept})...)
		}
	}
	refuse := &expr.Verdict{Kind: expr.VerdictGoto, Chain: refuseChain(id)}
	spent := refuse // never, without a bound: the object counts all the same
	if g.rec.Egress.Bytes > 0 {
		spent = &expr.Verdict{Kind: expr.VerdictGoto, Chain: quotaChain(id)}
	}
	r.rule(c, chain, &expr.Objref{Type: int(nftables.ObjTypeQuota), Name: bytesObject(id)}, spent)
	// What goes on was let through when it began, or is the answer to somebody who could begin it; it outlives the time of a
	// destination.
	r.rule(c, chain, append(ctState(expr.CtStateBitESTABLISHED), &expr.Verdict{Kind: expr.VerdictAccept})...)
	for _, proto := range []byte{unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6} { // an error that belongs to such a connection
		r.rule(c, chain, slices.Concat(l4proto(expr.CmpOpEq, proto), ctState(expr.CtStateBitRELATED), []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}})...)
	}
	bounds := &expr.Verdict{Kind: expr.VerdictGoto, Chain: boundsChain(id)}
	switch mode {
	case egress.Open:
		r.rule(c, chain, bounds)
	case egress.Allowlist:
		for _, four := range []bool{true, false} {
			r.rule(c, chain, append(r.isOpen(id, four), bounds)...)
		}
		for _, e := range g.policy.Ranges() {
			for _, exprs := range compile(rangeRule(e), routedLayer) {
				// The last is the rule's own verdict, with its counter before it.
				r.rule(c, chain, append(exprs[:len(exprs)-2], bounds)...)
			}
		}
	}
	r.rule(c, chain, refuse)
}

func rangeRule(e egress.Entry) listeners.Rule {
	proto := uint8(listeners.TCP)
	if e.Protocol == egress.UDP {
		proto = listeners.UDP
	}
	return listeners.Rule{Protocols: []uint8{proto}, Ports: e.Ports, To: []netip.Prefix{e.Range}, Action: listeners.Admit}
}

// isOpen matches what the sandbox's names have opened.
func (r *egressRules) isOpen(id string, four bool) []expr.Any {
	family, a, next := listeners.IPv6, netip.IPv6Unspecified(), uint32(firstRegister+4)
	if four {
		family, a, next = listeners.IPv4, netip.IPv4Unspecified(), firstRegister+1
	}
	return append(ofFamily(family, routedLayer),
		&expr.Payload{DestRegister: firstRegister, Base: expr.PayloadBaseNetworkHeader, Offset: destinationOffset(a), Len: uint32(a.BitLen() / 8)},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: next},
		&expr.Payload{DestRegister: next + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: firstRegister, SetName: r.destinations(id, four).Name})
}

// toResolvers match questions for names, as long as the node itself has the resolver's address.
func (r *egressRules) toResolvers() (out [][]expr.Any) {
	for _, a := range r.resolvers {
		for _, proto := range []uint8{listeners.TCP, listeners.UDP} {
			rule := listeners.Rule{Protocols: []uint8{proto}, Ports: []uint16{dnsPort}, To: hostRanges(a), Action: listeners.Admit}
			for _, e := range compile(rule, routedLayer) {
				out = append(out, append(e[:len(e)-2], addressType(expr.CmpOpEq, unix.RTN_LOCAL)...))
			}
		}
	}
	return out
}

func hostRanges(a netip.Addr) []netip.Prefix { return []netip.Prefix{netip.PrefixFrom(a, a.BitLen())} }

const dnsPort = 53

// neighbours match what keeps IPv6 going on the link.
func neighbours() (out [][]expr.Any) {
	for _, rule := range listeners.Neighbours() {
		for _, e := range compile(rule, routedLayer) {
			out = append(out, e[:len(e)-2])
		}
	}
	return out
}

// addBounds admits a new connection within the session's bounds.
func (r *egressRules) addBounds(c *nftables.Conn, chain *nftables.Chain, rec *Record) {
	id, e := rec.ID, rec.Egress
	began := &expr.Objref{Type: int(nftables.ObjTypeCounter), Name: connsObject(id)}
	if e.PerSecond > 0 {
		r.rule(c, chain, append(ctState(expr.CtStateBitNEW),
			&expr.Limit{Type: expr.LimitTypePkts, Rate: uint64(e.PerSecond), Unit: expr.LimitTimeSecond, Burst: e.PerSecond, Over: true},
			&expr.Verdict{Kind: expr.VerdictGoto, Chain: rateChain(id)})...)
	}
	if e.Connections > 0 {
		for _, asks := range questions(rec) {
			r.rule(c, chain, slices.Concat(asks, tooManyQuestions(rec))...)
			r.rule(c, chain, slices.Concat(asks, ctState(expr.CtStateBitNEW), []expr.Any{began, &expr.Verdict{Kind: expr.VerdictAccept}})...)
		}
		r.rule(c, chain, append(ctState(expr.CtStateBitNEW), &expr.Connlimit{Count: e.Connections, Flags: expr.NFT_CONNLIMIT_F_INV},
			&expr.Verdict{Kind: expr.VerdictGoto, Chain: countChain(id)})...)
	}
	r.rule(c, chain, append(ctState(expr.CtStateBitNEW), began)...)
	r.rule(c, chain, &expr.Verdict{Kind: expr.VerdictAccept})
}

// questions match those for names, by datagram, to the nameservers of a sandbox without a list. The kernel knows each for half a minute and longer after
// its answer: a command that does nothing but connect to one host after the other would soon have all its connections taken by them.
func questions(rec *Record) (out [][]expr.Any) {
	if rec.Egress.mode() != egress.Open {
		return nil // asks the agent's resolver, which is no connection of anybody's
	}
	for _, a := range rec.Nameservers {
		rule := listeners.Rule{Protocols: []uint8{listeners.UDP}, Ports: []uint16{dnsPort}, To: hostRanges(a.Unmap()), Action: listeners.Admit}
		for _, e := range compile(rule, routedLayer) {
			out = append(out, e[:len(e)-2])
		}
	}
	return out
}

// questionSeconds is how long the kernel knows a question that got no answer, and whose command sends nothing more of it;
// fewQuestions are admitted at once whatever the bounds are.
const (
	questionSeconds = 32
	fewQuestions    = 1024
)

// questionsAtOnce is how many questions to one nameserver the kernel knows of a sandbox at most: as many as it can begin by the second,
// so that it is told of that bound first. Without a bound a command could fill the node's table of connections, which all sandboxes share.
func questionsAtOnce(e Egress) uint32 {
	return max(fewQuestions, e.Connections, questionSeconds*e.PerSecond)
}

// tooManyQuestions ends a rule that refuses questions beyond that.
func tooManyQuestions(rec *Record) []expr.Any {
	return append(ctState(expr.CtStateBitNEW), &expr.Connlimit{Count: questionsAtOnce(rec.Egress), Flags: expr.NFT_CONNLIMIT_F_INV},
		&expr.Verdict{Kind: expr.VerdictGoto, Chain: countChain(rec.ID)})
}

// addRefusal makes a chain that counts, tells and answers. why is empty for what is not listed.
func (r *egressRules) addRefusal(c *nftables.Conn, name, id, why string) {
	chain := r.emptyChain(c, name)
	r.rule(c, chain, &expr.Objref{Type: int(nftables.ObjTypeCounter), Name: refusals(id)})
	r.rule(c, chain, refusalsLimit(), tellWhy(r.group, why))
	r.rule(c, chain, append(l4proto(expr.CmpOpEq, unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})...)
	r.rule(c, chain, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: icmpxAdminProhibited})
}

func rejectWith(kind uint32, code uint8) []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Reject{Type: kind, Code: code}}
}

func ctState(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// element is a destination as a key: each part fills registers of four bytes.
func element(d resolver.Destination, hold time.Duration) nftables.SetElement {
	proto := byte(unix.IPPROTO_TCP)
	if d.Protocol == egress.UDP {
		proto = unix.IPPROTO_UDP
	}
	key := append(d.Addr.AsSlice(), proto, 0, 0, 0)
	return nftables.SetElement{Key: append(binary.BigEndian.AppendUint16(key, d.Port), 0, 0), Timeout: hold}
}

// admit opens destinations to a sandbox for at least this long.
func (r *egressRules) admit(id string, to []resolver.Destination, hold time.Duration) error {
	r.opening.Lock()
	defer r.opening.Unlock()
	g, fresh, err := r.worth(id, to, hold)
	if err != nil || len(fresh) == 0 {
		return err
	}
	holds := make(map[resolver.Destination]time.Duration, len(fresh))
	for _, d := range fresh {
		holds[d] = hold + newest
	}
	if err := r.addElements(id, holds); err != nil {
		return err
	}
	until := time.Now().Add(hold)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range fresh {
		g.open[d] = until
	}
	return nil
}

// worth are the destinations that are not open for so long yet.
func (r *egressRules) worth(id string, to []resolver.Destination, hold time.Duration) (*governed, []resolver.Destination, error) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.sandboxes[id]
	if g == nil {
		return nil, nil, fmt.Errorf("opening destinations to sandbox %s: %w", id, ErrNotFound)
	}
	var fresh []resolver.Destination
	for _, d := range to {
		if g.open[d].Before(now.Add(hold - newest)) {
			fresh = append(fresh, d)
		}
	}
	if len(g.open)+len(fresh) > maxOpen {
		maps.DeleteFunc(g.open, func(_ resolver.Destination, until time.Time) bool { return until.Before(now) })
	}
	return g, fresh, nil
}

// remove takes away what is a sandbox's own.
func (r *egressRules) remove(rec *Record) error {
	r.forget(rec.ID)
	c, err := dialNFT()
	if err != nil {
		return err
	}
	for _, a := range rec.Addresses {
		names := []string{fromSandbox}
		if rec.Egress.mode() != egress.Open {
			names = append(names, toSandbox)
		}
		for _, name := range names {
			if err := c.SetDeleteElements(r.chains(name, a.Is4()), []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
				return fmt.Errorf("removing sandbox %s from the map of sandboxes: %w", rec.ID, err)
			}
		}
	}
	chains := chainsOf(rec)
	for _, name := range chains {
		c.FlushChain(&nftables.Chain{Table: r.table, Name: name})
	}
	for _, name := range chains {
		c.DelChain(&nftables.Chain{Table: r.table, Name: name})
		delete(r.made, name)
	}
	r.keep()
	for _, four := range []bool{true, false} {
		c.DelSet(r.destinations(rec.ID, four))
	}
	c.DeleteObject(&nftables.QuotaObj{Table: r.table, Name: bytesObject(rec.ID)})
	c.DeleteObject(&nftables.CounterObj{Table: r.table, Name: connsObject(rec.ID)})
	c.DeleteObject(&nftables.CounterObj{Table: r.table, Name: refusals(rec.ID)})
	if err := r.commits.flush(c); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing the egress rules of sandbox %s: %w", rec.ID, err)
	}
	return nil
}

// traffic reads the counters of a sandbox: over one socket, as each command of one with a network waits for it.
func (r *egressRules) traffic(id string) (Traffic, error) {
	c, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return Traffic{}, fmt.Errorf("%w: reaching nftables: %w (kernel option CONFIG_NF_TABLES)", ErrUnavailable, err)
	}
	defer func() { _ = c.CloseLasting() }()
	var t Traffic
	for _, o := range []struct {
		object nftables.Obj
		to     *uint64
	}{
		{&nftables.QuotaObj{Table: r.table, Name: bytesObject(id)}, &t.BytesOut},
		{&nftables.CounterObj{Table: r.table, Name: connsObject(id)}, &t.Connections},
		{&nftables.CounterObj{Table: r.table, Name: refusals(id)}, &t.Refused},
	} {
		got, err := c.GetObject(o.object)
		if err != nil {
			return Traffic{}, fmt.Errorf("reading what sandbox %s has sent: %w", id, err)
		}
		switch x := got.(type) {
		case *nftables.QuotaObj:
			*o.to = x.Consumed
		case *nftables.CounterObj:
			*o.to = x.Packets
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if g := r.sandboxes[id]; g != nil {
		g.counted = t
	}
	return t, nil
}

// intact says whether the table has the chains of these sandboxes, with as many rules as they were given, and leads to them.
// Where that is not known they have any.
func (r *egressRules) intact(all []*Record) bool {
	c, err := dialNFT()
	if err != nil {
		return false
	}
	if !r.leadsTo(c, all) {
		return false
	}
	chains := []string{sentHook, reachedHook, inbound}
	for _, rec := range all {
		chains = append(chains, chainsOf(rec)...)
	}
	for _, name := range chains {
		found, err := c.GetRules(r.table, &nftables.Chain{Table: r.table, Name: name})
		if n, known := r.made[name]; err != nil || len(found) == 0 || known && len(found) != n {
			return false
		}
	}
	return true
}

// leadsTo says whether the maps have these sandboxes' addresses.
func (r *egressRules) leadsTo(c *nftables.Conn, all []*Record) bool {
	for _, name := range []string{fromSandbox, toSandbox} {
		for _, four := range []bool{true, false} {
			found, err := c.GetSetElements(r.chains(name, four))
			if err != nil {
				return false
			}
			has := map[string]bool{}
			for _, e := range found {
				has[string(e.Key)] = true
			}
			for _, rec := range all {
				for _, e := range elements(rec, four) {
					if isMapped(rec, name) && !has[string(e.Key)] {
						return false
					}
				}
			}
		}
	}
	return true
}

// isMapped says whether a map leads to a sandbox's chain.
func isMapped(rec *Record, name string) bool {
	return name == fromSandbox || rec.Egress.mode() != egress.Open
}
