package grants

import (
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Size is how many bytes and inodes a file system (tmpfs(5)) needs to hold grants and nothing else.
func Size(grants []runtime.Grant) (bytes int64, inodes int) {
	page := int64(os.Getpagesize())
	bytes, inodes = page, 1
	for _, g := range grants {
		inodes++
		for _, f := range g.Files {
			bytes += (int64(len(f.Content)) + page - 1) / page * page
			inodes += 1 + countFolders(f.Path)
		}
	}
	return bytes, inodes
}

// countFolders is how many folders there are above a file of a grant, at most.
func countFolders(file string) int {
	n := 0
	for dir := path.Dir(file); dir != "."; dir = path.Dir(dir) {
		n++
	}
	return n
}

// Write fills an empty folder, of which nothing is visible to a command yet, and gives its content to uid and gid.
func Write(top *os.File, uid, gid uint32, grants []runtime.Grant) error {
	w := writer{top: int(top.Fd()), uid: uid, gid: gid}
	if err := w.write(grants); err != nil {
		return fmt.Errorf("making the grants' file system: %w", err)
	}
	return nil
}

// writer fills a file system that nobody else can see. Folders and files belong to the command, which alone can
// read them.
type writer struct {
	top      int // descriptor of its root
	uid, gid uint32
}

func (w writer) write(grants []runtime.Grant) error {
	for _, g := range grants {
		if err := w.folder(g.Name); err != nil {
			return err
		}
		for _, f := range g.Files {
			if err := w.file(path.Join(g.Name, f.Path), f.Content); err != nil {
				return err
			}
		}
	}
	return nil
}

// folder makes a folder and those above it.
func (w writer) folder(name string) error {
	if name == "." {
		return nil
	}
	if err := w.folder(path.Dir(name)); err != nil {
		return err
	}
	err := unix.Mkdirat(w.top, name, 0o500)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "mkdirat", Path: name, Err: err}
	}
	return w.give(name, 0o500)
}

func (w writer) file(name string, content []byte) error {
	if err := w.folder(path.Dir(name)); err != nil {
		return err
	}
	fd, err := unix.Openat(w.top, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return &os.PathError{Op: "openat", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(content)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return w.give(name, 0o400)
}

// give sets the mode, which the umask may have narrowed, and the owner.
func (w writer) give(name string, mode uint32) error {
	if err := unix.Fchmodat(w.top, name, mode, 0); err != nil {
		return &os.PathError{Op: "fchmodat", Path: name, Err: err}
	}
	if err := unix.Fchownat(w.top, name, int(w.uid), int(w.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "fchownat", Path: name, Err: err}
	}
	return nil
}
