package agent

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

const (
	infoWait    = 30 * time.Second
	infoRetries = 3
)

// execution is one exec from its request to its outcome. intent is complete once started is closed; result and err
// once done is.
type execution struct {
	session  *session
	intent   intentRecord
	command  string
	wishMS   uint64 // the timeout as the caller gave it, 0 if it gave none
	fenced   uint64 // the generation that the caller insists on, 0 for any
	ownerAsk uint64 // the owner epoch that the caller has, 0 for any
	// spillAbove: a stream of more bytes is to be had as a file; 0: none is.
	spillAbove uint64
	phase      ExecPhase // guarded by session.mu
	output     *hub
	// request is done once exec.requested is told; waits: it is told before its turn has come.
	request sync.Once
	waits   bool
	// recovered is one whose intent an earlier agent wrote.
	recovered bool
	// boundaryTold: its exec.boundary is among the events already.
	boundaryTold bool
	// use is what it did over the network; nil without one, and for one of an earlier agent.
	use *networkUse
	// startedAt is when the intent was durable; zero after a restart of the agent.
	startedAt time.Time
	// cancelledAt is when receiptd was first asked to end it; guarded by session.mu.
	cancelledAt time.Time
	// because says why it was cancelled when no caller of CancelExec wanted it: a clause; guarded by session.mu.
	because string
	// evicts is what the end of its sandbox counts as, when it is that of no caller either (metrics.Evicted); guarded by session.mu.
	evicts string

	started chan struct{} // the intent is durable
	done    chan struct{}
	result  *sandboxv1.ExecResult
	err     error
}

func (s *session) newExecution(r *sandboxv1.ExecRequest, digest string, wishMS uint64, timeout time.Duration) *execution {
	return &execution{
		session: s, command: r.GetCommand(), wishMS: wishMS, fenced: r.GetGeneration(), ownerAsk: r.GetOwnerEpoch(), spillAbove: r.GetSpillAbove(), phase: Queued,
		output: newHub(s.agent.cfg.Limits.OutputBytes), started: make(chan struct{}), done: make(chan struct{}),
		intent: intentRecord{
			ExecID: r.GetExecId(), SessionID: s.id, RequestDigest: digest, Labels: r.GetLabels(),
			TimeoutMS: uint64(timeout.Milliseconds()), RequestedAt: time.Now().UTC(), Nonce: randomHex(32),
			Spill: r.GetSpillAbove() > 0,
		},
	}
}

// submit finds the exec of this id, or queues a new one. Exactly one of live and record is set. A known id is answered
// whatever epoch or generation is current; only starting is fenced.
func (s *session) submit(r *sandboxv1.ExecRequest) (live *execution, record *execRecord, err error) {
	wish, timeout, err := checkTimeout(r.TimeoutSeconds, s.agent.cfg.Limits)
	if err != nil {
		return nil, nil, err
	}
	digest := receipt.Request{SessionID: s.id, Command: r.GetCommand(), TimeoutMS: wish, Labels: r.GetLabels()}.Digest()
	s.mu.Lock()
	defer s.mu.Unlock()
	live, record, err = s.lookup(r.GetExecId())
	switch {
	case err == nil && live != nil:
		return live, nil, sameRequest(live.intent.RequestDigest, digest, r.GetExecId())
	case err == nil:
		return nil, record, sameRequest(record.Intent.RequestDigest, digest, r.GetExecId())
	case !errors.Is(err, ErrNotFound):
		return nil, nil, err
	}
	if err := s.admit(r); err != nil {
		return nil, nil, err
	}
	live = s.newExecution(r, digest, wish, timeout)
	live.waits = s.active
	s.queue = append(s.queue, live)
	if !s.wake() {
		s.queue = s.queue[:len(s.queue)-1]
		return nil, nil, fmt.Errorf("%w: %w", ErrUnavailable, errAbandoned)
	}
	s.live[r.GetExecId()] = live
	return live, nil, nil
}

func sameRequest(recorded, asked, id string) error {
	if recorded != asked {
		return fmt.Errorf("%w: exec_id %q was used for another command, timeout or labels: choose a new id", ErrExists, id)
	}
	return nil
}

