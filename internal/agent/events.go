package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
)

// maxWatchers bounds how many streams of events there are at a time.
const maxWatchers = 64

// watching is how many streams of events there are.
type watching struct {
	mu sync.Mutex
	n  int
}

func (w *watching) enter() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n >= maxWatchers {
		return fmt.Errorf("%w: %d callers watch events already, the most there can be: end one of them first", ErrExhausted, w.n)
	}
	w.n++
	return nil
}

func (w *watching) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n--
}

// WatchEvents passes the node's events on, from a cursor on, as they come. send may be slow: nothing waits for it. It
// ends with ctx, with the newest event (until_now), when the agent stops (ErrUnavailable), or when events after the
// cursor are no longer kept (ErrPrecondition; the message names the oldest cursor to go on from).
func (a *Agent) WatchEvents(ctx context.Context, r *sandboxv1.WatchEventsRequest, send func(*sandboxv1.WatchEventsResponse) error) error {
	if r.GetSessionId() != "" {
		if err := checkSessionID(r.GetSessionId()); err != nil {
			return err
		}
	}
	after, err := events.ParseCursor(r.GetCursor())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if err := a.watching.enter(); err != nil {
		return err
	}
	defer a.watching.leave()
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(a.ctx, cancel)()
	err = a.chain.Watch(watch, after, r.GetSessionId(), r.GetUntilNow(), func(e events.Entry) error {
		return send(&sandboxv1.WatchEventsResponse{Event: eventProto(e)})
	})
	switch {
	case errors.Is(err, events.ErrTooOld), errors.Is(err, events.ErrAhead):
		return fmt.Errorf("%w: %w", ErrPrecondition, err)
	case err != nil && ctx.Err() == nil && a.ctx.Err() != nil:
		return fmt.Errorf("%w: the agent is shutting down: ask again with the cursor of the last event", ErrUnavailable)
	}
	return err
}

func eventProto(e events.Entry) *sandboxv1.Event {
	return &sandboxv1.Event{
		Cursor: e.Cursor.String(), SessionId: e.Session, Kind: string(e.Kind), ExecId: e.Exec, Generation: e.Generation,
		At: timestamppb.New(e.At), Detail: e.Detail,
	}
}

// openEvents takes over the chain and the audit log.
func (a *Agent) openEvents() error {
	var err error
	if a.chain, err = events.Open(a.ctx, a.journal, a.cfg.Events.Keep, a.opts.Version, a.log); err != nil {
		return fmt.Errorf("opening the chain of events: %w", err)
	}
	a.watchers.Go(func() { a.chain.Trim(a.ctx) })
	if a.cfg.Audit.Path == "" {
		return nil
	}
	a.audit, err = events.OpenAudit(a.chain, events.AuditOptions{
		Path: a.cfg.Audit.Path, MaxBytes: a.cfg.Audit.MaxBytes, Keep: int(a.cfg.Audit.Keep), Log: a.log,
	})
	if err != nil {
		a.closeEvents() // this start told itself, and ends in order
		return fmt.Errorf("starting the agent: %w", err)
	}
	go a.audit.Run()
	return nil
}

// closeEvents tells that the agent stops, and has the audit log written to its end. Failing is no reason not to stop: the
// next start tells what is missing.
func (a *Agent) closeEvents() {
	if err := a.chain.Close(context.Background()); err != nil {
		a.log.Warn("the agent's stop is not among the events", "error", err)
	}
	if a.audit != nil {
		if err := a.audit.Close(); err != nil {
			a.log.Warn("audit log not written to its end", "error", err)
		}
	}
}

// told is what a change of the session's state tells. Caller holds mu.
func (s *session) told(e Event, r *sessionRecord) []events.Event {
	var list []events.Event
	switch e {
	case EvProvision:
		list = append(list, sandboxEvent(events.SandboxAssigned, r, ""))
	case EvProved:
		list = append(list, sandboxEvent(events.SandboxReady, r, ""))
	case EvEvidence, EvEvidenceOnly:
		list = append(list, sandboxEvent(events.SandboxRetired, r, "Evidence: "+sourcesOf(r.Sandbox)+"."))
	case EvNoEvidence:
		// It is looked at again and again, and told once.
		if s.uncertain == r.Sandbox.ID {
			return nil
		}
		s.uncertain = r.Sandbox.ID
		list = append(list, sandboxEvent(events.SandboxUncertain, r, ""))
	}
	if r.State == GrantsRequired {
		list = append(list, events.Event{Kind: events.GrantsRequired, Session: r.ID, Generation: r.Generation, Detail: r.Reason})
	}
	return list
}

// sandboxEvent is about the newest sandbox: its id, why the session's state changed, and more.
func sandboxEvent(kind events.Kind, r *sessionRecord, more string) events.Event {
	var say []string
	for _, x := range []string{sentence(r.Reason), more} {
		if x != "" {
			say = append(say, x)
		}
	}
	detail := strings.TrimSuffix(r.Sandbox.ID+": "+strings.Join(say, " "), ": ")
	return events.Event{Kind: kind, Session: r.ID, Generation: r.Sandbox.Generation, Detail: detail}
}

func sentence(s string) string {
	if s == "" {
		return ""
	}
	return strings.TrimSuffix(s, ".") + "."
}

// sourcesOf are the places that a sandbox's evidence comes from.
func sourcesOf(sb *sandboxRecord) string {
	if sb.Evidence == nil {
		return "none"
	}
	var list []string
	for _, i := range sb.Evidence.Items {
		list = append(list, i.Source)
	}
	return strings.Join(list, ", ")
}

