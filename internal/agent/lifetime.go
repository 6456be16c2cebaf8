package agent

import (
	"fmt"
	"os"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// maxNap bounds the time between two looks while anything has a time, so that a clock that was set is noticed.
const maxNap = time.Minute

// vitals are what decides whether a session's time is up.
type vitals struct {
	state State
	busy  bool // a command runs or waits
	// The times are in steady time. started is when the newest sandbox was ready, used when it had its last command.
	started, used time.Time
	// expires is when the first of the grants does; zero when none does, or their contents are gone already.
	expires time.Time
}

// ending is why a sandbox goes although nobody asked for it.
type ending int

const (
	notYet ending = iota
	grantExpired
	tooOld
	idleLong
)

// timeIsUp says what is to be done now, and otherwise when to look again at the latest; zero: there is nothing to look for.
// It is pure. A command that runs comes to its end before its sandbox is too old; only an expired grant ends it.
func timeIsUp(l config.Lifetime, v vitals, now time.Time) (what ending, next time.Time) {
	sooner := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	if !v.expires.IsZero() {
		if !now.Before(v.expires) {
			return grantExpired, time.Time{}
		}
		sooner(v.expires)
	}
	if v.state != Ready && v.state != Executing {
		return notYet, next
	}
	if l.Max > 0 {
		old := v.started.Add(l.Max.Std())
		if !now.Before(old) {
			return tooOld, time.Time{}
		}
		sooner(old)
	}
	if l.Idle > 0 {
		idle := v.used.Add(l.Idle.Std())
		switch {
		case v.busy: // its last command ends now at the soonest
			sooner(now.Add(l.Idle.Std()))
		case !now.Before(idle):
			return idleLong, time.Time{}
		default:
			sooner(idle)
		}
	}
	return notYet, next
}

// keepTimes ends sandboxes and grants whose time is up, until the agent closes. Everything that it goes by is in the
// records and on the disk, so that a restart of the agent prolongs nothing. All of it is in steady time (clock.go), which no
// jump of the node's clock moves.
func (a *Agent) keepTimes() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-a.closing:
			return
		case <-timer.C:
		case <-a.timesChanged:
		}
		if next := a.endWhatIsOver(a.clock.steady()); !next.IsZero() {
			timer.Reset(min(max(next.Sub(a.clock.steady()), 0), maxNap))
		}
	}
}

// lookAtTimes has keepTimes look now: there is a new sandbox, or a set of grants.
func (a *Agent) lookAtTimes() {
	select {
	case a.timesChanged <- struct{}{}:
	default: // it will look anyway
	}
}

// endWhatIsOver looks at every session, and says when to look again.
func (a *Agent) endWhatIsOver(now time.Time) (next time.Time) {
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	for _, s := range sessions {
		if at := s.endIfOver(now); !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

// endIfOver queues what has to be done to a session whose time is up. The job looks again: a command may have begun.
func (s *session) endIfOver(now time.Time) time.Time {
	what, next := timeIsUp(s.agent.cfg.Lifetime, s.vitals(), now)
	if what == notYet {
		return next
	}
	s.mu.Lock()
	queued := s.ending
	s.ending = true
	s.mu.Unlock()
	switch {
	case queued:
	case what == grantExpired:
		// On a goroutine of its own: ending a command takes its grace period. A refusal means that the agent is closing.
		s.agent.spawn(s.expire)
	default:
		s.enqueue(func() error { return s.ended(s.retireOver(now)) })
	}
	return now.Add(maxNap)
}

// ended takes back the mark that a job is queued. What failed is tried again at the next look, and not at once.
func (s *session) ended(err error) error {
	s.mu.Lock()
	s.ending = false
	s.mu.Unlock()
	if err == nil {
		s.agent.lookAtTimes()
	}
	return err
}

// retireOver runs on the session's goroutine, so nothing runs in the sandbox. seen is when its time was found to be up.
func (s *session) retireOver(seen time.Time) error {
	if s.agent.isClosing() || s.isStillAway() { // away, it may run something
		return nil
	}
	l, v := s.agent.cfg.Lifetime, s.vitals()
	s.mu.Lock()
	v.busy = len(s.queue) > 0
	s.mu.Unlock()
	var why, reason string
	switch what, _ := timeIsUp(l, v, seen); what {
	case tooOld:
		reason = metrics.EvictedAge
		why = fmt.Sprintf("The sandbox was older than %s (lifetime.max).", l.Max.Std())
	case idleLong:
		reason = metrics.EvictedIdle
		why = fmt.Sprintf("The sandbox had no command for %s (lifetime.idle).", l.Idle.Std())
	default:
		return nil
	}
	if _, err := s.stop(why); err != nil {
		s.log.Error("sandbox whose time is up not stopped with evidence", "error", err)
		return err
	}
	s.agent.metrics.Evicted(reason)
	s.settle()
	return nil
}

func (s *session) vitals() vitals {
	c := s.agent.clock
	s.mu.Lock()
	v := vitals{state: s.rec.State, busy: s.active, used: s.used}
	if first := firstExpiry(s.rec.Grants); s.grants != nil && !first.IsZero() {
		v.expires = c.steady().Add(first.Sub(s.grantsTime()))
	}
	sb := s.rec.Sandbox
	s.mu.Unlock()
	if sb == nil {
		return v
	}
	v.started = c.startOf(sb)
	if v.used.IsZero() {
		v.used = s.lastUse(sb)
	}
	return v
}

// startOf is when a sandbox was ready, in steady time. Of one that an agent of an older version made there is only what the
// node's clock said; it is never in the future.
func (c *clock) startOf(sb *sandboxRecord) time.Time {
	if sb.ProvedAt > 0 {
		return c.at(sb.ProvedAt)
	}
	return earliest(sb.Identity.StartedAt, c.steady())
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// lastUse is when the last command of a sandbox of an earlier agent ended, by the newest of its receipts that retention has
// left. It is never before the sandbox's start nor in the future, whatever was done to the clock or the folder.
func (s *session) lastUse(sb *sandboxRecord) time.Time {
	c := s.agent.clock
	used := earliest(latest(c.startOf(sb), newestReceipt(s.agent.receiptsDir(sb.ID))), c.steady())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used.IsZero() {
		s.used = used
	}
	return s.used
}

// newestReceipt is when the newest receipt in a folder was written; zero when there is none. Not the folder's own time:
// retention changes that too, and whoever makes room for the next receipt.
func newestReceipt(dir string) (newest time.Time) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return newest
	}
	for _, e := range entries {
		if _, is := receipt.ExecIDOf(e.Name()); !is {
			continue
		}
		if st, err := e.Info(); err == nil {
			newest = latest(newest, st.ModTime())
		}
	}
	return newest
}
