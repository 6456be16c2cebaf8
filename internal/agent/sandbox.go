package agent

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/ttrpc"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

const (
	attachTimeout = 20 * time.Second
	stopTimeout   = 60 * time.Second
)

// startTime bounds a sandbox's start, attachTime the part of it that attaches to what runs.
func (a *Agent) startTime() time.Duration { return a.cfg.Runtime.StartTimeout.Std() }

func (a *Agent) attachTime() time.Duration { return a.startTime() / 3 }

func randomHex(n int) string {
	b := make([]byte, n)
	// crypto/rand.Read never fails (Go 1.24): it ends the program instead.
	rand.Read(b)
	return hex.EncodeToString(b)
}

// ready gives a sandbox that can take the next command: the one there is, or a new generation. fenced is the
// generation that the caller insists on, 0 for any: then no new one is started for it.
func (s *session) ready(fenced uint64) (*attached, error) {
	if err := s.agent.checkDraining(); err != nil {
		return nil, err
	}
	if err := s.requireGrants(); err != nil {
		return nil, err
	}
	if err := s.checkAway(); err != nil {
		return nil, err
	}
	if sb := s.current(); sb != nil && s.state() == Ready {
		switch {
		case sb.dead():
			if err := s.endedItself(); err != nil {
				return nil, err
			}
		case sb.broken():
			if again, err := s.reattach(sb); err == nil {
				return again, nil
			} else if errors.Is(err, runtime.ErrUnreachable) {
				return nil, fmt.Errorf("%w: the connection to the sandbox of session %s was lost, and can't be made again: %w: ask again", ErrUnavailable, s.id, err)
			} else if _, stopErr := s.stop("The connection to receiptd was lost: " + err.Error()); stopErr != nil {
				return nil, stopErr
			}
		case s.grantsMoved():
			if _, err := s.stop("The session's grants were replaced."); err != nil {
				return nil, err
			}
		case s.configMoved():
			if _, err := s.stop("The base clone's configuration was changed, and the sandbox has it as it was."); err != nil {
				return nil, err
			}
		default:
			return sb, nil
		}
	}
	if st := s.state(); st != Idle {
		if _, err := s.stop("A new sandbox is needed."); err != nil {
			return nil, fmt.Errorf("%w: the workspace of session %s is still reserved, because %w", ErrPrecondition, s.id, err)
		}
		s.settle()
	}
	if fenced != 0 {
		return nil, s.staleGeneration(fenced)
	}
	return s.provision()
}

func (s *session) staleGeneration(want uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if want == s.rec.Generation {
		return fmt.Errorf("%w: generation %d of session %s has no sandbox any more (state %s: %s): look at the workspace, then send generation 0 to have the next one started",
			ErrPrecondition, want, s.id, s.rec.State, s.rec.Reason)
	}
	return fmt.Errorf("%w: generation %d is not the current one of session %s, which is %d: read the session again", ErrPrecondition, want, s.id, s.rec.Generation)
}

// provision starts the next generation's sandbox and has it prove itself. On an error nothing of it is left, or the
// session is UNCERTAIN; there is no other way to run a command (P14).
func (s *session) provision() (_ *attached, err error) {
	began := time.Now()
	defer func() {
		if !errors.Is(err, ErrPrecondition) && !errors.Is(err, ErrExhausted) {
			s.agent.metrics.SandboxStarted(s.runtimeName(), time.Since(began), err)
		}
	}()
	if err := s.agent.checkDraining(); err != nil {
		return nil, err
	}
	spec, err := s.prepare()
	switch {
	case errors.Is(err, ErrPrecondition), errors.Is(err, ErrExhausted):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w: preparing a sandbox for session %s: %w", ErrUnavailable, s.id, err)
	}
	sb, err := s.start(spec)
	if err == nil {
		point("provision.ready")
		return sb, nil
	}
	err = s.explain(err)
	s.log.Error("sandbox not started", "sandbox", spec.SandboxID, "error", err)
	if _, stopErr := s.stop("Its start failed: " + err.Error()); stopErr != nil {
		return nil, fmt.Errorf("%w: starting a sandbox for session %s: %w; then %w", ErrUnavailable, s.id, err, stopErr)
	}
	return nil, fmt.Errorf("%w: starting a sandbox for session %s: %w", ErrUnavailable, s.id, err)
}

