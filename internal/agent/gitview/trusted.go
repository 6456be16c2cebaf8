package gitview

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Git runs trusted Git in the session's jail, with the worktree. A command that only reads sees everything read-only, and
// an index that was copied and checked before; one that writes works in the session's own, and the caller harvests after
// it. output bounds each stream, bytes; timeout and output 0 are gitjail's defaults.
func (v *View) Git(ctx context.Context, c gitguard.GitCommand, timeout time.Duration, output int) (gitjail.Result, error) {
	if err := v.checkKinds(); err != nil {
		return gitjail.Result{}, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	j := v.worktreeJail()
	j.Timeout, j.Output = timeout, output
	j.Env = append(j.Env, v.o.Env...)
	if c.Writes {
		return j.Do(ctx, gitjail.Call{Args: c.Args})
	}
	for i := range j.Mounts {
		j.Mounts[i].ReadOnly = true
	}
	j.Env = append(j.Env, "GIT_INDEX_FILE="+scratchAt+"/index")
	if err := v.copyIndex(); err != nil {
		return gitjail.Result{}, fmt.Errorf("%w: the session's index: %w", gitguard.ErrIndex, err)
	}
	s, err := j.Start(ctx)
	if err != nil {
		return gitjail.Result{}, err
	}
	defer s.Close()
	if _, err := checkCopy(ctx, s); err != nil {
		return gitjail.Result{}, err
	}
	return s.Do(ctx, gitjail.Call{Args: c.Args})
}

// checkKinds refuses, before Git hangs on it, what is neither a file nor a folder in the part that commands write.
func (v *View) checkKinds() error {
	path, shown := v.Private(), v.o.Workspace.CommonDir
	if v.o.Layout == mounts.Shared {
		path, shown = v.o.Workspace.MetaDir, v.o.Workspace.MetaDir
	}
	dir, err := hostfs.OpenDir("the workspace's Git folder", path)
	if err != nil {
		return err
	}
	defer dir.Close()
	_, err = walk(dir, shown)
	return err
}

// checkCopy reads the copied index and refuses one that trusted Git must not use. Nested repositories are let pass: the
// jail has nothing to reach and is read-only, and the list of commands keeps Git from going into them. The list may be
// longer than what the caller keeps of a command's output.
func checkCopy(ctx context.Context, s *gitjail.Session) ([]string, error) {
	list := &limitedBuffer{max: keptOutput}
	_, err := s.RunCall(ctx, gitjail.Call{Args: []string{"ls-files", "-z", "--stage"}, Stdout: list, Timeout: stepTimeout})
	if err != nil {
		return nil, err
	}
	return gitguard.CheckIndex(list.b, gitguard.Submodules(list.b)...)
}

// checkOwn checks the session's index before it goes to the base clone. Of nested repositories only the base clone's own
// submodules pass: one that a command made up is a repository that the host's Git would run programs in.
func (v *View) checkOwn(ctx context.Context, j *jails, listing []byte) ([]string, error) {
	ids, err := gitguard.CheckIndex(listing)
	if err == nil || len(gitguard.Submodules(listing)) == 0 {
		return ids, err
	}
	base, baseErr := j.inBase()
	if baseErr != nil {
		return nil, baseErr
	}
	known, baseErr := v.listBaseIndex(ctx, base)
	if baseErr != nil {
		return nil, baseErr
	}
	return gitguard.CheckIndex(listing, gitguard.Submodules(known)...)
}

// limitedBuffer fails when it is full, so that nothing is checked in part.
type limitedBuffer struct {
	b   []byte
	max int
}

func (l *limitedBuffer) Write(p []byte) (int, error) {
	if len(l.b)+len(p) > l.max {
		return 0, errors.New("too long")
	}
	l.b = append(l.b, p...)
	return len(p), nil
}

// unfinished are the files and folders that an operation which is not finished has in a worktree's Git folder.
var unfinished = []struct{ name, operation string }{
	{"rebase-merge", "rebase"}, {"rebase-apply", "rebase or am"}, {"MERGE_HEAD", "merge"}, {"CHERRY_PICK_HEAD", "cherry-pick"},
	{"REVERT_HEAD", "revert"}, {"BISECT_LOG", "bisect"}, {"sequencer", "series of cherry-picks or reverts"},
}

// Unsaved are sentences that say what deleting the workspace would lose: files that are not committed, an unfinished
// operation, stashes, and commits that no branch, tag or remote branch of the base clone has. None: nothing.
func (v *View) Unsaved(ctx context.Context) ([]string, error) {
	var out []string
	status, err := v.Git(ctx, gitguard.GitCommand{Args: []string{"status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=all"}}, stepTimeout, 0)
	switch {
	case errors.Is(err, gitguard.ErrIndex):
		out = append(out, fmt.Sprintf("The worktree's changes can't be listed (%v).", err))
	case err != nil:
		return nil, err
	case status.ExitCode != 0:
		out = append(out, fmt.Sprintf("The worktree's changes can't be listed (%s).", status.Stderr))
	default:
		out = append(out, uncommitted(string(status.Stdout))...)
	}
	operations, err := v.operations()
	if err != nil {
		return nil, err
	}
	out = append(out, operations...)
	commits, err := v.unsavedCommits(ctx)
	return append(out, commits...), err
}

func (v *View) operations() (out []string, err error) {
	err = inFolder("the worktree's Git folder", v.gitFolder(), v.o.Workspace.Owner, func(d folder) error {
		for _, u := range unfinished {
			_, there, err := d.lstat(v.meta() + "/" + u.name)
			if err != nil && !errors.Is(err, unix.ELOOP) {
				return err
			}
			if there {
				out = append(out, fmt.Sprintf("A %s is not finished.", u.operation))
			}
		}
		return nil
	})
	return out, err
}
