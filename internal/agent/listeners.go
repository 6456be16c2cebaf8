package agent

import (
	"fmt"
	"strings"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// watched are the listeners that a sandbox proves that it can't reach, while it does so.
type watched struct {
	targets  []*receiptdv1.Target
	canaries *network.Canaries
}

// watchListeners gathers what the session's sandbox must not reach, and opens canaries on the node. A sandbox without a network
// has nothing that leads anywhere but to itself, so only unix sockets are tried.
func (s *session) watchListeners() (*watched, error) {
	w := &watched{}
	cfg := s.agent.cfg
	for _, path := range append([]string{cfg.Socket.Path, cfg.Containerd.Address}, cfg.Listeners.Unix...) {
		w.targets = append(w.targets, &receiptdv1.Target{Network: "unix", Address: path})
	}
	s.mu.Lock()
	mode, id, isolation := s.rec.Network, s.rec.Sandbox.ID, s.rec.Sandbox.Isolation
	s.mu.Unlock()
	var err error
	if mode == config.NoNetwork {
		w.canaries, err = network.UnixCanary()
	} else {
		w.canaries, err = s.agent.networks.Canaries(id)
	}
	if err != nil {
		return nil, err
	}
	for _, t := range w.canaries.Targets() {
		w.targets = append(w.targets, targetOf(t))
	}
	if mode != config.NoNetwork && max(isolation, runtime.Namespaces) == runtime.Namespaces {
		w.inside("tcp", cfg.Listeners.TCP)
		w.inside("udp", cfg.Listeners.UDP)
	}
	return w, nil
}

func targetOf(t network.Target) *receiptdv1.Target {
	if t.Network == "unix" {
		return &receiptdv1.Target{Network: t.Network, Address: t.Name, Token: t.Token}
	}
	return &receiptdv1.Target{Network: t.Network, Address: t.Address.Addr().String(), Port: uint32(t.Address.Port()), Token: t.Token}
}

// inside has listed ports tried in the sandbox's own network namespace. A guest's own network is the guest's alone.
func (w *watched) inside(network string, ports []int) {
	for _, p := range ports {
		w.targets = append(w.targets, &receiptdv1.Target{Network: "inside-" + network, Port: uint32(p)})
	}
}

// end closes the canaries, and says what they heard.
func (w *watched) end() ([]*receiptdv1.ProofItem, error) {
	reached, err := w.canaries.Close()
	if err != nil {
		return nil, err
	}
	detail := fmt.Sprintf("%d listeners", len(w.canaries.Targets()))
	if len(reached) > 0 {
		detail = "heard: " + strings.Join(reached, ", ")
	}
	return []*receiptdv1.ProofItem{{Promise: "P10", What: "no listener of the node hears a command", Holds: len(reached) == 0, Detail: detail}}, nil
}
