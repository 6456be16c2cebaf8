package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

const (
	sweepEvery = time.Hour
	// sweepBatch is how many records are expired in one change of the journal.
	sweepBatch = 256
	// sweepSlack is the share of retention.execs that may be there beyond it, so that not each command has them counted.
	sweepSlack = 16
)

// err is the answer for an exec of which only the digest is left.
func (r *expiredRecord) err(id string) error {
	return fmt.Errorf("%w: exec %q has expired: it ended at %s, and its record and receipt were removed at %s (retention.execs, retention.age); it is not run again: choose a new id",
		ErrPrecondition, id, r.EndedAt.UTC().Format(time.RFC3339), r.ExpiredAt.UTC().Format(time.RFC3339))
}

// expired is what is left of an exec that retention took, nil if it took none of this id.
func (s *session) expired(id string) (*expiredRecord, error) {
	b, err := s.agent.journal.Get(expiredKey(s.id, id))
	if errors.Is(err, journal.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking up exec %q: %w", id, err)
	}
	r := &expiredRecord{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%w: what is left of exec %q can't be read: %w", ErrDataLoss, id, err)
	}
	return r, nil
}

// expiredExec is the record of an exec that has none any more; ErrNotFound: it never had one.
func (s *session) expiredExec(id string) (*execRecord, error) {
	gone, err := s.expired(id)
	if err != nil {
		return nil, err
	}
	if gone == nil {
		return nil, fmt.Errorf("%w: session %s has no exec %q", ErrNotFound, s.id, id)
	}
	return &execRecord{Intent: intentRecord{ExecID: id, SessionID: s.id, RequestDigest: gone.RequestDigest}, EndedAt: gone.EndedAt, expired: gone}, nil
}

// counted counts an outcome that was just recorded, and has the session swept when there are too many.
func (s *session) counted() {
	s.mu.Lock()
	s.recorded++
	s.kept++
	over := s.kept > s.agent.cfg.Retention.Execs+s.agent.cfg.Retention.Execs/sweepSlack
	s.mu.Unlock()
	if !over {
		return
	}
	select {
	case s.agent.sweepNow <- struct{}{}:
	default: // one is waiting already
	}
}

// keepRetention applies retention at the start, each hour, and when a session has too many records.
func (a *Agent) keepRetention() {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	if err := a.clearForgotten(); err != nil {
		a.log.Error("exec records of deleted sessions not cleared", "error", err)
	}
	a.sweepRecords(true)
	for {
		select {
		case <-tick.C:
			a.sweepRecords(true)
		case <-a.sweepNow:
			a.sweepRecords(false)
		case <-a.closing:
			return
		}
	}
}

