package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/network"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// networkRecord is how a sandbox is connected.
type networkRecord struct {
	Addresses   []netip.Addr `json:"addresses"`
	Interfaces  []string     `json:"interfaces"` // the node's sides
	Nameservers []netip.Addr `json:"nameservers,omitempty"`
	CNI         string       `json:"cni,omitempty"`
}

// checkNetworks wants somebody to make the allowed modes.
func checkNetworks(o *Options) error {
	for _, mode := range o.Config.Network.Allowed {
		if mode != config.NoNetwork && o.Networks == nil {
			return fmt.Errorf("starting the agent: network mode %q of network.allowed is not built into it: remove it from the list", mode)
		}
	}
	return nil
}

// checkMode refuses a mode that the operator has taken from the list since the session was made.
func (a *Agent) checkMode(session, mode string) error {
	if slices.Contains(a.cfg.Network.Allowed, mode) {
		return nil
	}
	return fmt.Errorf("%w: network mode %q of session %s is not one of %v any more (network.allowed): have it allowed again, or delete the session and create another one on its worktree",
		ErrPrecondition, mode, session, a.cfg.Network.Allowed)
}

// connector connects the sandbox of this id; nil where it is to have no network.
func (a *Agent) connector(id, mode string, policy network.Egress) func(context.Context, *os.File) (runtime.Connection, error) {
	if mode == config.NoNetwork {
		return nil
	}
	return func(ctx context.Context, netns *os.File) (runtime.Connection, error) {
		c, err := a.networks.ConnectUnder(ctx, id, network.Mode(mode), policy, netns)
		return c, networkError(err)
	}
}

// noteNetwork keeps with the session's sandbox how it is connected. The next save writes it.
func (s *session) noteNetwork(id, mode string) error {
	if mode == config.NoNetwork {
		return nil
	}
	rec, err := s.agent.networks.Get(id)
	if err != nil {
		return err
	}
	n := &networkRecord{Addresses: rec.Addresses, Nameservers: rec.Nameservers}
	for _, l := range rec.Links {
		n.Interfaces = append(n.Interfaces, l.Name)
	}
	if rec.CNI != nil {
		n.CNI = rec.CNI.Network
	}
	s.mu.Lock()
	s.rec.Sandbox.Network = n
	s.mu.Unlock()
	return nil
}

// disconnect takes away the network of a sandbox that was seen to be gone. What stays, with nobody in it, is taken away at the
// next start.
func (a *Agent) disconnect(id string) {
	if a.networks == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := a.networks.Remove(ctx, id); err != nil {
		a.log.Error("the network of a sandbox that is gone is not removed; it is tried again when the agent starts", "sandbox", id, "error", err)
	}
}

// sweepNetworks takes away the networks of sandboxes that are gone. alive are all that may not be: their addresses are given
// to nobody else.
func (a *Agent) sweepNetworks(alive map[string]bool) {
	if a.networks == nil {
		return
	}
	ids, err := a.networks.List()
	if err != nil {
		a.log.Error("networks not listed", "error", err)
		return
	}
	owned := a.owned() // after the list: what is in it and was made meanwhile is owned by now
	for _, id := range ids {
		if !alive[id] && !owned[id] {
			a.log.Warn("removing the network of a sandbox that is gone", "sandbox", id)
			a.disconnect(id)
		}
	}
}

// recheckNetwork looks whether a sandbox that was attached to again is still connected. One that isn't goes on: what its commands
// miss they see.
func (s *session) recheckNetwork(id string) {
	s.mu.Lock()
	mode := s.rec.Network
	s.mu.Unlock()
	if mode == config.NoNetwork || s.agent.networks == nil {
		return
	}
	ctx, cancel := context.WithTimeout(s.agent.ctx, attachTimeout)
	defer cancel()
	if err := s.agent.networks.Recheck(ctx, id); err != nil {
		s.log.Warn("the session's network is not as it was; retire its sandbox for a new one", "error", err)
	}
}

