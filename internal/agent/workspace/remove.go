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
		err = removeWorktree(ctx, trusted(ws.Repository, ws.CommonDir, ws.Worktree, owner), ws.Worktree)
	}
	if err != nil {
		return fmt.Errorf("left is worktree %s, or a part of it: remove it (git -C %s worktree remove --force %s): %w", ws.Worktree, ws.Repository, ws.Worktree, err)
	}
	return nil
}

// gone says what to do with the worktree of a repository that is not there any more.
func gone(ws Workspace) error {
	if _, err := hostfs.StatDir("worktree", ws.Worktree); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("%w: repository %s is gone, and worktree %s is not: look at it, and remove it by hand", ErrRefused, ws.Repository, ws.Worktree)
}
