package resolver

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// What is under way at once: in all, and for one sandbox, which can't take all of it. The rest is not answered.
	maxBusy, maxBusyOfOne = 1024, 64
	// tcpIdle is how long a connection may be silent.
	tcpIdle = 5 * time.Second
)

// load counts what is under way, by source address.
type load struct {
	mu  sync.Mutex
	all int
	of  map[string]int
}

func (l *load) begin(who string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all >= maxBusy || l.of[who] >= maxBusyOfOne {
		return false
	}
	l.all++
	l.of[who]++
	return true
}

func (l *load) end(who string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all--
	if l.of[who]--; l.of[who] == 0 {
		delete(l.of, who)
	}
}

// Serve answers on both until ctx ends, and closes them. It returns nil then, and an error when one of them fails.
func (r *Resolver) Serve(ctx context.Context, udp net.PacketConn, tcp net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var busy sync.WaitGroup
	errs := make(chan error, 2)
	busy.Go(func() { errs <- r.serveUDP(ctx, &busy, udp) })
	busy.Go(func() { errs <- r.serveTCP(ctx, &busy, tcp) })
	var err error
	select {
	case <-ctx.Done():
	case err = <-errs:
	}
	cancel()
	udp.Close()
	tcp.Close()
	busy.Wait()
	return err
}

func (r *Resolver) serveUDP(ctx context.Context, busy *sync.WaitGroup, c net.PacketConn) error {
	buf := make([]byte, maxMessage)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return over(ctx, err)
		}
		source := addrOf(from)
		if !r.load.begin(source.String()) {
			continue
		}
		msg := append([]byte(nil), buf[:n]...)
		busy.Go(func() {
			defer r.load.end(source.String())
			if reply := r.respond(ctx, source, msg, 0); reply != nil {
				_, _ = c.WriteTo(reply, from) // who is gone needs no answer
			}
		})
	}
}

func (r *Resolver) serveTCP(ctx context.Context, busy *sync.WaitGroup, l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return over(ctx, err)
		}
		source := addrOf(c.RemoteAddr())
		if !r.load.begin(source.String()) {
			c.Close()
			continue
		}
		busy.Go(func() {
			defer r.load.end(source.String())
			defer c.Close()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			r.converse(ctx, source, c)
		})
	}
}

// converse answers one question after the other of a connection.
func (r *Resolver) converse(ctx context.Context, source netip.Addr, c net.Conn) {
	for {
		if c.SetDeadline(soon()) != nil {
			return
		}
		msg, err := readFramed(c)
		if err != nil {
			return
		}
		reply := r.respond(ctx, source, msg, maxMessage)
		if reply == nil || c.SetDeadline(soon()) != nil || writeFramed(c, reply) != nil {
			return
		}
	}
}

// over is nil for an error that comes of the end of ctx.
func over(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the sockets are closed then
	}
	return err
}

func addrOf(a net.Addr) netip.Addr {
	p, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return p.Addr().Unmap()
}