// event is one of the session's own.
func (s *session) event(kind events.Kind, detail string) journal.Op {
	return events.Event{Kind: kind, Session: s.id, Detail: detail}.Op()
}

// event is one of the exec's.
func (e *execution) event(kind events.Kind, detail string) events.Event {
	return events.Event{Kind: kind, Session: e.session.id, Exec: e.intent.ExecID, Generation: e.intent.Generation, Detail: detail}
}

// requested gives the event of the exec's request, unless it is told already. While another goroutine tells it, it waits
// for that: the request stands before all else of its exec.
func (e *execution) requested() (ops []journal.Op) {
	e.request.Do(func() {
		ops = events.Ops(events.Event{Kind: events.ExecRequested, Session: e.session.id, Exec: e.intent.ExecID, At: e.intent.RequestedAt})
	})
	return ops
}

// announce tells the request of an exec that has to wait for its turn; of another one it is told with its intent.
func (s *session) announce(e *execution) {
	if !e.waits {
		return
	}
	e.request.Do(func() {
		err := s.agent.chain.Tell(events.Event{Kind: events.ExecRequested, Session: s.id, Exec: e.intent.ExecID, At: e.intent.RequestedAt})
		if err != nil {
			s.log.Warn("request not among the events", "exec", e.intent.ExecID, "error", err)
		}
	})
}

// startedEvents go with the intent.
func (e *execution) startedEvents() []journal.Op {
	ev := e.event(events.ExecStarted, e.intent.SandboxID)
	if a := e.session.agent.cfg.Audit; a.Commands && a.Path != "" {
		ev.Command = e.command
	}
	return append(e.requested(), ev.Op())
}

// refusedEvents tell that an exec never started and is not recorded. The error is not told: it may quote what a
// repository holds.
func (s *session) refusedEvents(e *execution, err error) {
	kind := "internal"
	for word, k := range map[string]error{
		"not_found": ErrNotFound, "failed_precondition": ErrPrecondition, "resource_exhausted": ErrExhausted, "unavailable": ErrUnavailable,
		"invalid_argument": ErrInvalid, "data_loss": ErrDataLoss,
	} {
		if errors.Is(err, k) {
			kind = word
		}
	}
	s.agent.metrics.ExecRefused(kind)
	ops := append(e.requested(), e.event(events.ExecRefused, kind).Op())
	if err := s.agent.journal.Update(context.Background(), false, ops...); err != nil {
		s.log.Warn("refusal not among the events", "exec", e.intent.ExecID, "error", err)
	}
}

func (e *execution) boundaryEvent(p *proven) journal.Op {
	b := e.event(events.ExecBoundary, string(p.predicate.Status))
	b.At = p.predicate.EndedAt
	return b.Op()
}

// tellBoundary tells that a command has ended before its sandbox is stopped, whose end is told in between; of others the
// boundary is told with the outcome. The exec's record says that it is told, so that a restart doesn't tell it again.
func (s *session) tellBoundary(e *execution, p *proven) {
	if p == nil || e.boundaryTold {
		return
	}
	err := s.agent.journal.Update(context.Background(), false, e.boundaryEvent(p),
		journal.Set(execKey(s.id, e.intent.ExecID), encode(execRecord{Intent: e.intent, BoundaryTold: true})))
	if err != nil {
		s.log.Warn("boundary not among the events yet", "exec", e.intent.ExecID, "error", err)
		return
	}
	e.boundaryTold = true
	point("boundary.told")
}

// endedEvents go with the outcome.
func (e *execution) endedEvents(p *proven, r *sandboxv1.ExecResult, h *gitview.Harvest) []journal.Op {
	ops := e.requested()
	if p != nil && !e.boundaryTold {
		ops = append(ops, e.boundaryEvent(p))
	}
	if h != nil {
		ops = append(ops, e.session.conflictEvents(e.intent.ExecID, *h)...)
	}
	return append(ops, e.event(events.ExecResult, resultText(r)).Op())
}

// resultText is an answer without what the command had a hand in.
func resultText(r *sandboxv1.ExecResult) string {
	text := r.GetStatus().String()
	switch r.GetStatus() {
	case sandboxv1.ExecResult_EXITED:
		text = fmt.Sprintf("%s %d", text, r.GetExitCode())
	case sandboxv1.ExecResult_SIGNALED:
		text = fmt.Sprintf("%s %d", text, r.GetSignal())
	case sandboxv1.ExecResult_NOT_STARTED, sandboxv1.ExecResult_UNCERTAIN:
		text += ": " + r.GetReason()
	}
	return text
}

// conflictEvents tell of a harvest with conflicts how many there are: the names of refs are the command's.
func (s *session) conflictEvents(exec string, h gitview.Harvest) []journal.Op {
	if len(h.Conflicts) == 0 {
		return nil
	}
	return events.Ops(events.Event{Kind: events.HarvestConflict, Session: s.id, Exec: exec, At: time.Now().UTC(),
		Detail: fmt.Sprintf("%d refs in conflict: the session's last_harvest names them", len(h.Conflicts))})
}

// grantsEvent tells which grants a session has from now on, by their names.
func (s *session) grantsEvent(list []grantRecord) journal.Op {
	var names []string
	for _, g := range list {
		names = append(names, g.Name)
	}
	return s.event(events.GrantsUpdated, strings.Join(names, ", "))
}
