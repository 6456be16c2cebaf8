package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// watchEvery is how often the rules are looked at: so long they can be missing, when somebody else takes them away. A reload
// of the node's own firewall often does ("flush ruleset").
const watchEvery = time.Second

// Watch puts the rules back when somebody else has changed them, until ctx ends. restored is told whose rules were not as they
// should be.
func (m *Manager) Watch(ctx context.Context, restored func(ids []string)) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var seen uint32
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ids, err := m.look(&seen)
		if err != nil {
			m.log.Error("the rules that keep sandboxes from the node can't be looked at or put back", "error", err)
		}
		if len(ids) > 0 {
			m.log.Warn("somebody else has changed the rules that keep sandboxes from the node; they are put back", "sandboxes", ids)
			restored(ids)
		}
	}
}

// look compares the rules with what they should be, if anything of nftables has changed since seen.
func (m *Manager) look(seen *uint32) (changed []string, err error) {
	m.changing.Lock()
	defer m.changing.Unlock()
	all, err := m.all()
	if err != nil {
		return nil, err
	}
	var connected []*Record
	for _, rec := range all {
		if rec.Connected { // what is being connected has no rules yet
			connected, changed = append(connected, rec), append(changed, rec.ID)
		}
	}
	if len(connected) == 0 {
		return nil, nil
	}
	now, err := generation()
	if err != nil || now == *seen {
		return nil, err
	}
	ok, err := m.rules.intact(connected)
	if err != nil || ok && m.egress.intact(connected) {
		*seen = now
		return nil, err
	}
	return changed, errors.Join(m.rules.set(all), m.restoreEgress(all))
}

// generation is a number that changes with every change of the node's nftables (NFT_MSG_GETGEN).
func generation() (uint32, error) {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of nftables: %w", err)
	}
	defer c.Close()
	answers, err := c.Execute(nl.Message{
		Header: nl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: nl.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}, // struct nfgenmsg
	})
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of nftables: %w", err)
	}
	for _, a := range answers {
		if len(a.Data) < 4 {
			continue
		}
		d, err := nl.NewAttributeDecoder(a.Data[4:])
		if err != nil {
			return 0, fmt.Errorf("reading the generation of nftables: %w", err)
		}
		d.ByteOrder = binary.BigEndian
		for d.Next() {
			if d.Type() == unix.NFTA_GEN_ID {
				return d.Uint32(), d.Err()
			}
		}
	}
	return 0, errors.New("reading the generation of nftables: it is not in the answer")
}

// Recheck says whether a sandbox that was connected by an earlier agent still is: its interfaces are there, and its plugins find
// all as they left it.
func (m *Manager) Recheck(ctx context.Context, id string) error {
	rec, err := m.records().read(id)
	if err != nil {
		return err
	}
	if !isBound(rec.Namespace) || len(present(rec)) < len(rec.Links) {
		return fmt.Errorf("the network of sandbox %s is not as it was made: its namespace or its interface on the node is gone", id)
	}
	if rec.CNI == nil {
		return nil
	}
	if err := m.checkPlugged(ctx, rec); err != nil {
		return fmt.Errorf("the network of sandbox %s is not as it was made: %w", id, err)
	}
	return nil
}