// lookup finds an exec among the live ones and in the journal. Caller holds mu.
func (s *session) lookup(id string) (*execution, *execRecord, error) {
	if e := s.live[id]; e != nil {
		return e, nil, nil
	}
	b, err := s.agent.journal.Get(execKey(s.id, id))
	if errors.Is(err, journal.ErrNotFound) {
		rec, err := s.expiredExec(id)
		return nil, rec, err
	}
	if err != nil {
		return nil, nil, fmt.Errorf("looking up exec %q: %w", id, err)
	}
	rec := &execRecord{}
	if err := json.Unmarshal(b, rec); err != nil {
		return nil, nil, fmt.Errorf("%w: the record of exec %q can't be read: %w", ErrDataLoss, id, err)
	}
	return nil, rec, nil
}

// admit refuses what can't start: fenced off, or no room in the queue. Caller holds mu.
func (s *session) admit(r *sandboxv1.ExecRequest) error {
	if s.deleted {
		return fmt.Errorf("%w: session %s is deleted", ErrNotFound, s.id)
	}
	if err := s.agent.checkDraining(); err != nil {
		return err
	}
	if err := checkEpoch(s.id, r.GetOwnerEpoch(), s.rec.OwnerEpoch); err != nil {
		return err
	}
	if g := r.GetGeneration(); g != 0 && g != s.rec.Generation {
		return fmt.Errorf("%w: generation %d is not the current one of session %s, which is %d: read the session again", ErrPrecondition, g, s.id, s.rec.Generation)
	}
	if limit := s.agent.cfg.Limits.Queue; s.active && int64(len(s.queue)) >= limit {
		return fmt.Errorf("%w: %d commands of session %s wait already (limits.queue): ask again when one has ended", ErrExhausted, len(s.queue), s.id)
	}
	return nil
}

func checkEpoch(session string, have, current uint64) error {
	switch {
	case have == 0 || have == current:
		return nil
	case have > current:
		return fmt.Errorf("%w: owner_epoch %d was never given out by session %s, which is at %d: take the one that creating or claiming it answered", ErrPrecondition, have, session, current)
	default:
		return fmt.Errorf("%w: owner_epoch %d is not the current one of session %s, which is %d: another owner has claimed it", ErrPrecondition, have, session, current)
	}
}

// execute is the exec's turn. It runs on the session's goroutine.
func (s *session) execute(e *execution) {
	if s.agent.isClosing() {
		s.refuse(e, fmt.Errorf("%w: %w", ErrUnavailable, errAbandoned))
		return
	}
	if s.state() == Deleted {
		s.refuse(e, fmt.Errorf("%w: session %s was deleted before exec %s had its turn: it never ran", ErrNotFound, s.id, e.intent.ExecID))
		return
	}
	sb, err := s.ready(e.fenced)
	if err != nil {
		s.refuse(e, err)
		return
	}
	point("exec.ready")
	if err := s.refresh(context.Background()); err != nil {
		s.refuse(e, err)
		return
	}
	point("exec.refreshed")
	s.beginUse(e)
	stream, err := s.launch(e, sb)
	if err != nil {
		s.endUse()
		s.refuse(e, err)
		return
	}
	v := s.follow(e, sb, stream)
	e.use = s.endUse()
	s.conclude(e, v)
}

// refuse ends an exec that never started: nothing of it is recorded, the same id may be used again.
func (s *session) refuse(e *execution, err error) {
	event := ExRefused
	switch {
	case errors.Is(err, errUnrecorded):
		event = ExUnrecorded
	case errors.Is(err, errAbandoned):
		event = ExShutdown
	}
	if _, _, stateErr := s.step(e, event); stateErr != nil {
		return // it was cancelled before its turn had come, and whoever did that answers
	}
	s.refusedEvents(e, err)
	s.finish(e, nil, err)
}

// step takes an event through the exec's state machine. Exactly one caller gets each step, and does what comes with it.
func (s *session) step(e *execution, event ExecEvent) (from ExecPhase, effects ExecEffects, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return e.step(event)
}

// step is session.step for a caller that holds session.mu.
func (e *execution) step(event ExecEvent) (from ExecPhase, effects ExecEffects, err error) {
	from = e.phase
	e.phase, effects, err = from.Next(event)
	return from, effects, err
}

