package resolver

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// rounds is how often each upstream is asked: a datagram can be lost.
const rounds = 2

// ask asks the upstreams, one after the other.
func (r *Resolver) ask(ctx context.Context, name string, kind dnsmessage.Type) (answer, error) {
	if len(r.opts.Upstreams) == 0 {
		return answer{}, errNoUpstream
	}
	var failures []error
	for range rounds {
		for _, up := range r.opts.Upstreams {
			a, err := r.askOne(ctx, up, name, kind)
			if err == nil {
				return a, nil
			}
			failures = append(failures, fmt.Errorf("asking %s: %w", up, err))
			if ctx.Err() != nil {
				return answer{}, errors.Join(failures...)
			}
		}
	}
	return answer{}, errors.Join(failures...)
}

// askOne asks over UDP, and again over TCP what does not fit. Each question has an id and a port of its own, so that somebody
// who can't see it has to guess both to answer in the upstream's place.
func (r *Resolver) askOne(ctx context.Context, up netip.AddrPort, name string, kind dnsmessage.Type) (answer, error) {
	var b [2]byte
	if _, err := rand.Read(b[:]); err != nil {
		return answer{}, err
	}
	id := binary.BigEndian.Uint16(b[:])
	msg, err := query(id, name, kind)
	if err != nil {
		return answer{}, err
	}
	for _, network := range []string{"udp", "tcp"} {
		a, cut, err := r.exchange(ctx, network, up, msg, func(reply []byte) (answer, bool, error) {
			return response(reply, id, name, kind, r.opts.MaxTTL)
		})
		if err != nil || !cut {
			return a, err
		}
	}
	return answer{}, errors.New("its answer is cut over TCP too")
}

func (r *Resolver) exchange(ctx context.Context, network string, up netip.AddrPort, msg []byte, read func([]byte) (answer, bool, error)) (answer, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, r.opts.Timeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, up.String())
	if err != nil {
		return answer{}, false, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return answer{}, false, err
	}
	if network == "tcp" {
		if err := writeFramed(c, msg); err != nil {
			return answer{}, false, err
		}
		reply, err := readFramed(c)
		if err != nil {
			return answer{}, false, err
		}
		return read(reply)
	}
	if _, err := c.Write(msg); err != nil {
		return answer{}, false, err
	}
	for buf := make([]byte, maxMessage); ; {
		n, err := c.Read(buf)
		if err != nil {
			return answer{}, false, err
		}
		a, cut, err := read(buf[:n])
		if !errors.Is(err, errNotOurs) { // else somebody else's, or an old one's
			return a, cut, err
		}
	}
}

// writeFramed writes a message as TCP carries it (RFC 1035, 4.2.2).
func writeFramed(c net.Conn, msg []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint16(make([]byte, 0, len(msg)+2), uint16(len(msg))), msg...))
	return err
}

func readFramed(c net.Conn) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	msg := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(c, msg)
	return msg, err
}

// soon is a deadline for one step of a peer.
func soon() time.Time { return time.Now().Add(tcpIdle) }
