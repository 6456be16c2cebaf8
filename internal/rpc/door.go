package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect/v2/connecthttp"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent"
)

const (
	// maxConnections bounds the allowed peers' connections: one for each place in the default queues of the default
	// number of sessions. A node whose descriptors are fewer has fewer (connectionsFor).
	maxConnections = 4096
	// maxRefused and refusedTime bound what a peer that isn't allowed can hold: so many connections, so long.
	maxRefused  = 16
	refusedTime = 2 * time.Second
	// refusalLogEvery keeps a peer that tries again and again from filling the log.
	refusalLogEvery = 10 * time.Second
)

// peer is who is at the other end of a connection, as the kernel recorded it when it connected (SO_PEERCRED, unix(7)).
type peer struct {
	uid uint32
	pid int32
	// refused is why it gets no other answer than this.
	refused error
}

type peerKey struct{}

// peerOf tells nothing of a connection that did not come through a door.
func peerOf(ctx context.Context) (peer, bool) {
	p, ok := ctx.Value(peerKey{}).(peer)
	return p, ok
}

// withPeer is the HTTP server's ConnContext.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*conn); ok {
		return context.WithValue(ctx, peerKey{}, c.peer)
	}
	return ctx
}

func lookUpPeer(c *net.UnixConn) (peer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return peer{}, err
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err == nil {
		err = credErr
	}
	if err != nil {
		return peer{}, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	return peer{uid: cred.Uid, pid: cred.Pid}, nil
}

// door is the exec socket's listener. It asks the kernel who connects before a byte is read, so that whoever isn't
// allowed takes neither a place from those who are nor much of anything else: a few of them get an answer that says
// why, for a moment, and the others are hung up on.
type door struct {
	*net.UnixListener
	allow       []uint32
	log         *slog.Logger
	refusedTime time.Duration
	// The places that are taken.
	admitted, refused chan struct{}
	quiet             quieter
}

func newDoor(l *net.UnixListener, allow []uint32, log *slog.Logger) *door {
	return &door{
		UnixListener: l, allow: allow, log: log, refusedTime: refusedTime,
		admitted: make(chan struct{}, connectionsFor(openFiles())), refused: make(chan struct{}, maxRefused),
		quiet: quieter{every: refusalLogEvery},
	}
}

// connectionsFor leaves half of the agent's descriptors to everything else.
func connectionsFor(files uint64) int { return int(min(maxConnections, max(files/2, 1))) }

// openFiles is the soft RLIMIT_NOFILE, which Go has raised to the hard one.
func openFiles() uint64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 1024 // what every system grants
	}
	return r.Cur
}

// Accept answers with the next connection that gets an answer, be it a refusal. Only one goroutine may call it.
func (d *door) Accept() (net.Conn, error) {
	for {
		c, err := d.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if in := d.let(c); in != nil {
			return in, nil
		}
		c.Close()
	}
}

// let gives a connection its place; nil: there is none.
func (d *door) let(c *net.UnixConn) *conn {
	p, err := lookUpPeer(c)
	if p.refused = d.judge(p, err); p.refused == nil {
		if take(d.admitted) {
			return &conn{UnixConn: c, peer: p, leave: func() { <-d.admitted }}
		}
		p.refused = fmt.Errorf("%w: %d connections to the exec socket are open, the most that may be: close some, or send more calls over each (HTTP/2)",
			agent.ErrExhausted, cap(d.admitted))
	}
	if told, untold := d.quiet.speak(time.Now()); told {
		d.log.Warn("peer refused", "uid", p.uid, "pid", p.pid, "error", p.refused, "refused_since_last_line", untold)
	}
	if !take(d.refused) {
		return nil
	}
	in := &conn{UnixConn: c, peer: p, leave: func() { <-d.refused }}
	time.AfterFunc(d.refusedTime, func() { in.Close() })
	return in
}

func (d *door) judge(p peer, err error) error {
	switch {
	case err != nil:
		return fmt.Errorf("%w: the kernel doesn't say who calls: %w", errPeer, err)
	case !slices.Contains(d.allow, p.uid):
		return fmt.Errorf("%w: uid %d is not in socket.allow_uids: call as an allowed user, or have the operator add it", errPeer, p.uid)
	}
	return nil
}

func take(places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		return true
	default:
		return false
	}
}

// conn is a connection that has a place, which it gives back when it is closed.
type conn struct {
	*net.UnixConn
	peer  peer
	once  sync.Once
	leave func()
}

func (c *conn) Close() error {
	err := c.UnixConn.Close()
	c.once.Do(c.leave)
	return err
}

// quieter lets one message through in each span of time, and counts the others. Only the door's goroutine uses it.
type quieter struct {
	every  time.Duration
	last   time.Time
	untold int
}

func (q *quieter) speak(now time.Time) (told bool, untold int) {
	if !q.last.IsZero() && now.Sub(q.last) < q.every {
		q.untold++
		return false, 0
	}
	untold, q.last, q.untold = q.untold, now, 0
	return true, untold
}

// onlyAdmitted answers a refused peer in its own protocol, reads nothing of its request's body, and hangs up. Whoever
// did not come through a door is refused too.
func onlyAdmitted(next http.Handler) http.Handler {
	answer := connecthttp.NewErrorWriter(connecthttp.WithCodecs(codecs()...))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, ok := peerOf(r.Context())
		if !ok {
			p.refused = fmt.Errorf("%w: nobody asked who calls", errPeer)
		}
		if p.refused == nil {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Connection", "close")
		_ = answer.Write(w, r, toConnect(p.refused)) // it may have gone already
	})
}