// explain adds what the node lacks, if that is why: user namespaces that are switched off are said with the sysctl.
func (s *session) explain(err error) error {
	rt, rtErr := s.host()
	if rtErr != nil || errors.Is(err, runtime.ErrUnavailable) || errors.Is(err, runtime.ErrUnreachable) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), attachTimeout)
	defer cancel()
	return alsoSay(err, rt.Check(ctx))
}

// prepare decides everything of the next sandbox and makes it durable, before the runtime is asked for anything: a
// crash from here on leaves a sandbox id by which the rest of it is found.
func (s *session) prepare() (runtime.Spec, error) {
	a := s.agent
	rt, err := s.nextHost()
	if err != nil {
		return runtime.Spec{}, err
	}
	// Before anything is recorded: what was never asked for needs no evidence.
	if err := a.hosts.reachable(a.ctx, rt); err != nil {
		return runtime.Spec{}, err
	}
	s.mu.Lock()
	rec, grants, lost := s.rec, s.grants.mounted(), s.grantsProblem()
	s.mu.Unlock()
	if err := a.checkMode(s.id, rec.Network); err != nil {
		return runtime.Spec{}, err
	}
	policy, err := a.egressOf(&rec)
	if err != nil {
		return runtime.Spec{}, err
	}
	if lost != "" {
		return runtime.Spec{}, fmt.Errorf("%w: session %s needs its grants again: %s", ErrPrecondition, s.id, lost)
	}
	w := rec.Workspace
	if err := a.checkNotDeleting(w.Worktree); err != nil {
		return runtime.Spec{}, err
	}
	if err := workspace.Recheck(w); err != nil {
		return runtime.Spec{}, err
	}
	view, err := s.renewView(context.Background())
	if err != nil {
		return runtime.Spec{}, err
	}
	caches, err := a.cacheMounts(rec.Caches, w.Worktree, w.Owner)
	if err != nil {
		return runtime.Spec{}, err
	}
	if err := workspace.MakeScratch(w.Worktree, w.Owner); err != nil {
		return runtime.Spec{}, err
	}
	plan, err := mounts.New(mounts.Workspace{
		Worktree: w.Worktree, CommonDir: w.CommonDir, MetaDir: w.MetaDir, OwnerUID: w.Owner.UID, OwnerGID: w.Owner.GID,
		Layout: rec.GitLayout, Private: view.Private(), Extra: caches, Hooks: a.cfg.Workspace.Hooks == "inside",
	}, mounts.Exists)
	if err != nil {
		return runtime.Spec{}, err
	}
	id := "sb-" + randomHex(8)
	slot, err := a.slots.take(id, rec.Resources.MemoryBytes)
	if err != nil {
		return runtime.Spec{}, err
	}
	point("provision.prepared")
	sb := &sandboxRecord{
		ID: id, Slot: slot, Plan: plan, Dir: filepath.Join(a.sandboxesDir(), id), Isolation: rt.Isolation(), Concessions: rt.Concessions(),
	}
	if err := s.apply(EvProvision, "", func(r *sessionRecord) {
		sb.Generation, sb.GrantsDigest = r.Generation, r.GrantsDigest
		r.Sandbox, r.ConfigSHA256, r.LeftOut = sb, s.viewSum, view.LeftOut()
	}, workspaceOp(s.id, w, rec.GitLayout)); err != nil {
		s.mu.Lock() // there is none, and the session is what it was
		r := &s.rec
		r.State, r.Reason, r.Generation, r.Sandbox, r.ConfigSHA256, r.LeftOut = rec.State, rec.Reason, rec.Generation, rec.Sandbox, rec.ConfigSHA256, rec.LeftOut
		s.mu.Unlock()
		a.slots.release(slot, id)
		return runtime.Spec{}, err
	}
	point("provision.recorded")
	return runtime.Spec{
		SandboxID: id, SessionID: s.id, Generation: sb.Generation,
		Rootfs: a.cfg.Rootfs, IDs: idsOf(slot), Workspace: plan, Network: rec.Network, Connect: a.connector(id, rec.Network, policy),
		Resources: resourcesOf(rec.Resources, a.cfg.Limits), Grants: grants,
		Dir: sb.Dir, ReceiptsDir: a.receiptsDir(id), Receiptd: a.opts.Receiptd, Pid1: a.opts.Pid1,
		ReceiptdSHA256: a.programs.receiptd, Pid1SHA256: a.programs.pid1,
	}, nil
}

