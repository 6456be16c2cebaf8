package workspace

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

const (
	// outputName is the folder in the scratch folder that holds whole outputs of commands.
	outputName = "output"
	// mostOutputs is how many of them there are; mostListed is how many names the folder may hold before it is set aside.
	mostOutputs = 16
	mostListed  = 1024
)

// OutputPath is where KeepOutput writes, as a command sees it too.
func OutputPath(worktree, name string) string {
	return filepath.Join(worktree, ScratchName, outputName, name)
}

// KeepOutput writes size bytes of src to OutputPath, as the owner and through no link, whatever commands left on the way.
// The oldest outputs make room, so that there are never more than mostOutputs of them, of room bytes together. Outputs are
// the files whose names end with ".stdout" or ".stderr"; all else in the folder is left alone. When it fails there is no
// file of that name.
func KeepOutput(worktree string, owner Owner, name string, src io.Reader, size, room int64) error {
	w, err := hostfs.OpenDir("the worktree", worktree)
	if err != nil {
		return err
	}
	defer w.Close()
	err = hostfs.AsOwner(owner, func() error {
		if err := makeScratch(w); err != nil {
			return err
		}
		d, err := outputFolder(w)
		if err != nil {
			return err
		}
		defer d.Close()
		if err := makeRoom(d, size, room); err != nil {
			return err
		}
		return writeNew(d, name, io.LimitReader(src, size), size)
	})
	if err != nil {
		return fmt.Errorf("keeping an output as %s: %w", OutputPath(worktree, name), err)
	}
	return nil
}

// RemoveOutput removes the file at OutputPath, if there is one, as the owner and through no link.
func RemoveOutput(worktree string, owner Owner, name string) error {
	w, err := hostfs.OpenDir("the worktree", worktree)
	if err != nil {
		return err
	}
	defer w.Close()
	err = hostfs.AsOwner(owner, func() error {
		fd, err := hostfs.Beneath(w, filepath.Join(ScratchName, outputName), unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			return nil // no folder, or what a command made instead of it
		}
		if err != nil {
			return fmt.Errorf("openat2: %w", err)
		}
		defer unix.Close(fd)
		if err := unix.Unlinkat(fd, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unlinkat: %w", err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("removing the output %s: %w", OutputPath(worktree, name), err)
	}
	return nil
}

// outputFolder opens the folder of outputs. One with more names than can be looked at is set aside.
func outputFolder(w *os.File) (*os.File, error) {
	scratch, err := makeFolder(w, ScratchName)
	if err != nil {
		return nil, err
	}
	defer scratch.Close()
	for {
		d, err := makeFolder(scratch, outputName)
		if err != nil {
			return nil, err
		}
		if names, _ := d.Readdirnames(mostListed); len(names) < mostListed {
			_, err = d.Seek(0, io.SeekStart)
			return d, err
		}
		d.Close()
		if err := unix.Renameat(int(scratch.Fd()), outputName, int(scratch.Fd()), "replaced-"+rand.Text()); err != nil {
			return nil, fmt.Errorf("setting aside a folder of %d names: renameat: %w", mostListed, err)
		}
	}
}

// kept is an output that is there.
type kept struct {
	name string
	size int64
	at   int64
}

// makeRoom removes the oldest outputs until one more of size bytes has room.
func makeRoom(d *os.File, size, room int64) error {
	names, err := d.Readdirnames(mostListed)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("listing the outputs: %w", err)
	}
	var all []kept
	for _, name := range names {
		var st unix.Stat_t
		if !isOutput(name) || unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		all = append(all, kept{name, st.Size, st.Mtim.Nano()})
		size += st.Size
	}
	slices.SortFunc(all, func(a, b kept) int { return cmp.Compare(a.at, b.at) })
	for len(all) > 0 && (len(all) >= mostOutputs || size > room) {
		if err := unix.Unlinkat(int(d.Fd()), all[0].name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing the old output %s: unlinkat: %w", all[0].name, err)
		}
		size -= all[0].size
		all = all[1:]
	}
	return nil
}

func isOutput(name string) bool {
	return strings.HasSuffix(name, ".stdout") || strings.HasSuffix(name, ".stderr")
}

// writeNew writes a file that nobody had open before. What has its name is removed, a folder gets another name.
func writeNew(d *os.File, name string, src io.Reader, size int64) error {
	dir := int(d.Fd())
	err := unix.Unlinkat(dir, name, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Renameat(dir, name, dir, "replaced-"+rand.Text())
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("replacing what has its name: %w", err)
	}
	fd, err := hostfs.Beneath(d, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("openat2: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	n, err := io.Copy(f, src)
	if err == nil && n != size {
		err = io.ErrUnexpectedEOF
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, unix.Unlinkat(dir, name, 0))
	}
	return nil
}
