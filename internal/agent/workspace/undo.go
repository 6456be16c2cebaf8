package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// Undo takes away what Open made for ws: the worktree, with all that is in it, and the branch, if Open made that too and
// it still points at its start. What Open found it leaves alone. No sandbox may ever have been ready on ws: a command
// could have left work in it. The error says what is left and how to remove it.
func Undo(ctx context.Context, ws Workspace) error {
	// Whatever ended the caller must not end this; Git's own time limit does.
	ctx = context.WithoutCancel(ctx)
	owner, err := hostfs.StatDir("repository", ws.Repository)
	both := worktreeJail(ws, owner).Keep(ctx)
	defer both.Close()
	base := forWorktree(both, ws)
	if ws.Created {
		if err == nil {
			err = removeWorktree(ctx, base, ws.Worktree)
		}
		if err != nil {
			return fmt.Errorf("left are the new worktree %s and its branch %q: remove them (git -C %s worktree remove --force %s; git branch -d): %w",
				ws.Worktree, ws.Branch, ws.Repository, ws.Worktree, err)
		}
	}
	if ws.BranchStart == "" {
		return nil
	}
	if err == nil {
		// Only from its start: a branch that has moved since holds somebody's work.
		_, err = base.Run(ctx, "update-ref", "-d", "refs/heads/"+ws.Branch, ws.BranchStart)
	}
	if err != nil {
		return fmt.Errorf("left is the new branch %q: remove it (git -C %s branch -d %s): %w", ws.Branch, ws.Repository, ws.Branch, err)
	}
	return nil
}

func removeWorktree(ctx context.Context, base git, worktree string) error {
	base.Close() // a jail that stands has the worktree's folder also when that is gone
	// Its failure may only say that Git had not begun; what counts is whether folder and entry go.
	_, gitErr := base.Run(ctx, "worktree", "remove", "--force", "--", worktree)
	if err := hostfs.RemoveMade(worktree); err != nil {
		return errors.Join(gitErr, err)
	}
	switch _, err := hostfs.StatDir("worktree", worktree); {
	case err == nil:
		return errors.Join(gitErr, fmt.Errorf("%s is still there", worktree))
	case !errors.Is(err, os.ErrNotExist):
		return errors.Join(gitErr, err)
	}
	list, err := base.Run(ctx, "worktree", "list", "--porcelain", "-z")
	if err != nil {
		return errors.Join(gitErr, err)
	}
	if strings.Contains(list+"\x00", "worktree "+worktree+"\x00") {
		return errors.Join(errors.New("git still lists it"), gitErr)
	}
	return nil
}