// start makes the container, attaches to it, and has it prove itself.
func (s *session) start(spec runtime.Spec) (*attached, error) {
	rt, err := s.nextHost()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.agent.startTime())
	defer cancel()
	receipts, err := makeReceiptsDir(spec.ReceiptsDir)
	if err != nil {
		return nil, err
	}
	point("provision.receipts")
	container, err := rt.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	point("provision.created")
	if err := cmpErr(<-receipts, checkProvenance(container.Identity().Provenance, &spec)); err != nil {
		return nil, errors.Join(err, container.Close())
	}
	if err := s.noteNetwork(spec.SandboxID, spec.Network); err != nil {
		return nil, errors.Join(err, container.Close())
	}
	sb, key, err := s.attach(ctx, container, spec.ReceiptsDir)
	if err != nil {
		if s.current() == nil {
			err = errors.Join(err, container.Close())
		}
		return nil, err
	}
	proof, err := s.prove(ctx, sb)
	if err != nil {
		return nil, err
	}
	if spec.Network != config.NoNetwork { // what its proof was refused is no command's
		if err := s.agent.networks.Settle(ctx); err != nil {
			s.log.Warn("refusals of a sandbox's proof may be told as a command's", "sandbox", spec.SandboxID, "error", err)
		}
	}
	point("provision.proved")
	defer s.agent.lookAtTimes()
	c := s.agent.clock
	return sb, s.apply(EvProved, "", func(r *sessionRecord) {
		r.Sandbox.Proof, r.Sandbox.ProvedAt, s.used = proof, c.boot(), c.steady()
	}, key...)
}

// makeReceiptsDir makes a sandbox's receipts folder and syncs the folder above, while the container starts: a receipt
// is only as durable as the way to it.
func makeReceiptsDir(dir string) (<-chan error, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the receipts folder: %w", err)
	}
	parent, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return nil, fmt.Errorf("making the receipts folder %s durable: %w", dir, err)
	}
	done := make(chan error, 1)
	go func() { done <- errors.Join(parent.Sync(), parent.Close()) }()
	return done, nil
}

// attach opens a connection of a new epoch. The epoch is durable before receiptd hears it, so that no two agents'
// connections ever carry the same one (P6). The record of the public key goes into the journal with the next change.
func (s *session) attach(ctx context.Context, container runtime.Sandbox, receipts string) (*attached, []journal.Op, error) {
	err := s.save(true, func(r *sessionRecord) {
		made := r.Sandbox.Identity.Provenance
		r.Sandbox.AttachEpoch++
		r.Sandbox.Identity = container.Identity()
		if made != (runtime.Provenance{}) { // what it was made of is known from its start, and in its receipts
			r.Sandbox.Identity.Provenance = made
		}
	})
	if err != nil {
		return nil, nil, err
	}
	point("attach.recorded")
	rec := s.sandboxRecord()
	conn, err := container.Dial(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("connecting to receiptd of %s: %w", rec.ID, err)
	}
	sb := &attached{Sandbox: container, epoch: rec.AttachEpoch, receipts: receipts, lost: make(chan struct{})}
	sb.conn = ttrpc.NewClient(conn, ttrpc.WithOnClose(func() { close(sb.lost) }))
	sb.receiptd = receiptdv1.NewReceiptdClient(sb.conn)
	s.mu.Lock()
	old := s.sandbox
	s.sandbox = sb
	s.mu.Unlock()
	if old != nil {
		old.conn.Close()
	} else {
		s.agent.watchers.Go(func() { s.watch(container) })
	}
	point("attach.connected")
	key, err := s.introduce(ctx, sb, rec)
	return sb, key, err
}

