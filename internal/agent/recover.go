package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// recoverAtOnce bounds how many sandboxes are attached to at a time.
const recoverAtOnce = 8

// recover takes over what the journal names. When it returns each session's state is known; of the intents without an
// outcome, those whose command still runs are waited for by their session's goroutine (P6).
func (a *Agent) recover() error {
	if err := a.loadSessions(); err != nil {
		return err
	}
	open, err := a.loadOpen()
	if err != nil {
		return err
	}
	point("recover.loaded")
	var wg sync.WaitGroup
	room := make(chan struct{}, recoverAtOnce)
	for _, s := range a.sessions {
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			if err := s.do(context.Background(), func() error { return s.recover(open[s.id]) }); err != nil {
				s.log.Error("session not recovered", "error", err)
			}
		})
	}
	wg.Wait()
	point("recover.sessions")
	a.sweep()
	return nil
}

func (a *Agent) loadSessions() error {
	return a.journal.Scan(sessionPrefix, "", func(key string, value []byte) error {
		var rec sessionRecord
		if err := json.Unmarshal(value, &rec); err != nil {
			return fmt.Errorf("%w: reading %s from the journal: %w", ErrDataLoss, key, err)
		}
		s := newSession(a, rec)
		a.sessions[rec.ID] = s
		if rec.Workspace.Worktree != "" {
			a.worktrees[rec.Workspace.Worktree] = rec.ID
		}
		if rec.Sandbox != nil && rec.State.HasSandbox() {
			if err := a.slots.claim(rec.Sandbox.Slot, rec.Sandbox.ID, rec.Resources.MemoryBytes); err != nil {
				return fmt.Errorf("%w: %w", ErrDataLoss, err)
			}
		}
		return nil
	})
}

