package nsexec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A dead process's socket still sends what was buffered in it: a server got a request two seconds after its sender had
// been reaped (facts.md, hole 10). At the boundary, no process of a command is alive and this one has no internet
// socket, so every one that is left in the network namespace was a command's, or is somebody's beside the sandbox.

// From linux/sock_diag.h and linux/inet_diag.h, which x/sys/unix does not have.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21
	diagRequestSize  = 56 // struct inet_diag_req_v2
	diagIDOffset     = 8  // of its struct inet_diag_sockid
	diagIDSize       = 48
	diagMsgIDOffset  = 4 // of the same in struct inet_diag_msg
	diagUIDOffset    = 64
	diagInodeOffset  = 68
	diagMessageSize  = 72
	allStates        = 0xffffffff
	tcpTimeWait      = 6
)

type diagSocket struct {
	family, protocol, state uint8
	id                      [diagIDSize]byte
	uid, inode              uint32
}

// A datagram socket that was on its way over SCM_RIGHTS when its command ended is freed by the kernel in a moment of its own, which
// is waited for.
const (
	leftTries = 5
	leftWait  = 10 * time.Millisecond
)

// errNoDiagnostics: there are sockets, and no module that could destroy them.
var errNoDiagnostics = errors.New("there are sockets, and the kernel has no socket diagnostics for them: load the modules tcp_diag and udp_diag (kernel options CONFIG_INET_TCP_DIAG, CONFIG_INET_UDP_DIAG)")

// DestroySockets destroys the internet sockets of the calling thread's network namespace, but for those that a process has
// which this process's user, or one from outside of its user namespace, has made: an operator's sidecar goes on. It needs
// CAP_NET_ADMIN in the namespace's user namespace and CONFIG_INET_DIAG_DESTROY. left counts those that are still there and can
// still send: older kernels say that they destroy a closed connection with unsent data, and don't (tcp_abort did nothing to a
// SOCK_DEAD socket; seen on 5.10). What has left a socket and waits for a neighbour's answer is dropped as well.
func DestroySockets() (destroyed, left int, err error) {
	destroyed, left, err = destroySockets()
	return destroyed, left, errors.Join(err, dropUnresolved())
}

func destroySockets() (destroyed, left int, err error) {
	counts, err := countSockets()
	if err != nil || nothing(counts) {
		return 0, 0, err
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, 0, fmt.Errorf("opening a socket-diagnostics socket: %w", err)
	}
	defer unix.Close(fd)
	sockets, hidden, err := listSockets(fd, counts)
	if err != nil || len(sockets)+hidden == 0 {
		return 0, 0, err
	}
	var failures []error
	for _, s := range sockets {
		switch err := destroySocket(fd, s); {
		case err == nil:
			destroyed++
		case errors.Is(err, unix.ENOENT): // it ended by itself
		default:
			failures = append(failures, err)
		}
	}
	left, unseen, err := stillThere(fd)
	for try := 1; left > 0 && err == nil && try < leftTries; try++ {
		collect()
		time.Sleep(leftWait) //nolint:forbidigo // the kernel says to nobody when it has freed them
		left, unseen, err = stillThere(fd)
	}
	switch {
	case err != nil:
		return destroyed, len(failures) + hidden, err
	case left == 0:
		return destroyed, 0, nil
	case unseen > 0:
		failures = append(failures, errNoDiagnostics)
	}
	return destroyed, left, errors.Join(failures...)
}

// collect has the kernel look for sockets that are in the queue of one that nobody has: it does when a unix socket ends (unix_gc).
func collect() {
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		_ = unix.Close(fd)
	}
}

// stillThere counts the sockets that can still send, with those that can't be listed, which hidden are.
func stillThere(fd int) (left, hidden int, err error) {
	counts, err := countSockets()
	if err != nil {
		return 0, 0, err
	}
	all, hidden, err := listSockets(fd, counts)
	if err != nil {
		return 0, 0, err
	}
	left = hidden
	for _, s := range all {
		if s.state != tcpTimeWait { // holds no data
			left++
		}
	}
	return left, hidden, nil
}

// nothing says whether there is no socket that could be listed.
func nothing(counts map[string]int) bool {
	return counts["TCP"]+counts["TCP6"]+counts["UDP"]+counts["UDP6"] == 0
}

// listSockets lists the TCP and UDP sockets that are nobody's beside the sandbox; counts says how many there are of both. hidden
// counts those that the kernel has no diagnostics for: it loads that module by itself, unless the node keeps it from doing so.
func listSockets(fd int, counts map[string]int) (all []diagSocket, hidden int, err error) {
	outside := outsider()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			n := counts[countName(family, protocol)]
			if n == 0 {
				continue
			}
			found, err := dumpSockets(fd, family, protocol)
			if errors.Is(err, unix.ENOENT) {
				hidden += n
				continue
			}
			if err != nil {
				return nil, 0, err
			}
			all = append(all, slices.DeleteFunc(found, func(s diagSocket) bool { return s.beside(outside) })...)
		}
	}
	return all, hidden, nil
}

// beside says whether a socket is somebody's beside the sandbox: it is open, as a dead process's is not (it has no inode any more),
// and who made it is this process's user or one without a number here, as all users of the node are. No command is either of them,
// nor can it give them a socket of its own.
func (s diagSocket) beside(outside int) bool {
	return s.inode != 0 && (int(s.uid) == os.Geteuid() || int(s.uid) == outside)
}

