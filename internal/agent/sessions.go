package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// CreateSession checks the workspace, reserves it, records the session and starts its first sandbox. The same request
// under the same id gives the session that is there.
func (a *Agent) CreateSession(ctx context.Context, r *sandboxv1.CreateSessionRequest) (*sandboxv1.Session, error) {
	if r.GetSessionId() == "" {
		r.SessionId = "s-" + randomHex(8)
	}
	want, err := checkCreate(r, a.cfg, a.hosts.classes())
	if err != nil {
		return nil, err
	}
	digest := requestDigest(want)
	existing, err := a.claimID(want.GetSessionId(), digest)
	if err != nil {
		return nil, err
	}
	if existing != nil {
		return existing.snapshot(), nil
	}
	defer a.unclaimID(want.GetSessionId())
	// A caller that goes away leaves no half-made worktree: the session is made, and the same request finds it. Each step
	// has a time limit of its own.
	ctx = context.WithoutCancel(ctx)
	s, err := a.makeSession(ctx, want, digest)
	if err != nil {
		return nil, err
	}
	err = s.do(ctx, func() error {
		if _, err := s.provision(); err != nil {
			return alsoSay(err, s.undo(ctx))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return s.snapshot(), nil
}

// claimID keeps a second CreateSession of this id away, or gives the session that is there already.
func (a *Agent) claimID(id, digest string) (*session, error) {
	tomb, err := a.tomb(id)
	if err != nil {
		return nil, err
	}
	if tomb != nil {
		return nil, fmt.Errorf("%w: session_id %q belonged to a session that was deleted at %s, and ids are never reused: choose another",
			ErrExists, id, tomb.DeletedAt.Format(time.RFC3339))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch s := a.sessions[id]; {
	case a.closed:
		return nil, fmt.Errorf("%w: the agent is shutting down: ask again", ErrUnavailable)
	case a.draining.Load() && a.sessions[id] == nil:
		return nil, errDraining
	case a.creating[id]:
		return nil, fmt.Errorf("%w: session_id %q is just being created: wait for that call", ErrExists, id)
	case s != nil && s.requestDigest() == digest:
		return s, nil
	case s != nil:
		return nil, fmt.Errorf("%w: session_id %q was used for another request: choose another id", ErrExists, id)
	case a.count() >= a.cfg.Limits.Sessions:
		return nil, fmt.Errorf("%w: there are %d sessions (limits.sessions): delete one first", ErrExhausted, len(a.sessions))
	}
	a.creating[id] = true
	return nil, nil
}

// count is the sessions that there are or will be. Caller holds mu.
func (a *Agent) count() int64 {
	n := len(a.sessions)
	for id := range a.creating {
		if a.sessions[id] == nil {
			n++
		}
	}
	return int64(n)
}

func (a *Agent) unclaimID(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.creating, id)
}

func (s *session) requestDigest() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.RequestDigest
}

// makeSession looks at the disk, reserves the worktree and records the session.
func (a *Agent) makeSession(ctx context.Context, r *sandboxv1.CreateSessionRequest, digest string) (_ *session, err error) {
	w := r.GetWorkspace()
	grants, err := newGrantSet(r.GetGrants(), a.cfg.Workspace.AllowEnv)
	if err != nil {
		return nil, err
	}
	// Not with the rest of the request's checks: the same request finds its session also once they have expired.
	if err := grants.checkFresh(); err != nil {
		return nil, err
	}
	if err := a.reserveWorkspace(w.GetWorktree(), r.GetSessionId()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			a.releaseWorkspace(w.GetWorktree(), r.GetSessionId())
		}
	}()
	if root := a.cfg.Workspace.Roots[0]; w.GetWorktree() == a.cfg.DefaultWorktree(r.GetSessionId()) {
		if err := workspace.MakeRoot(root); err != nil {
			return nil, err
		}
	}
	if err := a.checkNotDeleting(w.GetWorktree()); err != nil {
		return nil, err
	}
	base, err := baseGit(ctx, w.GetRepository())
	if err != nil {
		return nil, err
	}
	defer base.Close()
	found, err := guard(ctx, w, base)
	if err != nil {
		return nil, err
	}
	ws, err := workspace.Open(ctx, workspace.Wanted{
		Repository: w.GetRepository(), Worktree: w.GetWorktree(), Branch: w.GetBranch(), BaseRef: w.GetBaseRef(),
		AllowRootOwned: a.cfg.Workspace.AllowRootOwned, Base: base,
	})
	if err != nil {
		return nil, workspaceError(err)
	}
	point("create.opened")
	// As long as the session is not recorded, what was made for it belongs to nobody.
	defer func() {
		if err != nil {
			err = alsoSay(err, workspace.Undo(ctx, ws))
		}
	}()
	s := newSession(a, sessionRecord{
		ID: r.GetSessionId(), RequestDigest: digest, OwnerEpoch: 1, State: Idle, CreatedAt: time.Now().UTC(),
		Workspace: ws, GitLayout: w.GetGitLayout(), Runtime: r.GetRuntime(), MinIsolation: runtime.Isolation(r.GetMinIsolation()), Network: r.GetNetwork().GetMode(), Env: r.GetEnv(),
		Egress: egress.Mode(r.GetNetwork().GetEgress()), Allow: r.GetNetwork().GetAllow(),
		Resources: resources{CPUs: r.GetResources().GetCpus(), MemoryBytes: r.GetResources().GetMemoryBytes(), Pids: r.GetResources().GetPids()},
		Caches:    cacheRecords(r.GetCaches()),
		Notes:     notesOf(a.cfg.Workspace, w.GetGitLayout(), found),
	})
	grants.take(s, &s.rec)
	if err := s.setUp(ctx, base); err != nil {
		return nil, err
	}
	point("create.set-up")
	if err := s.save(true, nil, s.event(events.SessionCreated, ws.Worktree), workspaceOp(s.id, ws, w.GetGitLayout())); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, alsoSay(err, s.dropView(ctx)))
	}
	point("create.recorded")
	a.mu.Lock()
	a.sessions[s.id] = s
	a.mu.Unlock()
	return s, nil
}

