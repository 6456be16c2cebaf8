package resolver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// The defaults of Options.
const (
	DefaultMinHold = time.Minute
	DefaultMaxTTL  = time.Hour
	DefaultTimeout = 2 * time.Second
)

const (
	maxAddresses = 32               // of one answer; the rest is left out
	negativeTTL  = 5 * time.Second  // how long "no such name" is kept
	maxQuestion  = 20 * time.Second // for one question, all upstreams and aliases together
)

// Sandbox is who asks.
type Sandbox struct {
	ID     string
	Policy *egress.Policy
}

// Destination is what an answer opens.
type Destination struct {
	Addr     netip.Addr
	Protocol string // as in egress.Entry
	Port     uint16
}

// Options configure a Resolver.
type Options struct {
	// Upstreams are asked one after the other. They have to be recursive resolvers, and trusted.
	Upstreams []netip.AddrPort
	// Sandbox is the one with this source address; nil: nobody's, which gets no answer.
	Sandbox func(netip.Addr) *Sandbox
	// Closed are the ranges that are closed to every sandbox; see egress.Entry.CheckAnswer. It is asked for each answer.
	Closed func() ([]netip.Prefix, error)
	// Admit opens destinations to a sandbox for at least the time hold. Without an error the answer is sent.
	Admit func(id string, d []Destination, hold time.Duration) error
	// Refused is told of each refusal: the name, and why where that is not that it isn't listed.
	Refused func(id, name, why string)
	// MinHold is the shortest time for which a destination is open, MaxTTL the longest for which an answer may be kept.
	MinHold, MaxTTL time.Duration
	// Timeout bounds one question to one upstream.
	Timeout time.Duration
	Log     *slog.Logger
}

// Resolver answers. It is safe for concurrent use.
type Resolver struct {
	opts  Options
	cache cache
	load  load
}

