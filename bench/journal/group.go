//go:build sqlite || zombiezen

package main

// group gives an engine that has one transaction at a time the group commit that Pebble and bbolt bring: whatever
// waits becomes one transaction.
type group struct {
	queue chan request
	done  chan struct{}
}

type request struct {
	key   string
	value []byte
	err   chan error
}

func newGroup(commit func([]request) error) *group {
	g := &group{queue: make(chan request, 64), done: make(chan struct{})}
	go func() {
		defer close(g.done)
		for first := range g.queue {
			batch := []request{first}
			for len(g.queue) > 0 {
				batch = append(batch, <-g.queue)
			}
			err := commit(batch)
			for _, r := range batch {
				r.err <- err
			}
		}
	}()
	return g
}

func (g *group) Put(key string, value []byte) error {
	r := request{key, value, make(chan error, 1)}
	g.queue <- r
	return <-r.err
}

func (g *group) stop() {
	close(g.queue)
	<-g.done
}
