package resolver

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	// leastUDP is what every asker takes over UDP (RFC 1035, 4.2.1); mostUDP goes through every link without fragments.
	leastUDP, mostUDP = 512, 1232
	maxMessage        = 65535
	maxAliases        = 16
	// extendedError is the option that says why (RFC 8914), with the code "prohibited".
	extendedError, prohibited = 15, 18
)

// question is one message of a sandbox.
type question struct {
	id     uint16
	opCode dnsmessage.OpCode
	// recursion is told back as it was asked for.
	recursion bool
	name      dnsmessage.Name
	kind      dnsmessage.Type
	class     dnsmessage.Class
	asked     bool // there is a question to be repeated in the answer
	// payload is what the asker takes over UDP; 0: it says nothing (RFC 6891).
	payload int
}

var errNoQuery = errors.New("it is no question")

// parse reads a question. With an error that is not errNoQuery, an answer can still be addressed.
func parse(msg []byte) (question, error) {
	var p dnsmessage.Parser
	h, err := p.Start(msg)
	if err != nil || h.Response {
		return question{}, errNoQuery
	}
	q := question{id: h.ID, opCode: h.OpCode, recursion: h.RecursionDesired}
	all, err := p.AllQuestions()
	if err != nil || len(all) != 1 {
		return q, errors.New("it has not one question")
	}
	q.name, q.kind, q.class, q.asked = all[0].Name, all[0].Type, all[0].Class, true
	if err := errors.Join(p.SkipAllAnswers(), p.SkipAllAuthorities()); err != nil {
		return q, err
	}
	for {
		rh, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return q, nil
		}
		if err != nil {
			return q, err
		}
		if rh.Type == dnsmessage.TypeOPT {
			q.payload = min(max(int(rh.Class), leastUDP), mostUDP)
		}
		if err := p.SkipAdditional(); err != nil {
			return q, err
		}
	}
}

// pack writes the answer to a question. limit is the most bytes it may have, 0 for UDP, where the question says it.
func (q question) pack(a answer, limit int) []byte {
	if limit == 0 {
		limit = max(q.payload, leastUDP)
	}
	msg, err := q.build(a, false)
	if err == nil && len(msg) > limit {
		msg, err = q.build(answer{code: a.code}, true)
	}
	if err != nil {
		msg, err = q.build(answer{code: dnsmessage.RCodeServerFailure}, false)
	}
	if err != nil {
		return nil
	}
	return msg
}

func (q question) build(a answer, truncated bool) ([]byte, error) {
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{
		ID: q.id, Response: true, OpCode: q.opCode, Truncated: truncated, RecursionDesired: q.recursion, RecursionAvailable: true, RCode: a.code,
	})
	b.EnableCompression()
	var errs []error
	note := func(err error) { errs = append(errs, err) }
	note(b.StartQuestions())
	if q.asked {
		note(b.Question(dnsmessage.Question{Name: q.name, Type: q.kind, Class: q.class}))
	}
	note(b.StartAnswers())
	note(answers(&b, q.name, a))
	note(b.StartAdditionals())
	if q.payload > 0 {
		var h dnsmessage.ResourceHeader
		note(h.SetEDNS0(mostUDP, a.code, false))
		var o dnsmessage.OPTResource
		if a.why != "" {
			o.Options = []dnsmessage.Option{{Code: extendedError, Data: append(binary.BigEndian.AppendUint16(nil, prohibited), a.why...)}}
		}
		note(b.OPTResource(h, o))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return b.Finish()
}

