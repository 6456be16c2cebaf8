package gitview

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

// folder is a Git folder that somebody else can write: opened once, worked in by descriptor, as its owner. No name in it
// is followed as a link. Its methods are called inside of do.
type folder struct {
	*os.File
	owner hostfs.Owner
}

func openFolder(what, path string, owner hostfs.Owner) (folder, error) {
	f, err := hostfs.OpenDir(what, path)
	return folder{f, owner}, err
}

// inFolder opens a folder and calls f as its owner.
func inFolder(what, path string, owner hostfs.Owner, f func(d folder) error) error {
	d, err := openFolder(what, path, owner)
	if err != nil {
		return err
	}
	defer d.Close()
	return hostfs.AsOwner(owner, func() error { return f(d) })
}

// inBoth is inFolder with two folders: both are opened before anything is done as the owner, who may not get at the
// agent's own folders by path.
func inBoth(one, two string, owner hostfs.Owner, f func(a, b folder) error) error {
	a, err := openFolder("the Git folder", one, owner)
	if err != nil {
		return err
	}
	defer a.Close()
	return inFolder("the Git folder", two, owner, func(b folder) error { return f(a, b) })
}

func (d folder) fail(doing, name string, err error) error {
	return fmt.Errorf("%s %s: %w", doing, filepath.Join(d.Name(), name), err)
}

// errNotRegular: what should be a file is something else; it was not opened for reading.
var errNotRegular = errors.New("it is no regular file")

// openFile opens a regular file for reading, and nothing else: a FIFO would hang, a device could do anything.
func (d folder) openFile(name string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := hostfs.Beneath(d.File, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, st, d.fail("opening", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	err = unix.Fstat(fd, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errNotRegular
	}
	if err != nil {
		f.Close()
		return nil, st, d.fail("opening", name, err)
	}
	return f, st, nil
}

// read gives a regular file's content, of at most limit bytes.
func (d folder) read(name string, limit int64) ([]byte, error) {
	f, _, err := d.openFile(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("it has more than %d bytes", limit)
	}
	if err != nil {
		return nil, d.fail("reading", name, err)
	}
	return b, nil
}

// mkdir makes a folder, parents included; one that is there is fine.
func (d folder) mkdir(name string) error {
	if name == "." || name == "/" {
		return nil
	}
	if err := d.mkdir(filepath.Dir(name)); err != nil {
		return err
	}
	parent, err := d.parent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := unix.Mkdirat(int(parent.Fd()), filepath.Base(name), 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return d.fail("making the folder", name, err)
	}
	return nil
}

func (d folder) parent(name string) (*os.File, error) {
	fd, err := hostfs.Beneath(d.File, filepath.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, d.fail("opening the folder of", name, err)
	}
	return os.NewFile(uintptr(fd), filepath.Dir(name)), nil
}

// write puts a file in the place of whatever has its name: by a new one that is renamed, so that nothing is followed and
// nothing is ever half written.
func (d folder) write(name string, content []byte) error {
	return d.writeMode(name, 0o644, content)
}

func (d folder) writeMode(name string, mode uint64, content []byte) error {
	return d.writeFrom(name, mode, func(w io.Writer) error {
		_, err := w.Write(content)
		return err
	})
}

func (d folder) writeFrom(name string, mode uint64, fill func(io.Writer) error) error {
	parent, err := d.parent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	temporary := "sandbox-agent-" + rand.Text() + ".new"
	fd, err := hostfs.Beneath(parent, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, mode)
	if err != nil {
		return d.fail("writing", name, err)
	}
	f := os.NewFile(uintptr(fd), temporary)
	err = errors.Join(fill(f), f.Close())
	if err == nil {
		err = unix.Renameat(int(parent.Fd()), temporary, int(parent.Fd()), filepath.Base(name))
	}
	if err != nil {
		_ = unix.Unlinkat(int(parent.Fd()), temporary, 0)
		return d.fail("writing", name, err)
	}
	return nil
}

// names are the names in a folder; none if it is not there.
func (d folder) names(path string) ([]string, error) {
	fd, err := hostfs.Beneath(d.File, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, d.fail("opening", path, err)
	}
	dir := os.NewFile(uintptr(fd), path)
	defer dir.Close()
	return dir.Readdirnames(-1)
}

// remove takes a name that is no folder away; one that is not there is fine.
func (d folder) remove(name string) error {
	parent, err := d.parent(name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := unix.Unlinkat(int(parent.Fd()), filepath.Base(name), 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return d.fail("removing", name, err)
	}
	return nil
}

// lstat looks at a name without opening it. found is false when it is not there.
func (d folder) lstat(name string) (st unix.Stat_t, found bool, err error) {
	fd, err := hostfs.Beneath(d.File, name, unix.O_PATH, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return st, false, nil
	case err != nil:
		return st, false, d.fail("looking at", name, err)
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &st); err != nil {
		return st, false, d.fail("looking at", name, err)
	}
	return st, true, nil
}

// writeOwn writes a file of the agent's own: by rename, so that a killed agent finds the old one or the new one.
func writeOwn(path string, content []byte) error {
	temporary := path + ".new"
	if err := os.WriteFile(temporary, content, 0o600); err != nil {
		return fmt.Errorf("keeping the state of a workspace: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("keeping the state of a workspace: %w", err)
	}
	return nil
}
