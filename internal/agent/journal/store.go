package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"sync/atomic"
	"syscall"

	crdberrors "github.com/cockroachdb/errors"
	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"
)

// Memory of the store. Its records are small and few (10,000 execs of about 2 KiB by default), and are read back
// mostly at the start.
const (
	cacheBytes    = 1 << 20
	memTableBytes = 1 << 20
	openFiles     = 64
)

// Room that must be left on the file system for a change to be taken. A store that runs out of space in the middle of
// a write is poisoned, so it is refused beforehand; a plain change (an outcome) may go on for a while when a durable one
// (an intent, which lets something start) may not any more. Pebble's log, tables and their rewriting stay well below.
const (
	durableRoom = 32 << 20
	plainRoom   = 16 << 20
)

func openStore(files vfs.FS, dir string, logger *pebbleLogger, readOnly bool) (*pebble.DB, error) {
	cache := pebble.NewCache(cacheBytes)
	defer cache.Unref()
	db, err := pebble.Open(dir, &pebble.Options{
		FS:           files,
		Cache:        cache,
		MemTableSize: memTableBytes,
		MaxOpenFiles: openFiles,
		// From FormatWALSyncChunks on a log says how far it was synced, so that a broken record in its middle is told
		// from its end.
		FormatMajorVersion: pebble.FormatNewest,
		ReadOnly:           readOnly,
		Logger:             logger,
	})
	if err != nil {
		return nil, err
	}
	logger.opened.Store(true)
	return db, nil
}

// prove reads the whole store, without changing it, and compares it with what was promised.
func (j *Journal) prove() (st state, err error) {
	if empty, err := isAbsent(j.files, j.storeDir()); err != nil || empty {
		if err == nil && j.high.seen > 0 {
			err = corrupt(fmt.Errorf("%s is gone, and held %d changes", j.storeDir(), j.high.seen))
		}
		return state{}, err
	}
	// Pebble panics on some damage (open.go, replayWAL).
	defer func() {
		if p := recover(); p != nil {
			err = corrupt(fmt.Errorf("%s: %v", j.storeDir(), p))
		}
	}()
	db, err := openStore(j.files, j.storeDir(), &pebbleLogger{log: j.log, fatal: func(err error) { panic(err) }}, true)
	if err != nil {
		return state{}, damage(err)
	}
	st, err = j.check(db)
	return st, damage(errors.Join(err, db.Close()))
}

// damage makes of whatever stops the reading of a store that is there ErrCorrupt, unless the operating system refused:
// a file that is gone is damage, too.
func damage(err error) error {
	var errno syscall.Errno
	if err == nil || errors.Is(err, ErrCorrupt) || errors.As(err, &errno) && errno != unix.ENOENT {
		return err
	}
	return corrupt(err)
}

func (j *Journal) check(db *pebble.DB) (state, error) {
	written, err := lastState(db)
	if err != nil {
		return state{}, err
	}
	if written.seq < j.high.seen {
		return state{}, corrupt(fmt.Errorf("%s ends with change %d, and change %d was durable (%s)", j.storeDir(), written.seq, j.high.seen, highWaterName))
	}
	it, err := db.NewIter(nil)
	if err != nil {
		return state{}, err
	}
	var found state
	err = each(it, func(key string, value []byte) error {
		found.add(key, value)
		if n, ok := entryNumber(key); ok {
			j.entries.saw(n)
		}
		return nil
	})
	if err := errors.Join(err, it.Error(), it.Close()); err != nil {
		return state{}, err
	}
	if err := written.compare(found); err != nil {
		return state{}, corrupt(fmt.Errorf("%s: %w", j.storeDir(), err))
	}
	return written, nil
}

func lastState(db *pebble.DB) (state, error) {
	b, err := get(db, stateKey)
	if errors.Is(err, ErrNotFound) {
		return state{}, nil
	}
	if err != nil {
		return state{}, err
	}
	st, err := decodeState(b)
	if err != nil {
		return state{}, corrupt(err)
	}
	return st, nil
}

// isAbsent says whether there is no store yet: no folder, or one that Pebble was killed in before it had written a
// manifest.
func isAbsent(files vfs.FS, dir string) (bool, error) {
	names, err := files.List(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	for _, name := range names {
		if strings.HasPrefix(name, "MANIFEST-") || strings.HasSuffix(name, ".sst") {
			return false, nil
		}
	}
	return true, err
}

// room fails with ErrNoSpace when the file system has less than need bytes left for this process.
func room(dir string, need uint64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("asking for the free space of %s: %w", dir, err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < need {
		return fmt.Errorf("%w: the file system of %s has %d MiB left, and %d MiB are needed; free some", ErrNoSpace, dir, free>>20, need>>20)
	}
	return nil
}

// corrupt wraps the description of damage.
func corrupt(err error) error { return fmt.Errorf("%w: %w", ErrCorrupt, err) }

// explain turns what the store and the operating system say into this package's errors, with the remedy.
func explain(err error) error {
	switch {
	case err == nil, errors.Is(err, ErrPoisoned):
		return err
	case errors.Is(err, ErrCorrupt), pebble.IsCorruptionError(err):
		// Pebble names the file in the details, which Error leaves out.
		return fmt.Errorf("%w%s; nothing was changed: restore the folder from a backup, or move it away and look at its sandboxes by hand (their receipts still verify)", asCorrupt(err), details(err))
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: %w; free space on its file system, or raise its quota", ErrNoSpace, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w; run the agent as root and keep its state on a writable file system", err)
	}
	return err
}

func asCorrupt(err error) error {
	if errors.Is(err, ErrCorrupt) {
		return err
	}
	return corrupt(err)
}

func details(err error) string {
	if d := crdberrors.FlattenDetails(err); d != "" {
		return " (" + strings.ReplaceAll(d, "\n", ", ") + ")"
	}
	return ""
}

// pebbleLogger is what Pebble tells. It expects that Fatalf does not return.
type pebbleLogger struct {
	log    *slog.Logger
	fatal  func(error)
	opened atomic.Bool
}

func (l *pebbleLogger) Infof(format string, args ...any) {
	l.log.Debug(fmt.Sprintf(format, args...), "part", "journal")
}

func (l *pebbleLogger) Errorf(format string, args ...any) {
	l.log.Error(fmt.Sprintf(format, args...), "part", "journal")
}

// Fatalf is called when a write or sync failed for good, by Pebble's default with os.Exit. Before the store is open it
// becomes Open's error. After that the journal is poisoned and the calling goroutine of the store stands still, with
// whatever it holds: nothing is written any more, and reads go on.
func (l *pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	if !l.opened.Load() {
		panic(err)
	}
	l.fatal(err)
	select {}
}

var _ pebble.Logger = (*pebbleLogger)(nil)
