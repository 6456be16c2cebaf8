package kata

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// Ports that Kata's own parts listen on in the guest (kata-types, config/default.rs). A command must reach none of them.
const (
	AgentPort        = 1024
	LogPort          = 1025
	DebugConsolePort = 1026
	PassFDPort       = 1027
)

// Endpoint is where a guest's listeners are reached: AF_VSOCK with a CID, or hybrid vsock with a unix socket of the VMM.
type Endpoint struct {
	// CID is the guest's context id, 3 to 2^32-2; 0 with hybrid vsock.
	CID uint32
	// Path is the VMM's unix socket, absolute and clean; empty with vsock.
	Path string
	// Port is that of the guest's agent.
	Port uint32
}

func (e Endpoint) String() string {
	if e.Path != "" {
		return fmt.Sprintf("hvsock://%s:%d", e.Path, e.Port)
	}
	return fmt.Sprintf("vsock://%d:%d", e.CID, e.Port)
}

// maxPath is PATH_MAX less its NUL. A unix socket's address holds less, but it is connected to by descriptor.
const maxPath = 4095

// ParseAgentURL reads what /agent-url answers: vsock://CID:PORT or hvsock://PATH:PORT, and nothing besides. A "remote" URL
// (a VM on another machine) is an error, as is any spelling that Kata does not use. An error wraps ErrAddress.
func ParseAgentURL(s string) (Endpoint, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	last := strings.LastIndexByte(rest, ':')
	if !ok || last < 0 || len(s) > maxPath+32 {
		return Endpoint{}, fmt.Errorf("%w: %.200q is not vsock://CID:PORT or hvsock://PATH:PORT", ErrAddress, s)
	}
	host := rest[:last]
	port, err := number(rest[last+1:], 1)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w: %.200q: port: %w", ErrAddress, s, err)
	}
	switch scheme {
	case "vsock":
		// 0, 1 and 2 are the hypervisor, this machine and its host (vsock(7)): no guest.
		cid, err := number(host, 3)
		if err != nil {
			return Endpoint{}, fmt.Errorf("%w: %.200q: context id: %w", ErrAddress, s, err)
		}
		return Endpoint{CID: cid, Port: port}, nil
	case "hvsock":
		if err := socketPath(host); err != nil {
			return Endpoint{}, fmt.Errorf("%w: %.200q: %w", ErrAddress, s, err)
		}
		return Endpoint{Path: host, Port: port}, nil
	}
	return Endpoint{}, fmt.Errorf("%w: %.200q: scheme %.32q; nothing is known of a VM that is not reached by vsock or hvsock", ErrAddress, s, scheme)
}

// number is a decimal from least to 2^32-2, as Kata prints it: 2^32-1 is VMADDR_CID_ANY and VMADDR_PORT_ANY.
func number(s string, least uint64) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || strconv.FormatUint(n, 10) != s || n < least || n > 1<<32-2 {
		return 0, fmt.Errorf("%.32q is not a number from %d to %d", s, least, uint64(1<<32-2))
	}
	return uint32(n), nil
}

func socketPath(p string) error {
	switch {
	case !path.IsAbs(p) || path.Clean(p) != p || p == "/":
		return fmt.Errorf("%.200q is not an absolute, clean path", p)
	case len(p) > maxPath:
		return fmt.Errorf("longer than %d bytes", maxPath)
	case strings.ContainsFunc(p, func(r rune) bool { return r < ' ' || r == 0x7f || r == '�' }):
		return fmt.Errorf("%.200q holds what is no text", p)
	}
	return nil
}