// introduce sends Init and takes receiptd's public key: new at the first time, the same ever after.
func (s *session) introduce(ctx context.Context, sb *attached, rec *sandboxRecord) ([]journal.Op, error) {
	ctx, cancel := context.WithTimeout(ctx, s.agent.attachTime())
	defer cancel()
	resp, err := sb.receiptd.Init(ctx, &receiptdv1.InitRequest{
		Identity:    &receiptdv1.Identity{SessionId: s.id, SandboxId: rec.ID, Generation: rec.Generation},
		AttachEpoch: sb.epoch,
		View:        s.view(sb, rec),
		Limits:      s.limits(),
		Provenance:  toldProvenance(rec.Identity.Provenance),
	})
	if err != nil {
		return nil, fmt.Errorf("introducing itself to receiptd of %s (epoch %d): %w", rec.ID, sb.epoch, err)
	}
	switch key := resp.GetPublicKey(); {
	case len(key) != ed25519.PublicKeySize:
		return nil, fmt.Errorf("receiptd of %s gave a public key of %d bytes instead of %d", rec.ID, len(key), ed25519.PublicKeySize)
	case len(rec.PublicKey) == 0:
		return s.learnKey(rec, resp)
	case !bytes.Equal(key, rec.PublicKey):
		return nil, fmt.Errorf("receiptd of %s has another public key than it had: it is not the one that was started", rec.ID)
	}
	return nil, nil
}

func (s *session) learnKey(rec *sandboxRecord, resp *receiptdv1.InitResponse) ([]journal.Op, error) {
	key := ed25519.PublicKey(resp.GetPublicKey())
	if err := verify.SaveKey(s.agent.keyFile(rec.ID), key); err != nil {
		return nil, err
	}
	point("attach.key-saved")
	var seals []sealRecord
	for _, x := range resp.GetSeals() {
		seals = append(seals, sealRecord{Path: x.GetPath(), MountID: x.GetMountId(), Device: x.GetDevice(), Inode: x.GetInode(), ReadOnly: x.GetReadOnly(), SHA256: x.GetSha256()})
	}
	s.mu.Lock()
	s.rec.Sandbox.PublicKey, s.rec.Sandbox.Seals = key, seals
	s.mu.Unlock()
	return []journal.Op{journal.Set(sandboxKey(rec.ID), encode(keyRecord{
		Session: s.id, Generation: rec.Generation, PublicKey: key, Provenance: rec.Identity.Provenance,
		ConcedesSockets: concedesSockets(rec.Concessions),
	}))}, nil
}

func (s *session) view(sb *attached, rec *sandboxRecord) *receiptdv1.View {
	v := sb.View()
	v.Dir = rec.Plan.Worktree
	v.Env = commandEnv(rec.Plan.Worktree, s.rec.GitLayout, s.agent.cfg.Workspace, s.variables())
	v.Seals = rec.Plan.Seals()
	if rec.GrantsDigest != "" {
		v.Seals = append(v.Seals, runtime.GrantsPath)
	}
	v.AllowNestedUserns = s.agent.cfg.Runtime.NestedUserns
	return v
}

func (s *session) limits() *receiptdv1.Limits {
	l := s.agent.cfg.Limits
	return &receiptdv1.Limits{
		OutputBytes: uint64(l.OutputBytes), Nproc: uint64(s.rec.Resources.Pids), Nofile: filesOf(nodeFileMax(), s.rec.Resources.Pids),
		GraceMs: uint32(l.Grace.Std().Milliseconds()), MaxTimeoutMs: uint64(l.MaxTimeout.Std().Milliseconds()),
	}
}

// prove has the sandbox show what it must, which is all that its runtime has not conceded beforehand.
func (s *session) prove(ctx context.Context, sb *attached) ([]proofRecord, error) {
	watched, err := s.watchListeners()
	if err != nil {
		return nil, fmt.Errorf("having sandbox %s prove itself: %w", sb.Identity().SandboxID, err)
	}
	resp, err := sb.receiptd.Prove(ctx, &receiptdv1.ProveRequest{AttachEpoch: sb.epoch, Targets: watched.targets})
	items, watchErr := watched.end()
	if err = cmpErr(err, watchErr); err != nil {
		return nil, fmt.Errorf("having sandbox %s prove itself: %w", sb.Identity().SandboxID, err)
	}
	proof, err := judgeProof(append(resp.GetItems(), items...), s.sandboxRecord().Concessions)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s %w", sb.Identity().SandboxID, err)
	}
	return proof, nil
}

// reattach opens a new connection to a sandbox that lives.
func (s *session) reattach(sb *attached) (*attached, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.agent.attachTime())
	defer cancel()
	again, key, err := s.attach(ctx, sb.Sandbox, sb.receipts)
	if err != nil {
		return nil, err
	}
	if len(key) > 0 {
		return nil, fmt.Errorf("sandbox %s was attached before its key was known", sb.Identity().SandboxID)
	}
	return again, nil
}

