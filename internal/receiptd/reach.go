package receiptd

import (
	"fmt"
	"net"
	"slices"
	"strings"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
)

// targetsVariable has the targets of a probe, one a line.
const targetsVariable = "SANDBOX_PROBE_TARGETS"

// reachScript tries each target, by nothing but what bash has built in. Of a datagram it can't tell whether it arrived: whoever
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

// control is a listener that the probe has to reach: where it doesn't, that it reached nothing else proves nothing.
type control struct{ net.Listener }

// newControl listens on the sandbox's loopback interface. It is closed before the boundary, like everything of the probe's.
func newControl() (*control, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0") //nolint:forbidigo // in the sandbox, for the moments of a proof
	if err != nil {
		return nil, fmt.Errorf("listening for the probe: %w", err)
	}
	return &control{l}, nil
}

func (c *control) target() *receiptdv1.Target {
	return &receiptdv1.Target{Network: "tcp", Address: "127.0.0.1", Port: uint32(c.Addr().(*net.TCPAddr).Port), Token: "control"}
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
		if !slices.Contains([]string{"tcp", "udp", "unix"}, t.GetNetwork()) || t.GetAddress() == "" || strings.ContainsAny(t.GetAddress(), "\n\x00") ||
			strings.ContainsAny(t.GetToken(), " \t\n\x00") || t.GetPort() > 65535 {
			return fmt.Errorf("target %v: a network, an address on one line and a port are needed", t)
		}
	}
	return nil
}

// judgeReach is what the attempts come to: nothing for a sandbox that was not told to try any. It is pure.
func judgeReach(targets []*receiptdv1.Target, control *receiptdv1.Target, reached []string) []*receiptdv1.ProofItem {
	if len(targets) == 0 {
		return nil
	}
	able := !dialled(targets) || slices.Contains(reached, reachable(control))
	var broken []string
	for _, t := range targets {
		if name := reachable(t); slices.Contains(reached, name) {
			broken = append(broken, name)
		}
	}
	detail := fmt.Sprintf("%d tried", len(targets))
	switch {
	case !able:
		detail = "the probe can't connect to anything, so it proves nothing: the sandbox's bash needs network redirections (/dev/tcp)"
	case len(broken) > 0:
		detail = "reached: " + strings.Join(broken, ", ")
	}
	return []*receiptdv1.ProofItem{{Promise: "P10", What: "no connection to a listener of the node", Holds: able && len(broken) == 0, Detail: detail}}
}
