package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// watchEvery is how often the rules are looked at: so long they can be missing, when somebody else takes them away. A reload
// of the node's own firewall often does ("flush ruleset").
const watchEvery = time.Second

// setTries bounds how often the rules are set in a row: an interface that goes meanwhile makes one attempt fail.
const setTries = 3

// Lapses are sandboxes whose rules were not as they should be.
type Lapses struct {
	// Restored have them again.
	Restored []string
	// CutOff are those whose interfaces on the node were set down, as the rules can't be had. They stay so.
	CutOff []string
}

func (l Lapses) any() bool { return len(l.Restored)+len(l.CutOff) > 0 }

// Watch puts the rules back when somebody else has changed them, until ctx ends. A sandbox that can't have them is cut off.
// tell is told of which ones that was.
func (m *Manager) Watch(ctx context.Context, tell func(Lapses)) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var seen uint32
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		found, err := m.look(&seen)
		m.logLapses(found, err)
		if found.any() {
			tell(found)
		}
	}
}

func (m *Manager) logLapses(found Lapses, err error) {
	if err != nil {
		m.log.Error("the rules that keep sandboxes from the node can't be looked at or put back", "error", err)
	}
	if len(found.Restored) > 0 {
		m.log.Warn("somebody else has changed the rules that keep sandboxes from the node; they are put back", "sandboxes", found.Restored)
	}
	if len(found.CutOff) > 0 {
		m.log.Error("sandboxes are cut off from the network, as the rules that keep them from the node can't be had", "sandboxes", found.CutOff)
	}
}

// Restore brings the rules into the state that the recorded sandboxes need, whatever is there, and says of which ones they were
// not as the last agent left them. Also with an error no sandbox is left without: those are cut off.
func (m *Manager) Restore() (Lapses, error) {
	m.changing.Lock()
	defer m.changing.Unlock()
	all, err := m.all()
	if err == nil && len(all) == 0 {
		return Lapses{}, errors.Join(m.rules.clear(), m.egress.set(nil))
	}
	running := slices.DeleteFunc(connected(all), func(rec *Record) bool { return !isBound(rec.Namespace) || len(present(rec)) == 0 })
	running, cut, cutErr := m.unbridged(running)
	ok, lookErr := m.rules.asLeft(running)
	ok = ok && m.egress.intact(running)
	found, setErr := m.bringBack(all, running, ok)
	found.CutOff = append(cut, found.CutOff...)
	err = errors.Join(err, cutErr, lookErr, setErr)
	m.logLapses(found, nil)
	return found, err
}

// look compares the rules with what they should be, if anything of nftables has changed since seen.
func (m *Manager) look(seen *uint32) (Lapses, error) {
	m.changing.Lock()
	defer m.changing.Unlock()
	all, err := m.all()
	found := Lapses{Restored: m.lapsed}
	m.lapsed = nil
	running, cut, cutErr := m.unbridged(connected(all)) // what is being connected has no rules yet
	found.CutOff, err = cut, errors.Join(err, cutErr)
	if len(running) == 0 {
		return found, err
	}
	now, genErr := generation()
	if genErr == nil && now == *seen && m.rules.named(running) {
		return found, err
	}
	ok, lookErr := m.rules.intact(running)
	if ok = ok && m.egress.intact(running); ok && genErr == nil {
		*seen = now
		return found, err
	}
	more, setErr := m.bringBack(all, running, ok || lookErr != nil)
	found.Restored, found.CutOff = append(found.Restored, more.Restored...), append(found.CutOff, more.CutOff...)
	return found, errors.Join(err, genErr, lookErr, setErr)
}

// unbridged cuts off those whose policy the node's bridge doesn't hand packets to any more, and gives the rest.
func (m *Manager) unbridged(list []*Record) (rest []*Record, cut []string, err error) {
	var errs []error
	for _, rec := range list {
		why := checkBridged(rec)
		if !errors.Is(why, ErrUnavailable) {
			rest, errs = append(rest, rec), append(errs, why)
			continue
		}
		ids, err := m.cutOff([]*Record{rec}, why.Error())
		cut, errs = append(cut, ids...), append(errs, why, err)
	}
	return rest, cut, errors.Join(errs...)
}

// bringBack sets the rules of all, and cuts off those that run if that can't be done. ok says that no change was seen.
func (m *Manager) bringBack(all, running []*Record, ok bool) (Lapses, error) {
	var err error
	for range setTries {
		if err = m.set(all); err == nil {
			break
		}
	}
	switch {
	case err != nil:
		cut, cutErr := m.cutOff(running, "the rules that keep it from the node could not be set: "+err.Error())
		return Lapses{CutOff: cut}, errors.Join(err, cutErr)
	case ok:
		return Lapses{}, nil
	}
	return Lapses{Restored: idsOf(running)}, nil
}

// set sets the rules of these sandboxes.
func (m *Manager) set(all []*Record) error {
	return errors.Join(m.rules.set(all), m.restoreEgress(all))
}

// cutOff sets the node's sides of these sandboxes down, for good: nothing they send arrives any more.
func (m *Manager) cutOff(list []*Record, why string) (cut []string, err error) {
	var errs []error
	for _, rec := range list {
		if err := setDown(rec); err != nil {
			errs = append(errs, fmt.Errorf("cutting off sandbox %s: %w", rec.ID, err))
			continue
		}
		rec.CutOff = why
		cut, errs = append(cut, rec.ID), append(errs, m.records().write(rec))
	}
	return cut, errors.Join(errs...)
}

func setDown(rec *Record) error {
	for _, l := range present(rec) {
		link, err := netlink.LinkByIndex(l.Index)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err == nil {
			err = netlink.LinkSetDown(link)
		}
		if err != nil {
			return fmt.Errorf("setting the interface %s down: %w", l.Name, err)
		}
	}
	return nil
}

// connected are those that run with a network.
func connected(all []*Record) []*Record {
	return slices.DeleteFunc(slices.Clone(all), func(rec *Record) bool { return !rec.Connected || rec.CutOff != "" })
}

func idsOf(list []*Record) (out []string) {
	for _, rec := range list {
		out = append(out, rec.ID)
	}
	return out
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
	if rec.CutOff != "" {
		return fmt.Errorf("sandbox %s is cut off from the network: %s", id, rec.CutOff)
	}
	if !isBound(rec.Namespace) || len(present(rec)) < len(rec.Links) {
		return fmt.Errorf("the network of sandbox %s is not as it was made: its namespace or its interface on the node is gone", id)
	}
	if rec.CNI == nil {
		return nil
	}
	for _, l := range present(rec) {
		node, err := netlink.LinkByIndex(l.Index)
		if err == nil {
			err = checkDatapath(node)
		}
		if err != nil {
			return fmt.Errorf("the network of sandbox %s is not as it was made: %w", id, err)
		}
	}
	if err := m.checkPlugged(ctx, rec); err != nil {
		return fmt.Errorf("the network of sandbox %s is not as it was made: %w", id, err)
	}
	return nil
}
