package nsexec

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// The two ends of a link between new network namespaces.
const (
	near4, far4 = "10.99.0.1", "10.99.0.2"
	near6, far6 = "fd99::1", "fd99::2"
	farPort     = 4000
)

// betweenNamespaces calls f on a thread in a new network namespace, which has a link to another one. far makes what is to be there;
// nothing has an address there until meet is called.
func betweenNamespaces(t *testing.T, far func() error, f func(meet func() error) error) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("ip"), testkit.Program("nsenter"))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread has a network namespace of its own
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			there, err := os.Open("/proc/thread-self/ns/net")
			if err != nil {
				return err
			}
			defer there.Close()
			if err := errors.Join(far(), unix.Unshare(unix.CLONE_NEWNET)); err != nil {
				return err
			}
			script := func(s string) error {
				cmd := exec.Command("sh", "-ec", s)
				cmd.ExtraFiles = []*os.File{there}
				out, err := cmd.CombinedOutput()
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			}
			if err := script("ip link set lo up; ip link add v0 type veth peer name v1; ip link set v1 netns /proc/$$/fd/3; ip addr add " + near4 + "/24 dev v0; ip link set v0 up; " +
				"ip addr add " + near6 + "/64 dev v0 nodad; nsenter --net=/proc/$$/fd/3 ip link set v1 up"); err != nil {
				return err
			}
			// It asks ten times a second, and goes on while this machine is busy.
			for _, family := range []string{"ipv4", "ipv6"} {
				of := "/proc/sys/net/" + family + "/neigh/v0/"
				if err := errors.Join(os.WriteFile(of+"retrans_time_ms", []byte("100"), 0o644), os.WriteFile(of+"mcast_solicit", []byte("1000"), 0o644)); err != nil {
					return err
				}
			}
			return f(func() error {
				return script("nsenter --net=/proc/$$/fd/3 sh -ec 'ip addr add " + far4 + "/24 dev v1; ip addr add " + far6 + "/64 dev v1 nodad'")
			})
		}()
	}()
	require.NoError(t, <-done)
}

func sockaddr(family int, address string) unix.Sockaddr {
	ip := netip.MustParseAddr(address)
	if family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: ip.As4(), Port: farPort}
	}
	return &unix.SockaddrInet6{Addr: ip.As16(), Port: farPort}
}

// sendings are what a command can send with. mapped is a socket of IPv6 that speaks IPv4.
var sendings = map[string]struct {
	family, kind int
	to           string
}{
	"TCP over IPv4": {unix.AF_INET, unix.SOCK_STREAM, far4}, "TCP over IPv6": {unix.AF_INET6, unix.SOCK_STREAM, far6}, "TCP over IPv4, mapped": {unix.AF_INET6, unix.SOCK_STREAM, "::ffff:" + far4},
	"UDP over IPv4": {unix.AF_INET, unix.SOCK_DGRAM, far4}, "UDP over IPv6": {unix.AF_INET6, unix.SOCK_DGRAM, far6}, "UDP over IPv4, mapped": {unix.AF_INET6, unix.SOCK_DGRAM, "::ffff:" + far4},
}

func TestHole10WhatADeadSocketHasBufferedIsNotSentOverAnyFamily(t *testing.T) {
	for name, s := range sendings {
		if s.kind != unix.SOCK_STREAM {
			continue // a datagram waits for a neighbour only
		}
		t.Run(name, func(t *testing.T) {
			total, _ := orphanOver(t, s.family, s.to, false)
			require.Positive(t, total, "the control case")
			received, left := orphanOver(t, s.family, s.to, true)
			if testkit.OlderKernel(5, 15) {
				require.Positive(t, left)
				return
			}
			require.Zero(t, left)
			require.Less(t, received, total, "what was buffered in the dead process's socket was still sent")
		})
	}
}

