package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Bounds of a record, bytes.
const (
	MaxKey   = 1024
	MaxValue = 4 << 20
)

// Names in the journal's folder.
const (
	lockName      = "lock"
	highWaterName = "high-water"
	storeName     = "store"
)

// Op is one change: Set or Delete, Append or Forget.
type Op struct {
	key    string
	value  []byte
	delete bool
	entry  entryOp
}

// Set writes a record; value may be empty. The slice must not be changed before Update returns.
func Set(key string, value []byte) Op { return Op{key: key, value: value} }

// Delete removes a record, if it is there.
func Delete(key string) Op { return Op{key: key, delete: true} }

// Journal is an open journal. Its methods may be called at the same time.
type Journal struct {
	dir   string
	files vfs.FS // the store's
	log   *slog.Logger
	lock  *os.File
	high  *highWater
	db    *pebble.DB

	entries entries
	queue   chan *update
	stopped chan struct{} // the committer has ended

	closing sync.RWMutex // held for reading while the store is in use
	closed  bool

	synced   atomic.Pointer[func(time.Duration)] // told of each durable write; nil: nobody is
	poison   chan struct{}                       // closed with the first failure
	poisonMu sync.Mutex
	cause    error
}

// Open opens the journal in a folder, which is made if it is absent, and proves that everything that was ever durable
// is there. Nothing in the folder is changed before that. It fails with ErrLocked, ErrCorrupt, ErrNoSpace, or the
// operating system's error (fs.ErrPermission).
func Open(dir string, log *slog.Logger) (*Journal, error) { return openOn(vfs.Default, dir, log) }

// openOn opens a journal whose store lies in files. Everything else of it is always on the real file system.
func openOn(files vfs.FS, dir string, log *slog.Logger) (*Journal, error) {
	j, err := open(files, dir, log)
	if err != nil {
		return nil, fmt.Errorf("opening the journal %s: %w", dir, explain(err))
	}
	return j, nil
}

func open(files vfs.FS, dir string, log *slog.Logger) (_ *Journal, err error) {
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	j := &Journal{dir: dir, files: files, log: log, queue: make(chan *update, maxGroup), stopped: make(chan struct{}), poison: make(chan struct{})}
	defer func() {
		if err != nil {
			_ = j.release()
		}
	}()
	if j.lock, err = lock(filepath.Join(dir, lockName)); err != nil {
		return nil, err
	}
	if j.high, err = openHighWater(filepath.Join(dir, highWaterName)); err != nil {
		return nil, err
	}
	st, err := j.prove()
	if err != nil {
		return nil, err
	}
	if err := room(dir, durableRoom); err != nil {
		return nil, err
	}
	if j.db, err = openStore(j.files, j.storeDir(), &pebbleLogger{log: log, fatal: j.fail}, false); err != nil {
		return nil, err
	}
	go j.commitLoop(st, j.entries.last>>runShift+1)
	return j, nil
}

func (j *Journal) storeDir() string { return filepath.Join(j.dir, storeName) }

func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	parent, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return err
	}
	return errors.Join(parent.Sync(), parent.Close())
}

// OnSync has f told how long each durable write took, from the committer: f must not block.
func (j *Journal) OnSync(f func(time.Duration)) { j.synced.Store(&f) }

// Failed is why the journal takes no more changes, wrapping ErrPoisoned; nil while it does.
func (j *Journal) Failed() error { return j.poisoned() }

// Get gives a record's value; ErrNotFound if there is none.
func (j *Journal) Get(key string) ([]byte, error) {
	done, err := j.use()
	if err != nil {
		return nil, err
	}
	defer done()
	v, err := get(j.db, key)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, fmt.Errorf("reading %q from the journal %s: %w", key, j.dir, explain(err))
	}
	return v, err
}

func get(db *pebble.DB, key string) ([]byte, error) {
	v, closer, err := db.Get([]byte(key))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, fmt.Errorf("%q: %w", key, ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	defer closer.Close()
	return bytes.Clone(v), nil
}

// Scan calls fn for each record whose key begins with prefix and is greater than after (give the last key of a page,
// or ""), in ascending order of bytes, as they were when Scan was called. fn may keep the value. Its error ends the
// scan and is returned as it is; ErrStop ends it without one.
func (j *Journal) Scan(prefix, after string, fn func(key string, value []byte) error) error {
	done, err := j.use()
	if err != nil {
		return err
	}
	defer done()
	it, err := j.db.NewIter(bounds(prefix, after))
	if err != nil {
		return fmt.Errorf("reading the journal %s: %w", j.dir, explain(err))
	}
	fnErr := each(it, fn)
	if err := errors.Join(it.Error(), it.Close()); err != nil {
		return fmt.Errorf("reading the journal %s: %w", j.dir, explain(err))
	}
	if errors.Is(fnErr, ErrStop) {
		return nil
	}
	return fnErr
}

func each(it *pebble.Iterator, fn func(key string, value []byte) error) error {
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return explain(err)
		}
		if key := string(it.Key()); key != stateKey {
			if err := fn(key, bytes.Clone(v)); err != nil {
				return err
			}
		}
	}
	return nil
}

