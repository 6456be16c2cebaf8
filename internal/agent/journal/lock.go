package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lock takes the folder for this process, until the file is closed or the process ends: flock(2) belongs to the open
// file, so that nothing stale is left by a kill. The file holds the pid of the last one who had it.
func lock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder := holderOf(f)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w by another sandbox-agent%s; stop that one, or give this one another state folder", ErrLocked, holder)
		}
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	pid := strconv.Itoa(os.Getpid()) + "\n"
	if _, err := f.WriteAt([]byte(pid), 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := f.Truncate(int64(len(pid))); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// holderOf is for the message only: the pid may be of another PID namespace.
func holderOf(f *os.File) string {
	b, err := io.ReadAll(io.LimitReader(f, 32))
	if pid, convErr := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && convErr == nil {
		return fmt.Sprintf(" (pid %d)", pid)
	}
	return ""
}
