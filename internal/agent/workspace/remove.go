package workspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// Remove takes a worktree away, with all that is in it, and what the repository keeps of it; its branch stays. What is gone
// already is no error. Nothing may be running in the worktree. The error says what is left and how to remove it.
func Remove(ctx context.Context, ws Workspace) error {
	owner, err := hostfs.StatDir("repository", ws.Repository)
	if errors.Is(err, os.ErrNotExist) {
		return gone(ws)
	}
	if err == nil {
		err = dropForeign(ws, owner)
	}
	if err == nil {
		base := trusted(ws.Repository, ws.CommonDir, ws.Worktree, owner)
		if err = removeAll(ctx, base, ws); err != nil && mendHead(ws, owner) == nil {
			err = removeAll(ctx, base, ws)
		}
	}
	if err != nil {
		return fmt.Errorf("left is worktree %s, or a part of it: remove it (git -C %s worktree remove --force %s): %w", ws.Worktree, ws.Repository, ws.Worktree, err)
	}
	return nil
}

// removeAll also removes folders that a command has closed to their owner (Go's module cache does that).
func removeAll(ctx context.Context, base git, ws Workspace) error {
	base.Timeout = checkoutTimeout
	err := removeWorktree(ctx, base, ws.Worktree)
	if err == nil {
		return nil
	}
	dir, openErr := hostfs.OpenDir("worktree", ws.Worktree)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	defer dir.Close()
	emptied := hostfs.AsOwner(base.Owner, func() error {
		if err := openUp(dir, 0); err != nil {
			return err
		}
		return empty(dir)
	})
	if emptied != nil {
		return errors.Join(err, emptied)
	}
	return removeWorktree(ctx, base, ws.Worktree)
}

// empty removes what is in a folder. Git has given up on it, and knows it no more.
func empty(dir *os.File) error {
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return fmt.Errorf("opening the folder %s: %w", dir.Name(), err)
	}
	defer root.Close()
	names, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
	}
	for _, e := range names {
		if err := root.RemoveAll(e.Name()); err != nil {
			return fmt.Errorf("removing what is in %s: %w", dir.Name(), err)
		}
	}
	return nil
}

// mostDeep bounds how deep folders are opened up; PATH_MAX holds half as many names as it has bytes.
const mostDeep = unix.PathMax / 2

// openUp lets their owner into all folders below dir, by descriptor and over no link.
func openUp(dir *os.File, depth int) error {
	if depth > mostDeep {
		return fmt.Errorf("%s is too deep in it", dir.Name())
	}
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return fmt.Errorf("reading the folder %s: %w", dir.Name(), err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := openUpOne(dir, e.Name(), depth); err != nil {
			return err
		}
	}
	return nil
}

func openUpOne(dir *os.File, name string, depth int) error {
	path := filepath.Join(dir.Name(), name)
	fd, err := hostfs.Beneath(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("looking at the folder %s: openat2: %w", path, err)
	}
	// fchmod(2) takes no O_PATH descriptor; its magic link leads to that very folder.
	err = unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o700)
	unix.Close(fd)
	if err != nil {
		return fmt.Errorf("opening the folder %s to its owner: chmod: %w", path, err)
	}
	if fd, err = hostfs.Beneath(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
		return fmt.Errorf("opening the folder %s: openat2: %w", path, err)
	}
	below := os.NewFile(uintptr(fd), path)
	defer below.Close()
	return openUp(below, depth+1)
}

// gone says what to do with the worktree of a repository that is not there any more.
func gone(ws Workspace) error {
	if _, err := hostfs.StatDir("worktree", ws.Worktree); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("%w: repository %s is gone, and worktree %s is not: look at it, and remove it by hand", ErrRefused, ws.Repository, ws.Worktree)
}
