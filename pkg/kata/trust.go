package kata

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// resolve follows a path's symlinks and sees to it that what it ends at, and every folder on the way there, can be
// changed by root alone. A folder with the sticky bit may be written by others: they can't replace root's entries.
func resolve(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%s: not an absolute path", path)
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	for p := real; ; p = filepath.Dir(p) {
		if err := onlyRoots(p); err != nil {
			return "", err
		}
		if p == "/" {
			return real, nil
		}
	}
}

func onlyRoots(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	sticky := st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
	switch {
	case st.Uid != 0:
		return fmt.Errorf("%s: %w: it belongs to uid %d; chown root %s", path, ErrUntrusted, st.Uid, path)
	case st.Mode&0o022 != 0 && !sticky && st.Mode&unix.S_IFMT != unix.S_IFLNK:
		return fmt.Errorf("%s: %w: its mode is %04o; chmod go-w %s", path, ErrUntrusted, st.Mode&0o7777, path)
	}
	return nil
}

// regular resolves a path to a regular file that is not empty.
func regular(path string) (string, error) {
	real, err := resolve(path)
	if err != nil {
		return "", err
	}
	st, err := os.Stat(real)
	switch {
	case err != nil:
		return "", err
	case !st.Mode().IsRegular():
		return "", fmt.Errorf("%s: not a regular file", real)
	case st.Size() == 0:
		return "", fmt.Errorf("%s: empty", real)
	}
	return real, nil
}
