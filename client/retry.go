package client

import (
	"context"
	"time"
)

// Waits between two attempts: an agent's restart takes about a second.
const (
	firstWait = 50 * time.Millisecond
	maxWait   = 2 * time.Second
)

// patience is for how long one call is asked again.
type patience struct {
	window time.Duration
	since  time.Time
	next   time.Duration
	// asked: an attempt may have reached the agent.
	asked bool
}

func (c *Client) newPatience() *patience { return &patience{window: c.retryFor, next: firstWait} }

// progress begins the time anew: the agent was there.
func (p *patience) progress() { p.since, p.next = time.Time{}, firstWait }

// wait waits before the next attempt. It says false when there is to be none.
func (p *patience) wait(ctx context.Context) bool {
	p.asked = true
	if p.since.IsZero() {
		p.since = time.Now()
	}
	if time.Since(p.since) > p.window {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(p.next):
		p.next = min(2*p.next, maxWait)
		return true
	}
}
