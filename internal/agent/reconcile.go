package agent

import (
	"fmt"
	"strings"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Waits between two looks at a sandbox that could not be seen to be gone.
const (
	firstLook = time.Second
	maxLook   = time.Minute
)

// lookAgain has the session look for the evidence that it lacks, in a while: a killed task may leave uninterruptible
// sleep, a cgroup may come to be empty. It goes on until there is evidence, or the agent ends; the next one begins with a
// look at once.
func (s *session) lookAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.looking {
		return
	}
	s.looking = true
	s.lookWait = min(max(2*s.lookWait, firstLook), maxLook)
	wait := s.lookWait
	s.agent.watchers.Go(func() {
		select {
		case <-time.After(wait):
		case <-s.agent.closing:
			return
		}
		s.mu.Lock()
		s.looking = false
		s.mu.Unlock()
		// A refusal means that the agent is closing.
		s.enqueue(s.reconcile)
	})
}

// stopAgain has a stop whose end could not be recorded done once more, in a while: it finds the same evidence. Until then the
// session is being stopped, and neither its host uids nor its workspace are anybody else's.
func (s *session) stopAgain(why string) {
	s.mu.Lock()
	s.rec.State = Stopping
	if s.rec.Sandbox != nil {
		s.rec.Sandbox.State, s.rec.Sandbox.Evidence = SandboxStopping, nil
	}
	if s.stoppedFor == "" {
		s.stoppedFor = why
	}
	s.mu.Unlock()
	s.lookAgain()
}

// reconcile tries to stop once more what could not be seen to be gone, or not recorded, and to recover what is away. Should that fail again,
// lookAgain follows.
func (s *session) reconcile() error {
	s.mu.Lock()
	state, why := s.rec.State, s.stoppedFor
	s.mu.Unlock()
	if s.isStillAway() {
		return s.recover(s.endAway())
	}
	if state != Uncertain && state != Stopping {
		return nil
	}
	evidence, err := s.stop(why)
	if err == nil {
		s.log.Info("evidence was had at last", "sandbox", s.sandboxRecord().ID, "evidence", evidenceText(*evidence))
	}
	return err
}

// stuck is what the session says while there is no evidence: why, and what an operator can do. The first
// why stays until there is evidence.
func (s *session) stuck(why string, err error) string {
	s.mu.Lock()
	if s.stoppedFor == "" {
		s.stoppedFor = why
	}
	why = s.stoppedFor
	id := s.rec.Sandbox.Identity
	s.mu.Unlock()
	return fmt.Sprintf("%s; %v. The workspace stays reserved until there is evidence, and the agent looks again by itself, at the latest each %s. %s",
		strings.TrimSuffix(why, "."), err, maxLook, remedyFor(id))
}

func remedyFor(id runtime.Identity) string {
	where := "its cgroup"
	if len(id.Cgroups) > 0 {
		where = strings.Join(id.Cgroups, ", ")
	}
	return "An operator ends what is left in " + where + " (cgroup.procs names it; a task in state D waits for storage that does not answer), or restarts the node: another boot id is evidence too."
}

// settled forgets how long was waited for evidence.
func (s *session) settled() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lookWait, s.stoppedFor = 0, ""
}