// launch makes the intent durable and hands the command to receiptd, in this order (P1), with the fencing tokens
// unchanged from the last look at them to the request on the wire (P8). A stream that could not be opened is not an
// error here: the intent stands, and what became of it is found out like after a crash.
func (s *session) launch(e *execution, sb *attached) (receiptdv1.Receiptd_ExecClient, error) {
	s.startMu.Lock()
	defer s.startMu.Unlock()
	nonce, err := hex.DecodeString(e.intent.Nonce)
	if err != nil {
		return nil, err
	}
	if err := s.fence(e, sb); err != nil {
		return nil, err
	}
	_, effects, err := s.step(e, ExTurn)
	if err != nil { // it was cancelled while the sandbox was made ready
		return nil, errors.Join(err, s.apply(EvExecEnd, "", nil))
	}
	point("exec.fenced")
	in := &e.intent
	err = s.agent.journal.Update(context.Background(), effects.Durable, append(e.startedEvents(),
		journal.Set(execKey(s.id, in.ExecID), encode(execRecord{Intent: *in})), journal.Set(openKey(s.id, in.ExecID), nil))...)
	if err != nil {
		err = fmt.Errorf("%w: %w of exec %s: %w", ErrUnavailable, errUnrecorded, in.ExecID, err)
		return nil, errors.Join(err, s.apply(EvExecEnd, "", nil))
	}
	point("intent.recorded")
	e.startedAt = time.Now()
	close(e.started)
	if s.agent.cfg.Log.Commands {
		s.log.Debug("exec starts", "exec", in.ExecID, "command", e.command)
	}
	// startMu is held: nobody may wait longer for a connection whose other end takes nothing than for one that is made. Writing
	// knows no context, but ends with the connection.
	stuck := time.AfterFunc(s.agent.attachTime(), func() { sb.conn.Close() })
	stream, err := sb.receiptd.Exec(s.agent.ctx, &receiptdv1.ExecRequest{
		AttachEpoch: sb.epoch, ExecId: in.ExecID, Nonce: nonce, Command: e.command, TimeoutMs: in.TimeoutMS,
		Labels: in.Labels, RequestedTimeoutMs: e.wishMS, GrantsDigest: in.GrantsDigest, SpillBytes: e.spillBytes(),
	})
	stuck.Stop()
	if err != nil {
		s.log.Warn("exec not handed over", "exec", in.ExecID, "error", err)
		return nil, nil
	}
	point("exec.handed-over")
	return stream, nil
}

// fence is the last look before the intent; it also fills in what the exec is bound to.
func (s *session) fence(e *execution, sb *attached) error {
	s.mu.Lock()
	epoch, rec := s.rec.OwnerEpoch, s.rec.Sandbox
	if s.deleted {
		s.mu.Unlock()
		return fmt.Errorf("%w: session %s is deleted", ErrNotFound, s.id)
	}
	if _, _, err := e.phase.Next(ExTurn); err != nil { // withdrawn, and not ours any more
		s.mu.Unlock()
		return err
	}
	e.intent.SandboxID, e.intent.ContainerID, e.intent.Generation = rec.ID, rec.Identity.ContainerID, rec.Generation
	e.intent.AttachEpoch, e.intent.OwnerEpoch, e.intent.GrantsDigest = sb.epoch, epoch, rec.GrantsDigest
	s.mu.Unlock()
	if err := checkEpoch(s.id, e.ownerAsk, epoch); err != nil {
		return err
	}
	if e.fenced != 0 && e.fenced != e.intent.Generation {
		return s.staleGeneration(e.fenced)
	}
	return s.apply(EvExecStart, "", nil)
}

// verdict is what became of an exec that had an intent.
type verdict struct {
	event  ExecEvent
	proven *proven // with ExReceipt and ExCancelled
	reason string
	// because says why it was cancelled when no caller of CancelExec wanted it: a clause.
	because string
}

// why is the reason, with what was behind it.
func (v verdict) why() string {
	if v.because == "" || v.event == ExReceipt {
		return v.reason
	}
	return v.reason + "; " + v.because
}

