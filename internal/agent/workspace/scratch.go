package workspace

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ScratchName is the folder in a worktree that TMPDIR names. It ignores itself: its .gitignore holds "*".
const (
	ScratchName   = ".sandbox-tmp"
	ignoreName    = ".gitignore"
	ignoreContent = "*\n"
)

// MakeScratch makes sure that <worktree>/.sandbox-tmp is a folder of the owner with its .gitignore, and follows no
// link on the way: an earlier command may have left anything at that name. No command may be running.
func MakeScratch(worktree string, owner Owner) error {
	w, err := openDir("the worktree", worktree)
	if err != nil {
		return err
	}
	defer w.Close()
	err = asOwner(owner, func() error { return makeScratch(w) })
	if err != nil {
		return fmt.Errorf("making the scratch folder %s/%s: %w", worktree, ScratchName, err)
	}
	return nil
}

func makeScratch(w *os.File) error {
	if err := unix.Mkdirat(int(w.Fd()), ScratchName, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("mkdirat: %w", err)
	}
	fd, err := beneath(w, ScratchName, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%w: a link or a file is in its place: remove it (a command may have put it there)", ErrRefused)
	}
	if err != nil {
		return fmt.Errorf("openat2: %w", err)
	}
	d := os.NewFile(uintptr(fd), ScratchName)
	defer d.Close()
	return writeIgnore(d)
}

// writeIgnore replaces whatever is at .gitignore unless it is already right: unlinking removes a link itself, and
// O_EXCL never opens what another one put there meanwhile.
func writeIgnore(d *os.File) error {
	if ignoreIsRight(d) {
		return nil
	}
	if err := unix.Unlinkat(int(d.Fd()), ignoreName, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("replacing its %s: unlinkat: %w (remove it by hand)", ignoreName, err)
	}
	fd, err := beneath(d, ignoreName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("making its %s: openat2: %w", ignoreName, err)
	}
	f := os.NewFile(uintptr(fd), ignoreName)
	_, err = f.WriteString(ignoreContent)
	return errors.Join(err, f.Close())
}

func ignoreIsRight(d *os.File) bool {
	// O_NONBLOCK: a FIFO planted at this name must not hang the agent.
	fd, err := beneath(d, ignoreName, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), ignoreName)
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false
	}
	b, err := io.ReadAll(io.LimitReader(f, int64(len(ignoreContent))+1))
	return err == nil && string(b) == ignoreContent
}

func beneath(dir *os.File, name string, flags int, mode uint64) (int, error) {
	return unix.Openat2(int(dir.Fd()), name, &unix.OpenHow{
		Flags:   uint64(flags) | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Mode:    mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
}