func workspaceError(err error) error {
	if errors.Is(err, workspace.ErrRefused) || errors.Is(err, config.ErrPath) {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return err
}

// setUp sees that the file systems do what Git needs, and makes the workspace's Git folder.
func (s *session) setUp(ctx context.Context, base *gitjail.Kept) error {
	ws := s.rec.Workspace
	for _, dir := range []string{ws.Worktree, ws.CommonDir} {
		if err := workspace.CheckStorage(ctx, dir, ws.Owner); err != nil {
			return workspaceError(err)
		}
	}
	v, err := s.openViewIn(ctx, base)
	if err != nil {
		return workspaceError(err)
	}
	s.rec.LeftOut = v.LeftOut()
	return nil
}

// dropView takes back the Git folder of a worktree that was made for this session: there is no work in it. That of a
// worktree that was there stays, as the worktree does.
func (s *session) dropView(ctx context.Context) error {
	if !s.rec.Workspace.Created || s.gitView == nil {
		return nil
	}
	if _, err := s.gitView.Remove(ctx); err != nil {
		return fmt.Errorf("left is %s: %w", s.agent.workspaceDir(s.rec.Workspace.Worktree), err)
	}
	return nil
}

// notesOf says what is different in the sandbox from what the repository has, and what a command can do to the base clone.
func notesOf(w config.Workspace, layout string, found []gitguard.Finding) []string {
	var notes []string
	if w.Hooks == "off" {
		notes = append(notes, "The repository's hooks don't run in the sandbox (workspace.hooks: off).")
	}
	notes = append(notes, "Git's configuration is read-only in the sandbox: git config and remote add are refused; the upstream that checkout --track and push -u would store is not stored.")
	if layout == config.SharedLayout {
		notes = append(notes,
			"Commands write the base clone's refs and objects (git_layout shared): use it for sessions of one trust domain.",
			"Deleting a packed ref, git pack-refs and git gc fail in the sandbox (git_layout shared).")
	} else {
		notes = append(notes, "Commands write nothing of the base clone: after each command the agent brings its commits over (git_layout isolated).")
	}
	for _, f := range found {
		if f.Key == "" {
			notes = append(notes, upper(findingText(f))+".")
		}
	}
	return notes
}

func upper(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// undo takes back a session whose first sandbox could not be had, so that its caller can try again under the same id: it
// never had a sandbox that anyone was told of. Without evidence it stays, UNCERTAIN. The worktree and branch that were
// made for it go too, unless a sandbox was ever ready there. They go first, while the worktree is still reserved.
func (s *session) undo(ctx context.Context) error {
	if st := s.state(); st != Idle && st != GrantsRequired {
		return fmt.Errorf("session %s is kept, because its workspace is still reserved: retire or delete it later", s.id)
	}
	s.mu.Lock()
	ws, sb := s.rec.Workspace, s.rec.Sandbox
	s.mu.Unlock()
	var left error
	var forgotten []journal.Op
	if sb == nil || len(sb.Proof) == 0 {
		left = alsoSay(s.dropView(ctx), workspace.Undo(ctx, ws))
		if ws.Created {
			forgotten = append(forgotten, journal.Delete(workspaceKey(ws.Worktree)))
		}
	}
	point("undo.undone")
	if err := s.forget("Its first sandbox could not be had.", forgotten...); err != nil {
		left = alsoSay(err, left)
	}
	return left
}

// alsoSay joins two errors in one sentence; either may be nil.
func alsoSay(err, more error) error {
	switch {
	case more == nil:
		return err
	case err == nil:
		return more
	}
	return fmt.Errorf("%w; %w", err, more)
}

// forget takes the session out of the journal and the agent's memory. why is for the event.
func (s *session) forget(why string, more ...journal.Op) error {
	s.startMu.Lock()
	defer s.startMu.Unlock()
	s.saveMu.Lock()
	defer s.saveMu.Unlock()
	to, effects, err := s.state().Next(EvDelete)
	if err != nil {
		return err
	}
	if err := s.agent.journal.Update(context.Background(), effects.Durable, append(more, s.event(events.SessionDeleted, why), journal.Delete(sessionKey(s.id)))...); err != nil {
		return fmt.Errorf("forgetting session %s: %w", s.id, err)
	}
	point("delete.forgotten")
	s.mu.Lock()
	s.rec.State, s.deleted = to, true
	s.mu.Unlock()
	s.after(effects)
	s.agent.mu.Lock()
	delete(s.agent.sessions, s.id)
	s.agent.mu.Unlock()
	return nil
}

// ClaimSession raises owner_epoch, durably. When it returns, no call with an older epoch starts anything (P8).
func (a *Agent) ClaimSession(_ context.Context, r *sandboxv1.ClaimSessionRequest) (*sandboxv1.Session, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	s.startMu.Lock()
	defer s.startMu.Unlock()
	s.mu.Lock()
	current, deleted := s.rec.OwnerEpoch, s.deleted
	s.mu.Unlock()
	if deleted {
		return nil, fmt.Errorf("%w: session %s is deleted", ErrNotFound, s.id)
	}
	if err := checkEpoch(s.id, r.GetOwnerEpoch(), current); err != nil {
		return nil, err
	}
	claimed := s.event(events.SessionClaimed, fmt.Sprintf("owner_epoch %d", current+1))
	point("claim.checked")
	if err := s.save(true, func(rec *sessionRecord) { rec.OwnerEpoch++ }, claimed); err != nil {
		// What is not on disk is no epoch of the session's: after a restart the one before would start things again.
		s.mu.Lock()
		s.rec.OwnerEpoch = current
		s.mu.Unlock()
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	point("claim.recorded")
	return s.snapshot(), nil
}

// GetSession shows one session.
func (a *Agent) GetSession(_ context.Context, r *sandboxv1.GetSessionRequest) (*sandboxv1.Session, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	return s.snapshot(), nil
}

// SandboxKey gives the public key of one of a session's sandboxes, of earlier ones too; nil when id is empty, no such sandbox
// is on record any more, or it is another session's. It fails with ErrNotFound when there is no such session.
func (a *Agent) SandboxKey(session, id string) (*sandboxv1.SandboxKey, error) {
	s, err := a.find(session)
	if err != nil || id == "" {
		return nil, err
	}
	k, err := s.keyRecordOf(id)
	if errors.Is(err, ErrDataLoss) || err == nil && k.Session != session {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &sandboxv1.SandboxKey{SandboxId: id, Generation: k.Generation, PublicKey: k.PublicKey}, nil
}

// ListSessions gives one page of the sessions, in the order of their ids, and the token of the next one.
func (a *Agent) ListSessions(_ context.Context, r *sandboxv1.ListSessionsRequest) ([]*sandboxv1.Session, string, error) {
	size, err := pageSize(r.GetPageSize())
	if err != nil {
		return nil, "", err
	}
	a.mu.Lock()
	list := a.all()
	a.mu.Unlock()
	slices.SortFunc(list, func(x, y *session) int { return strings.Compare(x.id, y.id) })
	var page []*sandboxv1.Session
	for _, s := range list {
		if s.id <= r.GetPageToken() {
			continue
		}
		if len(page) == size {
			return page, page[size-1].GetSessionId(), nil
		}
		page = append(page, s.snapshot())
	}
	return page, "", nil
}

func pageSize(want int32) (int, error) {
	switch {
	case want < 0 || want > maxPage:
		return 0, invalid("page_size is %d: allowed are 1 to %d, 0 for %d", want, maxPage, defaultPage)
	case want == 0:
		return defaultPage, nil
	}
	return int(want), nil
}

// RetireSandbox ends the running command, stops the sandbox and answers with the evidence. Commands that wait in the
// queue get the next generation, unless they insist on the old one.
func (a *Agent) RetireSandbox(ctx context.Context, r *sandboxv1.RetireSandboxRequest) (*sandboxv1.Session, *sandboxv1.Evidence, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, nil, err
	}
	check := func() error { return s.checkFence(r.GetOwnerEpoch(), r.GetGeneration()) }
	evidence, err := s.retire(ctx, check, "Retired on request.", "its sandbox was retired", func() error { return nil })
	if err != nil {
		return nil, nil, err
	}
	return s.snapshot(), evidenceProto(evidence), nil
}

func (s *session) checkFence(epoch, generation uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := checkEpoch(s.id, epoch, s.rec.OwnerEpoch); err != nil {
		return err
	}
	if generation != 0 && generation != s.rec.Generation {
		return fmt.Errorf("%w: generation %d is not the current one of session %s, which is %d: read the session again", ErrPrecondition, generation, s.id, s.rec.Generation)
	}
	return nil
}

// retire has a running command end at its boundary, so that its receipt survives, stops the sandbox, and then does
// what else there is to do, before any queued exec has its turn. check is asked now and again then.
func (s *session) retire(ctx context.Context, check func() error, why, because string, then func() error) (*runtime.Evidence, error) {
	if err := check(); err != nil {
		return nil, err
	}
	var evidence *runtime.Evidence
	over := s.haste.hurry()
	// The job is queued before the cancel: no queued exec starts between the two.
	done := s.enqueue(func() (err error) {
		defer over()
		if err := check(); err != nil {
			return err
		}
		if s.state().HasSandbox() {
			if evidence, err = s.stop(why); err != nil {
				return fmt.Errorf("%w: the workspace of session %s stays reserved, because %w", ErrPrecondition, s.id, err)
			}
			s.settle()
		} else if sb := s.sandboxRecord(); sb != nil {
			evidence = sb.Evidence
		}
		over() // what comes then has bounds of its own
		return then()
	})
	s.cancelRunning(because, "")
	if err := s.await(ctx, done); err != nil {
		return nil, err
	}
	return evidence, nil
}

// DeleteSession stops the sandbox with evidence and forgets the session and its exec records. The worktree, what the agent
// keeps for it, the receipts and the keys stay on disk; the id is never used again. A call during another one waits for that, and
// answers the same.
func (a *Agent) DeleteSession(ctx context.Context, r *sandboxv1.DeleteSessionRequest) (*sandboxv1.Evidence, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	return s.delete(ctx, r.GetOwnerEpoch())
}

func (s *session) delete(ctx context.Context, epoch uint64) (*sandboxv1.Evidence, error) {
	check := func() error { return s.checkFence(epoch, 0) }
	evidence, err := s.retire(ctx, check, "The session is deleted.", "the session was deleted", s.bury)
	if err != nil {
		return nil, err
	}
	return evidenceProto(evidence), nil
}

// bury forgets the session, leaves its tombstone, and clears its exec records away; should the agent die between the
// two, the next start clears them. It may be asked again by who had found the session before it was forgotten.
func (s *session) bury() error {
	if s.state() != Deleted {
		if err := s.forget("", journal.Set(tombKey(s.id), encode(tombRecord{DeletedAt: time.Now().UTC()}))); err != nil {
			return err
		}
	}
	err := s.agent.clearExecs(s.id)
	point("delete.cleared")
	return err
}

func (a *Agent) clearExecs(session string) error {
	for _, prefix := range []string{execKey(session, ""), openKey(session, ""), expiredKey(session, ""), sweptKey(session, "")} {
		var ops []journal.Op
		err := a.journal.Scan(prefix, "", func(key string, _ []byte) error {
			ops = append(ops, journal.Delete(key))
			return nil
		})
		if err == nil && len(ops) > 0 {
			err = a.journal.Update(context.Background(), false, ops...)
		}
		if err != nil {
			return fmt.Errorf("clearing the exec records of session %s: %w", session, err)
		}
	}
	return nil
}

// NodeInfo says what this node is.
func (a *Agent) NodeInfo(ctx context.Context) *sandboxv1.GetNodeInfoResponse {
	a.mu.Lock()
	n := len(a.sessions)
	a.mu.Unlock()
	return &sandboxv1.GetNodeInfoResponse{
		Version: a.opts.Version, BootId: a.bootID, Kernel: kernelRelease(), DefaultRuntime: a.cfg.Runtime.Default,
		AllowedRuntimes: a.cfg.Runtime.Allowed, StartedAt: timestamppb.New(a.started), Sessions: int32(n),
		WorkspaceRoots: a.cfg.Workspace.Roots, Runtimes: a.runtimes(ctx, statusAge),
	}
}
