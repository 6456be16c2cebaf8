package agent

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

const (
	defaultGitTimeout = 60 * time.Second
	maxGitTimeout     = 600 * time.Second
)

// workspaceDir is what the agent keeps for a worktree: private Git state and caches. It belongs to the worktree, not to a
// session.
func (a *Agent) workspaceDir(worktree string) string {
	return filepath.Join(a.workspacesDir(), gitview.Key(worktree))
}

func (a *Agent) workspacesDir() string { return filepath.Join(a.cfg.StateDir, "workspaces") }

// openView opens the session's view of its repository. It runs on the session's goroutine, or before there is one.
func (s *session) openView(ctx context.Context) (*gitview.View, error) { return s.openViewIn(ctx, nil) }

// openViewIn is openView where the caller has a jail of the base clone already; nil: it has none.
func (s *session) openViewIn(ctx context.Context, base *gitjail.Kept) (*gitview.View, error) {
	if s.gitView != nil {
		return s.gitView, nil
	}
	if err := s.checkConfig(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	// After a restart of the agent the sandbox may be alive: then what it has mounted stays as it is.
	live := rec.State.HasSandbox()
	v, err := gitview.Open(ctx, gitview.Options{
		Dir: s.agent.workspaceDir(rec.Workspace.Worktree), SessionID: s.id, Layout: rec.GitLayout,
		Workspace: rec.Workspace, Config: s.judged, Export: s.agent.cfg.Workspace.Export, Live: live,
		Base: base, Env: identity(s.agent.cfg.Workspace), Hooks: s.agent.cfg.Workspace.Hooks == "inside",
	})
	if err != nil {
		return nil, err
	}
	s.gitView, s.viewSum, s.viewUsed = v, s.judged.SHA256, live
	return v, nil
}

// renewView opens the view anew for the next sandbox: with the configuration as it is now. No sandbox may be alive.
func (s *session) renewView(ctx context.Context) (*gitview.View, error) {
	if err := s.checkConfig(ctx); err != nil {
		return nil, err
	}
	if s.viewUsed || s.viewSum != s.judged.SHA256 {
		s.gitView = nil
	}
	v, err := s.openView(ctx)
	if err == nil {
		s.viewUsed = true
	}
	return v, err
}

// refresh brings what changed in the base clone into the session's view, before a command's intent.
func (s *session) refresh(ctx context.Context) error {
	v, err := s.openView(ctx)
	if err == nil {
		err = s.checkConfig(ctx)
	}
	if err != nil {
		return viewError(err)
	}
	if err := v.Refresh(ctx); err != nil {
		return fmt.Errorf("%w: bringing the base clone's changes to session %s: %w", ErrUnavailable, s.id, err)
	}
	return nil
}

// harvest brings Git work of the session to the base clone. Nothing may be running in the sandbox. What hinders it is in
// the answer: the work stays where it is, and the next harvest tries again.
func (s *session) harvest(ctx context.Context) gitview.Harvest {
	failed := func(err error) gitview.Harvest {
		s.log.Warn("nothing harvested", "error", err)
		return gitview.Harvest{Status: gitview.Failed, Detail: err.Error()}
	}
	if st := s.state(); !st.Quiet() && st != Executing {
		return failed(fmt.Errorf("the session is %s: whether its sandbox is gone is not known", st))
	}
	v, err := s.openView(ctx)
	if err == nil {
		err = s.checkConfig(ctx)
	}
	if err != nil {
		return failed(err)
	}
	ctx, end := s.haste.harvesting(ctx)
	began := time.Now()
	h := v.Harvest(ctx)
	s.agent.metrics.Harvested(string(h.Status), time.Since(began))
	if end() && h.Status == gitview.Failed {
		h.Detail = fmt.Sprintf("%v (%s)", errHurried, h.Detail)
		s.enqueue(s.settleAgain) // a refusal means that the agent is closing: the next start completes it
	}
	if didAnything(h) {
		s.log.Info("harvested", "status", h.Status, "refs", h.Refs, "objects", h.Objects, "conflicts", len(h.Conflicts), "detail", h.Detail)
	}
	return h
}

// didAnything says whether a harvest is worth a record.
func didAnything(h gitview.Harvest) bool {
	quiet := h.Status == gitview.Unchanged || h.Status == gitview.Shared
	return !quiet || len(h.StaleLocks) > 0 || h.Detail != ""
}

// settle completes a harvest that was cut short, and takes what a failed one left. It costs some stats when there is
// nothing to do.
func (s *session) settle() gitview.Harvest {
	h := s.harvest(context.Background())
	if !didAnything(h) && !s.standsUnrecorded(h) {
		return h
	}
	point("settle.harvested")
	if err := s.saveHarvest(false, &h, s.conflictEvents("", h)...); err != nil {
		s.log.Error("harvest not recorded", "error", err)
	}
	return h
}

// saveHarvest records what a harvest did, with other changes. What can't be recorded is not the session's: it would keep all
// that comes after from being recorded too.
func (s *session) saveHarvest(durable bool, h *gitview.Harvest, more ...journal.Op) error {
	s.mu.Lock()
	before := s.rec.LastHarvest
	s.mu.Unlock()
	err := s.save(durable, func(r *sessionRecord) { r.LastHarvest = h }, more...)
	if err != nil {
		s.mu.Lock()
		s.rec.LastHarvest = before
		s.mu.Unlock()
	}
	return err
}

// standsUnrecorded says whether the session's record does not show the conflicts that stand: the agent that was told of
// them was killed before it wrote them down.
func (s *session) standsUnrecorded(h gitview.Harvest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.rec.LastHarvest
	return len(h.Standing) > 0 && (last == nil || len(last.Whole().Conflicts) == 0)
}

// Git runs a Git command of the allow-list in the session's jail, when its turn has come: it never runs beside a command.
// Of one that writes, the changes are harvested. It goes on when ctx ends once it runs.
func (a *Agent) Git(ctx context.Context, r *sandboxv1.GitRequest) (*sandboxv1.GitResponse, error) {
	cmd, err := gitguard.AllowGit(r.GetArgs())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	timeout, err := gitTimeout(r.TimeoutSeconds)
	if err != nil {
		return nil, err
	}
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	var out *sandboxv1.GitResponse
	err = s.trusted(ctx, r.GetOwnerEpoch(), func() error {
		out, err = s.git(cmd, timeout)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func gitTimeout(seconds *float64) (time.Duration, error) {
	if seconds == nil {
		return defaultGitTimeout, nil
	}
	if v := *seconds; math.IsNaN(v) || v < 0.001 || v > maxGitTimeout.Seconds() {
		return 0, invalid("timeout_seconds is %v: allowed are 0.001 to %v; leave it out for %v", v, maxGitTimeout.Seconds(), defaultGitTimeout.Seconds())
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// git runs on the session's goroutine. The agent's end ends Git: the next start completes what it left.
func (s *session) git(cmd gitguard.GitCommand, timeout time.Duration) (*sandboxv1.GitResponse, error) {
	if err := s.refresh(s.agent.ctx); err != nil {
		return nil, err
	}
	point("git.refreshed")
	res, err := s.gitView.Git(s.agent.ctx, cmd, timeout, int(s.agent.cfg.Limits.OutputBytes))
	point("git.ran")
	var h *sandboxv1.Harvest
	if cmd.Writes {
		h = harvestProto(s.settle())
	}
	if err != nil {
		return nil, viewError(err)
	}
	return &sandboxv1.GitResponse{
		ExitCode: int32(res.ExitCode), Stdout: res.Stdout, Stderr: res.Stderr, Truncated: res.Truncated, Harvest: h,
	}, nil
}

// viewError says that it is the workspace, as commands have left it, that is not fit for trusted Git. A time that was up
// stays what it is.
func viewError(err error) error {
	timeUp := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	unfit := errors.Is(err, gitview.ErrRefused) || errors.Is(err, gitguard.ErrIndex) || errors.Is(err, gitguard.ErrRefName) || errors.Is(err, gitjail.ErrGit)
	if timeUp || !unfit {
		return err
	}
	return fmt.Errorf("%w: %w", ErrPrecondition, err)
}

// Harvest brings the session's Git work to the base clone now, for example after a conflict was resolved there. Its answer
// has all conflicts that stand, also those that an earlier one told of.
func (a *Agent) Harvest(ctx context.Context, r *sandboxv1.HarvestRequest) (*sandboxv1.Harvest, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	var out *sandboxv1.Harvest
	err = s.trusted(ctx, r.GetOwnerEpoch(), func() error {
		// What was done about a conflict in the base clone is seen only then.
		if err := s.refresh(s.agent.ctx); err != nil {
			return err
		}
		out = harvestProto(s.settle().Whole())
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// trusted has a job of trusted Git take its turn among the session's: the fence is looked at then, and whoever has
// stopped waiting by then is not served.
func (s *session) trusted(ctx context.Context, epoch uint64, job func() error) error {
	if err := s.checkFence(epoch, 0); err != nil {
		return err
	}
	if err := s.admitTrusted(); err != nil {
		return err
	}
	return s.do(ctx, func() error {
		defer s.leftTrusted()
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.checkFence(epoch, 0); err != nil {
			return err
		}
		switch st := s.state(); {
		case st.Quiet():
			return job()
		case st == Deleted:
			return fmt.Errorf("%w: session %s is deleted", ErrNotFound, s.id)
		default:
			return fmt.Errorf("%w: session %s is %s: whether a command still writes to its workspace is not known; retire its sandbox first",
				ErrPrecondition, s.id, st)
		}
	})
}

// admitTrusted bounds how many calls of trusted Git wait (P16).
func (s *session) admitTrusted() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if limit := max(s.agent.cfg.Limits.Queue, 1); s.trustedWaiting >= limit {
		return fmt.Errorf("%w: %d Git calls of session %s wait already (limits.queue): ask again when one has ended", ErrExhausted, s.trustedWaiting, s.id)
	}
	s.trustedWaiting++
	return nil
}

func (s *session) leftTrusted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trustedWaiting--
}
