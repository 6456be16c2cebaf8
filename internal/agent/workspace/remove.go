package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"

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
		both := worktreeJail(ws, owner).Keep(ctx)
		both.Timeout = checkoutTimeout
		defer both.Close()
		base := forWorktree(both, ws)
		if err = removeAll(ctx, base, ws); err != nil {
			if mendErr := mend(ws, owner); mendErr != nil {
				err = errors.Join(err, mendErr)
			} else {
				err = removeAll(ctx, base, ws)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("left is worktree %s, or a part of it: remove it (git -C %s worktree remove --force %s): %w", ws.Worktree, ws.Repository, ws.Worktree, err)
	}
	return nil
}

// removeAll also removes folders that a command has closed to their owner (Go's module cache does that), and those that
// are too deep for Git.
func removeAll(ctx context.Context, base git, ws Workspace) error {
	err := removeWorktree(ctx, base, ws.Worktree)
	if err == nil {
		return nil
	}
	dir, openErr := hostfs.OpenDir("worktree", ws.Worktree)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	defer dir.Close()
	if emptied := hostfs.AsOwner(base.Owner, func() error { return empty(dir) }); emptied != nil {
		return errors.Join(err, emptied)
	}
	// Git refuses a worktree without its .git file, and forgets one whose folder is gone.
	if goneErr := hostfs.RemoveMade(ws.Worktree); goneErr != nil {
		return errors.Join(err, goneErr)
	}
	return removeWorktree(ctx, base, ws.Worktree)
}

// gone says what to do with the worktree of a repository that is not there any more.
func gone(ws Workspace) error {
	if _, err := hostfs.StatDir("worktree", ws.Worktree); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("%w: repository %s is gone, and worktree %s is not: look at it, and remove it by hand", ErrRefused, ws.Repository, ws.Worktree)
}
