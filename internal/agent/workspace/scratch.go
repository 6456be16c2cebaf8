package workspace

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// ScratchName is the folder in a worktree that TMPDIR names. It ignores itself: its .gitignore holds "*".
const (
	ScratchName   = ".sandbox-tmp"
	ignoreName    = ".gitignore"
	ignoreContent = "*\n"
)

// MakeScratch makes sure that <worktree>/.sandbox-tmp is a folder that its owner can use, with its .gitignore, and
// follows no link on the way: an earlier command may have left anything at those names, of any mode. What is in the way
// is kept, inside of the folder, for the session must go on whatever a command did, and nothing of anybody may be lost.
// No command may be running.
func MakeScratch(worktree string, owner Owner) error {
	w, err := hostfs.OpenDir("the worktree", worktree)
	if err != nil {
		return err
	}
	defer w.Close()
	err = hostfs.AsOwner(owner, func() error { return makeScratch(w) })
	if err != nil {
		return fmt.Errorf("making the scratch folder %s/%s: %w", worktree, ScratchName, err)
	}
	return nil
}

func makeScratch(w *os.File) error {
	d, err := makeFolder(w, ScratchName)
	if err != nil {
		return err
	}
	defer d.Close()
	return writeIgnore(d)
}

// makeFolder makes sure that a name in w is a folder of the owner's, and opens it.
func makeFolder(w *os.File, name string) (*os.File, error) {
	if err := unix.Mkdirat(int(w.Fd()), name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("mkdirat: %w (its owner must be able to write to the worktree: chmod u+rwx)", err)
	}
	if err := makeUsable(w, name); err != nil {
		return nil, err
	}
	fd, err := hostfs.Beneath(w, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("openat2: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// makeUsable looks at what has a folder's name without opening it, and puts a folder there that the owner can read, write
// and enter.
func makeUsable(w *os.File, name string) error {
	fd, err := hostfs.Beneath(w, name, unix.O_PATH, 0)
	if err != nil {
		return fmt.Errorf("looking at it: openat2: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("looking at it: fstat: %w", err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return replaceByFolder(w, name)
	case st.Mode&0o700 != 0o700:
		// fchmod(2) takes no O_PATH descriptor; its magic link leads to that very folder, whatever has its name now.
		if err := unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), st.Mode&0o777|0o700); err != nil {
			return fmt.Errorf("letting its owner in: chmod: %w (chmod u+rwx it)", err)
		}
	}
	return nil
}

// replaceByFolder moves what is no folder into a new one, which then takes its name. Renaming follows no link.
func replaceByFolder(w *os.File, name string) error {
	dir := int(w.Fd())
	replaced := "replaced-" + rand.Text()
	made := name + "." + replaced
	if err := unix.Mkdirat(dir, made, 0o700); err != nil {
		return fmt.Errorf("replacing what is in its place: mkdirat: %w (remove it by hand)", err)
	}
	err := unix.Renameat(dir, name, dir, made+"/"+replaced)
	if err == nil {
		err = unix.Renameat(dir, made, dir, name)
	}
	if err != nil {
		return fmt.Errorf("replacing what is in its place: renameat: %w (remove it by hand, and %s)", err, made)
	}
	return nil
}

// writeIgnore replaces whatever is at .gitignore unless it is already right: unlinking removes a link itself, a folder
// gets another name, and O_EXCL never opens what another one put there meanwhile.
func writeIgnore(d *os.File) error {
	if ignoreIsRight(d) {
		return nil
	}
	err := unix.Unlinkat(int(d.Fd()), ignoreName, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Renameat(int(d.Fd()), ignoreName, int(d.Fd()), "replaced-"+rand.Text())
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("replacing its %s: %w (remove it by hand)", ignoreName, err)
	}
	fd, err := hostfs.Beneath(d, ignoreName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("making its %s: openat2: %w", ignoreName, err)
	}
	f := os.NewFile(uintptr(fd), ignoreName)
	_, err = f.WriteString(ignoreContent)
	return errors.Join(err, f.Close())
}

func ignoreIsRight(d *os.File) bool {
	// O_NONBLOCK: a FIFO planted at this name must not hang the agent.
	fd, err := hostfs.Beneath(d, ignoreName, unix.O_RDONLY|unix.O_NONBLOCK, 0)
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
