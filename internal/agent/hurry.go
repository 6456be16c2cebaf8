package agent

import (
	"context"
	"errors"
	"sync"
	"time"
)

// harvestPatience is how long a call that ends a command, a sandbox or a session waits for a harvest, which usually takes
// milliseconds. The bound that a harvest has of its own is minutes.
const harvestPatience = 10 * time.Second

var errHurried = errors.New("it was interrupted, because a call that ends the command, the sandbox or the session waited for it; what is left is brought over next")

// haste lets who waits for a session interrupt its harvest. That is safe at any point: what was not brought over stays where
// it is, and the next harvest goes on.
type haste struct {
	patience time.Duration // 0: none

	mu        sync.Mutex
	waiting   int
	interrupt context.CancelCauseFunc // of the harvest under way; nil when there is none
}

// hurry says that a call waits, until over is called, once or more often: a harvest that is under way, or begins until then,
// is interrupted when the patience is over.
func (h *haste) hurry() (over func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting++
	h.limit()
	return sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.waiting--
	})
}

// harvesting gives the context of a harvest that begins. end says whether it was interrupted. One harvest at a time.
func (h *haste) harvesting(ctx context.Context) (_ context.Context, end func() (interrupted bool)) {
	ctx, cancel := context.WithCancelCause(ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.interrupt = cancel
	if h.waiting > 0 {
		h.limit()
	}
	return ctx, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.interrupt = nil
		interrupted := errors.Is(context.Cause(ctx), errHurried)
		cancel(nil)
		return interrupted
	}
}

// limit gives the harvest that is under way, if one is, as long as the patience lasts. Caller holds mu.
func (h *haste) limit() {
	interrupt := h.interrupt
	switch {
	case interrupt == nil:
	case h.patience <= 0:
		interrupt(errHurried)
	default:
		time.AfterFunc(h.patience, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.waiting > 0 { // of a harvest that has ended by now it does nothing
				interrupt(errHurried)
			}
		})
	}
}

// settleAgain is a job: it completes what a harvest left that was cut short.
func (s *session) settleAgain() error {
	if st := s.state(); st.Quiet() && !s.agent.isClosing() && s.agent.checkNotDeleting(s.workspace().Worktree) == nil {
		s.settle()
	}
	return nil
}
