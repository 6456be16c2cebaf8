package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// maxRefused bounds the destinations that an answer names, and so what a command can have logged and told as events.
const maxRefused = 64

// checkSessionNetwork fills in the defaults of a session's network.
func checkSessionNetwork(n *sandboxv1.Network, c config.Network) (*sandboxv1.Network, error) {
	mode, err := choose("network.mode", "network.allowed", n.GetMode(), c.Default, c.Allowed)
	if err != nil {
		return nil, err
	}
	if mode == config.NoNetwork {
		if n.GetEgress() != "" || len(n.GetAllow()) > 0 {
			return nil, invalid("network.egress and network.allow are for a session with a network: leave them out, or name a network.mode other than none")
		}
		return &sandboxv1.Network{Mode: mode}, nil
	}
	policy, err := choose("network.egress", "network.egress.allowed", n.GetEgress(), c.Egress.Default, c.Egress.Allowed)
	if err != nil {
		return nil, err
	}
	if policy != string(egress.Allowlist) && len(n.GetAllow()) > 0 {
		return nil, invalid("network.allow is for the policy allowlist, and network.egress is %s: name the one or leave out the other", policy)
	}
	if _, err := narrowed(n.GetAllow(), c.Egress); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return &sandboxv1.Network{Mode: mode, Egress: policy, Allow: n.GetAllow()}, nil
}

// narrowed is the list in effect of a session that asks for these destinations.
func narrowed(allow []string, c config.NetworkEgress) ([]egress.Entry, error) {
	var asked []egress.Entry
	for i, text := range allow {
		e, err := egress.ParseText(text)
		if err != nil {
			return nil, fmt.Errorf("network.allow[%d]: %w", i, err)
		}
		asked = append(asked, e)
	}
	list, err := egress.Narrow(c.Entries(), asked)
	if err != nil {
		return nil, fmt.Errorf("network.allow: %w", err)
	}
	return list, nil
}

// egressOf is what the session's next sandbox may reach. The operator may have changed the lists since the session was made.
func (a *Agent) egressOf(r *sessionRecord) (network.Egress, error) {
	c := a.cfg.Network.Egress
	if r.Network == config.NoNetwork {
		return network.Egress{}, nil
	}
	mode := r.Egress
	if mode == "" { // of an agent that had no policies
		mode = egress.Open
	}
	if !slices.Contains(c.Allowed, string(mode)) {
		return network.Egress{}, fmt.Errorf("%w: egress policy %q of session %s is not one of %v any more (network.egress.allowed): have it allowed again, or delete the session and create another one on its worktree",
			ErrPrecondition, mode, r.ID, c.Allowed)
	}
	out := network.Egress{Mode: mode, Connections: uint32(c.Connections), PerSecond: uint32(c.ConnectionsPerSecond), Bytes: uint64(c.BytesOut)}
	if mode != egress.Allowlist {
		return out, nil
	}
	list, err := narrowed(r.Allow, c)
	if err != nil {
		return network.Egress{}, fmt.Errorf("%w: the list of session %s is not within the operator's any more: %w: have it allowed again, or delete the session and create another one on its worktree",
			ErrPrecondition, r.ID, err)
	}
	out.Entries = list
	return out, nil
}

// serveNetworks has names resolved and refusals heard, where sandboxes can have a network.
func (a *Agent) serveNetworks() {
	connects := func(mode string) bool { return mode != config.NoNetwork }
	if a.networks != nil && slices.ContainsFunc(a.cfg.Network.Allowed, connects) {
		a.watchers.Go(func() { a.networks.Serve(a.ctx, a.noteRefused) })
	}
}

// networkUse is what an exec does over the network.
type networkUse struct {
	execID, sandbox string
	before          network.Traffic
	refused         []string // guarded by session.mu until the exec's end
	total           network.Traffic
}

// reading is what was counted of a sandbox at some time.
type reading struct {
	sandbox string
	traffic network.Traffic
}

// beginUse counts from here on for an exec. It runs before anything of it does.
func (s *session) beginUse(e *execution) {
	s.mu.Lock()
	connected := s.rec.Network != config.NoNetwork && s.rec.Sandbox != nil
	u := &networkUse{execID: e.intent.ExecID}
	if connected {
		u.sandbox = s.rec.Sandbox.ID
	}
	last := s.metered
	s.mu.Unlock()
	if !connected || s.agent.networks == nil {
		return
	}
	if u.before = last.traffic; last.sandbox != u.sandbox {
		var err error
		if u.before, err = s.agent.networks.Traffic(u.sandbox); err != nil {
			s.log.Warn("what the command does over the network is not counted", "exec", u.execID, "error", err)
		}
	}
	s.mu.Lock()
	s.usage, s.unasked = u, networkUse{}
	s.mu.Unlock()
}

