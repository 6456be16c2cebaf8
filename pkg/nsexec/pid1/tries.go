package pid1

import (
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// tryWait bounds how long one attempt to connect takes, seconds. What is refused takes no time.
const tryWait = 1

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
	for _, t := range tries {
		reached(reaches(t), t.Name)
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

// reaches connects: to a unix socket of any type, or over TCP with a socket that came over SCM_RIGHTS.
func reaches(t wire.Try) bool {
	if !t.Unix {
		return connects(t, unix.SOCK_STREAM)
	}
	return connects(t, unix.SOCK_STREAM) || connects(t, unix.SOCK_DGRAM) || connects(t, unix.SOCK_SEQPACKET)
}

func connects(t wire.Try, kind int) bool {
	family, to := socketAddress(t)
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	if !t.Unix {
		if fd, err = handed(fd); err != nil {
			return false
		}
	}
	defer unix.Close(fd)
	// It also bounds connect (socket(7)). Where it can't be set, the proof's own time limit holds.
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: tryWait})
	if err := unix.Connect(fd, to); err != nil {
		return false
	}
	_, _ = unix.Write(fd, []byte(t.Token+"\n")) // it is connected, whatever becomes of this
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
