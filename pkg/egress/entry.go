package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Mode is what becomes of connections that a sandbox begins.
type Mode string

// The modes. What no sandbox may reach is refused in each of them.
const (
	// None refuses every destination.
	None Mode = "none"
	// Open refuses nothing more.
	Open Mode = "open"
	// Allowlist refuses what is not listed.
	Allowlist Mode = "allowlist"
)

// Modes are the names that an operator can use.
var Modes = []string{string(None), string(Open), string(Allowlist)}

// The bounds of a list.
const (
	MaxEntries = 20000
	// MaxRanges bounds the entries with an address: each is a rule, which the packets of new connections pass one by one.
	MaxRanges = 256
	maxPorts  = 16
	maxReason = 200 // bytes
	maxName   = 253 // bytes of a name without its last dot (RFC 1035, 2.3.4)
	maxLabel  = 63
	dnsPort   = 53
)

// The protocols of an entry.
const (
	TCP = "tcp"
	UDP = "udp"
)

// DefaultPort is what an entry without ports stands for, over TCP.
const DefaultPort = 443

// Entry lets a sandbox reach one destination.
type Entry struct {
	// Name is a host's, in lower case and without a last dot, or a pattern: "*.example.com" stands for one or more labels
	// before ".example.com", and not for "example.com". Empty: the entry is for addresses.
	Name string
	// Range is what an entry for addresses lets through; not valid in one for a name.
	Range    netip.Prefix
	Protocol string
	// Ports are sorted, each once.
	Ports []uint16
	// Private are ranges in which the name's addresses may lie although they are nobody's on the internet.
	Private []netip.Prefix
	// Reason is why the destination is needed: one line of 1 to 200 bytes.
	Reason string
}

// Spec is an entry as it is written.
type Spec struct {
	// To is a host's name, a pattern, an address or a range of addresses.
	To string
	// Ports: none means 443 for TCP; UDP has no usual one.
	Ports []int64
	// Protocol is "tcp" or "udp"; empty: "tcp".
	Protocol string
	Private  []string
	Reason   string
}

// Parse reads an entry. Its errors say what is wrong with which part, and what is expected instead.
func Parse(s Spec) (Entry, error) {
	e := Entry{Protocol: s.Protocol, Reason: s.Reason}
	if err := e.parseTo(s.To); err != nil {
		return Entry{}, err
	}
	if err := checkReason(s.Reason); err != nil {
		return Entry{}, fmt.Errorf("%q: %w", s.To, err)
	}
	if err := e.parsePorts(s.Ports); err != nil {
		return Entry{}, fmt.Errorf("%q: %w", s.To, err)
	}
	if err := e.parsePrivate(s.Private); err != nil {
		return Entry{}, fmt.Errorf("%q: %w", s.To, err)
	}
	return e, nil
}

// ParseText reads an entry of one line: TO[:PORT[,PORT]…][/PROTOCOL] REASON. A range of IPv6 addresses, or an address of it
// with a port, is in brackets.
func ParseText(text string) (Entry, error) {
	to, reason, _ := strings.Cut(strings.TrimSpace(text), " ")
	s := Spec{To: to, Reason: strings.TrimSpace(reason)}
	for _, p := range []string{TCP, UDP} {
		if rest, ok := strings.CutSuffix(s.To, "/"+p); ok {
			s.To, s.Protocol = rest, p
		}
	}
	if err := s.cutPorts(); err != nil {
		return Entry{}, fmt.Errorf("%q: %w", to, err)
	}
	return Parse(s)
}

// cutPorts takes the ports off the end of To.
func (s *Spec) cutPorts() error {
	var ports string
	switch {
	case strings.HasPrefix(s.To, "["):
		inside, rest, ok := strings.Cut(s.To[1:], "]")
		if !ok || rest != "" && !strings.HasPrefix(rest, ":") {
			return errors.New("the brackets are not those of an IPv6 address")
		}
		s.To, ports = inside, strings.TrimPrefix(rest, ":")
	case strings.Count(s.To, ":") == 1:
		s.To, ports, _ = strings.Cut(s.To, ":")
	default:
		return nil
	}
	if ports == "" {
		return nil
	}
	for p := range strings.SplitSeq(ports, ",") {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return fmt.Errorf("port %q is not a number from 1 to 65535", p)
		}
		s.Ports = append(s.Ports, int64(n))
	}
	return nil
}

func (e *Entry) parseTo(to string) error {
	if p, err := netip.ParsePrefix(to); err == nil {
		if p != p.Masked() {
			return fmt.Errorf("range %q is not written with its first address, %s", to, p.Masked())
		}
		return e.setRange(p)
	}
	if a, err := netip.ParseAddr(to); err == nil {
		if a.Zone() != "" {
			return fmt.Errorf("%q names an interface, which a sandbox doesn't have", to)
		}
		return e.setRange(netip.PrefixFrom(a, a.BitLen()))
	}
	name, err := Normal(strings.TrimPrefix(to, "*."))
	if err != nil {
		return fmt.Errorf("destination %q is no host name, no pattern like \"*.example.com\", and no address or range: %w", to, err)
	}
	if strings.HasPrefix(to, "*.") {
		if !strings.Contains(name, ".") {
			return fmt.Errorf("pattern %q stands for a whole top-level domain: at least two labels have to follow the star", to)
		}
		name = "*." + name
	}
	e.Name = name
	return nil
}

