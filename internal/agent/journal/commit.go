package journal

import (
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// maxGroup is how many Updates share one sync at most.
const maxGroup = 64

// update is one Update under way.
type update struct {
	ops     []Op
	durable bool
	done    chan error
}

// commitLoop is the only writer: that puts the batches, their sequence numbers and the running checksum in one order.
// run is the number of this Open's run of entries.
func (j *Journal) commitLoop(st state, run uint64) {
	defer close(j.stopped)
	for first := range j.queue {
		group := j.gather(first)
		if err := j.commit(&st, run, group); err != nil {
			j.fail(err)
			return
		}
		for _, u := range group {
			u.done <- nil
		}
	}
}

// gather takes what is waiting, without waiting itself.
func (j *Journal) gather(first *update) []*update {
	group := []*update{first}
	for len(group) < maxGroup {
		select {
		case u, ok := <-j.queue:
			if !ok {
				return group
			}
			group = append(group, u)
		default:
			return group
		}
	}
	return group
}

// commit writes a group as one batch.
func (j *Journal) commit(st *state, run uint64, group []*update) (err error) {
	// Pebble panics when its log can't be written (db.go, commitWrite).
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("writing: %v", p)
		}
	}()
	b := j.db.NewIndexedBatch()
	defer b.Close()
	durable := false
	last, count := j.Entries()
	num := numbering{last: last, count: count, run: run}
	for _, u := range group {
		durable = durable || u.durable
		for _, op := range u.ops {
			if err := apply(b, st, &num, op); err != nil {
				return err
			}
		}
	}
	durable = durable || num.begun
	st.seq++
	if err := b.Set([]byte(stateKey), st.encode(), nil); err != nil {
		return err
	}
	began := time.Now()
	if err := b.Commit(&pebble.WriteOptions{Sync: durable}); err != nil {
		return err
	}
	if durable {
		if err := j.high.note(st.seq); err != nil {
			return err
		}
		if f := j.synced.Load(); f != nil {
			(*f)(time.Since(began))
		}
	}
	j.entries.published(num.last, num.count)
	return nil
}

// apply adds one change to the batch and carries the checksum on: what the record was goes out, what it is comes in.
// An indexed batch reads its own changes.
func apply(b *pebble.Batch, st *state, num *numbering, op Op) error {
	if op.entry == addEntry {
		key := entryKey(num.next()) // no record has it yet
		st.add(key, op.value)
		return b.Set([]byte(key), op.value, nil)
	}
	old, closer, err := b.Get([]byte(op.key))
	switch {
	case err == nil:
		st.remove(op.key, old)
		if op.entry == forgetEntry {
			num.count--
		}
		if err := closer.Close(); err != nil {
			return err
		}
	case !errors.Is(err, pebble.ErrNotFound):
		return err
	}
	if op.delete {
		return b.Delete([]byte(op.key), nil)
	}
	st.add(op.key, op.value)
	return b.Set([]byte(op.key), op.value, nil)
}

// fail poisons the journal; the first cause is the one that is told.
func (j *Journal) fail(cause error) {
	j.poisonMu.Lock()
	defer j.poisonMu.Unlock()
	if j.cause != nil {
		return
	}
	j.cause = fmt.Errorf("%w: %w; look at the disk and its free space, then restart the agent: it recovers from what is on disk", ErrPoisoned, explain(cause))
	j.log.Error("the journal has failed", "dir", j.dir, "error", cause)
	close(j.poison)
}

// poisoned is nil until the journal failed.
func (j *Journal) poisoned() error {
	j.poisonMu.Lock()
	defer j.poisonMu.Unlock()
	return j.cause
}
