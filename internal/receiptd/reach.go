package receiptd

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// targetsVariable has the targets of a probe, one a line.
const targetsVariable = "SANDBOX_PROBE_TARGETS"

// reachScript tries what can't hang, by nothing but what bash has built in. Of a datagram it can't tell whether it arrived: whoever
// listens there can, by the token. A unix socket that is neither in the command's view nor, by an abstract name, in its network
// namespace can't be connected to.
const reachScript = `
sockets=$(</proc/self/net/unix)$'\n'
while read -r kind port token address; do
	case $kind in
	tcp) { printf '%s\n' "$token" >&9; } 9<>"/dev/tcp/$address/$port" && printf 'reached: %s\n' "$kind $address $port" ;;
	udp) { printf '%s\n' "$token" >&9; } 9<>"/dev/udp/$address/$port" ;;
	unix) [[ -e $address || -L $address || $sockets == *" $address"$'\n'* ]] && printf 'reached: %s\n' "$kind $address" ;;
	esac
done 2>/dev/null <<<"${` + targetsVariable + `-}"
`

// attempts are what a probe tries: the script by what a shell can do, the launcher by system calls (wire.Try).
type attempts struct {
	script []*receiptdv1.Target
	tries  []wire.Try
	// needed are attempts that have to succeed: where one doesn't, that no other one of its kind did proves nothing.
	needed []string
	// closed are those that must not, besides what the launcher tries without being told.
	closed   []string
	sidecars *sidecars
	controls []io.Closer
}

// newAttempts prepares attempts at targets, with listeners that the probe has to reach. The caller closes them.
func newAttempts(targets []*receiptdv1.Target) (_ *attempts, err error) {
	a := &attempts{}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	name := "@" + rand.Text()
	if err := a.control("unix", name); err != nil {
		return nil, err
	}
	a.needed = append(a.needed, a.try(&receiptdv1.Target{Network: "unix", Address: name})...)
	targets, inside := split(targets)
	if a.sidecars, err = openSidecars(inside); err != nil {
		return nil, err
	}
	targets = append(targets, a.sidecars.targets...)
	if dialled(targets) {
		t, err := a.tcpControl(targets)
		if err != nil {
			return nil, err
		}
		a.script = append(a.script, t)
		a.needed = append(a.needed, reachable(t))
		a.needed = append(a.needed, a.try(t)...)
	}
	for _, t := range targets {
		if t.GetNetwork() != "tcp" { // bash would wait for who doesn't answer, one after the other
			a.script, a.closed = append(a.script, t), append(a.closed, reachable(t))
		}
		if t.GetNetwork() != "udp" {
			a.closed = append(a.closed, a.try(t)...)
		}
	}
	return a, nil
}

// split takes from targets those that receiptd is to listen at itself.
func split(targets []*receiptdv1.Target) (rest, inside []*receiptdv1.Target) {
	for _, t := range targets {
		if slices.Contains(insideNetworks, t.GetNetwork()) {
			inside = append(inside, t)
		} else {
			rest = append(rest, t)
		}
	}
	return rest, inside
}

// try has the launcher try a target, and says under which names.
func (a *attempts) try(t *receiptdv1.Target) []string {
	out := wire.Try{Name: "connected " + reachable(t), Token: t.GetToken(), Port: t.GetPort()}
	names := []string{out.Name}
	if t.GetNetwork() == "unix" {
		out.Unix, out.Address = true, t.GetAddress()
		if abstract, ok := strings.CutPrefix(t.GetAddress(), "@"); ok {
			out.Address = "\x00" + abstract
		}
	} else if ip, err := netip.ParseAddr(t.GetAddress()); err == nil {
		out.Address = string(ip.AsSlice())
		names = append(names, wire.Passed+out.Name, wire.Listened+out.Name)
	}
	a.tries = append(a.tries, out)
	return names
}

// tcpControl listens on the sandbox's loopback interface, at a port that no target has: those are tried there as well.
func (a *attempts) tcpControl(targets []*receiptdv1.Target) (*receiptdv1.Target, error) {
	for {
		if err := a.control("tcp4", "127.0.0.1:0"); err != nil {
			return nil, err
		}
		port := uint32(a.controls[len(a.controls)-1].(net.Listener).Addr().(*net.TCPAddr).Port)
		if !slices.ContainsFunc(targets, func(t *receiptdv1.Target) bool { return t.GetPort() == port }) {
			return &receiptdv1.Target{Network: "tcp", Address: "127.0.0.1", Port: port, Token: "control"}, nil
		}
	}
}