// follow reads the stream to its end. It never blocks on a reader of the output.
func (s *session) follow(e *execution, sb *attached, stream receiptdv1.Receiptd_ExecClient) verdict {
	if stream == nil {
		return s.resolve(e)
	}
	// One timer per exec instead of a context per message: when it fires, the connection is closed, which ends Recv.
	overdue := time.AfterFunc(e.budget(), func() { sb.conn.Close() })
	defer overdue.Stop()
	for {
		ev, err := stream.Recv()
		if err != nil {
			s.log.Warn("lost the stream of an exec", "exec", e.intent.ExecID, "error", err)
			return s.resolve(e)
		}
		switch x := ev.GetEvent().(type) {
		case *receiptdv1.ExecEvent_Output:
			e.output.publish(chunk{stream: sandboxv1.Stream(x.Output.GetStream()), offset: x.Output.GetOffset(), data: x.Output.GetData()})
		case *receiptdv1.ExecEvent_Done:
			go drain(stream)
			point("exec.done")
			return s.fromFolder(e, x.Done.GetReceiptSha256())
		case *receiptdv1.ExecEvent_NotStarted:
			go drain(stream)
			return verdict{event: ExNotStarted, reason: x.NotStarted.GetReason()}
		}
	}
}

// drain takes the stream's closing message, which the library waits to hand over.
func drain(stream receiptdv1.Receiptd_ExecClient) {
	for {
		if _, err := stream.Recv(); err != nil {
			return
		}
	}
}

// budget is how long an exec may take in all, counted from its start.
func (e *execution) budget() time.Duration {
	return time.Duration(e.intent.TimeoutMS)*time.Millisecond + e.cancelBudget()
}