// bounds are those of the keys that begin with prefix and are greater than after.
func bounds(prefix, after string) *pebble.IterOptions {
	o := &pebble.IterOptions{LowerBound: []byte(prefix), UpperBound: successor(prefix)}
	if prefix == "" {
		o.LowerBound = []byte{1} // what begins with NUL is the journal's own
	}
	if after >= prefix && after != "" {
		o.LowerBound = append([]byte(after), 0)
	}
	return o
}

// successor is the least key that is greater than all that begin with prefix; nil if there is none.
func successor(prefix string) []byte {
	b := []byte(prefix)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i] < 0xff {
			b[i]++
			return b[:i+1]
		}
	}
	return nil
}

// Update makes all changes or none. With durable they are on disk when it returns; without, they survive a crash only
// once a later durable one returned. Updates that wait at the same time share one sync. A later Update sees the changes
// of those that returned before it; Get sees them at once.
//
// It fails with ErrBadKey, ErrNoSpace and ErrClosed, having changed nothing, and with ErrPoisoned from the first failed
// write on. When ctx ends first, its error is returned and the changes may still be made.
func (j *Journal) Update(ctx context.Context, durable bool, ops ...Op) error {
	if err := checkOps(ops); err != nil {
		return fmt.Errorf("changing the journal %s: %w", j.dir, err)
	}
	u := &update{ops: ops, durable: durable, done: make(chan error, 1)}
	if err := j.submit(ctx, u); err != nil {
		return fmt.Errorf("changing the journal %s: %w", j.dir, err)
	}
	return nil
}

func (j *Journal) submit(ctx context.Context, u *update) error {
	done, err := j.use()
	if err != nil {
		return err
	}
	defer done()
	need := uint64(plainRoom)
	if u.durable {
		need = durableRoom
	}
	if err := room(j.dir, need); err != nil {
		return err
	}
	select {
	case <-j.poison:
		return j.poisoned()
	default:
	}
	select {
	case j.queue <- u:
	case <-j.poison:
		return j.poisoned()
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-u.done:
		return err
	case <-j.poison:
		return j.poisoned()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func checkOps(ops []Op) error {
	for _, op := range ops {
		switch {
		case op.entry == noEntry && (op.key == "" || op.key[0] == 0):
			return fmt.Errorf("%w: key %q is empty or begins with NUL", ErrBadKey, op.key)
		case len(op.key) > MaxKey:
			return fmt.Errorf("%w: a key of %d bytes; at most %d", ErrBadKey, len(op.key), MaxKey)
		case len(op.value) > MaxValue:
			return fmt.Errorf("%w: key %q: a value of %d bytes; at most %d", ErrBadKey, op.key, len(op.value), MaxValue)
		}
	}
	return nil
}

// use keeps the store open until the returned function is called.
func (j *Journal) use() (func(), error) {
	j.closing.RLock()
	if j.closed {
		j.closing.RUnlock()
		return nil, ErrClosed
	}
	return j.closing.RUnlock, nil
}

// Close waits for what is under way, makes everything durable and releases the folder.
func (j *Journal) Close() error {
	j.closing.Lock()
	defer j.closing.Unlock()
	if j.closed {
		return nil
	}
	j.closed = true
	close(j.queue)
	select {
	case <-j.stopped:
	case <-j.poison:
	}
	return j.release()
}

// release lets go of everything, in the order in which it can't be taken by another before it is free.
func (j *Journal) release() error {
	var errs []error
	if j.db != nil && j.poisoned() == nil {
		errs = append(errs, j.db.Close())
	}
	// A poisoned store can't be closed: a goroutine of it stands still, perhaps with its locks (pebbleLogger).
	if j.high != nil {
		errs = append(errs, j.high.f.Close())
	}
	if j.lock != nil {
		errs = append(errs, j.lock.Close())
	}
	return errors.Join(errs...)
}
