package workspace

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// emptier removes what is in a folder that a command may have filled, to any depth, with two descriptors and no path: a
// folder below the top one has its own folders moved up into the top one, and is then empty. No link is followed.
type emptier struct {
	top *os.File
	// prefix begins the names of what is moved up: no command knows it beforehand.
	prefix string
	moved  int
	// found and done count a pass: the entries of the top folder, and what was removed or moved.
	found, done int
}

// empty removes what is in dir, also from folders that are closed to their owner. What can't be removed is left, and the
// error names a part of it. The caller acts as the owner, and nobody else may be writing in dir.
func empty(dir *os.File) error {
	e := emptier{top: dir, prefix: rand.Text()}
	for {
		e.found, e.done = 0, 0
		err := e.each(dir, e.remove)
		if e.done == 0 {
			if err == nil && e.found > 0 {
				err = fmt.Errorf("the folder %s does not get empty", dir.Name())
			}
			return err
		}
	}
}

// removeFolder removes a folder in parent, with all that is in it.
func removeFolder(parent *os.File, name string) error {
	dir, err := openUp(parent, name)
	if err != nil {
		return err
	}
	if err := errors.Join(empty(dir), dir.Close()); err != nil {
		return err
	}
	if err := unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR); err != nil {
		return fmt.Errorf("removing the folder %s: %w", dir.Name(), err)
	}
	return nil
}

// each calls f for the entries of dir, also after an error, and gives the first one. It may miss entries, as readdir(3)
// may when others are removed meanwhile.
func (e *emptier) each(dir *os.File, f func(dir *os.File, name string) error) error {
	const atOnce = 1024
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
	}
	var first error
	for {
		names, err := dir.Readdirnames(atOnce)
		for _, name := range names {
			if err := f(dir, name); err != nil && first == nil {
				first = err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return first
		case err != nil:
			return errors.Join(first, fmt.Errorf("reading the folder %s: %w", dir.Name(), err))
		}
	}
}

// remove removes an entry of the top folder.
func (e *emptier) remove(top *os.File, name string) error {
	e.found++
	folder, err := e.unlink(top, name)
	if !folder {
		return err
	}
	dir, err := openUp(top, name)
	if err != nil {
		return err
	}
	if err := errors.Join(e.each(dir, e.clear), dir.Close()); err != nil {
		return err
	}
	if err := unix.Unlinkat(int(top.Fd()), name, unix.AT_REMOVEDIR); err != nil {
		return fmt.Errorf("removing the folder %s: %w", dir.Name(), err)
	}
	e.done++
	return nil
}

// clear removes an entry of a folder in the top one, or moves it up if it is a folder.
func (e *emptier) clear(dir *os.File, name string) error {
	folder, err := e.unlink(dir, name)
	if !folder {
		return err
	}
	// To be moved, a folder must itself be open to its owner: its ".." changes.
	if err := openMode(dir, name); err != nil {
		return err
	}
	e.moved++
	up := fmt.Sprintf("%s-%d", e.prefix, e.moved)
	if err := unix.Renameat2(int(dir.Fd()), name, int(e.top.Fd()), up, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("moving the folder %s up into %s: %w", filepath.Join(dir.Name(), name), e.top.Name(), err)
	}
	e.done++
	return nil
}

// unlink removes what is no folder, and says of a folder that it is one.
func (e *emptier) unlink(dir *os.File, name string) (folder bool, err error) {
	err = unix.Unlinkat(int(dir.Fd()), name, 0)
	switch {
	case errors.Is(err, unix.EISDIR):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("removing %s: %w", filepath.Join(dir.Name(), name), err)
	}
	e.done++
	return false, nil
}

// openUp lets their owner into a folder in dir, and opens it.
func openUp(dir *os.File, name string) (*os.File, error) {
	path := filepath.Join(dir.Name(), name)
	if err := openMode(dir, name); err != nil {
		return nil, err
	}
	fd, err := hostfs.Beneath(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the folder %s: openat2: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

func openMode(dir *os.File, name string) error {
	path := filepath.Join(dir.Name(), name)
	fd, err := hostfs.Beneath(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("looking at the folder %s: openat2: %w", path, err)
	}
	defer unix.Close(fd)
	// fchmod(2) takes no O_PATH descriptor; its magic link leads to that very folder.
	err = unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o700)
	// Somebody else's folder may be open as it is.
	if err != nil && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("opening the folder %s to its owner: chmod: %w", path, err)
	}
	return nil
}