// endUse is what the exec did, now that nothing of it is left.
func (s *session) endUse() *networkUse {
	s.mu.Lock()
	u := s.usage
	s.mu.Unlock()
	if u == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(s.agent.ctx, attachTimeout)
	defer cancel()
	now, err := s.agent.networks.Traffic(u.sandbox)
	known := reading{u.sandbox, now}
	if err = errors.Join(err, s.agent.networks.Settle(ctx)); err != nil {
		s.log.Warn("what the command did over the network is not known", "exec", u.execID, "error", err)
		now, known = u.before, reading{}
	}
	s.mu.Lock()
	s.usage, s.metered = nil, known
	s.mu.Unlock()
	u.total = now.Since(u.before)
	return u
}

// noteRefused tells of a refusal in the log and as an event, and keeps it for the answer of the command that runs in the
// sandbox: one at a time does. Each destination is told once for a command; the rest is only counted.
func (a *Agent) noteRefused(sandbox, what string) {
	s := a.withSandbox(sandbox)
	if s == nil {
		return
	}
	s.mu.Lock()
	u, exec := &s.unasked, ""
	if s.usage != nil {
		u = s.usage
	}
	if s.running != nil {
		exec = s.running.intent.ExecID
	}
	// What a sandbox tries before it is ready is its proof.
	proof := s.rec.State == Provisioning
	news := !proof && u.note(what)
	event := events.Event{Kind: events.EgressRefused, Session: s.id, Exec: exec, Generation: s.rec.Generation, Detail: what}
	s.mu.Unlock()
	if !proof {
		a.metrics.Refused()
	}
	if !news {
		s.log.Debug("refused over the network", "sandbox", sandbox, "exec", exec, "destination", what)
		return
	}
	s.log.Info("refused over the network", "sandbox", sandbox, "exec", exec, "destination", what)
	if err := a.chain.Tell(event); err != nil {
		s.log.Warn("refusal over the network not among the events", "exec", exec, "error", err)
	}
}

// withSandbox is the session whose newest sandbox this is; nil without one.
func (a *Agent) withSandbox(id string) *session {
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	for _, s := range sessions {
		s.mu.Lock()
		found := s.rec.Sandbox != nil && s.rec.Sandbox.ID == id
		s.mu.Unlock()
		if found {
			return s
		}
	}
	return nil
}

// note says whether the destination is new among those that are kept. Caller holds session.mu.
func (u *networkUse) note(what string) bool {
	if len(u.refused) >= maxRefused || slices.Contains(u.refused, what) {
		return false
	}
	u.refused = append(u.refused, what)
	return true
}

// anything says whether there is something to tell.
func (u *networkUse) anything() bool {
	return u != nil && (len(u.refused) > 0 || u.total != network.Traffic{})
}

func (u *networkUse) tell(r *sandboxv1.ExecResult) {
	if u != nil {
		r.Network, r.RefusedDestinations = useProto(u.total), u.refused
	}
}

func useProto(t network.Traffic) *sandboxv1.NetworkUse {
	return &sandboxv1.NetworkUse{BytesOut: t.BytesOut, Connections: t.Connections, Refused: t.Refused}
}

// kubelets are where a kubelet of this node listens, or would.
func kubelets() ([]string, error) {
	const kubeletPort, most = 10250, 4
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("looking at this node's addresses: %w", err)
	}
	var out []string
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() && len(out) < most {
			out = append(out, netip.AddrPortFrom(p.Addr(), kubeletPort).String())
		}
	}
	return out, nil
}

// GetEgress says what a session's sandboxes may reach.
func (a *Agent) GetEgress(r *sandboxv1.GetEgressRequest) (*sandboxv1.GetEgressResponse, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	policy, err := a.egressOf(&rec)
	if err != nil {
		return nil, err
	}
	resp := &sandboxv1.GetEgressResponse{Network: &sandboxv1.Network{Mode: rec.Network, Egress: string(policy.Mode), Allow: rec.Allow}}
	if resp.Management, err = kubelets(); err != nil {
		return nil, err
	}
	if rec.Network == config.NoNetwork {
		resp.Network.Egress = string(egress.None)
		return resp, nil
	}
	for _, e := range policy.Entries {
		out := &sandboxv1.EgressEntry{Destination: e.Destination(), Reason: e.Reason}
		for _, p := range e.Private {
			out.Private = append(out.Private, p.String())
		}
		resp.Entries = append(resp.Entries, out)
	}
	if rec.Sandbox != nil && rec.Sandbox.Network != nil && rec.State.HasSandbox() {
		for _, n := range rec.Sandbox.Network.Nameservers {
			resp.Nameservers = append(resp.Nameservers, n.String())
		}
		t, err := a.networks.Traffic(rec.Sandbox.ID)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		resp.Use = useProto(t)
	}
	return resp, nil
}
