package agent

import (
	"errors"
	"fmt"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// A session is away when its sandbox was ready, the agent has no connection to it, and its runtime can't be reached: the
// daemon is down, or hangs. The sandbox may be well, and its command too. Nothing is declared gone (P5) and nothing is
// started (P14); the runtime is asked again until it answers, and then the session is recovered as at the agent's start.

// isAway says whether err, of recoverSandbox, leaves the session away.
func (s *session) isAway(err error) bool {
	st := s.state()
	return errors.Is(err, runtime.ErrUnreachable) && (st == Ready || st == Executing) && s.current() == nil
}

// stayAway keeps the intents of an earlier agent for later. If there are any, a command may be running: the session is
// EXECUTING, which keeps trusted Git away from what the command writes. With an error the session isn't, but the intents are
// kept all the same, and the runtime is asked again: nobody else has them.
func (s *session) stayAway(open []*execution, why error) error {
	s.mu.Lock()
	first := s.lookWait == 0
	s.away, s.open = why, open
	s.mu.Unlock()
	if first {
		s.log.Warn("the sandbox's runtime can't be reached; it is asked again", "sandbox", s.sandboxRecord().ID, "error", why)
	}
	s.lookAgain()
	if len(open) > 0 && s.state() == Ready {
		return s.apply(EvExecStart, "", nil)
	}
	return nil
}

// endAway gives the intents that waited, of which the caller sees to the end.
func (s *session) endAway() []*execution {
	s.mu.Lock()
	defer s.mu.Unlock()
	open := s.open
	s.away, s.open = nil, nil
	return open
}

func (s *session) isStillAway() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.away != nil
}

// checkAway refuses what needs the sandbox while the session is away, and has the runtime asked at once.
func (s *session) checkAway() error {
	s.mu.Lock()
	why := s.away
	s.mu.Unlock()
	if why == nil {
		return nil
	}
	s.enqueue(s.reconcile) // a refusal means that the agent is closing
	return fmt.Errorf("%w: the sandbox of session %s can't be reached, whether it runs is not known: %w: the runtime is asked again, ask again too", ErrUnavailable, s.id, why)
}

// awayReason is what the session says meanwhile; empty if it isn't away. Caller holds mu.
func (s *session) awayReason() string {
	if s.away == nil {
		return ""
	}
	return fmt.Sprintf("The sandbox can't be reached, and whether it still runs is not known: %v. The runtime is asked again, at the latest each %s.", s.away, maxLook)
}
