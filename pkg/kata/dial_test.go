package kata

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// vmm serves a stand-in for a VMM's unix socket: serve gets each connection.
func vmm(t testing.TB, path string, serve func(net.Conn)) {
	t.Helper()
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
}

// answerConnect is the VMM as documented: it reads the line and answers with the port of its side.
func answerConnect(c net.Conn) (string, *bufio.Reader) {
	r := bufio.NewReader(c)
	line, _ := r.ReadString('\n')
	_, _ = fmt.Fprintf(c, "OK %d\n", 1073741824)
	return line, r
}

func TestHybridVsockReachesThePortAndIsAnOrdinaryConnection(t *testing.T) {
	path := filepath.Join(short(t), "clh.sock")
	vmm(t, path, func(c net.Conn) {
		line, r := answerConnect(c)
		data, _ := io.ReadAll(r) // until the other end has said that nothing more comes
		_, _ = fmt.Fprintf(c, "%s%s", line, data)
	})
	c, err := Endpoint{Path: path, Port: AgentPort}.Dial(t.Context(), 22085)
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, "hvsock", c.RemoteAddr().Network())
	require.Equal(t, path+":22085", c.RemoteAddr().String())
	_, err = io.WriteString(c, "hello")
	require.NoError(t, err)
	require.NoError(t, c.(interface{ CloseWrite() error }).CloseWrite())
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "CONNECT 22085\nhello", string(got))
}

// A guest that speaks first has its words in the same packet as the VMM's answer.
func TestNoByteAfterTheHandshakeIsLost(t *testing.T) {
	path := filepath.Join(short(t), "vsock")
	var payload atomic.Value
	vmm(t, path, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 64))
		_, _ = io.WriteString(c, "OK 5\n"+payload.Load().(string))
	})
	rapid.Check(t, func(t *rapid.T) {
		sent := string(rapid.SliceOfN(rapid.Byte(), 0, 3000).Draw(t, "payload"))
		payload.Store(sent)
		c, err := DialHybrid(context.Background(), path, 1)
		require.NoError(t, err)
		defer c.Close()
		got, err := io.ReadAll(c)
		require.NoError(t, err)
		require.Equal(t, sent, string(got))
	})
}

func TestAnEndThatShakesHandsBadlyIsAnError(t *testing.T) {
	for name, say := range map[string]string{
		"hangs up, as for a port without a listener": "",
		"half a line":       "OK 10",
		"an endless line":   "OK " + strings.Repeat("1", 1<<20),
		"no OK":             "ERROR no such port\n",
		"a lower case":      "ok 1\n",
		"no port":           "OK\n",
		"no number":         "OK x\n",
		"a negative number": "OK -1\n",
		"a carriage return": "OK 1\r\n",
		"two spaces":        "OK  1\n",
		"something before":  "\nOK 1\n",
		"NUL bytes":         "OK 1\x00\n",
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(short(t), "vsock")
			vmm(t, path, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 64))
				_, _ = io.WriteString(c, say)
			})
			_, err := DialHybrid(t.Context(), path, 1024)
			require.ErrorIs(t, err, ErrHandshake)
			require.ErrorContains(t, err, path)
		})
	}
}

func TestTheHandshakeEndsWithTheContext(t *testing.T) {
	path := filepath.Join(short(t), "vsock")
	release := make(chan struct{})
	ctx, cancel := cancelled(t)
	vmm(t, path, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 64))
		_, _ = io.WriteString(c, "OK")
		cancel()
		<-release
	})
	_, err := DialHybrid(ctx, path, 1024)
	close(release)
	require.ErrorIs(t, err, context.Canceled)
}

