package receipt

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Stream is one of a command's two outputs.
type Stream int

const (
	Stdout Stream = iota + 1
	Stderr
)

func (s Stream) String() string {
	if s == Stderr {
		return "stderr"
	}
	return "stdout"
}

func (s Stream) name(execID string) string {
	if s == Stderr {
		return StderrName(execID)
	}
	return StdoutName(execID)
}

// Of is the stream's description in p.
func (s Stream) Of(p *Predicate) Output {
	if s == Stderr {
		return p.Stderr
	}
	return p.Stdout
}

// Read gives the bytes of an exec's receipt in a sandbox's receipts folder; they are NOT verified (package verify). It
// follows no link, takes a regular file of at most MaxEnvelope bytes and nothing else, and can't be made to wait. It
// fails with ErrExecID, ErrNotFound, ErrTooLarge or ErrMalformed.
func Read(dir, execID string) ([]byte, error) {
	if err := CheckExecID(execID); err != nil {
		return nil, fmt.Errorf("reading a receipt in %s: %w", dir, err)
	}
	fd, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAt(fd, dir, FileName(execID), MaxEnvelope)
}

// ReadKept gives the kept part of one stream, which must be what p, a VERIFIED receipt, says: size and SHA-256. It is
// empty when nothing was kept. It fails with ErrOutput and as Read does.
func ReadKept(dir string, p *Predicate, s Stream) ([]byte, error) {
	if err := CheckExecID(p.ExecID); err != nil {
		return nil, fmt.Errorf("reading the %s in %s: %w", s, dir, err)
	}
	fd, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readKept(fd, dir, p, s)
}

func readKept(dirFD int, dir string, p *Predicate, s Stream) ([]byte, error) {
	want, name := s.Of(p), s.name(p.ExecID)
	if want.KeptBytes > MaxKept {
		return nil, fmt.Errorf("reading %s/%s: %d bytes: %w: at most %d", dir, name, want.KeptBytes, ErrTooLarge, MaxKept)
	}
	b, err := readAt(dirFD, dir, name, int64(want.KeptBytes))
	switch {
	case errors.Is(err, ErrNotFound) && want.KeptBytes == 0:
		return nil, nil
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrTooLarge):
		return nil, fmt.Errorf("%w: its receipt says %d bytes: %w", ErrOutput, want.KeptBytes, err)
	case err != nil:
		return nil, err
	case uint64(len(b)) != want.KeptBytes || hexSHA256(b) != want.KeptSHA256:
		return nil, fmt.Errorf("%w: %s/%s has %d bytes and SHA-256 %s, its receipt says %d and %s", ErrOutput, dir, name, len(b), hexSHA256(b), want.KeptBytes, want.KeptSHA256)
	case want.KeptBytes == 0:
		return nil, fmt.Errorf("%w: %s/%s is there, its receipt says that nothing was kept", ErrOutput, dir, name)
	}
	return b, nil
}

// Sync makes what Read found durable. A receipt that is read before its Commit was seen to return (after a crash of
// the agent) may not be on disk yet: sync it before anyone is answered from it.
func Sync(dir, execID string) error {
	if err := CheckExecID(execID); err != nil {
		return fmt.Errorf("syncing a receipt in %s: %w", dir, err)
	}
	dirFD, err := openDir(dir)
	if err != nil {
		return err
	}
	defer unix.Close(dirFD)
	for _, name := range []string{StdoutName(execID), StderrName(execID), FileName(execID)} {
		if err := syncAt(dirFD, name); err != nil {
			return fmt.Errorf("syncing %s/%s: %w", dir, name, err)
		}
	}
	if err := fsync(dirFD); err != nil {
		return fmt.Errorf("syncing %s: %w", dir, err)
	}
	return nil
}

func syncAt(dirFD int, name string) error {
	fd, err := openRegular(dirFD, name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return fsync(fd)
}

// List gives the exec ids that have a receipt in the folder, sorted.
func List(dir string) ([]string, error) {
	fd, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	names, err := readNames(fd, dir)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, name := range names {
		if id, ok := ExecIDOf(name); ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// readNames lists a folder by its descriptor, which stays usable.
func readNames(dirFD int, dir string) ([]string, error) {
	// A descriptor of its own, since the position in a folder is shared between duplicates.
	fd, err := unix.Openat(dirFD, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", dir, err)
	}
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", dir, err)
	}
	return names, nil
}

// openRegular opens a file for reading without following a link in its last step, without waiting for a fifo's
// other end, and checks on the descriptor what it has got.
func openRegular(dirFD int, name string) (fd int, err error) {
	err = retry(func() error {
		fd, err = unix.Openat(dirFD, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return err
	})
	if errors.Is(err, unix.ELOOP) {
		return -1, fmt.Errorf("%w: it is a symbolic link", ErrMalformed)
	}
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = fmt.Errorf("%w: it is not a regular file (mode %#o)", ErrMalformed, st.Mode)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// readAt reads a whole regular file of at most limit bytes.
func readAt(dirFD int, dir, name string, limit int64) ([]byte, error) {
	fd, err := openRegular(dirFD, name)
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("reading %s/%s: %w", dir, name, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s/%s: %w", dir, name, err)
	}
	defer unix.Close(fd)
	b, err := readBounded(fd, limit)
	if err != nil {
		return nil, fmt.Errorf("reading %s/%s: %w", dir, name, err)
	}
	return b, nil
}

// readBounded reads to the end, whatever the size was said to be: the file may have been changed since.
func readBounded(fd int, limit int64) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Size > limit {
		return nil, fmt.Errorf("%d bytes: %w: at most %d", st.Size, ErrTooLarge, limit)
	}
	b := make([]byte, st.Size+1)
	got := 0
	for got < len(b) {
		n := 0
		err := retry(func() (err error) {
			n, err = unix.Pread(fd, b[got:], int64(got))
			return err
		})
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return b[:got], nil
		}
		got += n
	}
	return nil, fmt.Errorf("%w: it grew while it was read", ErrMalformed)
}