func (e *Entry) setRange(p netip.Prefix) error {
	if p.Addr().Is4In6() {
		return fmt.Errorf("%s is an IPv4-mapped address: write it as IPv4", p)
	}
	if n := overlapping(never, p); n.IsValid() && p.Bits() >= n.Bits() {
		return fmt.Errorf("%s lies in %s, which no sandbox may reach", p, n)
	}
	if nat64.Overlaps(p) && p.Bits() >= nat64.Bits() {
		a := p.Addr().As16()
		behind := netip.PrefixFrom(netip.AddrFrom4([4]byte(a[12:])), p.Bits()-nat64.Bits())
		if n := overlapping(never, behind); n.IsValid() && behind.Bits() >= n.Bits() {
			return fmt.Errorf("%s leads to %s, which lies in %s, which no sandbox may reach", p, behind, n)
		}
	}
	e.Range = p
	return nil
}

func (e *Entry) parsePorts(ports []int64) error {
	switch e.Protocol {
	case "":
		e.Protocol = TCP
	case TCP, UDP:
	default:
		return fmt.Errorf("protocol %q is neither tcp nor udp", e.Protocol)
	}
	if len(ports) == 0 {
		if e.Protocol == UDP {
			return errors.New("an entry for UDP has to say which ports")
		}
		ports = []int64{DefaultPort}
	}
	if len(ports) > maxPorts {
		return fmt.Errorf("%d ports are more than %d", len(ports), maxPorts)
	}
	for _, p := range ports {
		switch {
		case p < 1 || p > 65535:
			return fmt.Errorf("port %d is not a number from 1 to 65535", p)
		case p == dnsPort:
			return errors.New("port 53 can't be listed: names are asked of the agent's resolver only, as what is asked of others could carry anything away")
		}
		e.Ports = append(e.Ports, uint16(p))
	}
	slices.Sort(e.Ports)
	e.Ports = slices.Compact(e.Ports)
	return nil
}

func (e *Entry) parsePrivate(ranges []string) error {
	if len(ranges) > 0 && e.Name == "" {
		return errors.New("private ranges are for names: an entry for addresses lets its own range through")
	}
	if len(ranges) > maxPorts {
		return fmt.Errorf("%d private ranges are more than %d", len(ranges), maxPorts)
	}
	for _, r := range ranges {
		p, err := netip.ParsePrefix(r)
		if err != nil || p != p.Masked() || p.Addr().Is4In6() {
			return fmt.Errorf("private range %q is not a range written with its first address, such as 10.1.0.0/16", r)
		}
		if n := overlapping(never, p); n.IsValid() {
			return fmt.Errorf("private range %s overlaps with %s, which no sandbox may reach", p, n)
		}
		e.Private = append(e.Private, p)
	}
	return nil
}

func checkReason(reason string) error {
	switch {
	case strings.TrimSpace(reason) == "":
		return errors.New("the reason is missing: say in a few words what the destination is needed for")
	case len(reason) > maxReason:
		return fmt.Errorf("the reason has %d bytes, more than %d", len(reason), maxReason)
	case !utf8.ValidString(reason) || strings.ContainsFunc(reason, func(r rune) bool { return !unicode.IsPrint(r) }):
		return errors.New("the reason is not one line of printable text")
	}
	return nil
}

// Normal is a host's name in lower case and without its last dot. An error says what is no name (RFC 1035, 2.3.1; with the
// underscore of RFC 8552).
func Normal(name string) (string, error) {
	n := strings.ToLower(strings.TrimSuffix(name, "."))
	if n == "" || len(n) > maxName {
		return "", fmt.Errorf("a name has 1 to %d bytes", maxName)
	}
	for label := range strings.SplitSeq(n, ".") {
		if label == "" || len(label) > maxLabel {
			return "", fmt.Errorf("a label of a name has 1 to %d bytes", maxLabel)
		}
		for _, c := range []byte(label) {
			if c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
				return "", errors.New("a name is made of letters, digits, \"-\" and \"_\"; write others as punycode (xn--…)")
			}
		}
	}
	if last := n[strings.LastIndexByte(n, '.')+1:]; !strings.ContainsFunc(last, unicode.IsLetter) {
		return "", errors.New("the last label of a name has a letter")
	}
	return n, nil
}

// Destination is what the entry lets through, as ParseText reads it.
func (e Entry) Destination() string {
	to := e.Name
	switch {
	case to != "":
	case e.Range.IsSingleIP():
		to = e.Range.Addr().String()
	default:
		to = e.Range.String()
	}
	if strings.Contains(to, ":") {
		to = "[" + to + "]"
	}
	var ports []string
	for _, p := range e.Ports {
		ports = append(ports, strconv.Itoa(int(p)))
	}
	return to + ":" + strings.Join(ports, ",") + "/" + e.Protocol
}

func (e Entry) String() string { return e.Destination() + " " + e.Reason }
