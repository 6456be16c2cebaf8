package network

import (
	"errors"
	"fmt"

	"github.com/google/nftables"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
)

// A sandbox's network namespace is bound at a path, and what an operator starts in it is beside the sandbox: over the loopback
// interface its commands reach what listens there, and no rule of the node's sees that. So there are rules inside as well. The
// namespace is the sandbox's user namespace's: receiptd may change them, a command, which has no capability there, may not. So may
// what an operator starts there: a sidecar that sets up its own rules may begin with "flush ruleset".

// insideOutput is the chain inside.
const insideOutput = "output"

// sandboxRoot is receiptd's user, in the user namespace that the network namespace belongs to.
const sandboxRoot = 0

// insideTable is the table in a sandbox's own network namespace.
func (r *rules) insideTable() *nftables.Table {
	return &nftables.Table{Name: r.routed.Name, Family: nftables.TableFamilyINet}
}

// insideRules are those of insideOutput.
func (r *rules) insideRules() ([]compiled, error) {
	outside, err := nsexec.OverflowUID()
	if err != nil {
		return nil, err
	}
	return untold(r.list.Inside([]uint32{sandboxRoot, outside}), insideLayer), nil
}

// guardInside sets the rules in a sandbox's own network namespace, whatever is there, in one transaction, and says how many there are.
func (r *rules) guardInside(path string) (n int, err error) {
	list, err := r.insideRules()
	if err != nil {
		return 0, err
	}
	ns, err := openNamespace(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	c, err := dialNFT(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		return 0, err
	}
	t := r.insideTable()
	c.AddTable(t) // so that there is one to delete
	c.DelTable(t)
	c.AddTable(t)
	policy := nftables.ChainPolicyAccept
	chain := c.AddChain(&nftables.Chain{
		Table: t, Name: insideOutput, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(-10), Policy: &policy,
	})
	addRules(c, chain, list)
	return len(list), unflushed(c.Flush())
}

// insideSize is how many rules there are in a sandbox's own network namespace; 0 without the table.
func (r *rules) insideSize(path string) (n int, err error) {
	ns, err := openNamespace(path)
	if err == nil {
		defer ns.Close()
		n, err = rulesIn(int(ns), r.insideTable(), insideOutput)
	}
	if err != nil {
		return 0, fmt.Errorf("looking at the rules inside: %w", err)
	}
	return n, nil
}

// generationInside is the generation of the nftables in a sandbox's own network namespace.
func generationInside(path string) (uint32, error) {
	ns, err := openNamespace(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	return generation(int(ns))
}

// restoreInside sets the rules inside of sandboxes that run, as the lists of an agent may be others than those of the one
// before, and says of which they were not as that one left them. Who can't have them is cut off.
func (m *Manager) restoreInside(running []*Record) (Lapses, error) {
	var out Lapses
	var errs []error
	for _, rec := range running {
		was, err := m.rules.insideSize(rec.Namespace)
		changed := err == nil && rec.Inside > 0 && was != rec.Inside // by an agent that kept no number they may have been anything
		errs = append(errs, m.lapseInside(&out, rec, changed, m.renewInside(rec)))
	}
	return out, errors.Join(errs...)
}

// renewInside sets the rules inside anew, and keeps how many there are.
func (m *Manager) renewInside(rec *Record) error {
	var n int
	var err error
	for range setTries {
		if n, err = m.rules.guardInside(rec.Namespace); err == nil {
			break
		}
	}
	if err != nil || n == rec.Inside {
		return err
	}
	rec.Inside = n
	if err := m.records().write(rec); err != nil { // a full disk: the rules themselves stand
		m.log.Warn("whether the rules inside a sandbox are as this agent leaves them can't be kept for the next one", "error", err)
	}
	return nil
}

// lapseInside notes what has become of a sandbox whose rules inside were looked at.
func (m *Manager) lapseInside(out *Lapses, rec *Record, changed bool, err error) error {
	switch {
	case err != nil && !isBound(rec.Namespace):
		return nil // it is being taken away
	case err != nil:
		cut, cutErr := m.cutOffInside(rec, err)
		out.CutOff = append(out.CutOff, cut...)
		return errors.Join(fmt.Errorf("sandbox %s: %w", rec.ID, err), cutErr)
	case changed:
		out.Restored = append(out.Restored, rec.ID)
	}
	return nil
}

// lookInside puts back the rules inside of those whose nftables have changed since they were seen whole.
func (m *Manager) lookInside(running []*Record) (Lapses, error) {
	var out Lapses
	var errs []error
	seen := make(map[string]uint32, len(running))
	for _, rec := range running {
		now, err := generationInside(rec.Namespace)
		if before, known := m.inside[rec.ID]; err == nil && known && before == now {
			seen[rec.ID] = now
			continue
		}
		is, mendErr := m.mendInside(rec)
		if err == nil && is == whole {
			seen[rec.ID] = now
		}
		errs = append(errs, m.lapseInside(&out, rec, is == changed, mendErr))
	}
	m.inside = seen
	return out, errors.Join(errs...)
}

// mendInside sets the rules inside unless they are seen to be as this agent makes them, and says how they were.
func (m *Manager) mendInside(rec *Record) (condition, error) {
	want, err := m.rules.insideRules()
	if err != nil {
		return unknown, err
	}
	n, err := m.rules.insideSize(rec.Namespace)
	is, _ := conditionOf(n == len(want), err)
	if is == whole {
		return whole, nil
	}
	return is, m.renewInside(rec)
}

// cutOffInside is cutOff for a sandbox without the rules inside: its loopback interface goes down too, over which its commands
// would reach what is beside it.
func (m *Manager) cutOffInside(rec *Record, why error) ([]string, error) {
	lowered := lowerLoopback(rec.Namespace)
	if lowered != nil {
		lowered = fmt.Errorf("cutting off sandbox %s from what is beside it: %w", rec.ID, lowered)
	}
	cut, err := m.cutOff([]*Record{rec}, "the rules inside, that keep it from what is beside it, could not be set: "+why.Error())
	return cut, errors.Join(lowered, err)
}

func lowerLoopback(path string) error {
	h, err := inside(path)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err == nil {
		err = h.LinkSetDown(lo)
	}
	if err != nil {
		return fmt.Errorf("setting the loopback interface down: %w", err)
	}
	return nil
}
