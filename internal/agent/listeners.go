package agent

import (
	"fmt"
	"strings"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
)

// watched are the listeners that a sandbox proves that it can't reach, while it does so.
type watched struct {
	targets  []*receiptdv1.Target
	canaries *network.Canaries // nil without a network
}

// watchListeners gathers what the session's sandbox must not reach, and opens canaries on the node if it has a network. A
// sandbox without one has nothing that leads anywhere but to itself, so only unix sockets are tried.
func (s *session) watchListeners() (*watched, error) {
	w := &watched{}
	cfg := s.agent.cfg
	for _, path := range append([]string{cfg.Socket.Path, cfg.Containerd.Address}, cfg.Listeners.Unix...) {
		w.targets = append(w.targets, &receiptdv1.Target{Network: "unix", Address: path})
	}
	s.mu.Lock()
	mode, id := s.rec.Network, s.rec.Sandbox.ID
	s.mu.Unlock()
	if mode == config.NoNetwork {
		return w, nil
	}
	canaries, err := s.agent.networks.Canaries(id)
	if err != nil {
		return nil, err
	}
	w.canaries = canaries
	for _, t := range canaries.Targets() {
		w.targets = append(w.targets, &receiptdv1.Target{
			Network: t.Network, Address: t.Address.Addr().String(), Port: uint32(t.Address.Port()), Token: t.Token,
		})
	}
	return w, nil
}

// end closes the canaries, and says what they heard.
func (w *watched) end() ([]*receiptdv1.ProofItem, error) {
	if w.canaries == nil {
		return nil, nil
	}
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
