package netlab

import (
	"net"
	"net/netip"
	"strings"
	"sync"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
)

// Zone is a nameserver's data, which a test may change while it serves.
type Zone struct {
	mu      sync.Mutex
	answers map[string][]string
	asked   []string
	// TTL is that of every answer, seconds.
	ttl uint32
}

// Set gives a name its addresses, or an alias.
func (z *Zone) Set(name string, to ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.answers[name] = to
}

// SetTTL gives every answer a TTL, seconds.
func (z *Zone) SetTTL(ttl uint32) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.ttl = ttl
}

// Asked are the names that were asked for.
func (z *Zone) Asked() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return append([]string(nil), z.asked...)
}

// DNS serves names at an address of a namespace until the test ends, over UDP.
func (l *Lab) DNS(ns, address string) *Zone {
	l.T.Helper()
	z := &Zone{answers: map[string][]string{}, ttl: 60}
	var conn net.PacketConn
	l.inside(ns, func() (err error) {
		conn, err = net.ListenPacket("udp", address)
		return err
	})
	l.T.Cleanup(func() { conn.Close() })
	go func() {
		for b := make([]byte, 4096); ; {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			reply, err := z.reply(b[:n])
			require.NoError(l.T, err)
			_, _ = conn.WriteTo(reply, from) // who is gone gets no answer
		}
	}()
	return z
}

func (z *Zone) reply(msg []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(msg); err != nil {
		return nil, err
	}
	q := m.Questions[0]
	m.Response, m.Additionals, m.RCode = true, nil, dnsmessage.RCodeNameError
	z.mu.Lock()
	defer z.mu.Unlock()
	z.asked = append(z.asked, strings.TrimSuffix(q.Name.String(), "."))
	for at := q.Name; ; {
		to, known := z.answers[strings.TrimSuffix(at.String(), ".")]
		if known {
			m.RCode = dnsmessage.RCodeSuccess
		}
		h := dnsmessage.ResourceHeader{Name: at, Class: dnsmessage.ClassINET, TTL: z.ttl}
		alias := ""
		for _, v := range to {
			a, err := netip.ParseAddr(v)
			switch {
			case err != nil:
				alias = v
			case a.Is4() && q.Type == dnsmessage.TypeA:
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
			case a.Is6() && q.Type == dnsmessage.TypeAAAA:
				m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
			}
		}
		if alias == "" {
			return m.Pack()
		}
		next, err := dnsmessage.NewName(alias + ".")
		if err != nil {
			return nil, err
		}
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.CNAMEResource{CNAME: next}})
		at = next
	}
}