// New makes a resolver.
func New(o Options) *Resolver {
	for _, d := range []struct {
		have  *time.Duration
		usual time.Duration
	}{{&o.MinHold, DefaultMinHold}, {&o.MaxTTL, DefaultMaxTTL}, {&o.Timeout, DefaultTimeout}} {
		if *d.have == 0 {
			*d.have = d.usual
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Resolver{opts: o, cache: cache{entries: map[key]cached{}}, load: load{of: map[string]int{}}}
}

// answer is what there is to say to one question.
type answer struct {
	code dnsmessage.RCode
	// aliases are the names on the way from the one that was asked to the one that has the addresses.
	aliases []string
	addrs   []netip.Addr
	ttl     time.Duration
	// why is told beside the code (RFC 8914); empty: nothing is.
	why string
}

var errNoUpstream = errors.New("no nameserver is known that could be asked: set network.nameservers")

// respond answers a message from a source; nil where there is nothing to say. limit is the most bytes that the answer may
// have where the question names no more.
func (r *Resolver) respond(ctx context.Context, source netip.Addr, msg []byte, limit int) []byte {
	sandbox := r.opts.Sandbox(source)
	if sandbox == nil {
		return nil
	}
	q, err := parse(msg)
	switch {
	case errors.Is(err, errNoQuery):
		return nil
	case err != nil:
		return q.pack(answer{code: dnsmessage.RCodeFormatError}, limit)
	case q.opCode != 0:
		return q.pack(answer{code: dnsmessage.RCodeNotImplemented}, limit)
	}
	ctx, cancel := context.WithTimeout(ctx, maxQuestion)
	defer cancel()
	return q.pack(r.decide(ctx, sandbox, q), limit)
}

// decide answers a question of a sandbox.
func (r *Resolver) decide(ctx context.Context, s *Sandbox, q question) answer {
	name, err := egress.Normal(q.name.String())
	if err != nil {
		return r.refuse(s, strconv.Quote(strings.TrimSuffix(q.name.String(), ".")), "it is no host's name")
	}
	entries := s.Policy.Match(name)
	switch {
	case len(entries) == 0:
		return r.refuse(s, name, "")
	case q.class != dnsmessage.ClassINET:
		return answer{code: dnsmessage.RCodeRefused}
	case q.kind == dnsmessage.TypeHTTPS || q.kind == dnsmessage.TypeSVCB:
		return answer{} // what has them asks for addresses too, and their hints would go round the check
	case q.kind != dnsmessage.TypeA && q.kind != dnsmessage.TypeAAAA:
		return answer{code: dnsmessage.RCodeRefused, why: "sandboxes may ask for addresses only"}
	}
	a, err := r.resolve(ctx, name, q.kind)
	if err != nil {
		r.opts.Log.Warn("a name is not resolved", "sandbox", s.ID, "name", name, "error", err)
		return answer{code: dnsmessage.RCodeServerFailure, why: "no nameserver of the node answers"}
	}
	return r.admit(s, name, entries, a)
}

// refuse answers that there is no such name, as everything that asks takes that for final: "refused" makes some programs try
// again for seconds.
func (r *Resolver) refuse(s *Sandbox, name, why string) answer {
	r.opts.Refused(s.ID, name, why)
	if why == "" {
		why = "it is not on the sandbox's list of destinations"
	}
	return answer{code: dnsmessage.RCodeNameError, why: why}
}

// admit leaves out what the entries don't let an answer have, and opens the rest to the sandbox.
func (r *Resolver) admit(s *Sandbox, name string, entries []egress.Entry, a answer) answer {
	if len(a.addrs) == 0 {
		return a
	}
	closed, err := r.opts.Closed()
	if err != nil {
		r.opts.Log.Error("a name is not resolved", "sandbox", s.ID, "name", name, "error", err)
		return answer{code: dnsmessage.RCodeServerFailure}
	}
	var open []netip.Addr
	var to []Destination
	for _, addr := range a.addrs {
		d, err := destinations(entries, addr, closed)
		if err != nil {
			r.opts.Refused(s.ID, name, err.Error())
			a.why = err.Error()
			continue
		}
		open, to = append(open, addr), append(to, d...)
	}
	a.addrs = open
	if len(open) == 0 {
		a.aliases = nil
		return a
	}
	if err := r.opts.Admit(s.ID, to, max(a.ttl, r.opts.MinHold)); err != nil {
		r.opts.Log.Error("an answer is not given, as its addresses can't be admitted", "sandbox", s.ID, "name", name, "error", err)
		return answer{code: dnsmessage.RCodeServerFailure, why: "its addresses can't be admitted to the sandbox's rules"}
	}
	return a
}

// destinations are what the entries open of an address; an error says why none does.
func destinations(entries []egress.Entry, a netip.Addr, closed []netip.Prefix) (out []Destination, why error) {
	for _, e := range entries {
		if err := e.CheckAnswer(a, closed); err != nil {
			why = err
			continue
		}
		for _, p := range e.Ports {
			out = append(out, Destination{Addr: a, Protocol: e.Protocol, Port: p})
		}
	}
	if len(out) == 0 {
		return nil, why
	}
	return out, nil
}

// resolve finds the addresses of a name that is listed, following aliases wherever they lead.
func (r *Resolver) resolve(ctx context.Context, name string, kind dnsmessage.Type) (answer, error) {
	if a, ok := r.cache.get(key{name, kind}, time.Now()); ok {
		return a, nil
	}
	all := answer{ttl: r.opts.MaxTTL}
	for at, questions := name, 0; ; questions++ {
		if questions == maxQuestions {
			return answer{}, fmt.Errorf("its aliases have no end after %d questions", questions)
		}
		a, err := r.ask(ctx, at, kind)
		if err != nil {
			return answer{}, err
		}
		all.code, all.addrs, all.ttl = a.code, a.addrs, min(all.ttl, a.ttl)
		all.aliases = append(all.aliases, a.aliases...)
		if a.code != dnsmessage.RCodeSuccess || len(a.addrs) > 0 || len(a.aliases) == 0 {
			break
		}
		at = a.aliases[len(a.aliases)-1] // the upstream did not follow it
	}
	r.cache.put(key{name, kind}, all, time.Now())
	return all, nil
}

// maxQuestions bounds how often an alias is followed by a question of its own.
const maxQuestions = 8
