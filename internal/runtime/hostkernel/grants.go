package hostkernel

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// makeGrants makes the file system of a session's grants: filled before it is mounted anywhere, so that it is read-only
// wherever anyone sees it, and gone with the sandbox, whose mount namespace alone has it.
func (b *BindMounts) makeGrants(grants []runtime.Grant) error {
	if len(grants) == 0 {
		return nil
	}
	tmpfs, err := grantsTmpfs(grants)
	if err != nil {
		return err
	}
	b.root = append(b.root, attachment{runtime.GrantsPath, tmpfs})
	w := grantWriter{top: int(tmpfs.Fd())}
	w.uid, w.gid = b.commandIDs()
	if err := w.write(grants); err != nil {
		return fmt.Errorf("making the grants' file system: %w", err)
	}
	return mounts.SetAttr(tmpfs, mounts.Attr{ReadOnly: true, NoExec: true})
}

// grantsTmpfs is as large as its content. Its pages are never swapped out where the kernel can promise that (noswap,
// Linux 6.4, tmpfs(5)).
func grantsTmpfs(grants []runtime.Grant) (*os.File, error) {
	page := int64(os.Getpagesize())
	size, inodes := page, 1
	for _, g := range grants {
		inodes++
		for _, f := range g.Files {
			size += (int64(len(f.Content)) + page - 1) / page * page
			inodes += 1 + countFolders(f.Path)
		}
	}
	options := map[string]string{
		"mode": "0555", "size": strconv.FormatInt(size, 10), "nr_inodes": strconv.Itoa(inodes), "noswap": "",
	}
	tmpfs, err := mounts.NewTmpfs(options)
	if errors.Is(err, unix.EINVAL) {
		delete(options, "noswap")
		tmpfs, err = mounts.NewTmpfs(options)
	}
	return tmpfs, err
}

// countFolders is how many folders there are above a file of a grant, at most.
func countFolders(file string) int {
	n := 0
	for dir := path.Dir(file); dir != "."; dir = path.Dir(dir) {
		n++
	}
	return n
}

// grantWriter fills a file system that nobody else can see. Folders and files belong to the command, which alone can
// read them.
type grantWriter struct {
	top      int // descriptor of its root
	uid, gid uint32
}

func (w grantWriter) write(grants []runtime.Grant) error {
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
func (w grantWriter) folder(name string) error {
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

func (w grantWriter) file(name string, content []byte) error {
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
func (w grantWriter) give(name string, mode uint32) error {
	if err := unix.Fchmodat(w.top, name, mode, 0); err != nil {
		return &os.PathError{Op: "fchmodat", Path: name, Err: err}
	}
	if err := unix.Fchownat(w.top, name, int(w.uid), int(w.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "fchownat", Path: name, Err: err}
	}
	return nil
}