// deadline is when a running exec is given up. After a restart the start is not known (queueing may have taken
// long), so the whole time counts from now.
func (e *execution) deadline() time.Time {
	if e.startedAt.IsZero() {
		return time.Now().Add(e.budget())
	}
	return latest(e.startedAt.Add(e.budget()), time.Now().Add(infoWait))
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// fromFolder reads the receipt that receiptd says is there.
func (s *session) fromFolder(e *execution, sha string) verdict {
	key, err := s.keyOf(e.intent.SandboxID)
	if err != nil {
		return verdict{event: ExBad, reason: err.Error()}
	}
	p, err := readProven(s.agent.receiptsDir(e.intent.SandboxID), &e.intent, key, sha)
	if err != nil {
		return verdict{event: ExBad, reason: "receiptd says that the receipt is there, but " + err.Error()}
	}
	return receiptVerdict(p)
}

// receiptVerdict tells a command that ended by itself from one that was ended on request.
func receiptVerdict(p *proven) verdict {
	if p.predicate.Cancelled {
		return verdict{event: ExCancelled, proven: p, reason: "it was ended on request"}
	}
	return verdict{event: ExReceipt, proven: p}
}

// resolve finds out what became of an intent whose stream is gone: after a lost connection and after a crash of the
// agent alike. It waits while the command runs, and ends in exactly one verdict.
func (s *session) resolve(e *execution) verdict {
	limit := e.deadline()
	for {
		deadline := s.sooner(e, limit)
		if s.agent.isClosing() {
			return verdict{event: ExShutdown}
		}
		know, detail := s.ask(e)
		finding, p, err := s.look(e)
		if detail == "" {
			detail = know.String()
		}
		event, wait := Decide(finding, know)
		if wait && time.Now().Before(deadline) {
			continue // ask waits in receiptd
		}
		if wait && know == NotNow {
			event = ExLost
		} else if wait {
			event, detail = ExLost, "it was still running although its time is over, or it was cancelled, and the grace period too (a task in uninterruptible sleep?)"
		}
		switch event {
		case ExReceipt:
			return receiptVerdict(p)
		case ExBad:
			return verdict{event: event, reason: err.Error()}
		case ExNeverSeen:
			return verdict{event: event, reason: "receiptd never saw the request: the connection was lost before it arrived"}
		default:
			return verdict{event: ExLost, reason: detail}
		}
	}
}

// ask asks receiptd under an epoch that is current: an older connection is gone, or drained, before it answers.
func (s *session) ask(e *execution) (Knowledge, string) {
	why := "no sandbox is attached"
	for range s.patience(e) {
		sb := s.current()
		if sb == nil || sb.Identity().SandboxID != e.intent.SandboxID {
			return Gone, "its sandbox is gone"
		}
		if sb.dead() {
			return Gone, "its sandbox ended before there was a receipt"
		}
		var err error
		if sb.broken() {
			sb, err = s.reattach(sb)
			if errors.Is(err, runtime.ErrUnreachable) {
				s.agent.nap(firstLook)
				return NotNow, err.Error()
			}
			if err != nil {
				why = err.Error()
				continue
			}
		}
		ctx, cancel := context.WithTimeout(s.agent.ctx, infoWait+s.agent.attachTime())
		info, err := sb.receiptd.Info(ctx, &receiptdv1.InfoRequest{
			AttachEpoch: sb.epoch, ExecId: e.intent.ExecID, WaitMs: uint32(infoWait.Milliseconds()),
		})
		cancel()
		if err == nil {
			return knowledgeOf(info.GetExec()), info.GetDetail()
		}
		why = err.Error()
		if s.agent.isClosing() {
			return Unreachable, why
		}
		sb.conn.Close()
		<-sb.lost
	}
	return Unreachable, "receiptd could not be asked: " + why
}

func knowledgeOf(k receiptdv1.ExecKnowledge) Knowledge {
	switch k {
	case receiptdv1.ExecKnowledge_NEVER_SEEN:
		return KnowsNothing
	case receiptdv1.ExecKnowledge_RUNNING:
		return KnowsRunning
	case receiptdv1.ExecKnowledge_RECEIPTED:
		return KnowsReceipt
	case receiptdv1.ExecKnowledge_RECEIPT_LOST:
		return KnowsReceiptLost
	default:
		return Unreachable
	}
}

// look reads the folder when nobody said that the receipt's Commit had returned: it is synced before it is believed.
func (s *session) look(e *execution) (ReceiptFinding, *proven, error) {
	dir := s.agent.receiptsDir(e.intent.SandboxID)
	key, err := s.keyOf(e.intent.SandboxID)
	if err != nil {
		return ReceiptBad, nil, err
	}
	p, err := readProven(dir, &e.intent, key, "")
	switch {
	case errors.Is(err, receipt.ErrNotFound):
		return ReceiptAbsent, nil, err
	case err != nil:
		return ReceiptBad, nil, err
	}
	if err := receipt.Sync(dir, e.intent.ExecID); err != nil {
		return ReceiptBad, nil, err
	}
	return ReceiptGood, p, nil
}

// conclude stops the sandbox where it must, harvests, records the outcome, and answers. What may still run, or broke its
// seals, is stopped before trusted Git looks at what it wrote, and the evidence of that is part of the answer.
func (s *session) conclude(e *execution, v verdict) {
	v = s.endWhatLives(e, v)
	from, effects, err := s.step(e, v.event)
	if err != nil {
		s.finish(e, nil, err)
		return
	}
	if v.event == ExShutdown {
		s.finish(e, nil, fmt.Errorf("%w: %w", ErrUnavailable, errAbandoned))
		return
	}
	point("exec.concluded")
	var stopErr error
	v.because = s.endedBecause(e, from)
	stopFirst := v.mayHaveRun() && (effects.StopSandbox || leftBehind(v.proven) != "")
	if stopFirst {
		s.tellBoundary(e, v.proven)
		stopErr = s.leave(e, v, effects)
	}
	result := outcome(e, v, from == Cancelling, s.evidenceOf(e.intent.SandboxID))
	e.use.tell(result)
	var harvest *gitview.Harvest
	durable := effects.Durable || outlived(v.proven) || e.use.anything() // which is in no receipt either
	if v.mayHaveRun() {
		h := s.harvest(context.Background())
		harvest, result.Harvest = &h, answeredHarvest(e, v, h)
		// What was harvested is in no receipt: after a crash nothing would tell it again (P7).
		durable = durable || result.GetHarvest() != nil
	}
	point("exec.harvested")
	durable = s.spill(e, v.proven, result) || durable
	if err := s.record(e, v.proven, result, harvest, durable); err != nil {
		if v.event != ExReceipt || outlived(v.proven) {
			s.finish(e, nil, err)
			return
		}
		// The receipt is durable: it is the answer now, and at every later question (unrecorded).
		// What was harvested and the files of outputs are in no receipt, so they are in neither.
		result.Harvest, result.Network, result.RefusedDestinations = nil, nil, nil
		if unspilled(result) {
			s.forgetOutputs(e)
		}
		s.log.Error("outcome not recorded, answering from the receipt", "exec", e.intent.ExecID, "error", err)
	}
	point("outcome.recorded")
	if !stopFirst {
		stopErr = s.leave(e, v, effects)
	}
	if stopErr != nil {
		s.log.Error("sandbox not stopped with evidence", "exec", e.intent.ExecID, "error", stopErr)
	}
	point("exec.left")
	s.count(e, v.proven, result)
	s.log.Info("exec ended", "exec", e.intent.ExecID, "generation", e.intent.Generation, "status", result.GetStatus().String())
	s.finish(e, result, nil)
}

// endedBecause is why an exec that was in phase from was cancelled, when no caller of CancelExec wanted it.
func (s *session) endedBecause(e *execution, from ExecPhase) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from != Cancelling {
		return ""
	}
	return e.because
}

