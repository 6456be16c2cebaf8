package kata

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// DialVsock connects to a port of a guest by AF_VSOCK. The connection has deadlines and CloseWrite; ctx ends the dialing
// only, which also ends by itself after ten seconds. The host needs vhost_vsock (see Check).
func DialVsock(ctx context.Context, cid, port uint32) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	f, err := connectVsock(ctx, cid, port)
	if err != nil {
		return nil, fmt.Errorf("vsock %d:%d: %w", cid, port, err)
	}
	c := &vsockConn{File: f, remote: vsockAddr{cid, port}}
	if err := c.control(func(fd int) error {
		sa, err := unix.Getsockname(fd)
		if vm, ok := sa.(*unix.SockaddrVM); ok {
			c.local = vsockAddr{vm.CID, vm.Port}
		}
		return err
	}); err != nil {
		f.Close()
		return nil, fmt.Errorf("vsock %d:%d: %w", cid, port, err)
	}
	return c, nil
}

func connectVsock(ctx context.Context, cid, port uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	err = unix.Connect(fd, &unix.SockaddrVM{CID: cid, Port: port})
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	f := os.NewFile(uintptr(fd), "vsock") // non-blocking: Go's poller has it
	if err := awaitConnected(ctx, f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// awaitConnected waits until the socket can be written, and takes the result of the connecting from it (connect(2)).
func awaitConnected(ctx context.Context, f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	var result error
	err = raw.Write(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(fds, 0); n == 0 || errors.Is(err, unix.EINTR) {
			return false // Go's poller was woken for something else
		}
		var errno int
		if errno, result = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); result == nil && errno != 0 {
			result = os.NewSyscallError("connect", unix.Errno(errno))
		}
		return true
	})
	if !stop() {
		return errors.Join(ctx.Err(), err)
	}
	if err != nil {
		return err
	}
	return result
}

// vsockConn is a socket that package net has no type for. Read, Write, Close and the deadlines are the file's.
type vsockConn struct {
	*os.File
	local, remote vsockAddr
}

func (c *vsockConn) control(do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var doErr error
	if err := raw.Control(func(fd uintptr) { doErr = do(int(fd)) }); err != nil {
		return err
	}
	return doErr
}

// CloseWrite tells the other end that nothing more comes.
func (c *vsockConn) CloseWrite() error {
	return c.control(func(fd int) error { return os.NewSyscallError("shutdown", unix.Shutdown(fd, unix.SHUT_WR)) })
}

func (c *vsockConn) LocalAddr() net.Addr  { return c.local }
func (c *vsockConn) RemoteAddr() net.Addr { return c.remote }

// ReadFrom and WriteTo hide the file's own: they would hand the descriptor to splice and sendfile, which vsock has not.
func (c *vsockConn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(writerOnly{c}, r) }

// WriteTo: see ReadFrom.
func (c *vsockConn) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, readerOnly{c}) }

type writerOnly struct{ w *vsockConn }

func (o writerOnly) Write(p []byte) (int, error) { return o.w.Write(p) }

type readerOnly struct{ r *vsockConn }

func (o readerOnly) Read(p []byte) (int, error) { return o.r.Read(p) }

type vsockAddr struct{ cid, port uint32 }

func (vsockAddr) Network() string  { return "vsock" }
func (a vsockAddr) String() string { return fmt.Sprintf("%d:%d", a.cid, a.port) }
