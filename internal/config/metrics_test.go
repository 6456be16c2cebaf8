package config

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMetricsAreServedAtAnAddressThatIsNamed(t *testing.T) {
	for text, refused := range map[string]string{
		"{}":                     "",
		"{listen: ''}":           "",
		"{listen: '[::1]:9464'}": "", "{listen: '127.0.0.1:1'}": "",
		"{listen: '0.0.0.0:9464', any_address: true}": "",
		"{listen: '0.0.0.0:9464'}":                    "metrics.any_address",
		"{listen: '[::]:9464'}":                       "metrics.any_address",
		"{listen: '[::ffff:0.0.0.0]:9464'}":           "metrics.any_address",
		"{listen: ':9464'}":                           "ADDRESS:PORT",
		"{listen: 'localhost:9464'}":                  "ADDRESS:PORT",
		"{listen: '127.0.0.1:0'}":                     "ADDRESS:PORT",
	} {
		c := Default(1 << 34)
		require.NoError(t, Parse([]byte("metrics: "+text), &c), text)
		if err := c.Validate(); refused == "" {
			require.NoError(t, err, text)
		} else {
			require.ErrorContains(t, err, refused, text)
		}
	}
}

func TestP10TheAgentsOwnPortIsClosedLikeAListedOne(t *testing.T) {
	c := Default(1 << 34)
	listed := c.Listeners.TCP
	c.CloseOwnPorts()
	require.Equal(t, listed, c.Listeners.TCP, "nothing is served")
	c.Metrics.Listen = "127.0.0.1:9464"
	c.CloseOwnPorts()
	c.CloseOwnPorts()
	require.Equal(t, append(append([]int{}, listed...), 9464), c.Listeners.TCP)
}