// watch notices a sandbox that ends by itself while it is idle, so that its evidence is taken and the session says
// so. While a command runs, the command's own goroutine notices.
func (s *session) watch(container runtime.Sandbox) {
	select {
	case <-container.Exited():
	case <-s.agent.closing:
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.urgent = append(s.urgent, func() {
		if sb := s.current(); sb != nil && sb.Sandbox == container && s.state() == Ready {
			if err := s.endedItself(); err != nil {
				s.log.Error("sandbox ended without evidence", "sandbox", container.Identity().SandboxID, "error", err)
			}
		}
	})
	s.wake()
}

// endedItself takes the evidence of a sandbox that ended by itself.
func (s *session) endedItself() error {
	_, err := s.stop("The sandbox ended by itself.")
	if err == nil {
		s.agent.metrics.Evicted(metrics.EvictedDied)
	}
	return err
}

// stop ends the sandbox, whatever state it is in, and records the evidence. Without the whole set the session is
// UNCERTAIN and the workspace stays reserved (P5); stop can be called again. Intents that waited for the sandbox's runtime
// come to their end with it.
func (s *session) stop(why string) (*runtime.Evidence, error) {
	evidence, err := s.stopSandbox(why)
	if st := s.state(); st != Ready && st != Executing {
		for _, e := range s.endAway() {
			s.reclaim(e)
		}
	}
	return evidence, err
}

func (s *session) stopSandbox(why string) (*runtime.Evidence, error) {
	if err := s.apply(EvStop, why, nil); err != nil {
		if !unwritten(err) {
			return nil, err
		}
		// What has to end does so although there is no room to write it down: after a crash the record of a sandbox that is to
		// be found no more leads here too.
		s.log.Error("sandbox stopped without a record of that", "error", err)
	}
	point("stop.recorded")
	s.mu.Lock()
	sb := s.sandbox
	s.sandbox = nil
	s.mu.Unlock()
	if sb != nil {
		sb.conn.Close()
	}
	evidence, err := s.end(sb)
	point("stop.ended")
	if err != nil || !evidence.Complete {
		err = fmt.Errorf("sandbox %s could not be seen to be gone (%s): %w", s.sandboxRecord().ID, evidenceText(evidence), cmpErr(err, runtime.ErrNoEvidence))
		saveErr := s.apply(EvNoEvidence, s.stuck(why, err), func(r *sessionRecord) { r.Sandbox.Evidence = &evidence })
		if saveErr != nil {
			s.stopAgain(why)
		}
		return &evidence, errors.Join(err, saveErr)
	}
	s.agent.tidyReceipts(s.sandboxRecord().ID)
	s.agent.disconnect(s.sandboxRecord().ID)
	err = s.apply(s.gone(), why, func(r *sessionRecord) { r.Sandbox.Evidence = &evidence }, s.sandboxRecord().gone(s.id, &evidence)...)
	if err != nil {
		s.stopAgain(why)
	}
	point("stop.evidence")
	return &evidence, err
}

// unwritten says whether an error is of a journal that can't write, for now or for good, in an agent that goes on.
func unwritten(err error) bool {
	return errors.Is(err, journal.ErrNoSpace) || errors.Is(err, journal.ErrPoisoned)
}

// end asks the sandbox, and if that fails the runtime, which also knows half-made ones.
func (s *session) end(sb *attached) (runtime.Evidence, error) {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if sb != nil {
		evidence, err := sb.Stop(ctx)
		if err == nil && evidence.Complete {
			return evidence, nil
		}
		s.log.Warn("stopping the sandbox failed, removing it", "sandbox", sb.Identity().SandboxID, "error", err)
	}
	rt, err := s.host()
	if err != nil {
		return runtime.Evidence{}, err
	}
	return rt.Remove(ctx, s.sandboxRecord().identity(rt.Name()))
}

func evidenceText(e runtime.Evidence) string {
	if len(e.Items) == 0 {
		return "no observation"
	}
	var found []string
	for _, i := range e.Items {
		found = append(found, i.Source)
	}
	return "only " + strings.Join(found, ", ")
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}
