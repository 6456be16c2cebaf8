package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

const day = 24 * time.Hour

// settable is a node whose clocks a test sets.
type settable struct {
	now   time.Time
	since time.Duration // since its start
}

func newSettable() *settable {
	return &settable{now: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), since: 100 * time.Hour}
}

func (n *settable) clock() *clock {
	return newClock(func() time.Time { return n.now }, func() time.Duration { return n.since })
}

// pass lets time go by; jump sets the clock and lets none go by.
func (n *settable) pass(d time.Duration) { n.now, n.since = n.now.Add(d), n.since+d }
func (n *settable) jump(d time.Duration) { n.now = n.now.Add(d) }

// jumps are what may be done to a node's clock.
var jumps = map[string]time.Duration{"not at all": 0, "a day forward": day, "a day back": -day, "years back": -40 * 365 * day}

// aged is a session with a sandbox that was ready at the start of the node's clock, and had its last command then.
func aged(t *testing.T, n *settable) *session {
	t.Helper()
	cfg := &config.Config{StateDir: t.TempDir(), Lifetime: config.Lifetime{Idle: config.Duration(time.Hour), Max: config.Duration(3 * time.Hour)}}
	a := &Agent{cfg: cfg, log: slog.New(slog.DiscardHandler), clock: n.clock()}
	s := newSession(a, sessionRecord{ID: "s", State: Ready, Sandbox: &sandboxRecord{
		ID: "sb-1", ProvedAt: n.since, Identity: runtime.Identity{StartedAt: n.now},
	}})
	s.used = a.clock.steady()
	return s
}

func (s *session) over() ending {
	what, _ := timeIsUp(s.agent.cfg.Lifetime, s.vitals(), s.agent.clock.steady())
	return what
}

func TestNoJumpOfTheClockChangesHowLongASandboxLives(t *testing.T) {
	for name, jump := range jumps {
		n := newSettable()
		s := aged(t, n)
		n.pass(59 * time.Minute)
		n.jump(jump)
		require.Equal(t, notYet, s.over(), name)
		n.pass(time.Minute)
		require.Equal(t, idleLong, s.over(), name)
		s.used = s.agent.clock.steady()
		n.pass(59 * time.Minute)
		require.Equal(t, notYet, s.over(), name)
		n.pass(time.Hour + time.Minute)
		s.used = s.agent.clock.steady()
		require.Equal(t, tooOld, s.over(), name)
	}
}

func TestASandboxIsAsOldAsItIsForAnAgentThatWasRestartedAfterAJump(t *testing.T) {
	for name, jump := range jumps {
		n := newSettable()
		s := aged(t, n)
		n.pass(2 * time.Hour)
		n.jump(jump)
		s.agent.clock = n.clock() // the next agent begins
		s.used = s.agent.clock.steady()
		require.Equal(t, notYet, s.over(), name)
		n.pass(59 * time.Minute)
		require.Equal(t, notYet, s.over(), name)
		s.used = s.agent.clock.steady()
		n.pass(time.Minute)
		require.Equal(t, tooOld, s.over(), name)
	}
}

// The receipts say by the node's clock when they were written: after a jump and a restart that may be off, but a sandbox is
// never idle for longer than it lives, nor since a time that is still to come.
func TestTheLastUseIsThatOfTheNewestReceiptAndNeverOutOfBounds(t *testing.T) {
	n := newSettable()
	s := aged(t, n)
	n.pass(30 * time.Minute)
	dir := s.agent.receiptsDir("sb-1")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	write := func(name string, at time.Time) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
		require.NoError(t, os.Chtimes(filepath.Join(dir, name), at, at))
	}
	write(receipt.FileName("e1"), n.now.Add(-10*time.Minute))
	write(receipt.FileName("e2"), n.now.Add(-5*time.Minute))
	write("removed", n.now)
	require.NoError(t, os.Chtimes(dir, n.now, n.now))
	lastUse := func() time.Duration {
		s.used = time.Time{}
		return s.agent.clock.steady().Sub(s.vitals().used)
	}
	require.Equal(t, 5*time.Minute, lastUse(), "and not when retention removed something last, which changes the folder")

	require.NoError(t, os.Remove(filepath.Join(dir, receipt.FileName("e2"))))
	require.Equal(t, 10*time.Minute, lastUse())
	n.jump(-day)
	s.agent.clock = n.clock()
	require.Zero(t, lastUse(), "not in the future")
	n.jump(2 * day)
	s.agent.clock = n.clock()
	require.Equal(t, 30*time.Minute, lastUse(), "not before the sandbox was there")
}

func TestAGrantExpiresByTheClockOrByWhatHasPassedWhicheverIsFirst(t *testing.T) {
	for name, c := range map[string]struct {
		jump time.Duration
		left time.Duration // after it
	}{
		"not at all": {0, 30 * time.Minute},
		"a bit back": {-time.Minute, 30 * time.Minute},
		"a day back": {-day, 30 * time.Minute},
		// What it was given for is over by the clock, which is what its issuer goes by.
		"a bit forward": {time.Minute, 29 * time.Minute},
		"a day forward": {day, 0},
	} {
		n := newSettable()
		s := aged(t, n)
		s.agent.cfg.Lifetime = config.Lifetime{}
		set := &grantSet{names: []grantRecord{{Name: "g", ExpiresAt: n.now.Add(time.Hour)}}, digest: "d"}
		set.take(s, &s.rec)
		n.pass(30 * time.Minute)
		n.jump(c.jump)
		if c.left > 0 {
			require.Equal(t, notYet, s.over(), name)
			require.Empty(t, s.grantsProblem(), name)
			n.pass(c.left - 1)
			require.Equal(t, notYet, s.over(), name)
			n.pass(1)
		}
		require.Equal(t, grantExpired, s.over(), name)
		require.Contains(t, s.grantsProblem(), "Grant g expired", name)
		n.pass(day)
		require.Equal(t, grantExpired, s.over(), name)
	}
}

func TestNothingIsOldForRetentionOnlyBecauseTheClockJumped(t *testing.T) {
	const age = 30 * day
	for name, c := range map[string]struct {
		jump time.Duration
		goes bool // what ended 31 days before, by the clock before the jump
	}{
		"not at all":    {0, true},
		"a day forward": {day, true},
		"years forward": {3650 * day, true},
		"a day back":    {-day, false},
		"two days back": {-2 * day, false},
	} {
		n := newSettable()
		clock := n.clock()
		list := []endedExec{{id: "old", at: n.now.Add(-age - day)}, {id: "young", at: n.now.Add(-age + time.Hour)}}
		n.jump(c.jump)
		old := toExpire(list, len(list), clock.cautious().Add(-age))
		if c.goes {
			require.Len(t, old, 1, name)
			require.Equal(t, "old", old[0].id, name)
		} else {
			require.Empty(t, old, "%s: it stays for longer, which costs room and nothing else", name)
		}
		n.pass(3 * day)
		require.Len(t, toExpire(list, len(list), clock.cautious().Add(-age)), 2, name)
	}
}

func TestTheNodesOwnClocksGoOn(t *testing.T) {
	c := nodeClock()
	before := c.steady()
	require.WithinDuration(t, time.Now(), before, time.Minute)
	require.Positive(t, c.boot())
	require.Eventually(t, func() bool { return c.steady().After(before) }, bound, time.Millisecond)
}
