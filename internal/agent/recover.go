package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

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

// recover runs on the session's goroutine: first the sandbox, then the intents, then what an interrupted harvest left.
func (s *session) recover(open []*execution) error {
	err := s.recoverSandbox()
	if len(open) == 0 && err == nil {
		err = s.forgetGrants()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range open {
		s.urgent = append(s.urgent, func() { s.reclaim(e) })
	}
	if len(open) > 0 {
		s.urgent = append(s.urgent, func() {
			if err := s.forgetGrants(); err != nil {
				s.log.Error("sandbox with lost grants not stopped with evidence", "error", err)
			}
		})
	}
	s.urgent = append(s.urgent, func() {
		_ = s.settleAgain() // it never fails
	})
	return err
}

// recoverSandbox attaches to a sandbox that was ready, and ends everything else.
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
		if state == Executing { // its intents are looked at next, if there still are any
			return s.apply(EvExecEnd, "", nil)
		}
		return nil
	}
	_, stopErr := s.stop("After the agent's restart: " + err.Error())
	return stopErr
}

func (s *session) load(rec *sandboxRecord) error {
	rt, err := s.runtime()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), createTimeout)
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

// sweep ends sandboxes that no session owns: a crash between the runtime's start and a deletion's end leaves them.
func (a *Agent) sweep() {
	owned := map[string]bool{}
	for _, s := range a.sessions {
		if rec := s.sandboxRecord(); rec != nil && s.state().HasSandbox() {
			owned[rec.ID] = true
		}
	}
	// Whose end was not seen keeps its spare files until the next start.
	alive, listed := maps.Clone(owned), true
	for name, rt := range a.runtimes {
		ids, err := rt.List(a.ctx)
		if err != nil {
			a.log.Error("sandboxes not listed", "runtime", name, "error", err)
			listed = false
			continue
		}
		for _, id := range ids {
			if owned[id] {
				continue
			}
			ctx, cancel := context.WithTimeout(a.ctx, stopTimeout)
			evidence, err := rt.Remove(ctx, runtime.Identity{Runtime: name, SandboxID: id, Dir: filepath.Join(a.sandboxesDir(), id)})
			cancel()
			point("recover.removed")
			alive[id] = err != nil || !evidence.Complete
			a.log.Warn("removed a sandbox that belongs to no session", "sandbox", id, "runtime", name, "error", err)
		}
	}
	if listed {
		a.tidyAllReceipts(alive)
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
