package agent

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/ttrpc"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/events"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// session is an actor. Whatever starts, uses or stops its sandbox is a job that runs on its one goroutine, which
// lives while there is work; so commands run one at a time (P4) and a stop never meets a start. Callers queue jobs
// and wait.
//
// Lock order: sweepMu, startMu, saveMu, mu, haste.mu. No lock is held while a sandbox or a command is waited for.
type session struct {
	agent *Agent
	id    string
	log   *slog.Logger

	// startMu is held from an exec's last look at the fencing tokens until receiptd has its request, and by whoever
	// raises owner_epoch: when a claim is answered, no call of the older epoch starts any more (P8).
	startMu sync.Mutex
	// sweepMu lets one sweep of old records run at a time: two would write the same file of what is removed.
	sweepMu sync.Mutex
	// saveMu keeps the order of record and journal.
	saveMu sync.Mutex

	mu      sync.Mutex // guards what follows
	rec     sessionRecord
	urgent  []func()              // jobs that go before any queued exec
	queue   []*execution          // execs that wait for their turn
	live    map[string]*execution // queued and running ones, by exec id
	running *execution
	usage   *networkUse // of the running exec; nil without a network
	// metered is the last reading of the sandbox's counters: nothing of a sandbox sends between two commands.
	metered reading
	unasked networkUse // what is refused while usage is nil: after a restart of the agent under a command, for one
	active  bool       // the goroutine runs
	deleted bool
	sandbox *attached // nil when there is none, or none is attached
	grants  *grantSet // nil when there are none, or their contents are lost
	used    time.Time // when the goroutine was last seen to have nothing to do, steady time; zero since the agent's start
	ending  bool      // lifetime.go has queued a job that may end the sandbox
	// uncertain is the sandbox of which sandbox.uncertain was told.
	uncertain string
	// looking: lookAgain waits, lookWait long; stoppedFor is why the sandbox had to go.
	looking    bool
	lookWait   time.Duration
	stoppedFor string
	// away is why the runtime of a sandbox of an earlier agent can't be reached, nil if it can; open are the intents that
	// wait for it (away.go).
	away error
	open []*execution
	// recorded counts outcomes since the start, kept those that retention would count (retention.go).
	recorded, kept int64
	// haste has a mutex of its own, which comes last.
	haste haste
	// trustedWaiting is how many calls of trusted Git wait or run.
	trustedWaiting int64

	// What follows belongs to the session's goroutine; to its maker before there is one.
	gitView  *gitview.View   // nil until it is needed
	viewSum  string          // of the configuration that it was opened with
	viewUsed bool            // a sandbox was made with it
	judged   gitguard.Config // the base clone's configuration as it was judged last
}

// attached is a sandbox with the connection to its receiptd.
type attached struct {
	runtime.Sandbox
	conn     *ttrpc.Client
	receiptd receiptdv1.ReceiptdClient
	epoch    uint64
	receipts string        // the host folder of its receipts
	lost     chan struct{} // closed when the connection is
}

// broken says whether the connection is lost; the sandbox may live.
func (a *attached) broken() bool {
	select {
	case <-a.lost:
		return true
	default:
		return false
	}
}

// dead says whether the container's init was seen to end.
func (a *attached) dead() bool {
	select {
	case <-a.Exited():
		return true
	default:
		return false
	}
}

func newSession(a *Agent, rec sessionRecord) *session {
	return &session{agent: a, id: rec.ID, rec: rec, live: map[string]*execution{}, log: a.log.With("session", rec.ID), haste: haste{patience: harvestPatience}}
}

// wake starts the goroutine if there is work and none runs. false: the agent is closing, and what was just queued will
// not run. Caller holds mu.
func (s *session) wake() bool {
	if s.active || (len(s.urgent) == 0 && len(s.queue) == 0) {
		return true
	}
	s.active = s.agent.spawn(s.run)
	return s.active
}

func (s *session) run() {
	for job := s.next(); job != nil; job = s.next() {
		job()
	}
}

// next takes the next job, or marks the goroutine as ended.
func (s *session) next() func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(s.urgent) > 0:
		job := s.urgent[0]
		s.urgent = s.urgent[1:]
		return job
	case len(s.queue) > 0:
		e := s.queue[0]
		s.queue = s.queue[1:]
		s.running = e
		return func() { s.execute(e) }
	default:
		s.active, s.used = false, s.agent.clock.steady()
		return nil
	}
}

