package rpc

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// Listen makes the exec socket. A socket that nobody answers on is what a killed agent left, and is replaced.
func Listen(s config.Socket) (*net.UnixListener, error) {
	if len(s.Path) > config.MaxSocketPath {
		return nil, fmt.Errorf("%w %s: its path has %d bytes, a unix socket's at most %d (unix(7)): choose a shorter one with socket.path",
			ErrSocket, s.Path, len(s.Path), config.MaxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(s.Path), 0o755); err != nil {
		return nil, fmt.Errorf("%w %s: making its folder: %w", ErrSocket, s.Path, err)
	}
	if err := removeStale(s.Path); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.Path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("%w %s: %w", ErrSocket, s.Path, err)
	}
	// Who connects before the mode is set is still asked for its uid.
	if err := os.Chmod(s.Path, s.FileMode()); err != nil {
		return nil, errors.Join(fmt.Errorf("%w %s: setting its mode: %w", ErrSocket, s.Path, err), l.Close())
	}
	return l, nil
}

func removeStale(path string) error {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("%w %s: %w", ErrSocket, path, err)
	case st.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("%w %s: something that is no socket is there: remove it, or choose another socket.path", ErrSocket, path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return fmt.Errorf("%w %s: another program answers there: stop it, or choose another socket.path", ErrSocket, path)
	case !errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w %s: can't tell whether another program answers there: %w", ErrSocket, path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("%w %s: removing the stale socket: %w", ErrSocket, path, err)
	}
	return nil
}
