package workspace

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// A worktree's Git folder that is about to be removed may be one that a command has written (the Git layout shared): Git
// would wait for a FIFO in it, takes a folder with a broken HEAD for no worktree, and keeps one that has a lock.

// inMeta works in the worktree's Git folder by descriptor, as its owner. Where there is none it does nothing.
func inMeta(ws Workspace, owner Owner, f func(dir *os.File) error) error {
	dir, err := hostfs.OpenDir("the worktree's Git folder", ws.MetaDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return hostfs.AsOwner(owner, func() error { return f(dir) })
}

// dropForeign removes what is neither a file nor a folder.
func dropForeign(ws Workspace, owner Owner) error {
	return inMeta(ws, owner, func(dir *os.File) error {
		entries, err := dir.ReadDir(-1)
		if err != nil {
			return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
		}
		for _, e := range entries {
			if e.IsDir() || e.Type().IsRegular() {
				continue
			}
			if err := unix.Unlinkat(int(dir.Fd()), e.Name(), 0); err != nil {
				return fmt.Errorf("removing %s/%s, which is neither a file nor a folder: %w", dir.Name(), e.Name(), err)
			}
		}
		return nil
	})
}

// mend takes all out of Git's way for which it would keep the worktree. It is for one that Git could not remove.
func mend(ws Workspace, owner Owner) error {
	return errors.Join(unlock(ws, owner), emptyFolders(ws, owner), mendHead(ws, owner))
}

// unlock takes away what Git takes for the worktree's lock: whoever deletes a workspace has decided.
func unlock(ws Workspace, owner Owner) error {
	return inMeta(ws, owner, func(dir *os.File) error {
		const lock = "locked"
		err := unix.Unlinkat(int(dir.Fd()), lock, 0)
		if errors.Is(err, unix.EISDIR) {
			err = removeFolder(dir, lock)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unlocking the worktree: removing %s/%s: %w", dir.Name(), lock, err)
		}
		return nil
	})
}

// emptyFolders empties the folders in it, which can be too deep for Git; Git removes them.
func emptyFolders(ws Workspace, owner Owner) error {
	return inMeta(ws, owner, func(dir *os.File) error {
		names, err := dir.Readdirnames(-1)
		if err != nil {
			return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
		}
		for _, name := range names {
			below, err := openUp(dir, name)
			if errors.Is(err, unix.ENOTDIR) {
				continue
			}
			if err != nil {
				return err
			}
			if err := errors.Join(empty(below), below.Close()); err != nil {
				return err
			}
		}
		return nil
	})
}

// mendHead gives the folder a HEAD by which Git knows a worktree, in place of whatever is there.
func mendHead(ws Workspace, owner Owner) error {
	return inMeta(ws, owner, func(dir *os.File) error {
		const head, aside = "HEAD", "sandbox-agent-HEAD"
		if err := unix.Renameat(int(dir.Fd()), head, int(dir.Fd()), aside); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("setting %s/%s aside: %w", dir.Name(), head, err)
		}
		fd, err := hostfs.Beneath(dir, head, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
		if err != nil {
			return fmt.Errorf("writing %s/%s: %w", dir.Name(), head, err)
		}
		f := os.NewFile(uintptr(fd), head)
		_, err = f.WriteString("ref: refs/heads/removed\n")
		return errors.Join(err, f.Close())
	})
}
