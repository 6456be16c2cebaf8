package receiptd

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// interfacesFile is of the network namespace of this process, which is the sandbox's and its commands'.
const interfacesFile = "/proc/self/net/dev"

// traffic is what the sandbox's interfaces have sent and received since they were made. A command can't change the kernel's
// numbers: it has no capability over the namespace.
func traffic() (receipt.Network, error) {
	b, err := os.ReadFile(interfacesFile)
	if err != nil {
		return receipt.Network{}, fmt.Errorf("reading what the sandbox has sent: %w", err)
	}
	return parseInterfaces(string(b))
}

// The columns of interfacesFile after the interface's name (the kernel's net/core/net-procfs.c).
const (
	columnReceived = 0
	columnSent     = 8
	columns        = 16
)

// parseInterfaces adds up all interfaces but loopback, which leads nowhere. The first two lines are headings.
func parseInterfaces(text string) (n receipt.Network, err error) {
	for i, line := range strings.Split(strings.TrimSpace(text), "\n") {
		name, rest, ok := strings.Cut(line, ":")
		if i < 2 || ok && strings.TrimSpace(name) == "lo" {
			continue
		}
		fields := strings.Fields(rest)
		if !ok || len(fields) < columns {
			return receipt.Network{}, fmt.Errorf("reading %s: line %q is none of an interface", interfacesFile, line)
		}
		received, err := strconv.ParseUint(fields[columnReceived], 10, 64)
		if err != nil {
			return receipt.Network{}, fmt.Errorf("reading %s: %w", interfacesFile, err)
		}
		sent, err := strconv.ParseUint(fields[columnSent], 10, 64)
		if err != nil {
			return receipt.Network{}, fmt.Errorf("reading %s: %w", interfacesFile, err)
		}
		n.ReceivedBytes, n.SentBytes = n.ReceivedBytes+received, n.SentBytes+sent
	}
	return n, nil
}

// countTraffic counts from here on: what it gives says what the sandbox has sent and received since. That is zero, as without a
// network, where the kernel's numbers can't be read.
func countTraffic() func() receipt.Network {
	before, err := traffic()
	if err != nil {
		logf("%v", err)
		return func() receipt.Network { return receipt.Network{} }
	}
	return func() receipt.Network {
		now, err := traffic()
		if err != nil {
			logf("%v", err)
			return receipt.Network{}
		}
		return since(now, before)
	}
}

func since(now, before receipt.Network) receipt.Network {
	// A number that is smaller began anew: an interface was replaced.
	grown := func(now, before uint64) uint64 { return now - min(now, before) }
	return receipt.Network{SentBytes: grown(now.SentBytes, before.SentBytes), ReceivedBytes: grown(now.ReceivedBytes, before.ReceivedBytes)}
}
