package journal

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2"
)

// Beside its records, a journal has entries: values that are only ever added, each under a number that the journal
// gives, in the order in which the changes are made. Numbers rise strictly over the life of the folder. A crash may
// take the newest entries with it, whose numbers somebody has seen; so each Open that adds any begins a new run, the
// upper bits of the number, and the first entry of a run is on disk before its number is told.
const (
	runShift    = 40
	entryPrefix = "\x00entry/"
)

func entryKey(n uint64) string { return fmt.Sprintf("%s%016x", entryPrefix, n) }

func entryNumber(key string) (uint64, bool) {
	text, ok := strings.CutPrefix(key, entryPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(text, 16, 64)
	return n, err == nil
}

// Append adds an entry. The slice must not be changed before Update returns.
func Append(value []byte) Op { return Op{value: value, entry: addEntry} }

// Forget removes the entry of a number, if it is there. Who forgets the newest one breaks the rising of the numbers.
func Forget(n uint64) Op { return Op{key: entryKey(n), delete: true, entry: forgetEntry} }

type entryOp byte

const (
	noEntry entryOp = iota
	addEntry
	forgetEntry
)

// entries is what is known of a journal's entries. Only the committer changes it.
type entries struct {
	mu      sync.Mutex
	last    uint64 // the newest one whose Update was carried out, and synced if it was durable
	count   int64
	changed chan struct{}
}

// saw counts an entry that is found at Open.
func (e *entries) saw(n uint64) {
	e.count++
	e.last = max(e.last, n)
}

func (e *entries) published(last uint64, count int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	added := last != e.last
	e.last, e.count = last, count
	if added && e.changed != nil {
		close(e.changed)
		e.changed = nil
	}
}

// numbering gives the numbers of one group of changes.
type numbering struct {
	last  uint64
	count int64
	run   uint64 // of this Open
	begun bool   // an entry of this group is the first one of its run
}

func (n *numbering) next() uint64 {
	if n.last>>runShift < n.run {
		n.last, n.begun = n.run<<runShift, true
	} else {
		n.last++
	}
	n.count++
	return n.last
}

// Entries says which entry is the newest, 0 for none, and how many there are.
func (j *Journal) Entries() (last uint64, count int64) {
	j.entries.mu.Lock()
	defer j.entries.mu.Unlock()
	return j.entries.last, j.entries.count
}

// Appended gives a channel that is closed when the next entry was added. Ask for it before reading.
func (j *Journal) Appended() <-chan struct{} {
	j.entries.mu.Lock()
	defer j.entries.mu.Unlock()
	if j.entries.changed == nil {
		j.entries.changed = make(chan struct{})
	}
	return j.entries.changed
}

// ReadEntries calls fn for the entries with greater numbers than after, in their order, as far as Entries says. fn may
// keep the value. ErrStop ends it without an error.
func (j *Journal) ReadEntries(after uint64, fn func(n uint64, value []byte) error) error {
	last, _ := j.Entries()
	if after >= last {
		return nil
	}
	done, err := j.use()
	if err != nil {
		return err
	}
	defer done()
	it, err := j.db.NewIter(&pebble.IterOptions{LowerBound: []byte(entryKey(after) + "\x00"), UpperBound: []byte(entryKey(last) + "\x00")})
	if err != nil {
		return fmt.Errorf("reading the journal %s: %w", j.dir, explain(err))
	}
	fnErr := each(it, func(key string, value []byte) error {
		n, ok := entryNumber(key)
		if !ok {
			return nil
		}
		return fn(n, value)
	})
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		return fmt.Errorf("reading the journal %s: %w", j.dir, explain(err))
	}
	if errors.Is(fnErr, ErrStop) {
		return nil
	}
	return fnErr
}
