package journal

import (
	"errors"
	"fmt"

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
func (j *Journal) commitLoop(st state) {
	defer close(j.stopped)
	for first := range j.queue {
		group := j.gather(first)
		if err := j.commit(&st, group); err != nil {
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
func (j *Journal) commit(st *state, group []*update) (err error) {
	// Pebble panics when its log can't be written (db.go, commitWrite).
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("writing: %v", p)
		}
	}()
	b := j.db.NewIndexedBatch()
	defer b.Close()
	durable := false
	for _, u := range group {
		durable = durable || u.durable
		for _, op := range u.ops {
			if err := apply(b, st, op); err != nil {
				return err
			}
		}
	}
	st.seq++
	if err := b.Set([]byte(stateKey), st.encode(), nil); err != nil {
		return err
	}
	if err := b.Commit(&pebble.WriteOptions{Sync: durable}); err != nil {
		return err
	}
	if durable {
		return j.high.note(st.seq)
	}
	return nil
}

// apply adds one change to the batch and carries the checksum on: what the record was goes out, what it is comes in.
// An indexed batch reads its own changes.
func apply(b *pebble.Batch, st *state, op Op) error {
	old, closer, err := b.Get([]byte(op.key))
	switch {
	case err == nil:
		st.remove(op.key, old)
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
