package network

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/google/nftables"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
)

// A sandbox's network namespace is bound at a path, and what an operator starts in it is beside the sandbox: over the loopback
// interface its commands reach what listens there, and no rule of the node's sees that. So there are rules inside as well. The
// namespace is the sandbox's user namespace's: receiptd may change them, a command, which has no capability there, may not.

// insideOutput is the chain inside.
const insideOutput = "output"

// sandboxRoot is receiptd's user, in the user namespace that the network namespace belongs to.
const sandboxRoot = 0

// guardInside sets the rules in a sandbox's own network namespace, whatever is there, in one transaction.
func (r *rules) guardInside(path string) error {
	ns, err := netns.GetFromPath(filepath.Clean(path))
	if err != nil {
		return fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	defer ns.Close()
	c, err := dialNFT(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		return err
	}
	outside, err := nsexec.OverflowUID()
	if err != nil {
		return err
	}
	t := &nftables.Table{Name: r.routed.Name, Family: nftables.TableFamilyINet}
	c.AddTable(t) // so that there is one to delete
	c.DelTable(t)
	c.AddTable(t)
	policy := nftables.ChainPolicyAccept
	chain := c.AddChain(&nftables.Chain{
		Table: t, Name: insideOutput, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(-10), Policy: &policy,
	})
	addRules(c, chain, untold(r.list.Inside([]uint32{sandboxRoot, outside}), insideLayer))
	return flushed(c)
}

// guardAllInside is guardInside for sandboxes that run, as the lists of an agent may be others than those of the one before.
func (r *rules) guardAllInside(running []*Record) error {
	var errs []error
	for _, rec := range running {
		if err := r.guardInside(rec.Namespace); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("sandbox %s: %w", rec.ID, err))
		}
	}
	return errors.Join(errs...)
}
