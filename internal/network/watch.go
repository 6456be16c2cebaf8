package network

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// watchEvery is how often the rules are looked at whatever is heard. A reload of the node's own firewall often takes them away
// ("flush ruleset"), and the kernel says so at once (watchevents.go); names of interfaces, and what the kernel had no room to say,
// are found so.
const watchEvery = time.Second

// anyway is after how many ticks the rules are compared with what they should be though nobody else has changed anything.
const anyway = 60

// setTries bounds how often the rules are set in a row: an interface that goes meanwhile makes one attempt fail.
const setTries = 3

// Lapses are sandboxes whose rules were not as they should be.
type Lapses struct {
	// Restored have them again.
	Restored []string
	// CutOff are those whose interfaces on the node were set down, as the rules can't be had. They stay so.
	CutOff []string
}

// condition is how the rules were found.
type condition int

const (
	unknown condition = iota
	whole
	changed
)

func conditionOf(ok bool, err error) (condition, error) {
	switch {
	case err != nil:
		return unknown, err
	case ok:
		return whole, nil
	}
	return changed, nil
}

// and is the worse one.
func (c condition) and(ok bool) condition {
	if !ok {
		return changed
	}
	return c
}

// add adds those of more, each once.
func (l *Lapses) add(more Lapses) {
	for _, s := range []struct {
		to   *[]string
		more []string
	}{{&l.Restored, more.Restored}, {&l.CutOff, more.CutOff}} {
		for _, id := range s.more {
			if !slices.Contains(*s.to, id) {
				*s.to = append(*s.to, id)
			}
		}
	}
}

func (l Lapses) any() bool { return len(l.Restored)+len(l.CutOff) > 0 }

// Watch puts the rules back when somebody else has changed them, until ctx ends. A sandbox that can't have them is cut off.
// tell is told of which ones that was.
func (m *Manager) Watch(ctx context.Context, tell func(Lapses)) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	heard, stop, err := m.rules.listen()
	if err != nil {
		m.log.Warn("changes of the rules that keep sandboxes from the node are found within a second, not at once", "error", err)
	} else {
		defer stop()
	}
	m.watch(ctx, heard, tick.C, tell)
}

// watch looks when the kernel says that the rules were changed by somebody else, and at each tick.
func (m *Manager) watch(ctx context.Context, heard <-chan struct{}, tick <-chan time.Time, tell func(Lapses)) {
	var seen uint32
	for ticks := 1; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick:
			if ticks++; ticks%anyway == 0 {
				seen = 0
			}
		case <-heard:
			if others, err := m.rules.commits.others(); err == nil && others == seen {
				continue // it was this process
			}
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
	all, others, err := m.readAll()
	if err == nil && len(all) == 0 {
		return Lapses{}, errors.Join(m.rules.clear(), m.egress.set(nil))
	}
	running := slices.DeleteFunc(connected(all), func(rec *Record) bool { return !isBound(rec.Namespace) || len(present(rec)) == 0 })
	running, cut, cutErr := m.unruled(running, others)
	was, lookErr := m.rules.asLeft(running)
	found, setErr := m.bringBack(all, running, was.and(m.egress.intact(running)))
	found.CutOff = append(cut, found.CutOff...)
	within, insideErr := m.restoreInside(connected(running))
	found.add(within)
	err = errors.Join(err, cutErr, lookErr, setErr, insideErr)
	m.logLapses(found, nil)
	return found, err
}

// look compares the rules with what they should be, if anybody else has changed anything of nftables since seen.
func (m *Manager) look(seen *uint32) (Lapses, error) {
	m.changing.Lock()
	defer m.changing.Unlock()
	all, others, err := m.readAll()
	running, cut, cutErr := m.unruled(connected(all), others) // what is being connected has no rules yet
	found := Lapses{Restored: m.lapsed, CutOff: cut}
	m.lapsed, err = nil, errors.Join(err, cutErr)
	if len(running) == 0 {
		return found, err
	}
	within, insideErr := m.lookInside(running)
	found.add(within)
	err = errors.Join(err, insideErr)
	running = connected(running) // without those that were cut off for it
	now, genErr := m.rules.commits.others()
	if len(running) == 0 || genErr == nil && now == *seen && m.rules.named(running) {
		return found, err
	}
	m.log.Debug("the rules of all sandboxes are compared with what they should be")
	is, lookErr := conditionOf(m.rules.intact(running))
	if is = is.and(m.egress.intact(running)); is == whole && genErr == nil {
		*seen = now
		return found, err
	}
	more, setErr := m.bringBack(all, running, is)
	found.add(more)
	return found, errors.Join(err, genErr, lookErr, setErr)
}

// unruled cuts off those that no rules can be had for: whose policy the node's bridge doesn't hand packets to any more, and the
// others, whose records can't be read. It gives the rest.
func (m *Manager) unruled(list []*Record, others []string) (rest []*Record, cut []string, err error) {
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
	for _, id := range others {
		done, err := m.cutOffUnread(id)
		if errs = append(errs, err); done {
			cut = append(cut, id)
		}
	}
	return rest, cut, errors.Join(errs...)
}

// cutOffUnread sets the node's sides of a sandbox without a record down. done says that one was up.
func (m *Manager) cutOffUnread(id string) (done bool, err error) {
	if !isBound(m.namespace(id)) {
		return false, nil
	}
	h, err := inside(m.namespace(id))
	if err != nil {
		return false, err
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return false, fmt.Errorf("cutting off sandbox %s: looking at its interfaces: %w", id, err)
	}
	for _, l := range links {
		node, err := nodesSide(l)
		if err != nil || node.Attrs().RawFlags&unix.IFF_UP == 0 {
			continue // none of its own leads out, or not any more
		}
		if err := netlink.LinkSetDown(node); err != nil {
			return done, fmt.Errorf("cutting off sandbox %s: setting the interface %s down: %w", id, node.Attrs().Name, err)
		}
		done = true
	}
	return done, nil
}

// bringBack sets the rules of all. If that can't be done it cuts off those that run, unless their rules are known to stand.
func (m *Manager) bringBack(all, running []*Record, was condition) (Lapses, error) {
	var err error
	for range setTries {
		if err = m.set(all); err == nil {
			break
		}
	}
	switch {
	case err != nil && was == whole:
		return Lapses{}, err
	case err != nil:
		cut, cutErr := m.cutOff(running, "the rules that keep it from the node could not be set: "+err.Error())
		return Lapses{CutOff: cut}, errors.Join(err, cutErr)
	case was == changed:
		return Lapses{Restored: idsOf(running)}, nil
	}
	return Lapses{}, nil
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
