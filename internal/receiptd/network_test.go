package receiptd

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

const heading = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
`

func TestWhatASandboxHasSentIsThatOfItsInterfacesWithoutLoopback(t *testing.T) {
	n, err := parseInterfaces(heading + `    lo: 9999 9 0 0 0 0 0 0 9999 9 0 0 0 0 0 0
  eth0: 1000 9 0 0 0 0 0 0 200 3 0 0 0 0 0 0
  net1:30 1 0 0 0 0 0 0 4 1 0 0 0 0 0 0
`)
	require.NoError(t, err)
	require.Equal(t, receipt.Network{SentBytes: 204, ReceivedBytes: 1030}, n)
	n, err = parseInterfaces(heading + "    lo: 1 2 0 0 0 0 0 0 1 2 0 0 0 0 0 0\n")
	require.NoError(t, err)
	require.Zero(t, n)
	for _, bad := range []string{"eth0 1 2", "eth0: 1 2 3", "eth0: x 9 0 0 0 0 0 0 200 3 0 0 0 0 0 0", "eth0: 1 9 0 0 0 0 0 0 -2 3 0 0 0 0 0 0"} {
		_, err := parseInterfaces(heading + bad)
		require.Error(t, err, bad)
	}
	_, err = traffic()
	require.NoError(t, err, "the kernel's own")
	before := receipt.Network{SentBytes: 100, ReceivedBytes: 10}
	require.Equal(t, receipt.Network{SentBytes: 5}, since(receipt.Network{SentBytes: 105, ReceivedBytes: 3}, before), "an interface was replaced")
}