// The deadline of the handshake is not the connection's.
func TestAConnectionOutlivesTheContextOfItsDialing(t *testing.T) {
	path := filepath.Join(short(t), "vsock")
	vmm(t, path, func(c net.Conn) {
		_, r := answerConnect(c)
		_, _ = io.Copy(c, r)
	})
	ctx, cancel := cancelled(t)
	c, err := DialHybrid(ctx, path, 1)
	require.NoError(t, err)
	defer c.Close()
	cancel()
	_, err = io.WriteString(c, "x")
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Unix(1, 0)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestNoLinkOnTheWayToAVMMsSocketIsFollowed(t *testing.T) {
	dir := short(t)
	real := filepath.Join(dir, "real")
	require.NoError(t, os.Mkdir(real, 0o755))
	path := filepath.Join(real, "vsock")
	vmm(t, path, func(c net.Conn) { answerConnect(c) })
	c, err := DialHybrid(t.Context(), path, 1)
	require.NoError(t, err, "control: without a link it is reached")
	c.Close()
	require.NoError(t, os.Symlink(real, filepath.Join(dir, "link")))
	require.NoError(t, os.Symlink(path, filepath.Join(dir, "socket")))
	_, err = DialHybrid(t.Context(), filepath.Join(dir, "link/vsock"), 1)
	require.ErrorIs(t, err, unix.ELOOP)
	_, err = DialHybrid(t.Context(), filepath.Join(dir, "socket"), 1)
	require.ErrorContains(t, err, "is no socket", "the link itself is what was opened (openat2(2), O_PATH with O_NOFOLLOW)")
	for _, p := range []string{"", "relative", dir + "/../x", real, filepath.Join(dir, "none")} {
		_, err := DialHybrid(t.Context(), p, 1)
		require.Error(t, err, "%q", p)
	}
}

// A unix socket's address holds 108 bytes; Kata's folders and a long id are more.
func TestALongPathIsReached(t *testing.T) {
	dir := short(t)
	deep := filepath.Join(dir, strings.Repeat("d", 120))
	require.NoError(t, os.Mkdir(deep, 0o755))
	vmm(t, filepath.Join(dir, "s"), func(c net.Conn) { answerConnect(c) })
	require.NoError(t, os.Rename(filepath.Join(dir, "s"), filepath.Join(deep, "s")))
	c, err := DialHybrid(t.Context(), filepath.Join(deep, "s"), 1)
	require.NoError(t, err)
	c.Close()
}

// vsockLoopback asks the kernel for its loopback, or skips: this needs the module vsock_loopback (Linux 5.6).
func vsockListener(t *testing.T) (int, uint32) {
	t.Helper()
	l, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Skipf("this kernel has no vsock: %v", err)
	}
	t.Cleanup(func() { unix.Close(l) })
	require.NoError(t, unix.Bind(l, &unix.SockaddrVM{CID: unix.VMADDR_CID_LOCAL, Port: unix.VMADDR_PORT_ANY}))
	require.NoError(t, unix.Listen(l, 4))
	sa, err := unix.Getsockname(l)
	require.NoError(t, err)
	return l, sa.(*unix.SockaddrVM).Port
}

func TestVsockIsAnOrdinaryConnection(t *testing.T) {
	if _, err := os.Stat("/sys/module/vsock_loopback"); err != nil {
		t.Skip("this kernel has no vsock loopback (module vsock_loopback): real vsock runs in the kernel tests' guests")
	}
	l, port := vsockListener(t)
	accepted := make(chan *os.File, 1)
	go func() {
		defer close(accepted)
		if fd, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK); err == nil {
			accepted <- os.NewFile(uintptr(fd), "accepted")
		}
	}()
	c, err := Endpoint{CID: unix.VMADDR_CID_LOCAL}.Dial(t.Context(), port)
	require.NoError(t, err)
	defer c.Close()
	other := <-accepted
	require.NotNil(t, other)
	defer other.Close()
	require.Equal(t, fmt.Sprintf("1:%d", port), c.RemoteAddr().String())
	require.Equal(t, "vsock", c.LocalAddr().Network())

	sent := strings.Repeat("0123456789", 100_000)
	go func() { _, _ = io.Copy(other, other) }()
	go func() {
		_, _ = io.Copy(c, strings.NewReader(sent))
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got := make([]byte, len(sent))
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, sent, string(got))

	require.NoError(t, c.SetReadDeadline(time.Unix(1, 0)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var ne net.Error
	require.True(t, errors.As(err, &ne) && ne.Timeout())
	require.NoError(t, c.SetReadDeadline(time.Time{}))

	_, err = DialVsock(t.Context(), unix.VMADDR_CID_LOCAL, 1) // nobody listens there
	require.Error(t, err)
}

// A guest that does not exist: the kernel refuses at once, or nothing answers; either way the dialing ends with its context.
func TestDialingVsockEndsWithTheContext(t *testing.T) {
	testkit.Need(t, testkit.Root)
	ctx, cancel := cancelled(t)
	cancel()
	_, err := DialVsock(ctx, 0x7ffffff0, 1024)
	require.Error(t, err)
	require.ErrorContains(t, err, "vsock 2147483632:1024")
}
