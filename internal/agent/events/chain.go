package events

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
)

const (
	// floorKey holds the number of the newest event that was forgotten.
	floorKey = "events/floor"
	// batch is how many events a reader takes at a time: it holds nothing of the journal while it passes them on.
	batch = 256
	// trimAtOnce bounds one removal of old events, for which the journal's only writer is busy.
	trimAtOnce = 32
	trimEvery  = 10 * time.Second
)

// ErrTooOld: events after the cursor are no longer kept.
var ErrTooOld = errors.New("too old")

// ErrAhead: the chain has no event of this cursor yet.
var ErrAhead = errors.New("not of this chain")

// Chain is the node's events in its journal. Its methods may be called at the same time.
type Chain struct {
	journal *journal.Journal
	keep    int64
	log     *slog.Logger
	floor   atomic.Uint64
}

// Open takes over the chain of a journal and tells that the agent has started; and first, if the last one did not say
// that it stopped, that something may be missing. keep is how many events are kept at least.
func Open(ctx context.Context, j *journal.Journal, keep int64, version string, log *slog.Logger) (*Chain, error) {
	c := &Chain{journal: j, keep: keep, log: log}
	switch b, err := j.Get(floorKey); {
	case err == nil && len(b) == 8:
		c.floor.Store(binary.BigEndian.Uint64(b))
	case err == nil:
		return nil, fmt.Errorf("reading %s from the journal: %d bytes instead of 8", floorKey, len(b))
	case !errors.Is(err, journal.ErrNotFound):
		return nil, err
	}
	begin := []Event{{Kind: AgentStarted, Detail: version}}
	last, err := c.newest()
	switch {
	case err != nil:
		return nil, err
	case last != nil && last.Kind != AgentStopped:
		begin = append([]Event{{Kind: Gap, Detail: fmt.Sprintf(
			"The agent ended without notice after %s. Events that it told after that may be lost, with what they told of; what is found out again is told again.", last.Cursor)}}, begin...)
	}
	if err := j.Update(ctx, true, Ops(begin...)...); err != nil {
		return nil, err
	}
	return c, nil
}

// Close tells that the agent stops.
func (c *Chain) Close(ctx context.Context) error {
	return c.journal.Update(ctx, true, Event{Kind: AgentStopped}.Op())
}

func (c *Chain) newest() (*Entry, error) {
	end, _ := c.journal.Entries()
	if end == 0 {
		return nil, nil
	}
	var last *Entry
	err := c.journal.ReadEntries(end-1, func(n uint64, b []byte) error {
		e, err := decode(n, b)
		last = &e
		return err
	})
	return last, err
}

func decode(n uint64, b []byte) (Entry, error) {
	e := Entry{Cursor: Cursor(n)}
	if err := json.Unmarshal(b, &e.Event); err != nil {
		return e, fmt.Errorf("reading event %s from the journal: %w", e.Cursor, err)
	}
	return e, nil
}

// Tell adds events that no change of a record comes with. They are not synced.
func (c *Chain) Tell(list ...Event) error {
	return c.journal.Update(context.Background(), false, Ops(list...)...)
}

// Oldest is the cursor from which on every event is kept.
func (c *Chain) Oldest() Cursor { return Cursor(c.floor.Load()) }

// Newest is the cursor of the newest event.
func (c *Chain) Newest() Cursor {
	end, _ := c.journal.Entries()
	return Cursor(end)
}

// Read gives the next events after a cursor, at most batch of them, none at the end; ErrTooOld when some are gone.
func (c *Chain) Read(after Cursor) ([]Entry, error) {
	if end := c.Newest(); after > end {
		return nil, fmt.Errorf("%w: cursor %s is after %s, the newest: the state folder was replaced since; begin without a cursor", ErrAhead, after, end)
	}
	var list []Entry
	err := c.journal.ReadEntries(uint64(after), func(n uint64, b []byte) error {
		e, err := decode(n, b)
		if err != nil {
			return err
		}
		if list = append(list, e); len(list) == batch {
			return journal.ErrStop
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Looked at after reading: an event that was removed meanwhile shows.
	if oldest := c.Oldest(); after < oldest {
		return nil, fmt.Errorf("%w: events after cursor %s are no longer kept (events.keep): the oldest cursor to go on from is %s", ErrTooOld, after, oldest)
	}
	return list, nil
}

// Watch passes on the events after a cursor, 0 for the oldest that is kept, as they come, until ctx ends, or with
// untilNow until the newest one. session, if not empty, is the only one of interest. send may be slow: nothing waits
// for it, and when it falls behind what is kept Watch ends with ErrTooOld.
func (c *Chain) Watch(ctx context.Context, after Cursor, session string, untilNow bool, send func(Entry) error) error {
	fromOldest := after == 0
	end := c.Newest()
	for {
		if fromOldest {
			after = c.Oldest()
		}
		added := c.journal.Appended()
		list, err := c.Read(after)
		if fromOldest && errors.Is(err, ErrTooOld) {
			continue // they went while they were read, and nobody has seen any
		}
		if err != nil {
			return err
		}
		fromOldest = false
		for _, e := range list {
			if untilNow && e.Cursor > end {
				return nil
			}
			if session == "" || session == e.Session {
				if err := send(e); err != nil {
					return err
				}
			}
			after = e.Cursor
		}
		if len(list) > 0 {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			continue
		}
		if untilNow {
			return nil
		}
		select {
		case <-added:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Trim removes old events now and then until ctx ends.
func (c *Chain) Trim(ctx context.Context) {
	tick := time.NewTicker(trimEvery)
	defer tick.Stop()
	for {
		if err := c.trim(ctx); err != nil && ctx.Err() == nil {
			c.log.Warn("old events not removed", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// trim removes what is more than keep, a little at a time.
func (c *Chain) trim(ctx context.Context) error {
	for {
		_, count := c.journal.Entries()
		most := int(min(count-c.keep, trimAtOnce))
		if most <= 0 || ctx.Err() != nil {
			return ctx.Err()
		}
		var ops []journal.Op
		before := c.floor.Load()
		floor := before
		err := c.journal.ReadEntries(before, func(n uint64, _ []byte) error {
			ops, floor = append(ops, journal.Forget(n)), n
			if len(ops) == most {
				return journal.ErrStop
			}
			return nil
		})
		if err != nil {
			return err
		}
		c.floor.Store(floor) // before they go: see Read
		ops = append(ops, journal.Set(floorKey, binary.BigEndian.AppendUint64(nil, floor)))
		if err := c.journal.Update(ctx, false, ops...); err != nil {
			c.floor.Store(before)
			return err
		}
	}
}