func answers(b *dnsmessage.Builder, owner dnsmessage.Name, a answer) error {
	h := dnsmessage.ResourceHeader{Name: owner, Class: dnsmessage.ClassINET, TTL: uint32(a.ttl / time.Second)}
	for _, alias := range a.aliases {
		to, err := dnsmessage.NewName(alias + ".")
		if err != nil {
			return err
		}
		if err := b.CNAMEResource(h, dnsmessage.CNAMEResource{CNAME: to}); err != nil {
			return err
		}
		h.Name = to
	}
	for _, addr := range a.addrs {
		var err error
		if addr.Is4() {
			err = b.AResource(h, dnsmessage.AResource{A: addr.As4()})
		} else {
			err = b.AAAAResource(h, dnsmessage.AAAAResource{AAAA: addr.As16()})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// query is a message to an upstream.
func query(id uint16, name string, kind dnsmessage.Type) ([]byte, error) {
	n, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return nil, fmt.Errorf("%q is too long: %w", name, err)
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: id, RecursionDesired: true})
	var h dnsmessage.ResourceHeader
	if err := errors.Join(b.StartQuestions(), b.Question(dnsmessage.Question{Name: n, Type: kind, Class: dnsmessage.ClassINET}),
		b.StartAdditionals(), h.SetEDNS0(mostUDP, dnsmessage.RCodeSuccess, false), b.OPTResource(h, dnsmessage.OPTResource{})); err != nil {
		return nil, err
	}
	return b.Finish()
}

// errNotOurs: a message is no answer to the question that was sent.
var errNotOurs = errors.New("it is no answer to the question")

// response reads an upstream's answer to query. cut says that it was longer than UDP takes.
func response(msg []byte, id uint16, name string, kind dnsmessage.Type, maxTTL time.Duration) (a answer, cut bool, err error) {
	var p dnsmessage.Parser
	h, err := p.Start(msg)
	if err != nil || !h.Response || h.ID != id {
		return answer{}, false, errNotOurs
	}
	q, err := p.AllQuestions()
	if err != nil || len(q) != 1 || !strings.EqualFold(q[0].Name.String(), name+".") || q[0].Type != kind || q[0].Class != dnsmessage.ClassINET {
		return answer{}, false, errNotOurs
	}
	switch {
	case h.Truncated:
		return answer{}, true, nil
	case h.RCode == dnsmessage.RCodeNameError:
		return answer{code: h.RCode, ttl: negativeTTL}, false, nil
	case h.RCode != dnsmessage.RCodeSuccess:
		return answer{}, false, fmt.Errorf("it answers %v", h.RCode)
	}
	found, err := records(&p)
	if err != nil {
		return answer{}, false, fmt.Errorf("its answer can't be read: %w", err)
	}
	return found.follow(name, kind, maxTTL), false, nil
}

// record is what an upstream says of a name.
type record struct {
	alias string // where it is one
	addr  netip.Addr
	ttl   time.Duration
}

type recordsOf map[string][]record

func records(p *dnsmessage.Parser) (recordsOf, error) {
	out := recordsOf{}
	for {
		h, err := p.AnswerHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		r := record{ttl: seconds(h.TTL)}
		switch {
		case h.Class != dnsmessage.ClassINET:
			err = p.SkipAnswer()
		case h.Type == dnsmessage.TypeA:
			var a dnsmessage.AResource
			a, err = p.AResource()
			r.addr = netip.AddrFrom4(a.A)
		case h.Type == dnsmessage.TypeAAAA:
			var a dnsmessage.AAAAResource
			a, err = p.AAAAResource()
			r.addr = netip.AddrFrom16(a.AAAA)
		case h.Type == dnsmessage.TypeCNAME:
			var c dnsmessage.CNAMEResource
			c, err = p.CNAMEResource()
			r.alias = lower(c.CNAME.String())
		default:
			err = p.SkipAnswer()
		}
		if err != nil {
			return nil, err
		}
		if r.alias != "" || r.addr.IsValid() {
			out[lower(h.Name.String())] = append(out[lower(h.Name.String())], r)
		}
	}
}

func lower(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// seconds is a TTL; the highest bit stands for none at all (RFC 2181, 8).
func seconds(ttl uint32) time.Duration {
	if ttl > 1<<31-1 {
		return 0
	}
	return time.Duration(ttl) * time.Second
}

// follow goes from a name along its aliases to addresses of one kind.
func (f recordsOf) follow(name string, kind dnsmessage.Type, maxTTL time.Duration) answer {
	a := answer{ttl: maxTTL}
	for at := name; len(a.aliases) < maxAliases; {
		next := ""
		for _, r := range f[at] {
			switch {
			case r.alias != "":
				next = r.alias
			case r.addr.Is4() == (kind == dnsmessage.TypeA) && len(a.addrs) < maxAddresses:
				a.addrs = append(a.addrs, r.addr)
			default:
				continue
			}
			a.ttl = min(a.ttl, r.ttl)
		}
		if len(a.addrs) > 0 || next == "" {
			break
		}
		a.aliases, at = append(a.aliases, next), next
	}
	if len(a.addrs) == 0 {
		a.ttl = min(a.ttl, negativeTTL)
	}
	return a
}
