package pid1

import (
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

const (
	// tryWait bounds how long attempts take that are made at once, milliseconds. What is refused takes no time, and what somebody
	// drops without an answer takes all of it.
	tryWait = 1000
	// triesAtOnce bounds the descriptors of attempts.
	triesAtOnce = 192
)

// tryAll tries what a proof asks for, and what no shell can try: the ways to a listener that begin with a system call of their
// own. The launcher is as good as the command here: its uid, its namespaces, its cgroup and its filter are the command's, and only
// execve is still to come. What it gets to it writes to the command's standard output, a line each, and at the end that it has tried.
func tryAll(tries []wire.Try) {
	if len(tries) == 0 {
		return
	}
	var lines strings.Builder
	reached := func(ok bool, what string) {
		if ok {
			lines.WriteString("reached: " + what + "\n")
		}
	}
	reached(makesVsock(), "vsock")
	reached(makesRing(), "io_uring")
	reached(seesDescriptors(), "/proc/*/fd")
	names, listening := connectAll(tries)
	for _, name := range names {
		reached(true, name)
	}
	if !listening {
		lines.WriteString("cannot: " + wire.Listened + "\n")
	}
	for _, t := range tries {
		reached(t.Unix && reachesUnix(t), t.Name)
	}
	lines.WriteString("tried: all\n")
	if err := wire.FD(unix.Stdout).WriteAll([]byte(lines.String())); err != nil {
		fail("writing what a proof's attempts came to", err)
	}
}

// makesVsock: with such a socket there is a way to every listener of the node's and of the hypervisor's (cid 0, 1 and 2) and to
// the Kata agent's, whatever the network namespace (vsock(7)).
func makesVsock() bool {
	for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_SEQPACKET} {
		if fd, err := unix.Socket(unix.AF_VSOCK, kind|unix.SOCK_CLOEXEC, 0); err == nil {
			_ = unix.Close(fd)
			return true
		}
	}
	return false
}

// makesRing: a ring makes and connects sockets past the filter (IORING_OP_SOCKET, IORING_OP_CONNECT).
func makesRing() bool {
	var params [120]byte // struct io_uring_params
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if e == 0 {
		_ = unix.Close(int(fd))
	}
	return e == 0
}

// seesDescriptors says whether a socket can be had by its name in /proc: another process's, or one of its own again.
func seesDescriptors() bool {
	own, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(own)
	if opens("/proc/self/fd/"+strconv.Itoa(own), unix.O_RDWR) {
		return true
	}
	proc, err := unix.Open("/proc", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(proc)
	self := strconv.Itoa(unix.Getpid())
	buf := make([]byte, 8<<10)
	for {
		n, err := unix.ReadDirent(proc, buf)
		if err != nil || n <= 0 {
			return false
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			if name[0] >= '0' && name[0] <= '9' && name != self && opens("/proc/"+name+"/fd", unix.O_RDONLY|unix.O_DIRECTORY) {
				return true
			}
		}
	}
}

func opens(path string, flags int) bool {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err == nil
}

// reachesUnix connects to a unix socket of any type.
func reachesUnix(t wire.Try) bool {
	return connects(t, unix.SOCK_STREAM) || connects(t, unix.SOCK_DGRAM) || connects(t, unix.SOCK_SEQPACKET)
}

func connects(t wire.Try, kind int) bool {
	fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	// It also bounds connect (socket(7)). Where it can't be set, the proof's own time limit holds.
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: tryWait / 1000})
	_, to := socketAddress(t)
	if err := unix.Connect(fd, to); err != nil {
		return false
	}
	_, _ = unix.Write(fd, []byte(t.Token+"\n")) // it is connected, whatever becomes of this
	return true
}

// attempt is a connection that is being made.
type attempt struct {
	fd          int
	name, token string
}

// errListens: this kernel has a socket that once listened connect no more (gVisor, whose endpoint stays in its state).
const errListens = unix.EINVAL

