package kata

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// openSocket opens a unix socket for connecting to it (O_PATH), without following a symlink anywhere below base. It must
// be root's, or this process's own.
func openSocket(base, below string) (*os.File, error) {
	full := filepath.Join(base, below)
	// The folder itself is a trusted name, and may be a link (/var/run).
	dir, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: base, Err: err}
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, below, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "openat2", Path: full, Err: err}
	}
	f := os.NewFile(uintptr(fd), full)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, &os.PathError{Op: "fstat", Path: full, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFSOCK:
		err = fmt.Errorf("%s is no socket", full)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		err = fmt.Errorf("%s: %w: it belongs to uid %d", full, ErrUntrusted, st.Uid)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// connectSocket connects to an opened socket: to that very one, whatever its path leads to by now.
func connectSocket(ctx context.Context, f *os.File) (*net.UnixConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", f.Name(), err)
	}
	return conn.(*net.UnixConn), nil
}

// dialUnix connects to a socket by its absolute path, in which no part is a symlink.
func dialUnix(ctx context.Context, path string) (*net.UnixConn, error) {
	if err := socketPath(path); err != nil {
		return nil, err
	}
	f, err := openSocket("/", strings.TrimPrefix(path, "/"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return connectSocket(ctx, f)
}