// answeredHarvest is what an answer says of its harvest: nil when there was nothing to bring over. An exec of an earlier
// agent with a receipt may have been answered then, if nothing was harvested, for only then its record need not be
// durable; so what is harvested now is told with the session and not with that answer (P7).
func answeredHarvest(e *execution, v verdict, h gitview.Harvest) *sandboxv1.Harvest {
	if !didAnything(h) || e.recovered && v.proven != nil {
		return nil
	}
	return harvestProto(h)
}

// endWhatLives ends the sandbox of a command that something of outlived, by its own receipt, before that is its answer: without
// evidence of that end the receipt proves nothing (P3).
func (s *session) endWhatLives(e *execution, v verdict) verdict {
	if v.event != ExReceipt || !outlived(v.proven) || !s.state().HasSandbox() {
		return v
	}
	s.tellBoundary(e, v.proven)
	left := leftBehind(v.proven)
	if _, err := s.stop("Exec " + e.intent.ExecID + " left " + left + "."); err != nil {
		return verdict{event: ExLost, reason: fmt.Sprintf("its receipt says that it left %s, and %s", left, err)}
	}
	return v
}

// mayHaveRun says whether the command can have written anything.
func (v verdict) mayHaveRun() bool { return v.event != ExNotStarted && v.event != ExNeverSeen }

// outcome is the answer. evidence is that of the end of the exec's sandbox, nil without the whole set.
func outcome(e *execution, v verdict, cancelling bool, evidence *runtime.Evidence) *sandboxv1.ExecResult {
	status, plain := Answer(v.event, cancelling, evidence != nil)
	switch {
	case plain:
		return resultOf(&e.intent, v.proven)
	case v.proven != nil:
		return cancelledResult(&e.intent, v.proven, v.because, evidence)
	}
	r := resultWithout(&e.intent, status, reasonWithout(status, v.why()))
	if status != sandboxv1.ExecResult_NOT_STARTED {
		r.Evidence = evidenceProto(evidence)
	}
	return r
}

// record writes the outcome, and in the same step what a harvest did, if it did anything.
func (s *session) record(e *execution, p *proven, r *sandboxv1.ExecResult, harvest *gitview.Harvest, durable bool) error {
	b, err := encodeOutcome(r)
	if err != nil {
		return err
	}
	id, rec := e.intent.ExecID, execRecord{Intent: e.intent, Outcome: b, EndedAt: time.Now().UTC()}
	if p != nil {
		rec.Sequence = p.predicate.Sequence
	}
	ops := append(e.endedEvents(p, r, harvest), journal.Set(execKey(s.id, id), encode(rec)), journal.Delete(openKey(s.id, id)))
	if harvest != nil && didAnything(*harvest) {
		err = s.saveHarvest(durable, harvest, ops...)
	} else {
		err = s.agent.journal.Update(context.Background(), durable, ops...)
	}
	if err != nil {
		return fmt.Errorf("%w: recording the outcome of exec %s: %w (ask again with the same exec_id after the agent's restart)", ErrUnavailable, id, err)
	}
	s.counted()
	return nil
}

// leave takes the session out of EXECUTING. What may still run, and what broke its seals, is stopped first.
func (s *session) leave(e *execution, v verdict, effects ExecEffects) error {
	left := leftBehind(v.proven)
	if effects.StopSandbox || left != "" {
		why := "Exec " + e.intent.ExecID + ": " + v.why()
		if left != "" {
			why = "Exec " + e.intent.ExecID + " left " + left + "."
		}
		if !s.state().HasSandbox() {
			return nil // recovery has stopped it already
		}
		if _, err := s.stop(why); err != nil {
			return err
		}
		s.countEviction(e)
		return nil
	}
	if s.state() == Executing {
		return s.apply(EvExecEnd, "", nil)
	}
	return nil
}

