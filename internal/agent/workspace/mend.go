package workspace

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// A worktree's Git folder that is about to be removed may be one that a command has written (the Git layout shared): Git
// would wait for a FIFO in it, and takes a folder with a broken HEAD for no worktree.

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