// enqueue has a job run on the session's goroutine before any queued exec.
func (s *session) enqueue(job func() error) <-chan error {
	done := make(chan error, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.urgent = append(s.urgent, func() { done <- job() })
	if !s.wake() {
		s.urgent = s.urgent[:len(s.urgent)-1]
		done <- fmt.Errorf("%w: the agent is shutting down: ask again", ErrUnavailable)
	}
	return done
}

// do waits for a job. The job goes on when ctx ends.
func (s *session) do(ctx context.Context, job func() error) error {
	return s.await(ctx, s.enqueue(job))
}

func (s *session) await(ctx context.Context, done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("waiting for session %s: %w (the agent goes on)", s.id, ctx.Err())
	}
}

// snapshot is the session as the API shows it.
func (s *session) snapshot() *sandboxv1.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.rec.proto()
	p.Conditions = conditionsOf(&s.rec, s.agent.cfg)
	if away := s.awayReason(); away != "" {
		p.Reason = away
	}
	if s.running != nil {
		p.RunningExecId = s.running.intent.ExecID
	}
	for _, e := range s.queue {
		p.QueuedExecIds = append(p.QueuedExecIds, e.intent.ExecID)
	}
	return p
}

// save writes the record as it is now, after change, together with other changes of the journal.
func (s *session) save(durable bool, change func(*sessionRecord), more ...journal.Op) error {
	return s.saveTelling(durable, change, nil, more...)
}

// saveTelling is save; tell gives the events that go with the record as it is then.
func (s *session) saveTelling(durable bool, change func(*sessionRecord), tell func(*sessionRecord) []events.Event, more ...journal.Op) error {
	s.saveMu.Lock()
	defer s.saveMu.Unlock()
	s.mu.Lock()
	if change != nil {
		change(&s.rec)
	}
	b := encode(&s.rec)
	if tell != nil {
		more = append(events.Ops(tell(&s.rec)...), more...)
	}
	s.mu.Unlock()
	if err := s.agent.journal.Update(context.Background(), durable, append(more, journal.Set(sessionKey(s.id), b))...); err != nil {
		return fmt.Errorf("recording session %s: %w", s.id, err)
	}
	return nil
}

// apply takes an event through the state machine: it changes the record with change, and does what comes with the
// new state. reason is shown to the caller.
func (s *session) apply(e Event, reason string, change func(*sessionRecord), more ...journal.Op) error {
	s.mu.Lock()
	from := s.rec.State
	sandbox, sandboxErr := s.rec.nextSandbox(e)
	s.mu.Unlock()
	to, effects, err := from.Next(e)
	if err = cmpErr(err, sandboxErr); err != nil {
		return err
	}
	set := func(r *sessionRecord) {
		r.State, r.Reason = to, reason
		if effects.NewGeneration {
			r.Generation++
		}
		if change != nil {
			change(r)
		}
		if r.Sandbox != nil {
			r.Sandbox.State = sandbox
		}
	}
	if effects.Durable {
		tell := func(r *sessionRecord) []events.Event { return s.told(e, r) }
		if err := s.saveTelling(true, set, tell, more...); err != nil {
			return err
		}
	} else {
		s.mu.Lock()
		set(&s.rec)
		s.mu.Unlock()
	}
	s.after(effects)
	if effects.Durable {
		s.log.Info("session changed", "from", from, "to", to, "event", string(e), "reason", reason)
	}
	return nil
}

// after does what a new state brings with it in memory.
func (s *session) after(e Effects) {
	s.mu.Lock()
	sb, worktree := s.rec.Sandbox, s.rec.Workspace.Worktree
	s.mu.Unlock()
	if e.ReleaseIDs && sb != nil {
		s.agent.slots.release(sb.Slot, sb.ID)
	}
	if e.LookAgain {
		s.lookAgain()
	}
	if e.ReleaseIDs {
		s.settled()
	}
	if e.ReleaseWorkspace {
		s.agent.releaseWorkspace(worktree, s.id)
	}
}

func (s *session) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.State
}

// sandboxRecord is a copy of the newest sandbox's record, nil before the first.
func (s *session) sandboxRecord() *sandboxRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec.Sandbox == nil {
		return nil
	}
	c := *s.rec.Sandbox
	return &c
}

func (s *session) current() *attached {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sandbox
}
