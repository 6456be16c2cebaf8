package config

import (
	"net/netip"
	"slices"
)

// Metrics says where the agent serves metrics and health.
type Metrics struct {
	// Listen is ADDRESS:PORT; empty: nothing is served.
	Listen string `json:"listen"`
	// AnyAddress accepts a Listen that stands for every address of the node.
	AnyAddress bool `json:"any_address"`
}

// port is 0 where nothing is served.
func (m Metrics) port() int {
	at, err := netip.ParseAddrPort(m.Listen)
	if err != nil {
		return 0
	}
	return int(at.Port())
}

func (c *Config) checkMetrics() error {
	m := c.Metrics
	if m.Listen == "" {
		return nil
	}
	at, err := netip.ParseAddrPort(m.Listen)
	switch {
	case err != nil || at.Port() == 0:
		return bad("metrics.listen", m.Listen, "empty, or ADDRESS:PORT such as 127.0.0.1:9464 or [::1]:9464")
	case at.Addr().Unmap().IsUnspecified() && !m.AnyAddress:
		return bad("metrics.listen", m.Listen, "one address of the node; every address only together with metrics.any_address: true")
	}
	return nil
}

// CloseOwnPorts closes the agent's own ports to commands, as those that the operator lists are.
func (c *Config) CloseOwnPorts() {
	if p := c.Metrics.port(); p != 0 && !slices.Contains(c.Listeners.TCP, p) {
		c.Listeners.TCP = append(slices.Clone(c.Listeners.TCP), p)
	}
}