// orphanOver fills a connection, closes its sending end as a death would, maybe destroys what is left of it, and says how much the
// other end then receives.
func orphanOver(t *testing.T, family int, to string, destroy bool) (received, left int) {
	t.Helper()
	listener := -1
	betweenNamespaces(t, func() (err error) {
		if listener, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(unix.Bind(listener, sockaddr(unix.AF_INET6, "::")), unix.Listen(listener, 1))
	}, func(meet func() error) error {
		defer unix.Close(listener)
		if err := meet(); err != nil {
			return err
		}
		client, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := errors.Join(unix.Connect(client, sockaddr(family, to)), unix.SetNonblock(client, true)); err != nil {
			return err
		}
		server, _, err := unix.Accept(listener)
		if err != nil {
			return err
		}
		defer unix.Close(server)
		for { // until both buffers are full: the rest is sent when the server reads
			if _, err := unix.Write(client, make([]byte, 64<<10)); err != nil {
				break
			}
		}
		unix.Close(client)
		if destroy {
			// Where it stays (before Linux 5.15) it has lost what it had to send, its end too: the other side would wait for ever.
			if _, left, err = DestroySockets(); err != nil || left > 0 {
				return err
			}
		}
		for buf := make([]byte, 1<<20); ; {
			n, err := unix.Read(server, buf)
			received += max(n, 0)
			if n <= 0 {
				if destroy && left == 0 && err == nil {
					return errors.New("the connection ended in an orderly way")
				}
				return nil
			}
		}
	})
	return received, left
}

func TestHole10WhatWaitsForANeighbourIsNotSentAfterTheBoundary(t *testing.T) {
	for name, s := range sendings {
		for _, connected := range []bool{false, true} {
			if connected && s.kind == unix.SOCK_STREAM {
				continue // it waits to be
			}
			t.Run(fmt.Sprintf("%s, connected %v", name, connected), func(t *testing.T) {
				require.Equal(t, "late", firstAtTheFarEnd(t, s.family, s.kind, s.to, connected, false), "the control case")
				require.Equal(t, "after", firstAtTheFarEnd(t, s.family, s.kind, s.to, connected, true))
			})
		}
	}
}

// firstAtTheFarEnd sends to a neighbour that doesn't answer yet, closes the socket as a death would, maybe does what is done at the
// boundary, and has the neighbour answer and a command of later send to it. It says which of the two is heard first: what waits is
// sent in order.
func firstAtTheFarEnd(t *testing.T, family, kind int, to string, connected, destroy bool) (first string) {
	t.Helper()
	heard := -1
	betweenNamespaces(t, func() (err error) {
		// It sees what arrives, of a connection also the first packet.
		const everyProtocol = 0x0300 // ETH_P_ALL in network byte order
		heard, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, everyProtocol)
		return err
	}, func(meet func() error) error {
		defer unix.Close(heard)
		if err := unix.SetsockoptTimeval(heard, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64((time.Minute).Seconds())}); err != nil {
			return err
		}
		if err := send(family, kind, to, "late", connected); err != nil {
			return err
		}
		if destroy {
			if _, left, err := DestroySockets(); err != nil || left != 0 {
				return fmt.Errorf("%d left, error %w", left, err)
			}
		}
		if err := errors.Join(meet(), send(family, unix.SOCK_DGRAM, to, "after", false)); err != nil {
			return err
		}
		for b := make([]byte, 2048); ; {
			n, _, err := unix.Recvfrom(heard, b, 0)
			switch {
			case err != nil:
				return fmt.Errorf("nothing was heard: %w", err)
			case strings.Contains(string(b[:n]), "after"):
				first = "after"
				return nil
			case strings.Contains(string(b[:n]), "late"), isTCP(b[:n]):
				first = "late"
				return nil
			}
		}
	})
	return first
}

// isTCP says whether a packet is a segment to the far end's port.
func isTCP(b []byte) bool {
	switch {
	case len(b) >= 40 && b[0]>>4 == 4:
		return b[9] == unix.IPPROTO_TCP
	case len(b) >= 60 && b[0]>>4 == 6:
		return b[6] == unix.IPPROTO_TCP
	}
	return false
}

