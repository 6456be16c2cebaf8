package receiptd

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
)

// insideTCP and insideUDP are the networks of targets that receiptd listens at itself.
const insideTCP, insideUDP = "inside-tcp", "inside-udp"

var insideNetworks = []string{insideTCP, insideUDP}

// sidecarWait bounds how long one may take to answer receiptd.
const sidecarWait = 2 * time.Second

// sidecars are canaries in the sandbox's own network namespace, on every address of it: they stand for a management listener that
// somebody has put there, beside the sandbox. Where a port is taken, what listens there is its own canary.
//
// receiptd, which is not a command, has to reach them. It has no other internet socket, and these are gone before the next
// command.
type sidecars struct {
	// targets are the addresses at which they answered.
	targets []*receiptdv1.Target
	token   string
	closers []io.Closer
	// asked are the datagrams' own, at an address each.
	asked   []netip.AddrPort
	hearing sync.WaitGroup

	mu    sync.Mutex
	heard []string
}

func openSidecars(ports []*receiptdv1.Target) (_ *sidecars, err error) {
	s := &sidecars{token: rand.Text()}
	if len(ports) == 0 {
		return s, nil
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	own, err := ownAddresses()
	if err != nil {
		return nil, err
	}
	for _, p := range ports {
		network := strings.TrimPrefix(p.GetNetwork(), "inside-")
		open := s.tcp
		if network == "udp" {
			open = s.udp
		}
		live, err := open(uint16(p.GetPort()))
		if err != nil {
			return nil, fmt.Errorf("opening a canary in the sandbox at %s port %d: %w", network, p.GetPort(), err)
		}
		if live && network == "udp" {
			continue // what listens there answers nobody whom it doesn't know
		}
		answered := false
		for _, a := range own {
			if s.answers(network, netip.AddrPortFrom(a, uint16(p.GetPort()))) {
				answered = true
				s.add(network, a, p.GetPort())
			}
		}
		if !answered && !live {
			return nil, fmt.Errorf("the canary in the sandbox at %s port %d does not answer receiptd itself: the rules of the sandbox's loopback interface refuse everybody", network, p.GetPort())
		}
	}
	return s, nil
}

// ownAddresses are those of the network namespace, without link-local ones.
func ownAddresses() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("listing the sandbox's addresses: %w", err)
	}
	var out []netip.Addr
	for _, l := range list {
		if p, err := netip.ParsePrefix(l.String()); err == nil && !p.Addr().IsLinkLocalUnicast() {
			out = append(out, p.Addr())
		}
	}
	return out, nil
}

// add makes targets of an address that answers, and of the others that lead to the same one: the unspecified address is the
// loopback interface's.
func (s *sidecars) add(network string, a netip.Addr, port uint32) {
	all := []string{a.String()}
	switch a {
	case netip.AddrFrom4([4]byte{127, 0, 0, 1}):
		all = append(all, "0.0.0.0", "::ffff:127.0.0.1")
	case netip.IPv6Loopback():
		all = append(all, "::")
	}
	for _, to := range all {
		s.targets = append(s.targets, &receiptdv1.Target{Network: network, Address: to, Port: port, Token: s.token})
	}
}

// tcp listens. live says that somebody else does.
func (s *sidecars) tcp(port uint16) (live bool, err error) {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(int(port))) //nolint:forbidigo // in the sandbox, for the moments of a proof
	if errors.Is(err, unix.EADDRINUSE) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	s.closers = append(s.closers, l)
	s.hearing.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close() // who connects has been heard already, by the kernel
		}
	})
	return false, nil
}

func (s *sidecars) udp(port uint16) (live bool, err error) {
	conn, err := net.ListenPacket("udp", ":"+strconv.Itoa(int(port))) //nolint:forbidigo // as above
	if errors.Is(err, unix.EADDRINUSE) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	s.closers = append(s.closers, conn)
	s.hearing.Go(func() {
		b := make([]byte, 128)
		for {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			if strings.TrimSpace(string(b[:n])) == s.token {
				s.mu.Lock()
				s.heard = append(s.heard, fmt.Sprintf("udp port %d", port))
				s.mu.Unlock()
			}
			_, _ = conn.WriteTo([]byte("heard"), from) // who asked nothing gets no answer
		}
	})
	return false, nil
}

// answers says whether receiptd reaches a listener: over TCP by being connected, over UDP by an answer.
func (s *sidecars) answers(network string, at netip.AddrPort) bool {
	conn, err := net.DialTimeout(network, at.String(), sidecarWait)
	if err != nil {
		return false
	}
	defer conn.Close()
	if network == "tcp" {
		return true
	}
	if !answersDatagram(conn) {
		return false
	}
	s.asked = append(s.asked, at)
	return true
}

func answersDatagram(conn net.Conn) bool {
	if _, err := conn.Write([]byte("receiptd")); err != nil {
		return false
	}
	_ = conn.SetReadDeadline(time.Now().Add(sidecarWait))
	_, err := conn.Read(make([]byte, 16))
	return err == nil
}

// settle waits until what the probe sent has been heard: what is sent now comes after it.
func (s *sidecars) settle() error {
	for _, at := range s.asked {
		conn, err := net.Dial("udp", at.String())
		if err != nil {
			return fmt.Errorf("asking the canary in the sandbox at udp %s again: %w", at, err)
		}
		ok := answersDatagram(conn)
		_ = conn.Close()
		if !ok {
			return fmt.Errorf("the canary in the sandbox at udp %s does not answer any more", at)
		}
	}
	return nil
}

// reached are those that heard the probe's datagrams.
func (s *sidecars) reached() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.heard...)
}

// close ends them. It may be called of none.
func (s *sidecars) close() {
	if s == nil {
		return
	}
	for _, c := range s.closers {
		_ = c.Close()
	}
	s.hearing.Wait()
	s.closers = nil
}