// countEviction counts a sandbox that ended with its command, when no caller had asked for that.
func (s *session) countEviction(e *execution) {
	s.mu.Lock()
	reason := e.evicts
	s.mu.Unlock()
	if reason != "" {
		s.agent.metrics.Evicted(reason)
	}
}

// leftBehind says why a command's receipt, although it verifies, is no ground to run another one beside what it left;
// empty when there is nothing. The end of the sandbox takes it with it.
func leftBehind(p *proven) string {
	switch {
	case p == nil:
		return ""
	case !p.predicate.SealsIntact:
		return "broken seals"
	case p.predicate.Boundary.Cgroup == "populated":
		return "processes in its cgroup that were not in its PID namespace"
	case p.predicate.Boundary.SocketsLeft > 0:
		return fmt.Sprintf("%d sockets that could not be destroyed", p.predicate.Boundary.SocketsLeft)
	}
	return ""
}

// outlived says that something which a command began may be alive, or send, when its receipt was written.
func outlived(p *proven) bool {
	return p != nil && (p.predicate.Boundary.Cgroup == "populated" || p.predicate.Boundary.SocketsLeft > 0)
}

// finish gives the outcome to all who wait. The record is in the journal before the exec leaves the live ones, so a
// lookup always finds one of the two.
func (s *session) finish(e *execution, r *sandboxv1.ExecResult, err error) {
	s.mu.Lock()
	delete(s.live, e.intent.ExecID)
	if s.running == e {
		s.running = nil
	}
	s.mu.Unlock()
	e.result, e.err = r, err
	e.output.close()
	close(e.done)
}

// wait waits for the outcome. The exec goes on when ctx ends.
func (e *execution) wait(ctx context.Context) (*sandboxv1.ExecResult, error) {
	select {
	case <-e.done:
		return e.result, e.err
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for exec %s: %w (it goes on; ask again with the same exec_id)", e.intent.ExecID, ctx.Err())
	}
}

// unrecorded answers an exec whose outcome could not be recorded (the journal's disk is full): its receipt is as durable
// as a record, and gives the same answer. Without one the next start of the agent finds out, and so it does with one that
// was cancelled or outlived: the evidence belongs to that answer.
func (s *session) unrecorded(in *intentRecord) (*sandboxv1.ExecResult, error) {
	p, err := s.provenOf(in)
	if err == nil && p.predicate.Cancelled {
		err = errors.New("it was cancelled")
	}
	if err == nil && outlived(p) {
		err = fmt.Errorf("it left %s", leftBehind(p))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: exec %s has an intent and no recorded outcome, and %w: ask again after the agent's restart", ErrUnavailable, in.ExecID, err)
	}
	return resultOf(in, p), nil
}

// provenOf reads an exec's receipt.
func (s *session) provenOf(in *intentRecord) (*proven, error) {
	key, err := s.keyOf(in.SandboxID)
	if err != nil {
		return nil, err
	}
	return readProven(s.agent.receiptsDir(in.SandboxID), in, key, "")
}

// answerOf rebuilds the answer of a recorded exec: what the journal holds, receipt and output from the folder, verified
// again, and the evidence that was had after an uncertain answer.
func (s *session) answerOf(rec *execRecord) (*sandboxv1.ExecResult, error) {
	in := &rec.Intent
	switch {
	case rec.expired != nil:
		return nil, rec.expired.err(in.ExecID)
	case rec.Outcome == nil:
		return s.unrecorded(in)
	}
	r, err := decodeOutcome(rec.Outcome)
	if err != nil {
		return nil, err
	}
	if r.GetStatus() == sandboxv1.ExecResult_UNCERTAIN && r.GetEvidence() == nil {
		r.Evidence = evidenceProto(s.evidenceOf(in.SandboxID))
	}
	if !restsOnReceipt(r) {
		return r, nil
	}
	p, err := s.provenOf(in)
	if err != nil {
		if gone, lookErr := s.expired(in.ExecID); lookErr == nil && gone != nil { // just now
			return nil, gone.err(in.ExecID)
		}
		return nil, fmt.Errorf("%w: exec %s was answered before from a receipt that verified: %w", ErrDataLoss, in.ExecID, err)
	}
	r.Stdout, r.Stderr, r.Receipt = p.stdout, p.stderr, p.envelope
	return r, nil
}
