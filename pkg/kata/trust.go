package kata

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLinks bounds the symlinks of one path, as the kernel does.
const maxLinks = 40

// resolve follows a path's symlinks and sees to it that what it ends at, and every folder and link on the way there, can be
// changed by root alone: also whoever is given the path itself, and follows it later, comes to where this ended. A folder
// with the sticky bit may be written by others: they can't replace root's entries.
func resolve(path string) (string, error) {
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%s: not an absolute path", path)
	}
	if err := onlyRoots("/"); err != nil {
		return "", err
	}
	at, links := "/", 0
	for rest := strings.Split(path, "/"); len(rest) > 0; {
		next := rest[0]
		rest = rest[1:]
		if next == "" || next == "." {
			continue
		}
		if next == ".." {
			at = filepath.Dir(at)
			continue
		}
		file := filepath.Join(at, next)
		if err := onlyRoots(file); err != nil {
			return "", err
		}
		target, err := os.Readlink(file)
		if errors.Is(err, unix.EINVAL) { // it is no link
			at = file
			continue
		}
		if err != nil {
			return "", err
		}
		if links++; links > maxLinks {
			return "", &os.PathError{Op: "following", Path: path, Err: unix.ELOOP}
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at, nil
}

func onlyRoots(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	link := st.Mode&unix.S_IFMT == unix.S_IFLNK
	sticky := st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
	switch {
	case st.Uid != 0 && link:
		return fmt.Errorf("%s: %w: it is a link of uid %d's; chown -h root %s", path, ErrUntrusted, st.Uid, path)
	case st.Uid != 0:
		return fmt.Errorf("%s: %w: it belongs to uid %d; chown root %s", path, ErrUntrusted, st.Uid, path)
	case st.Mode&0o022 != 0 && !sticky && !link:
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