// connectAll connects over TCP in each way, and names what it got to. The attempts are made together: where nobody answers, one
// after the other would take longer than a proof may. listening is false where the kernel does not have the way wire.Listened.
func connectAll(tries []wire.Try) (reached []string, listening bool) {
	var pending []attempt
	listening = true
	for _, t := range tries {
		if t.Unix {
			continue
		}
		var plain error
		for _, way := range []string{"", wire.Passed, wire.Listened} {
			switch a, err := begin(t, way); {
			case err == nil:
				pending = append(pending, a)
			case way == "":
				plain = err
			case way == wire.Listened && err == errListens && plain != err: // an address where nothing connects says nothing of the way
				listening = false
			}
			if len(pending) == triesAtOnce {
				reached = append(reached, await(pending)...)
				pending = nil
			}
		}
	}
	return append(reached, await(pending)...), listening
}

// begin begins to connect; an error where that is refused at once. way is "", wire.Passed or wire.Listened.
func begin(t wire.Try, way string) (attempt, error) {
	family, to := socketAddress(t)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == unix.EAFNOSUPPORT {
		return attempt{}, err // a kernel without IPv6
	}
	if err == nil && way == wire.Passed {
		fd, err = handed(fd)
	}
	if err == nil && way == wire.Listened {
		if err = unix.Listen(fd, 1); err == nil {
			err = unix.Shutdown(fd, unix.SHUT_RD) // Linux takes it out of listening (tcp_disconnect)
		}
	}
	if err != nil {
		fail("making a socket for a proof", err) // what can't be tried is not proved
	}
	if err := unix.Connect(fd, to); err != nil && err != unix.EINPROGRESS {
		_ = unix.Close(fd)
		return attempt{}, err
	}
	return attempt{fd, way + t.Name, t.Token}, nil
}

// await waits for attempts, and names those that came to a connection.
func await(pending []attempt) (connected []string) {
	for end := wire.MonotonicNS() + tryWait*1_000_000; len(pending) > 0; {
		now := wire.MonotonicNS()
		if now >= end {
			break
		}
		fds := make([]unix.PollFd, len(pending))
		for i, a := range pending {
			fds[i] = unix.PollFd{Fd: int32(a.fd), Events: unix.POLLOUT}
		}
		if _, err := unix.Poll(fds, int((end-now)/1_000_000)+1); err != nil && err != unix.EINTR {
			fail("waiting for a proof's attempts", err)
		}
		var rest []attempt
		for i, a := range pending {
			if fds[i].Revents == 0 {
				rest = append(rest, a)
			} else if a.ended() {
				connected = append(connected, a.name)
			}
		}
		pending = rest
	}
	for _, a := range pending {
		_ = unix.Close(a.fd)
	}
	return connected
}

// ended says whether an attempt that is over came to a connection, and sends its token there.
func (a attempt) ended() bool {
	defer unix.Close(a.fd)
	if e, err := unix.GetsockoptInt(a.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || e != 0 {
		return false
	}
	_, _ = unix.Write(a.fd, []byte(a.token+"\n")) // as above
	return true
}

func socketAddress(t wire.Try) (family int, to unix.Sockaddr) {
	switch {
	case t.Unix && strings.HasPrefix(t.Address, "\x00"):
		return unix.AF_UNIX, &unix.SockaddrUnix{Name: "@" + t.Address[1:]}
	case t.Unix:
		return unix.AF_UNIX, &unix.SockaddrUnix{Name: t.Address}
	case len(t.Address) == 4:
		a := &unix.SockaddrInet4{Port: int(t.Port)}
		copy(a.Addr[:], t.Address)
		return unix.AF_INET, a
	}
	a := &unix.SockaddrInet6{Port: int(t.Port)}
	copy(a.Addr[:], t.Address)
	return unix.AF_INET6, a
}

// handed sends a socket through another one and gives what comes out. It closes fd.
func handed(fd int) (int, error) {
	defer unix.Close(fd)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		return -1, err
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[1], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) == 0 {
		return -1, unix.EBADMSG
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return -1, unix.EBADMSG
	}
	return fds[0], nil
}
