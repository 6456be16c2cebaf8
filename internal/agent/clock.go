package agent

import (
	"time"

	"golang.org/x/sys/unix"
)

// clock is what the agent goes by. The node's clock can be set at any time, by an operator or by NTP; what has passed is
// counted by one that can't be: that since the node's start.
type clock struct {
	wall  func() time.Time
	boot  func() time.Duration
	began instant // the agent's start
}

// instant is one moment, by both clocks.
type instant struct {
	wall time.Time
	boot time.Duration
}

func newClock(wall func() time.Time, boot func() time.Duration) *clock {
	c := &clock{wall: wall, boot: boot}
	c.began = c.instant()
	return c
}

// nodeClock is the real one.
func nodeClock() *clock {
	return newClock(time.Now, func() time.Duration {
		var ts unix.Timespec
		// It fails for no clock that the kernel has, and this one is there since Linux 2.6.39.
		_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
		return time.Duration(ts.Nano())
	})
}

// instant is now. Round(0) takes Go's own monotonic reading away: a comparison is to be of what it seems to be.
func (c *clock) instant() instant { return instant{c.wall().Round(0), c.boot()} }

// steady is what the node's clock showed at the agent's start, and what has passed since. Lifetimes are counted in it.
func (c *clock) steady() time.Time { return c.at(c.boot()) }

// at is the steady time of a moment since the node's start.
func (c *clock) at(boot time.Duration) time.Time { return c.began.wall.Add(boot - c.began.boot) }

// since is a time by which something that was given at an instant with an end of its own is over: the node's clock, unless
// that was set back since.
func (c *clock) since(given instant) time.Time {
	return latest(c.wall().Round(0), given.wall.Add(c.boot()-given.boot))
}

// cautious is a time by which nothing is old only because the node's clock was set forward, or back, since the agent's start.
func (c *clock) cautious() time.Time {
	wall, steady := c.wall().Round(0), c.steady()
	if steady.Before(wall) {
		return steady
	}
	return wall
}
