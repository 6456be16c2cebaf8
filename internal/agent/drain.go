package agent

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// maxDrain is the longest that running commands may be given.
const maxDrain = time.Hour

// errDraining refuses what would start something.
var errDraining = fmt.Errorf("%w: this node is drained: nothing new is started here; use another node, or restart the agent", ErrUnavailable)

func (a *Agent) checkDraining() error {
	if a.draining.Load() {
		return errDraining
	}
	return nil
}

// DrainNode starts nothing new from now on, until the agent is restarted: no session, no sandbox and no command, also not
// one that waits already. Commands that run have the given time to end by themselves, then they are ended at their
// boundary; their receipts stay. Every sandbox is stopped with evidence; workspaces stay. It answers for each session in
// the order of their ids, once all are done, and goes on when ctx ends. The same call again answers the same.
func (a *Agent) DrainNode(ctx context.Context, r *sandboxv1.DrainNodeRequest) ([]*sandboxv1.DrainedSession, error) {
	grace := a.cfg.Lifetime.DrainGrace.Std()
	if t := r.GetTimeoutSeconds(); math.IsNaN(t) || t < 0 || t > maxDrain.Seconds() {
		return nil, invalid("timeout_seconds is %v: allowed are 0 to %v, 0 for the node's default of %s (lifetime.drain_grace)", t, maxDrain.Seconds(), grace)
	} else if t > 0 {
		grace = time.Duration(t * float64(time.Second))
	}
	a.draining.Store(true)
	a.mu.Lock()
	sessions := a.all() // one that is made meanwhile gets no sandbox (provision)
	a.mu.Unlock()
	slices.SortFunc(sessions, func(x, y *session) int { return strings.Compare(x.id, y.id) })
	a.log.Warn("draining: nothing new is started", "sessions", len(sessions), "grace", grace.String())
	out := make([]*sandboxv1.DrainedSession, len(sessions))
	finished := make(chan struct{})
	if !a.spawn(func() {
		defer close(finished)
		over, cancel := context.WithTimeout(a.ctx, grace)
		defer cancel()
		var wg sync.WaitGroup
		for i, s := range sessions {
			wg.Go(func() { out[i] = s.drain(over) })
		}
		wg.Wait()
	}) {
		return nil, errShutDown
	}
	select {
	case <-finished:
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the node to be drained: %w (the agent goes on; the same call waits again)", ctx.Err())
	}
	if a.isClosing() {
		return nil, errShutDown
	}
	a.log.Info("drained", "sessions", len(sessions))
	return out, nil
}

// whyGone is why the session has no sandbox any more: of one whose command this drain has ended, the record says so.
func (s *session) whyGone() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec.Reason == "" {
		return "Its sandbox was gone already."
	}
	return sentence(s.rec.Reason)
}

// drain stops the session's sandbox once no command runs, or when over ends, the command.
func (s *session) drain(over context.Context) *sandboxv1.DrainedSession {
	var evidence *runtime.Evidence
	reason := "It had no sandbox."
	done := s.enqueue(func() (err error) {
		switch {
		case s.agent.isClosing():
			return errShutDown
		case s.state() == Deleted:
			reason = "The session was deleted."
		case s.state().HasSandbox():
			reason = "The node is drained."
			if evidence, err = s.stop(reason); err == nil {
				s.agent.metrics.Evicted(metrics.EvictedDrain)
				s.settle()
			}
		default:
			if sb := s.sandboxRecord(); sb != nil {
				evidence, reason = sb.Evidence, s.whyGone()
			}
		}
		return err
	})
	var err error
	select {
	case err = <-done:
	case <-over.Done():
		defer s.haste.hurry()()
		if !s.agent.isClosing() {
			s.cancelRunning("the node is drained", metrics.EvictedDrain)
		}
		err = <-done
	}
	if err != nil {
		reason = err.Error()
		if evidence == nil {
			evidence = &runtime.Evidence{} // none of it, not none needed
		}
	}
	return &sandboxv1.DrainedSession{SessionId: s.id, Evidence: evidenceProto(evidence), Reason: reason}
}