// networkChecks say of each allowed network mode whether a sandbox can be connected by it now.
func (a *Agent) networkChecks(ctx context.Context) []*sandboxv1.NodeCheck {
	var out []*sandboxv1.NodeCheck
	for _, mode := range a.cfg.Network.Allowed {
		if mode == config.NoNetwork {
			continue
		}
		c := &sandboxv1.NodeCheck{Feature: "network " + mode, Outcome: sandboxv1.CheckOutcome_CHECK_YES, Verdict: sandboxv1.CheckVerdict_CHECK_OK, Purpose: "connects sandboxes, and keeps them from the node's listeners"}
		c.Detail = c.GetPurpose()
		if err := a.networks.Check(ctx, network.Mode(mode)); err != nil {
			c.Outcome, c.Verdict = sandboxv1.CheckOutcome_CHECK_NO, sandboxv1.CheckVerdict_CHECK_MISSING
			c.Detail, c.Remedy = "it can't connect a sandbox now", err.Error()
		}
		out = append(out, c)
	}
	return out
}

func (n *networkRecord) proto(mode string) *sandboxv1.SandboxNetwork {
	if n == nil {
		return nil
	}
	p := &sandboxv1.SandboxNetwork{Mode: mode, NodeInterfaces: n.Interfaces, CniNetwork: n.CNI}
	for _, a := range n.Addresses {
		p.Addresses = append(p.Addresses, a.String())
	}
	for _, a := range n.Nameservers {
		p.Nameservers = append(p.Nameservers, a.String())
	}
	return p
}

// networkError puts a network that can't be had among what the caller can't change.
func networkError(err error) error {
	if errors.Is(err, network.ErrUnavailable) {
		return fmt.Errorf("%w: %w", runtime.ErrUnavailable, err)
	}
	return err
}

// restoreNetworks has the rules of sandboxes in place before anything runs in them for this agent. A sandbox that can't have
// them is cut off. The sessions are not known yet: they are marked when they are.
func (a *Agent) restoreNetworks() network.Lapses {
	if a.networks == nil {
		return network.Lapses{}
	}
	found, err := a.networks.Restore()
	if err != nil {
		a.log.Error("the rules of networks are not all restored", "error", err)
	}
	return found
}

// unguarded begins the note of a session whose rules somebody else had changed, disconnected that of one whose rules can't be had.
const (
	unguarded    = "The rules that keep its commands from the node's listeners were changed by another program"
	disconnected = "Its network was cut off"
)

// markUnguarded notes in the sessions of these sandboxes that their rules were not there for this time.
func (a *Agent) markUnguarded(found network.Lapses, during string) {
	now := time.Now().UTC().Format(time.RFC3339)
	a.note(found.Restored, unguarded, fmt.Sprintf("%s, and put back at %s: %s, they may have been reached.", unguarded, now, during))
	a.note(found.CutOff, disconnected, fmt.Sprintf("%s at %s: the rules that keep its commands from the node's listeners could not be put back (the agent's log says why), and %s they may have been reached. Retire its sandbox for one with a network.", disconnected, now, during))
}

// note notes something in the sessions of these sandboxes, in the place of an earlier note that begins so.
func (a *Agent) note(sandboxes []string, begins, note string) {
	if len(sandboxes) == 0 {
		return
	}
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	for _, s := range sessions {
		if sb := s.sandboxRecord(); sb == nil || !slices.Contains(sandboxes, sb.ID) {
			continue
		}
		// At once, also beside a command that runs.
		err := s.save(true, func(r *sessionRecord) {
			kept := slices.DeleteFunc(slices.Clone(r.Notes), func(n string) bool { return strings.HasPrefix(n, begins) })
			r.Notes = append(kept, note)
		})
		if err != nil {
			s.log.Error("session not marked: its network rules were missing for a moment", "error", err)
		}
	}
}
