package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Waits between two requests to end a command: receiptd may hear of the end before it has heard of the command.
const (
	firstCancelWait = 2 * time.Millisecond
	maxCancelWait   = time.Second
)

// CancelExec ends an exec and answers with what became of it. One that has no intent yet certainly never ran, and its id
// is answered so ever after. A running one is ended at its boundary, so that receipt and output survive, and its sandbox
// is stopped with evidence. A command that had ended by itself keeps its answer, and its sandbox. The same call again
// gives the same answer, and when ctx ends the cancel goes on.
//
// It fails with ErrNotFound (no such exec), ErrPrecondition (a stale owner_epoch, an answer that has expired) and
// ErrUnavailable.
func (a *Agent) CancelExec(ctx context.Context, r *sandboxv1.CancelExecRequest) (*sandboxv1.ExecResult, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	if err := checkExecID(r.GetExecId()); err != nil {
		return nil, err
	}
	defer s.haste.hurry()()
	live, record, err := s.cancelExec(r.GetExecId(), r.GetOwnerEpoch())
	if err != nil {
		return nil, err
	}
	return s.outcomeOf(ctx, live, record)
}

// cancelExec begins a cancel. Exactly one of live and record is set without an error. What is known already is answered
// whatever owner_epoch is current; only what would end something is fenced.
func (s *session) cancelExec(id string, epoch uint64) (live *execution, record *execRecord, err error) {
	s.mu.Lock()
	live, record, err = s.lookup(id)
	if err != nil || live == nil {
		s.mu.Unlock()
		return nil, record, err
	}
	if err := checkEpoch(s.id, epoch, s.rec.OwnerEpoch); err != nil {
		s.mu.Unlock()
		return nil, nil, err
	}
	effects, err := s.cancelled(live)
	s.mu.Unlock()
	point("cancel.begun")
	switch {
	case err != nil:
		return nil, nil, err
	case effects.Answer:
		s.withdraw(live, "it was cancelled before its turn")
	case effects.Cancel && !s.agent.spawn(func() { s.endCommand(live) }):
		return nil, nil, fmt.Errorf("%w: %w", ErrUnavailable, errAbandoned)
	}
	return live, nil, nil
}

// cancelled is the exec's step by a cancel. An exec that is withdrawn by it is out of the queue. Caller holds mu, and does
// what the effects say.
func (s *session) cancelled(e *execution) (ExecEffects, error) {
	_, effects, err := e.step(ExCancel)
	if err != nil {
		return effects, err
	}
	if effects.Answer {
		s.queue = slices.DeleteFunc(s.queue, func(x *execution) bool { return x == e })
	}
	if effects.Cancel {
		e.cancelledAt = time.Now()
	}
	return effects, nil
}

// withdraw answers an exec that was taken off its way to its intent: NOT_STARTED, recorded before anyone is told. why is
// a clause. Only the caller that made the exec's step calls it.
func (s *session) withdraw(e *execution, why string) {
	s.mu.Lock()
	e.intent.OwnerEpoch, e.intent.Generation = s.rec.OwnerEpoch, s.rec.Generation
	s.mu.Unlock()
	r := resultWithout(&e.intent, sandboxv1.ExecResult_NOT_STARTED, reasonWithout(sandboxv1.ExecResult_NOT_STARTED, why))
	if err := s.record(e, nil, r, nil, withdrawn.Durable); err != nil {
		s.finish(e, nil, err)
		return
	}
	point("withdraw.recorded")
	s.log.Info("exec withdrawn", "exec", e.intent.ExecID, "why", why)
	s.finish(e, r, nil)
}

// cancelRunning ends the command that runs now, because of something else than a call of CancelExec: a clause. What comes
// of it is seen from its receipt. evicts is what the end of its sandbox counts as (metrics.Evicted), empty where a caller asked for it.
func (s *session) cancelRunning(because, evicts string) {
	s.mu.Lock()
	e := s.running
	s.mu.Unlock()
	if e == nil {
		return
	}
	select {
	case <-e.started:
	case <-e.done:
		return
	}
	s.mu.Lock()
	effects, err := s.cancelled(e)
	if err == nil && effects.Cancel {
		e.because, e.evicts = because, evicts
	}
	s.mu.Unlock()
	if err == nil && effects.Cancel {
		s.endCommand(e)
	}
}

// endCommand has receiptd end a command, until receiptd says that it does, or the exec has its outcome. Where receiptd
// can't be asked the connection is closed: then the exec's own goroutine finds out what became of it, and stops the
// sandbox under it. One call for each exec: each cancel sets pid1's clock anew.
func (s *session) endCommand(e *execution) {
	select {
	case <-e.started:
	case <-e.done:
		return
	}
	// A task in uninterruptible sleep keeps the boundary from coming; then the sandbox is stopped all the same.
	time.AfterFunc(e.cancelBudget(), func() { s.hangUp(e) })
	for wait := firstCancelWait; ; wait = min(2*wait, maxCancelWait) {
		if sb := s.current(); sb != nil {
			ended, err := s.askToEnd(e, sb)
			switch {
			case ended:
				return
			case err != nil && !s.agent.isClosing():
				s.log.Warn("command not cancelled", "exec", e.intent.ExecID, "error", err)
				sb.conn.Close()
			}
		}
		select {
		case <-e.done:
			return
		case <-s.agent.closing:
			return
		case <-time.After(wait):
		}
	}
}

func (s *session) askToEnd(e *execution, sb *attached) (bool, error) {
	ctx, cancel := context.WithTimeout(s.agent.ctx, attachTimeout)
	defer cancel()
	resp, err := sb.receiptd.Cancel(ctx, &receiptdv1.CancelRequest{AttachEpoch: sb.epoch, ExecId: e.intent.ExecID})
	return resp.GetWasRunning(), err
}

// hangUp ends the wait for an exec's stream, if it is still waited for.
func (s *session) hangUp(e *execution) {
	select {
	case <-e.done:
	default:
		if sb := s.current(); sb != nil {
			sb.conn.Close()
		}
	}
}

// cancelBudget is how long a command may take to end once it was cancelled, or its time was over.
func (e *execution) cancelBudget() time.Duration {
	l := e.session.agent.cfg.Limits
	return l.Grace.Std() + l.Boundary.Std()
}

// sooner is when an exec is given up: at limit, or when a cancel's time is over.
func (s *session) sooner(e *execution, limit time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := e.cancelledAt.Add(e.cancelBudget()); !e.cancelledAt.IsZero() && at.Before(limit) {
		return at
	}
	return limit
}

// patience is how often receiptd is asked for an exec: of one that is to be ended anyway, once.
func (s *session) patience(e *execution) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.phase == Cancelling {
		return 1
	}
	return infoRetries
}

// evidenceOf is the whole set of evidence that a sandbox of this session is gone; nil as long as it was not had.
func (s *session) evidenceOf(sandboxID string) *runtime.Evidence {
	if sb := s.sandboxRecord(); sb != nil && sb.ID == sandboxID {
		if sb.Evidence != nil && sb.Evidence.Complete {
			return sb.Evidence
		}
		return nil
	}
	k, err := s.keyRecordOf(sandboxID)
	if err != nil {
		if !errors.Is(err, ErrDataLoss) {
			s.log.Error("evidence not looked up", "sandbox", sandboxID, "error", err)
		}
		return nil
	}
	return k.Evidence
}
