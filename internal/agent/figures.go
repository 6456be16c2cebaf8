package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
)

// Figures are what the agent has now, for who looks at it from outside.
func (a *Agent) Figures() metrics.State {
	st := metrics.State{
		Sessions: map[string]int{}, Sandboxes: map[string]int{}, MemoryReserved: a.slots.reserved(),
		Folders: map[string]string{},
	}
	for _, state := range []State{Provisioning, Ready, Executing, Stopping, Idle, GrantsRequired, Uncertain} {
		st.Sessions[string(state)] = 0
	}
	for _, name := range a.cfg.Runtime.Allowed {
		st.Sandboxes[name] = 0
	}
	for _, root := range a.cfg.Workspace.Roots {
		st.Folders[root] = "workspaces"
	}
	st.Folders[a.cfg.StateDir] = "state"
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	for _, s := range sessions {
		s.mu.Lock()
		st.Queued += len(s.queue)
		if s.running != nil {
			st.Running++
		}
		state, runtime := s.rec.State, s.rec.Runtime
		s.mu.Unlock()
		if state == Deleted {
			continue // a moment ago
		}
		st.Sessions[string(state)]++
		if state.HasSandbox() {
			st.Sandboxes[runtime]++
		}
	}
	return st
}

// Healthy says whether the agent can go on as it is: an error names what takes a restart.
func (a *Agent) Healthy(context.Context) error { return a.journal.Failed() }

// Ready says whether the agent takes new work: it is neither drained nor stopping, and one of runtime.allowed answers.
func (a *Agent) Ready(ctx context.Context) error {
	if err := a.Healthy(ctx); err != nil {
		return err
	}
	if a.isClosing() {
		return fmt.Errorf("%w: the agent is shutting down", ErrUnavailable)
	}
	if err := a.checkDraining(); err != nil {
		return err
	}
	var errs []error
	for _, name := range a.cfg.Runtime.Allowed {
		// What comes of it counts for others too: it does not depend on who asks, and may hang up.
		err := a.hosts.reachable(a.ctx, a.hosts.all[name])
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("runtime %s: %w", name, err))
	}
	return errors.Join(errs...)
}

// count counts an exec that has its answer. How long one took that an earlier agent began says something about restarts only.
func (s *session) count(e *execution, p *proven, r *sandboxv1.ExecResult) {
	m := s.agent.metrics
	m.ExecAnswered(r.GetStatus().String())
	if !e.recovered {
		m.ExecTook(max(time.Since(e.intent.RequestedAt), 0), r.GetDuration().AsDuration())
	}
	if p != nil && p.predicate.Boundary.Wait > 0 { // 0: pid1 did not say when its command ended
		m.Boundary(p.predicate.Boundary.Wait)
	}
	if e.use != nil {
		m.Sent(e.use.total.BytesOut, e.use.total.Refused)
	}
}

// runtimeName is what the session's sandboxes are hosted by.
func (s *session) runtimeName() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Runtime
}