// loadOpen gives the intents without an outcome, by session. Those of a session that is gone are what a crash in the
// middle of a deletion left.
func (a *Agent) loadOpen() (map[string][]*execution, error) {
	open := map[string][]*execution{}
	gone := map[string]bool{}
	err := a.journal.Scan(openPrefix, "", func(key string, _ []byte) error {
		session, exec, _ := strings.Cut(strings.TrimPrefix(key, openPrefix), "/")
		s := a.sessions[session]
		if s == nil {
			gone[session] = true
			return nil
		}
		b, err := a.journal.Get(execKey(session, exec))
		if err != nil {
			return fmt.Errorf("reading the intent of exec %s of session %s: %w", exec, session, err)
		}
		var rec execRecord
		if err := json.Unmarshal(b, &rec); err != nil {
			return fmt.Errorf("%w: reading the intent of exec %s of session %s: %w", ErrDataLoss, exec, session, err)
		}
		e := s.recovered(rec.Intent)
		e.boundaryTold = rec.BoundaryTold
		s.live[exec] = e
		open[session] = append(open[session], e)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for session := range gone {
		if err := a.clearExecs(session); err != nil {
			return nil, err
		}
	}
	return open, nil
}

func (s *session) recovered(in intentRecord) *execution {
	e := &execution{
		session: s, intent: in, phase: Intended, recovered: true, output: newHub(s.agent.cfg.Limits.OutputBytes),
		started: make(chan struct{}), done: make(chan struct{}),
	}
	close(e.started)
	e.request.Do(func() {}) // told with its intent
	return e
}

// recover runs on the session's goroutine: first the sandbox, then the intents, then what an interrupted harvest left. As
// long as the sandbox's runtime can't be reached nothing is decided (away.go).
func (s *session) recover(open []*execution) error {
	err := s.recoverSandbox()
	if s.isAway(err) {
		return s.stayAway(open, err)
	}
	if err == nil {
		s.settled()
	}
	if len(open) == 0 && err == nil {
		err = s.forgetGrants()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var jobs []func()
	for _, e := range open {
		jobs = append(jobs, func() { s.reclaim(e) })
	}
	if len(open) > 0 {
		jobs = append(jobs, func() {
			if err := s.forgetGrants(); err != nil {
				s.log.Error("sandbox with lost grants not stopped with evidence", "error", err)
			}
		})
	}
	// Before all that was asked for meanwhile: until an intent is reclaimed, its command may run in a session that is READY,
	// where trusted Git would find nobody beside it.
	s.urgent = append(append(jobs, s.retireDisallowed, func() {
		_ = s.settleAgain() // it never fails
	}), s.urgent...)
	return err
}

// retireDisallowed ends a sandbox whose runtime the operator has taken from the list since. What ran in it has come to its
// end by now.
func (s *session) retireDisallowed() {
	if s.state() != Ready {
		return
	}
	if _, err := s.nextHost(); err == nil {
		return
	}
	if _, err := s.stop("Its runtime is not one of runtime.allowed any more."); err != nil {
		s.log.Error("sandbox of a runtime that is not allowed not stopped with evidence", "error", err)
	}
}

// recoverSandbox attaches to a sandbox that was ready, and ends everything else. It changes nothing while the runtime can't
// be reached: that is no evidence of anything (P5).
func (s *session) recoverSandbox() error {
	state, rec := s.state(), s.sandboxRecord()
	switch {
	case !state.HasSandbox():
		return nil
	case state != Ready && state != Executing:
		_, err := s.stop("The agent was restarted while the session was " + string(state) + ".")
		return err
	}
	err := s.load(rec)
	if err == nil {
		s.log.Info("sandbox attached again", "sandbox", rec.ID, "generation", rec.Generation)
		s.recheckNetwork(rec.ID)
		if state == Executing { // its intents are looked at next, if there still are any
			return s.apply(EvExecEnd, "", nil)
		}
		return nil
	}
	if errors.Is(err, runtime.ErrUnreachable) {
		return err
	}
	_, stopErr := s.stop("After the agent's restart: " + err.Error())
	return stopErr
}

func (s *session) load(rec *sandboxRecord) (err error) {
	rt, err := s.host()
	if err != nil {
		return err
	}
	if err := s.agent.hosts.lately(rt); err != nil {
		return err
	}
	defer func() { s.agent.hosts.note(rt, err) }()
	ctx, cancel := context.WithTimeout(context.Background(), s.agent.startTime())
	defer cancel()
	container, err := rt.Load(ctx, rec.identity(rt.Name()))
	if err != nil {
		return fmt.Errorf("the sandbox is not to be found: %w", err)
	}
	point("recover.found")
	_, key, err := s.attach(ctx, container, s.agent.receiptsDir(rec.ID))
	switch {
	case err != nil && s.current() == nil:
		return errors.Join(err, container.Close())
	case err == nil && len(key) > 0:
		return fmt.Errorf("sandbox %s was ready before its key was recorded", rec.ID)
	}
	return err
}

// reclaim finds out what became of an intent of an earlier agent.
func (s *session) reclaim(e *execution) {
	s.mu.Lock()
	s.running = e
	s.mu.Unlock()
	if s.state() == Ready {
		if err := s.apply(EvExecStart, "", nil); err != nil {
			s.log.Error("session can't wait for its exec", "exec", e.intent.ExecID, "error", err)
		}
	}
	point("recover.intent")
	s.conclude(e, s.resolve(e))
}

// sweep ends sandboxes that no session owns: a crash between the runtime's start and a deletion's end leaves them. A runtime
// that can't be reached is swept once it can.
func (a *Agent) sweep() {
	alive, listed := a.owned(), true
	for _, rt := range a.inUse() {
		left, err := a.sweepRuntime(rt)
		if err != nil {
			a.log.Error("sandboxes not listed", "runtime", rt.Name(), "error", err)
			a.watchers.Go(func() { a.sweepLater(rt) })
			listed = false
		}
		// Whose end was not seen keeps its spare files until the next start.
		for _, id := range left {
			alive[id] = true
		}
	}
	if listed {
		a.tidyAllReceipts(alive)
		a.sweepNetworks(alive)
	}
}

// owned are the sandboxes that may be alive and belong to a session. A session has its sandbox's id before the runtime does.
func (a *Agent) owned() map[string]bool {
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	owned := map[string]bool{}
	for _, s := range sessions {
		if rec := s.sandboxRecord(); rec != nil && s.state().HasSandbox() {
			owned[rec.ID] = true
		}
	}
	return owned
}

// sweepRuntime removes what one runtime has and no session does; left are those that could not be seen to be gone.
func (a *Agent) sweepRuntime(rt runtime.Runtime) (left []string, err error) {
	if err := a.hosts.reachable(a.ctx, rt); err != nil {
		return nil, err
	}
	ids, err := rt.List(a.ctx)
	if err != nil {
		return nil, err
	}
	owned := a.owned() // after the list: what is in it and was made meanwhile is owned by now
	for _, id := range ids {
		if owned[id] {
			continue
		}
		ctx, cancel := context.WithTimeout(a.ctx, stopTimeout)
		evidence, err := rt.Remove(ctx, runtime.Identity{Runtime: rt.Name(), SandboxID: id, Dir: filepath.Join(a.sandboxesDir(), id)})
		cancel()
		point("recover.removed")
		if err != nil || !evidence.Complete {
			left = append(left, id)
		}
		a.log.Warn("removed a sandbox that belongs to no session", "sandbox", id, "runtime", rt.Name(), "error", err)
	}
	return left, nil
}

// sweepLater sweeps a runtime as soon as it can be.
func (a *Agent) sweepLater(rt runtime.Runtime) {
	for wait := firstLook; ; wait = min(2*wait, maxLook) {
		select {
		case <-time.After(wait):
		case <-a.closing:
			return
		}
		if _, err := a.sweepRuntime(rt); err == nil {
			return
		}
	}
}

// tidyAllReceipts does tidyReceipts for every sandbox that is gone: an agent may have ended between the two.
func (a *Agent) tidyAllReceipts(alive map[string]bool) {
	dirs, err := os.ReadDir(filepath.Join(a.cfg.StateDir, "receipts"))
	if err != nil {
		a.log.Error("receipts folders not listed", "error", err)
		return
	}
	for _, d := range dirs {
		if d.IsDir() && !alive[d.Name()] {
			a.tidyReceipts(d.Name())
		}
	}
}

// tidyReceipts removes the space that was held ready for the receipts of a sandbox that is gone, about 1 MiB. Failing
// costs that space and nothing else.
func (a *Agent) tidyReceipts(sandboxID string) {
	if err := receipt.RemoveSpares(a.receiptsDir(sandboxID)); err != nil {
		a.log.Warn("spare files of a sandbox that is gone not removed", "sandbox", sandboxID, "error", err)
	}
}