// clearForgotten clears the exec records of deleted sessions: an agent that was killed between the two steps of a deletion
// leaves them.
func (a *Agent) clearForgotten() error {
	for _, prefix := range []string{execPrefix, expiredPrefix, sweptPrefix} {
		for session, err := a.sessionAfter(prefix, ""); err != nil || session != ""; session, err = a.sessionAfter(prefix, session) {
			if err != nil {
				return err
			}
			gone, err := a.tomb(session)
			if err == nil && gone != nil {
				err = a.clearExecs(session)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// sessionAfter is the next session that has keys with the prefix; empty at the end.
func (a *Agent) sessionAfter(prefix, session string) (next string, err error) {
	after := ""
	if session != "" {
		after = prefix + session + "0" // "0" is the character after "/": no key of the session follows
	}
	err = a.journal.Scan(prefix, after, func(key string, _ []byte) error {
		next, _, _ = strings.Cut(strings.TrimPrefix(key, prefix), "/")
		return journal.ErrStop
	})
	return next, err
}

// sweepRecords applies retention to every session; without all, to those that have too many records.
func (a *Agent) sweepRecords(all bool) {
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	for _, s := range sessions {
		if a.isClosing() {
			return
		}
		s.mu.Lock()
		due := all || s.kept > a.cfg.Retention.Execs
		s.mu.Unlock()
		if !due {
			continue
		}
		if err := s.sweep(a.clock.cautious()); err != nil {
			s.log.Error("old exec records not removed", "error", err)
		}
	}
}

// endedExec is an exec as retention sees it.
type endedExec struct {
	id, digest, sandbox  string
	generation, sequence uint64
	at                   time.Time
}

// sweep removes what is beyond the count or older than the age, and the files of what was removed before.
func (s *session) sweep(now time.Time) error {
	s.sweepMu.Lock()
	defer s.sweepMu.Unlock()
	s.mu.Lock()
	mark := s.recorded
	s.mu.Unlock()
	list, err := s.endedExecs()
	if err != nil {
		return err
	}
	limits := s.agent.cfg.Retention
	old := toExpire(list, int(limits.Execs), now.Add(-limits.Age.Std()))
	for batch := range slices.Chunk(old, sweepBatch) {
		if s.agent.isClosing() {
			return nil
		}
		if err := s.expireRecords(batch, now); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.kept = int64(len(list)-len(old)) + s.recorded - mark
	s.mu.Unlock()
	if len(old) > 0 {
		s.log.Info("exec records expired", "count", len(old), "kept", len(list)-len(old))
	}
	return s.removeSwept(now)
}

func (s *session) endedExecs() ([]endedExec, error) {
	var list []endedExec
	err := s.agent.journal.Scan(execKey(s.id, ""), "", func(key string, value []byte) error {
		var rec execRecord
		if err := json.Unmarshal(value, &rec); err != nil {
			return fmt.Errorf("%w: reading %s from the journal: %w", ErrDataLoss, key, err)
		}
		if rec.Outcome != nil {
			list = append(list, endedExec{
				id: rec.Intent.ExecID, digest: rec.Intent.RequestDigest, sandbox: rec.Intent.SandboxID,
				generation: rec.Intent.Generation, sequence: rec.Sequence, at: rec.EndedAt,
			})
		}
		return nil
	})
	return list, err
}

// toExpire says which execs go, the oldest first: those beyond count, and those that ended before the time given. Of each
// sandbox's receipts only the first ones go, whatever the clock did meanwhile: the rest of the chain verifies.
func toExpire(list []endedExec, count int, before time.Time) []endedExec {
	chained, loose := split(list)
	slices.SortFunc(chained, func(a, b endedExec) int {
		return cmp.Or(cmp.Compare(a.generation, b.generation), cmp.Compare(a.sequence, b.sequence))
	})
	// A receipt is no older than the ones that follow it.
	for i := len(chained) - 2; i >= 0; i-- {
		if chained[i+1].at.Before(chained[i].at) {
			chained[i].at = chained[i+1].at
		}
	}
	ordered := append(chained, loose...)
	slices.SortStableFunc(ordered, func(a, b endedExec) int { return a.at.Compare(b.at) })
	n := max(len(ordered)-count, 0)
	for n < len(ordered) && ordered[n].at.Before(before) {
		n++
	}
	return ordered[:n]
}

// split keeps those with a receipt apart from those without.
func split(list []endedExec) (chained, loose []endedExec) {
	for _, e := range list {
		if e.sequence > 0 {
			chained = append(chained, e)
		} else {
			loose = append(loose, e)
		}
	}
	return chained, loose
}

// expireRecords leaves the digests of execs in place of their records, durably, before a file of theirs is touched: an
// answer is whole or expired.
func (s *session) expireRecords(batch []endedExec, now time.Time) error {
	var ops []journal.Op
	for _, e := range batch {
		ops = append(ops, journal.Delete(execKey(s.id, e.id)),
			journal.Set(expiredKey(s.id, e.id), encode(expiredRecord{RequestDigest: e.digest, EndedAt: e.at, ExpiredAt: now.UTC()})))
		if e.sandbox != "" {
			ops = append(ops, journal.Set(sweptKey(s.id, e.id), encode(sweptRecord{Sandbox: e.sandbox, Sequence: e.sequence})))
		}
	}
	// Against forget, which leaves nothing of a session behind.
	s.saveMu.Lock()
	defer s.saveMu.Unlock()
	if s.state() == Deleted {
		return nil
	}
	if err := s.agent.journal.Update(context.Background(), true, ops...); err != nil {
		return fmt.Errorf("expiring %d exec records of session %s: %w", len(batch), s.id, err)
	}
	point("expire.recorded")
	return nil
}

// sweptRecord is where the files of an expired exec are.
type sweptRecord struct {
	Sandbox  string `json:"sandbox"`
	Sequence uint64 `json:"sequence,omitempty"`
}

// removeSwept removes the receipts and the kept output of expired execs, also those that a crash left.
func (s *session) removeSwept(now time.Time) error {
	type file struct {
		id       string
		sequence uint64
	}
	files := map[string][]file{}
	var done []journal.Op
	err := s.agent.journal.Scan(sweptKey(s.id, ""), "", func(key string, value []byte) error {
		var rec sweptRecord
		if err := json.Unmarshal(value, &rec); err != nil {
			return fmt.Errorf("%w: reading %s from the journal: %w", ErrDataLoss, key, err)
		}
		files[rec.Sandbox] = append(files[rec.Sandbox], file{strings.TrimPrefix(key, sweptKey(s.id, "")), rec.Sequence})
		done = append(done, journal.Delete(key))
		return nil
	})
	if err != nil || len(done) == 0 {
		return err
	}
	for sandbox, list := range files {
		slices.SortFunc(list, func(a, b file) int { return cmp.Compare(a.sequence, b.sequence) })
		var ids []string
		for _, f := range list {
			ids = append(ids, f.id)
		}
		if err := receipt.Remove(s.agent.receiptsDir(sandbox), ids, now); err != nil {
			return fmt.Errorf("removing the receipts of expired execs: %w", err)
		}
	}
	point("expire.removed")
	for batch := range slices.Chunk(done, sweepBatch) {
		if err := s.agent.journal.Update(context.Background(), false, batch...); err != nil {
			return fmt.Errorf("recording that the receipts of expired execs are removed: %w", err)
		}
	}
	return nil
}
