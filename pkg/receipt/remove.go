package receipt

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// RemovedName is the file in a sandbox's receipts folder that says which receipts were removed on purpose. It has no
// ending that an exec's file has.
const RemovedName = "removed"

const (
	removedTemporary = RemovedName + spareMark
	maxRemovedFile   = 4096
)

// Removed is the beginning of a chain that was removed on purpose: receipts 1 to Sequence.
type Removed struct {
	Sequence uint64 `json:"sequence"`
	// SHA256 (lower-case hex) is of the envelope of receipt Sequence: the next one, which is signed, names it too.
	SHA256 string    `json:"sha256"`
	At     time.Time `json:"at"` // of the newest removal
}

// ReadRemoved gives what was removed on purpose of the receipts in dir; zero: nothing. It fails with ErrMalformed.
func ReadRemoved(dir string) (Removed, error) {
	fd, err := openDir(dir)
	if err != nil {
		return Removed{}, err
	}
	defer unix.Close(fd)
	return readRemoved(fd, dir)
}

func readRemoved(dirFD int, dir string) (Removed, error) {
	b, err := readAt(dirFD, dir, RemovedName, maxRemovedFile)
	if errors.Is(err, ErrNotFound) {
		return Removed{}, nil
	}
	if err != nil {
		return Removed{}, err
	}
	var r Removed
	if err := json.Unmarshal(b, &r); err != nil || r.Sequence == 0 || len(r.SHA256) != 64 {
		return Removed{}, fmt.Errorf("reading %s/%s: %w: it names no receipt (%v)", dir, RemovedName, ErrMalformed, err)
	}
	return r, nil
}

// Remove removes the receipts and the kept output of execs, given in the order of their chain, from its beginning on. What
// was removed is recorded first (RemovedName), durably, so that after a crash at any point the chain verifies; the same
// call again completes it. It may be called while a Store writes to the folder. Files that are gone already are no error.
func Remove(dir string, execIDs []string, at time.Time) error {
	for _, id := range execIDs {
		if err := CheckExecID(id); err != nil {
			return fmt.Errorf("removing receipts in %s: %w", dir, err)
		}
	}
	fd, err := openDir(dir)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := recordRemoval(fd, dir, execIDs, at); err != nil {
		return err
	}
	for _, id := range execIDs {
		// The receipt first: a receipt without its output would not verify, output without a receipt is debris.
		for _, name := range []string{FileName(id), StdoutName(id), StderrName(id)} {
			if err := unix.Unlinkat(fd, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("removing %s/%s: %w", dir, name, err)
			}
		}
	}
	if err := fsync(fd); err != nil {
		return fmt.Errorf("making the removal in %s durable: %w", dir, err)
	}
	return nil
}

// recordRemoval moves the recorded end of what was removed to the newest of the execs that still has its receipt.
func recordRemoval(dirFD int, dir string, execIDs []string, at time.Time) error {
	before, err := readRemoved(dirFD, dir)
	if err != nil {
		return err
	}
	now := before
	for _, id := range execIDs {
		b, err := readAt(dirFD, dir, FileName(id), MaxEnvelope)
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		e, err := Parse(b)
		if err != nil {
			continue // no link of the chain: verification says so as long as it is there
		}
		if e.Predicate.Sequence > now.Sequence {
			now = Removed{Sequence: e.Predicate.Sequence, SHA256: hexSHA256(b), At: at.UTC()}
		}
	}
	if now == before {
		return nil
	}
	if err := writeRemoved(dirFD, now); err != nil {
		return fmt.Errorf("recording in %s what is removed: %w", dir, err)
	}
	return nil
}

func writeRemoved(dirFD int, r Removed) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	var fd int
	err = retry(func() (err error) {
		fd, err = unix.Openat(dirFD, removedTemporary, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	err = writeAll(fd, b, 0)
	if err == nil {
		err = fsync(fd)
	}
	if err = errors.Join(err, unix.Close(fd)); err != nil {
		return err
	}
	if err := retry(func() error { return unix.Renameat(dirFD, removedTemporary, dirFD, RemovedName) }); err != nil {
		return err
	}
	return fsync(dirFD)
}
