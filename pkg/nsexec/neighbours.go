package nsexec

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// A packet whose next hop is not known yet waits in the kernel's entry for that neighbour, and no longer belongs to the socket that
// sent it: it leaves when the neighbour answers, some seconds after its sender's end (seen on 6.18: a datagram, and the first packet
// of a connection). At the boundary such entries hold nothing but what a command sent.

// From linux/neighbour.h, which x/sys/unix lacks.
const neighbourDst = 1 // NDA_DST

type neighbour struct {
	header [unix.SizeofNdMsg]byte
	dst    []byte // the attribute, with its header
}

// dropUnresolved removes the neighbours of the calling thread's network namespace that have not answered, and with each what waits
// for it. It needs CAP_NET_ADMIN in the namespace's user namespace.
func dropUnresolved() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening a routing socket: %w", err)
	}
	defer unix.Close(fd)
	waiting, err := unresolved(fd)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a guest's kernel that has no list of them (gVisor)
	}
	if err != nil {
		return fmt.Errorf("listing neighbours: %w", err)
	}
	for _, n := range waiting {
		if err := ask(fd, unix.RTM_DELNEIGH, unix.NLM_F_REQUEST|unix.NLM_F_ACK, append(n.header[:], n.dst...)); err != nil {
			return err
		}
		err := answers(fd, func(uint16, []byte) {})
		if err != nil && !errors.Is(err, unix.ENOENT) { // it may have failed by itself
			return fmt.Errorf("dropping what waits for a neighbour: %w", err)
		}
	}
	return nil
}

func unresolved(fd int) (all []neighbour, err error) {
	if err := ask(fd, unix.RTM_GETNEIGH, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, make([]byte, unix.SizeofNdMsg)); err != nil {
		return nil, err
	}
	err = answers(fd, func(kind uint16, body []byte) {
		const stateOffset = 8 // of ndm_state in struct ndmsg
		if kind != unix.RTM_NEWNEIGH || len(body) < unix.SizeofNdMsg || binary.NativeEndian.Uint16(body[stateOffset:])&unix.NUD_INCOMPLETE == 0 {
			return
		}
		n := neighbour{header: [unix.SizeofNdMsg]byte(body), dst: attribute(body[unix.SizeofNdMsg:], neighbourDst)}
		all = append(all, n)
	})
	return all, err
}

// attribute finds one attribute of a netlink message, with its header.
func attribute(b []byte, want uint16) []byte {
	for len(b) >= unix.SizeofRtAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:]) == want {
			return append([]byte(nil), b[:size]...)
		}
		b = b[min((size+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1), len(b)):]
	}
	return nil
}

// ask sends one netlink message to the kernel.
func ask(fd int, kind, flags uint16, body []byte) error {
	b := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(body))
	binary.NativeEndian.PutUint32(b, uint32(unix.NLMSG_HDRLEN+len(body)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], flags)
	if err := unix.Sendto(fd, append(b, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("asking for neighbours: %w", err)
	}
	return nil
}

// answers reads the answer to one message.
func answers(fd int, f func(kind uint16, body []byte)) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := receive(fd, buf)
		if err != nil {
			return err
		}
		if done, err := eachMessage(buf[:n], f); done || err != nil {
			return err
		}
	}
}