func send(family, kind int, to, text string, connected bool) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	address := sockaddr(family, to)
	if kind == unix.SOCK_STREAM {
		if err := unix.Connect(fd, address); !errors.Is(err, unix.EINPROGRESS) {
			return fmt.Errorf("a connection that can't be made yet: %w", err)
		}
		return nil
	}
	if !connected {
		return unix.Sendto(fd, []byte(text), 0, address)
	}
	if err := unix.Connect(fd, address); err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(text))
	return err
}

// another is a user that is neither this process's nor outside of its user namespace, as a command's is.
const another = 12345

// as has f make sockets as another user.
func as(uid int, f func() error) error {
	of := func(uid int) { _, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0) } // of this thread alone
	of(uid)
	defer of(os.Geteuid())
	return f()
}

func TestHole10ASocketThatIsOnItsWayToNobodyIsDestroyed(t *testing.T) {
	betweenNamespaces(t, func() error { return nil }, func(func() error) error {
		for _, kind := range []int{unix.SOCK_DGRAM, unix.SOCK_STREAM} {
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				if err := as(another, func() error { return inFlight(family, kind) }); err != nil {
					return err
				}
			}
		}
		destroyed, left, err := DestroySockets()
		if err != nil || destroyed != 4 {
			return fmt.Errorf("%d destroyed, error %w", destroyed, err)
		}
		// Of a datagram socket its port is left, which is counted until the kernel has freed it: on a busy machine after some time.
		for end := time.Now().Add(time.Minute); left > 0 && time.Now().Before(end); {
			if _, left, err = DestroySockets(); err != nil {
				return err
			}
		}
		if left > 0 {
			return fmt.Errorf("%d left", left)
		}
		return nil
	})
}

func TestASocketBesideTheSandboxGoesOnOverABoundary(t *testing.T) {
	for _, uid := range []int{os.Geteuid(), outsider(), another} {
		betweenNamespaces(t, func() error { return nil }, func(func() error) error {
			var fds [2]int
			err := as(uid, func() (err error) {
				for i, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
					if fds[i], err = unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0); err != nil {
						return err
					}
					if err := unix.Bind(fds[i], sockaddr(unix.AF_INET6, "::")); err != nil {
						return err
					}
				}
				return unix.Listen(fds[0], 1)
			})
			if err != nil {
				return err
			}
			defer unix.Close(fds[0])
			defer unix.Close(fds[1])
			destroyed, left, err := DestroySockets()
			if err != nil {
				return err
			}
			reached := send(unix.AF_INET6, unix.SOCK_DGRAM, "::1", "x", true)
			client, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(client)
			connected := unix.Connect(client, sockaddr(unix.AF_INET6, "::1"))
			if uid != another {
				if err := errors.Join(reached, connected); err != nil || destroyed != 0 || left != 0 {
					return fmt.Errorf("user %d: %d destroyed, %d left, error %w", uid, destroyed, left, err)
				}
				return nil
			}
			// Of the datagram socket the port is left as long as somebody has it.
			if destroyed != 2 || left != 1 || !errors.Is(connected, unix.ECONNREFUSED) {
				return fmt.Errorf("control: a command's: %d destroyed, %d left, connecting: %w", destroyed, left, connected)
			}
			return nil
		})
	}
}

// inFlight leaves a bound socket in the queue of a unix socket that is in its own queue: nobody has either, and the kernel frees
// them when it looks for such (unix_gc).
func inFlight(family, kind int) error {
	local := "127.0.0.1"
	if family == unix.AF_INET6 {
		local = "::1"
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, sockaddr(family, local)); err != nil {
		return err
	}
	if kind == unix.SOCK_STREAM {
		if err := unix.Listen(fd, 1); err != nil {
			return err
		}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	return unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd, pair[0], pair[1]), nil, 0)
}
