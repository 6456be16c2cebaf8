package resolver

import (
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// maxCached bounds the names that are kept.
const maxCached = 16384

type key struct {
	name string
	kind dnsmessage.Type
}

type cached struct {
	answer
	until time.Time
}

// cache keeps answers of upstreams for as long as those say.
type cache struct {
	mu      sync.Mutex
	entries map[key]cached
}

// get is an answer with the time that is left of it.
func (c *cache) get(k key, now time.Time) (answer, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.entries[k]
	if !ok || !now.Before(e.until) {
		return answer{}, false
	}
	e.ttl = e.until.Sub(now)
	return e.answer, true
}

func (c *cache) put(k key, a answer, now time.Time) {
	if a.ttl <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.entries) >= maxCached {
		c.makeRoom(now)
	}
	c.entries[k] = cached{answer: a, until: now.Add(a.ttl)}
}

// makeRoom drops what is over, and a quarter at least, so that the next ones don't look through everything again. Which ones
// does not matter: they can be asked for again.
func (c *cache) makeRoom(now time.Time) {
	for k, e := range c.entries {
		if !now.Before(e.until) {
			delete(c.entries, k)
		}
	}
	for k := range c.entries {
		if len(c.entries) <= maxCached*3/4 {
			return
		}
		delete(c.entries, k)
	}
}
