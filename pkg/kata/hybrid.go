package kata

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"time"
)

// handshakeTime bounds connecting and the handshake where the context has no earlier end; handshakeBytes the answer's line.
const (
	handshakeTime  = 10 * time.Second
	handshakeBytes = 32
)

// handshakeOK: Firecracker's docs/vsock.md, which Cloud Hypervisor and Dragonball follow: "OK", and the port of the host's side.
var handshakeOK = regexp.MustCompile(`^OK (0|[1-9][0-9]{0,9})$`)

// Dial connects to a port in the guest. The connection is a stream with deadlines and CloseWrite; ctx ends the dialing only.
func (e Endpoint) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	if e.Path != "" {
		return DialHybrid(ctx, e.Path, port)
	}
	return DialVsock(ctx, e.CID, port)
}

// DialHybrid connects to a port in the guest through the VMM's unix socket: it sends "CONNECT port", reads one line, and
// not a byte more. No part of the path may be a symlink. An error of the other end's wraps ErrHandshake.
func DialHybrid(ctx context.Context, path string, port uint32) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	conn, err := dialUnix(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("hybrid vsock %s: %w", path, err)
	}
	c := &hybridConn{conn, hybridAddr{path, port}}
	// Once the context has ended, nothing of the handshake waits any longer.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = handshake(conn, port)
	if !stop() && err == nil {
		err = os.ErrDeadlineExceeded // the deadline is set, or about to be
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		return nil, fmt.Errorf("hybrid vsock %s port %d: %w", path, port, err)
	}
	return c, nil
}

func handshake(conn net.Conn, port uint32) error {
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	// One byte at a time: what follows the line is the guest's, and the first to speak may be the guest.
	line := make([]byte, 0, handshakeBytes)
	for b := make([]byte, 1); ; {
		n, err := conn.Read(b)
		if err != nil {
			// The VMM closes the connection when nobody listens on the port.
			return fmt.Errorf("%w: after %q: %w", ErrHandshake, line, err)
		}
		if n == 0 {
			continue
		}
		if b[0] == '\n' {
			break
		}
		if len(line) == handshakeBytes {
			return fmt.Errorf("%w: %q and no end of the line", ErrHandshake, line)
		}
		line = append(line, b[0])
	}
	if !handshakeOK.Match(line) {
		return fmt.Errorf("%w: it answered %q and not \"OK port\"", ErrHandshake, line)
	}
	return nil
}

// hybridConn is the unix connection, with an address that tells where it leads. CloseWrite is the unix connection's.
type hybridConn struct {
	*net.UnixConn
	addr hybridAddr
}

func (c *hybridConn) RemoteAddr() net.Addr { return c.addr }

type hybridAddr struct {
	path string
	port uint32
}

func (hybridAddr) Network() string  { return "hvsock" }
func (a hybridAddr) String() string { return fmt.Sprintf("%s:%d", a.path, a.port) }