// OverflowUID is how a user namespace numbers whoever has no number in it: in a sandbox's all users but its own
// (user_namespaces(7)). No command is one of them.
func OverflowUID() (uint32, error) {
	const file = "/proc/sys/kernel/overflowuid"
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("reading the number of users without a number: %w", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", file, err)
	}
	return uint32(n), nil
}

// outsider is OverflowUID; -1 where that can't be read: then nobody is from outside.
func outsider() int {
	n, err := OverflowUID()
	if err != nil {
		return -1
	}
	return int(n)
}

// countSockets reads how many sockets of each kind the network namespace has, orphaned ones included: a socket is
// counted as long as it is hashed (sock_prot_inuse_add in inet_hash and inet_unhash). A dump of TCP sockets walks the
// hash table of the whole node, which takes milliseconds; nearly always there is nothing to dump.
func countSockets() (map[string]int, error) {
	counts := map[string]int{}
	for _, file := range []string{"sockstat", "sockstat6"} {
		b, err := os.ReadFile("/proc/thread-self/net/" + file)
		if errors.Is(err, os.ErrNotExist) && file == "sockstat6" {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, fmt.Errorf("counting sockets: %w", err)
		}
		for line := range strings.Lines(string(b)) {
			// TCP: inuse 0 orphan 0 tw 0 alloc 2 mem 0
			fields := strings.Fields(line)
			if len(fields) < 3 || fields[1] != "inuse" {
				continue
			}
			n, err := strconv.Atoi(fields[2])
			if err != nil {
				return nil, fmt.Errorf("counting sockets: %s says %q", file, strings.TrimSpace(line))
			}
			counts[strings.TrimSuffix(fields[0], ":")] = n
		}
	}
	for _, name := range []string{"TCP", "UDP"} {
		if _, ok := counts[name]; !ok {
			return nil, fmt.Errorf("counting sockets: sockstat does not say how many %s sockets there are", name)
		}
	}
	return counts, nil
}

func countName(family, protocol uint8) string {
	name := "TCP"
	if protocol == unix.IPPROTO_UDP {
		name = "UDP"
	}
	if family == unix.AF_INET6 {
		name += "6"
	}
	return name
}

func dumpSockets(fd int, family, protocol uint8) ([]diagSocket, error) {
	if err := diagSend(fd, sockDiagByFamily, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, diagSocket{family: family, protocol: protocol}); err != nil {
		return nil, err
	}
	var found []diagSocket
	buf := make([]byte, 32<<10)
	for {
		n, err := receive(fd, buf)
		if err != nil {
			return nil, err
		}
		done, err := eachMessage(buf[:n], func(kind uint16, body []byte) {
			if kind == sockDiagByFamily && len(body) >= diagMessageSize {
				s := diagSocket{family: body[0], protocol: protocol, state: body[1]}
				copy(s.id[:], body[diagMsgIDOffset:])
				s.uid, s.inode = binary.NativeEndian.Uint32(body[diagUIDOffset:]), binary.NativeEndian.Uint32(body[diagInodeOffset:])
				found = append(found, s)
			}
		})
		if err != nil {
			return nil, fmt.Errorf("listing sockets: %w", err)
		}
		if done {
			return found, nil
		}
	}
}

func destroySocket(fd int, s diagSocket) error {
	if err := diagSend(fd, sockDestroy, unix.NLM_F_REQUEST|unix.NLM_F_ACK, s); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	n, err := receive(fd, buf)
	if err != nil {
		return err
	}
	if _, err := eachMessage(buf[:n], func(uint16, []byte) {}); err != nil {
		return fmt.Errorf("destroying a socket (the kernel needs CONFIG_INET_DIAG_DESTROY): %w", err)
	}
	return nil
}

func diagSend(fd int, kind, flags uint16, s diagSocket) error {
	b := make([]byte, unix.NLMSG_HDRLEN+diagRequestSize)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], flags)
	body := b[unix.NLMSG_HDRLEN:]
	body[0], body[1] = s.family, s.protocol
	binary.NativeEndian.PutUint32(body[4:], allStates)
	copy(body[diagIDOffset:], s.id[:])
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("asking for socket diagnostics: %w", err)
	}
	return nil
}

func receive(fd int, buf []byte) (int, error) {
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("reading the kernel's answer: %w", err)
		}
		return n, nil
	}
}

// eachMessage walks the netlink messages of one datagram. An error message with a number other than 0 is the error.
func eachMessage(b []byte, f func(kind uint16, body []byte)) (done bool, err error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(b))
		kind := binary.NativeEndian.Uint16(b[4:])
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return false, fmt.Errorf("a netlink message says it has %d bytes of %d", size, len(b))
		}
		body := b[unix.NLMSG_HDRLEN:size]
		switch kind {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			if len(body) < 4 {
				return false, errors.New("a netlink error without a number")
			}
			if errno := -int32(binary.NativeEndian.Uint32(body)); errno != 0 {
				return false, unix.Errno(errno)
			}
			return true, nil
		default:
			f(kind, body)
		}
		b = b[min((size+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
	return false, nil
}