// control listens in the sandbox's network namespace. Who connects is not accepted, and is connected all the same.
func (a *attempts) control(network, address string) error {
	l, err := net.Listen(network, address) //nolint:forbidigo // in the sandbox, for the moments of a proof
	if err != nil {
		return fmt.Errorf("listening for the probe: %w", err)
	}
	a.controls = append(a.controls, l)
	return nil
}

// close is before the boundary, like the end of everything of the probe's.
func (a *attempts) close() {
	for _, c := range a.controls {
		_ = c.Close() // it had nothing to say
	}
	a.sidecars.close()
}

// targetsEnv tells the script what to try.
func targetsEnv(targets []*receiptdv1.Target) string {
	var b strings.Builder
	for _, t := range targets {
		token := t.GetToken()
		if token == "" {
			token = "-" // read would take the next word for it
		}
		fmt.Fprintf(&b, "%s %d %s %s\n", t.GetNetwork(), t.GetPort(), token, t.GetAddress())
	}
	return targetsVariable + "=" + b.String()
}

// reachable is how the script names a target.
func reachable(t *receiptdv1.Target) string {
	if t.GetNetwork() == "unix" {
		return "unix " + t.GetAddress()
	}
	return fmt.Sprintf("%s %s %d", t.GetNetwork(), t.GetAddress(), t.GetPort())
}

// dialled says whether the probe has to be able to connect to addresses.
func dialled(targets []*receiptdv1.Target) bool {
	return slices.ContainsFunc(targets, func(t *receiptdv1.Target) bool { return t.GetNetwork() != "unix" })
}

// checkTargets refuses what would be read as something else.
func checkTargets(targets []*receiptdv1.Target) error {
	for _, t := range targets {
		inside := slices.Contains(insideNetworks, t.GetNetwork())
		_, err := netip.ParseAddr(t.GetAddress())
		switch {
		case inside && t.GetAddress() == "" && t.GetPort() > 0 && t.GetPort() <= 65535:
		case inside, !slices.Contains([]string{"tcp", "udp", "unix"}, t.GetNetwork()), t.GetAddress() == "", strings.ContainsAny(t.GetAddress(), "\n\x00"),
			strings.ContainsAny(t.GetToken(), " \t\n\x00"), t.GetPort() > 65535, t.GetNetwork() != "unix" && err != nil:
			return fmt.Errorf("target %v: a network, an address on one line and a port are needed", t)
		}
	}
	return nil
}

// judgeReach is what the attempts come to. It is pure.
func judgeReach(a *attempts, p *probe) []*receiptdv1.ProofItem {
	item := func(what, detail string, holds bool) *receiptdv1.ProofItem {
		return &receiptdv1.ProofItem{Promise: "P10", What: what, Holds: holds, Detail: detail}
	}
	tried := p.flags["tried"]
	items := []*receiptdv1.ProofItem{
		item("no vsock socket can be made", "", tried && !slices.Contains(p.reached, "vsock")),
		item("no io_uring can be made", "", tried && !slices.Contains(p.reached, "io_uring")),
		item("no socket can be had by its name in /proc", "", tried && !slices.Contains(p.reached, "/proc/*/fd")),
	}
	if len(a.closed) == 0 {
		return items
	}
	missing := slices.DeleteFunc(slices.Clone(a.needed), func(n string) bool {
		return slices.Contains(p.reached, n) || p.flags["cannot"] && strings.HasPrefix(n, wire.Listened)
	})
	broken := slices.DeleteFunc(slices.Clone(a.closed), func(n string) bool { return !slices.Contains(p.reached, n) })
	broken = append(broken, a.sidecars.reached()...)
	detail := fmt.Sprintf("%d tried", len(a.closed))
	switch {
	case len(missing) > 0:
		detail = "the probe can't connect to anything, so it proves nothing: the sandbox's bash needs network redirections (/dev/tcp); not reached: " + strings.Join(missing, ", ")
	case len(broken) > 0:
		detail = "reached: " + strings.Join(broken, ", ")
	}
	return append(items, item("no connection to a listener of the node", detail, tried && len(missing)+len(broken) == 0))
}
