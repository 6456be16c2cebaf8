package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// DeleteWorkspace removes a worktree and what the agent keeps for it, and the session that has it. Each step can be
// repeated: after a crash in the middle the same call completes it.
func (a *Agent) DeleteWorkspace(ctx context.Context, r *sandboxv1.DeleteWorkspaceRequest) (*sandboxv1.DeleteWorkspaceResponse, error) {
	switch {
	case (r.GetSessionId() == "") == (r.GetWorktree() == ""):
		return nil, invalid("name the session_id, or, when no session has the workspace any more, the worktree: one of the two")
	case r.GetSessionId() != "":
		return a.deleteOfSession(ctx, r)
	}
	if err := a.cfg.CheckWorkspacePath("worktree", r.GetWorktree()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return a.deleteOrphan(context.WithoutCancel(ctx), r.GetWorktree(), r.GetForce())
}

func (a *Agent) deleteOfSession(ctx context.Context, r *sandboxv1.DeleteWorkspaceRequest) (*sandboxv1.DeleteWorkspaceResponse, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	var removed []string
	check := func() error { return s.checkFence(r.GetOwnerEpoch(), 0) }
	evidence, err := s.retire(ctx, check, "The workspace is being deleted.", "its workspace is being deleted", func() (err error) {
		rec, err := s.ownWorkspace()
		if err != nil {
			return err
		}
		if removed, err = s.removeWorkspace(context.WithoutCancel(ctx), rec, r.GetForce()); err != nil {
			return err
		}
		return s.bury()
	})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.DeleteWorkspaceResponse{Evidence: evidenceProto(evidence), Removed: removed}, nil
}

// deleteOrphan deletes the workspace of sessions that are gone. While it does, the worktree is reserved.
func (a *Agent) deleteOrphan(ctx context.Context, worktree string, force bool) (*sandboxv1.DeleteWorkspaceResponse, error) {
	const nobody = "(being deleted)"
	if err := a.reserveWorkspace(worktree, nobody); err != nil {
		return nil, err
	}
	defer a.releaseWorkspace(worktree, nobody)
	rec, err := a.workspaceRecordOf(worktree)
	switch {
	case err != nil:
		return nil, err
	case rec == nil:
		return nil, fmt.Errorf("%w: no session ever had worktree %s: git worktree remove removes it", ErrNotFound, worktree)
	}
	// A session that nobody has: it opens, harvests and judges as one would.
	s := newSession(a, sessionRecord{ID: rec.Session, State: Idle, Workspace: rec.Workspace, GitLayout: rec.Layout})
	removed, err := s.removeWorkspace(ctx, *rec, force)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.DeleteWorkspaceResponse{Removed: removed}, nil
}

// ownWorkspace is the record of the session's workspace; of one that an older agent made there is none yet.
func (s *session) ownWorkspace() (workspaceRecord, error) {
	s.mu.Lock()
	ws, layout := s.rec.Workspace, s.rec.GitLayout
	s.mu.Unlock()
	rec, err := s.agent.workspaceRecordOf(ws.Worktree)
	switch {
	case err != nil:
		return workspaceRecord{}, err
	case rec != nil:
		return *rec, nil
	}
	made := workspaceRecord{Session: s.id, Workspace: ws, Layout: layout}
	made.Device, made.Inode = identityOf(ws.MetaDir)
	return made, nil
}

// removeWorkspace removes, in this order: what the base clone keeps for the workspace and its private Git folder, the
// worktree, and the rest of what the agent keeps. From the mark on, which is durable, there is no way back, and nothing
// is asked again. Another worktree that is at the path now stays. No command may be running.
func (s *session) removeWorkspace(ctx context.Context, rec workspaceRecord, force bool) ([]string, error) {
	a, ws := s.agent, rec.Workspace
	view, err := s.viewToDelete(ctx, rec, force)
	if err != nil {
		return nil, err
	}
	// An earlier call may have come as far as to the worktree's Git folder, and not to its files, or the other way round.
	theirs := mounts.Exists(ws.MetaDir) && !rec.hasMeta()
	point("workspace.judged")
	mark, err := rec.step(WsDelete)
	if err != nil {
		return nil, err
	}
	if err := a.journal.Update(ctx, mark.Durable, journal.Set(workspaceKey(ws.Worktree), encode(rec))); err != nil {
		return nil, fmt.Errorf("%w: marking the workspace of %s as being deleted: %w", ErrUnavailable, ws.Worktree, err)
	}
	point("workspace.marked")
	var removed []string
	if view != nil {
		if removed, err = view.Remove(ctx); err != nil {
			return nil, fmt.Errorf("removing the private Git folder of %s: %w", ws.Worktree, err)
		}
	}
	point("workspace.git-removed")
	if there := mounts.Exists(ws.Worktree); !theirs {
		if err := workspace.Remove(ctx, ws); err != nil {
			return nil, err
		}
		if there {
			removed = append(removed, ws.Worktree)
		}
	}
	point("workspace.worktree-removed")
	if dir := a.workspaceDir(ws.Worktree); mounts.Exists(dir) {
		if err := os.RemoveAll(dir); err != nil {
			return nil, fmt.Errorf("removing what was kept for %s: %w", ws.Worktree, err)
		}
		removed = append(removed, dir)
	}
	point("workspace.kept-removed")
	done, err := rec.step(WsDeleted)
	if err != nil {
		return nil, err
	}
	if err := a.journal.Update(ctx, done.Durable, s.event(events.WorkspaceDeleted, ws.Worktree), journal.Delete(workspaceKey(ws.Worktree))); err != nil {
		return nil, fmt.Errorf("%w: forgetting the workspace of %s: %w", ErrUnavailable, ws.Worktree, err)
	}
	point("workspace.forgotten")
	return removed, nil
}

// viewToDelete opens the view of a workspace that is about to be deleted, harvests it, and refuses to lose work. nil: there
// is none any more, or none that could be opened, and that is accepted.
func (s *session) viewToDelete(ctx context.Context, rec workspaceRecord, force bool) (*gitview.View, error) {
	ws := rec.Workspace
	mayLose := force || rec.Deleting
	if !rec.is() {
		if mayLose {
			return nil, nil
		}
		return nil, fmt.Errorf("%w: the worktree %s is gone, or another one is there now: what was kept for it can't be looked at (force deletes that, and no other worktree)",
			ErrPrecondition, ws.Worktree)
	}
	view, err := s.openView(ctx)
	switch {
	case err != nil && mayLose:
		s.log.Warn("workspace deleted although it could not be opened", "error", err)
		return nil, nil
	case err != nil:
		if kept, ok := errors.AsType[*gitview.KeptError](err); ok { // its remedy is this deletion
			err = errors.New(kept.Why)
		}
		return nil, fmt.Errorf("%w: looking at what the workspace of %s holds: %w (force deletes it all the same)", ErrPrecondition, ws.Worktree, err)
	case rec.Deleting:
		return view, nil
	}
	s.harvest(ctx)
	return view, nothingToLose(ctx, view, ws, force)
}

// nothingToLose refuses to throw work away that nobody else has, unless that is what was asked for.
func nothingToLose(ctx context.Context, view *gitview.View, ws workspace.Workspace, force bool) error {
	if force {
		return nil
	}
	unsaved, err := view.Unsaved(ctx)
	if err != nil {
		return fmt.Errorf("%w: looking for work in %s that would be lost: %w (force deletes it all the same)", ErrPrecondition, ws.Worktree, err)
	}
	if len(unsaved) > 0 {
		return fmt.Errorf("%w: deleting the workspace of %s would lose work: %s (commit it, or use force)", ErrPrecondition, ws.Worktree, strings.Join(unsaved, " "))
	}
	return nil
}

// workspaceRecordOf is what the journal has of a worktree's workspace, nil if it has nothing.
func (a *Agent) workspaceRecordOf(worktree string) (*workspaceRecord, error) {
	b, err := a.journal.Get(workspaceKey(worktree))
	if errors.Is(err, journal.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking up the workspace of %s: %w", worktree, err)
	}
	rec := &workspaceRecord{}
	if err := json.Unmarshal(b, rec); err != nil {
		return nil, fmt.Errorf("%w: the record of the workspace of %s can't be read: %w", ErrDataLoss, worktree, err)
	}
	return rec, nil
}

// checkNotDeleting refuses a worktree of which a part may be gone already.
func (a *Agent) checkNotDeleting(worktree string) error {
	rec, err := a.workspaceRecordOf(worktree)
	if err != nil {
		return err
	}
	if _, _, err := rec.state().Next(WsUse); err != nil {
		return fmt.Errorf("%w: the deletion of the workspace of %s was begun: complete it first (DeleteWorkspace, sandbox-agent workspace delete)", ErrPrecondition, worktree)
	}
	return nil
}

// workspaceOp records whose workspace a worktree's is.
func workspaceOp(session string, ws workspace.Workspace, layout string) journal.Op {
	rec := workspaceRecord{Session: session, Workspace: ws, Layout: layout}
	rec.Device, rec.Inode = identityOf(ws.MetaDir)
	return journal.Set(workspaceKey(ws.Worktree), encode(rec))
}

// identityOf tells a folder from another one at its path; zeros, if it is not there.
func identityOf(path string) (device, inode uint64) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0, 0
	}
	return st.Dev, st.Ino
}

// is says whether the worktree that is there now is the one that the record is about.
func (r *workspaceRecord) is() bool {
	return mounts.Exists(r.Workspace.Worktree) && r.hasMeta()
}

// hasMeta says whether the worktree's Git folder that is there now is the one that the record is about.
func (r *workspaceRecord) hasMeta() bool {
	device, inode := identityOf(r.Workspace.MetaDir)
	return inode != 0 && device == r.Device && inode == r.Inode
}
