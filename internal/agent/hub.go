package agent

import (
	"context"
	"sync"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// readerBytes bounds what waits for one reader of a stream. A pipe that a person reads with less or sends through
// another program falls behind for a moment and catches up; memory is only used by what really waits.
const readerBytes = 4 << 20

// chunk is a piece of one stream; its data is never changed.
type chunk struct {
	stream sandboxv1.Stream
	offset uint64
	data   []byte
}

// hub hands the output of one running command to those who watch it. Publishing never blocks and never waits for a
// reader (P13): ttrpc carries all streams of a sandbox over one connection, so a stalled reader here would stall the
// command's own output. What a slow reader misses shows as lost bytes.
//
// It also keeps the newest bytes, so that a reader who comes late, or comes back, sees what was just printed.
// Lock order: hub.mu before subscriber.mu.
type hub struct {
	mu      sync.Mutex
	backlog ring
	subs    map[*subscriber]struct{}
	closed  bool
}

func newHub(limit int64) *hub { return &hub{backlog: ring{limit: int(limit)}} }

// ring keeps the newest chunks, at most limit bytes of them, and always the newest one.
type ring struct {
	chunks []chunk
	size   int
	limit  int
}

// cost is what a chunk takes in memory: a flood of one-byte chunks is bounded as well.
func (c chunk) cost() int { return len(c.data) + 64 }

func (r *ring) push(c chunk) {
	r.chunks = append(r.chunks, c)
	r.size += c.cost()
	for r.size > r.limit && len(r.chunks) > 1 {
		r.pop()
	}
}

func (r *ring) pop() (chunk, bool) {
	if len(r.chunks) == 0 {
		return chunk{}, false
	}
	c := r.chunks[0]
	r.chunks[0] = chunk{}
	r.chunks = r.chunks[1:]
	r.size -= c.cost()
	return c, true
}

func (h *hub) publish(c chunk) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.backlog.push(c)
	for s := range h.subs {
		s.push(c)
	}
}

// close ends every subscription once its reader has taken what is there.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for s := range h.subs {
		s.end()
	}
	h.subs = nil
}

// subscribe begins at the given offsets; what is older than the backlog shows as lost.
func (h *hub) subscribe(stdout, stderr uint64) *subscriber {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &subscriber{
		next:   map[sandboxv1.Stream]uint64{sandboxv1.Stream_STDOUT: stdout, sandboxv1.Stream_STDERR: stderr},
		queue:  ring{limit: readerBytes},
		wakeup: make(chan struct{}, 1),
	}
	for _, c := range h.backlog.chunks {
		s.push(c)
	}
	if h.closed {
		s.end()
		return s
	}
	if h.subs == nil {
		h.subs = map[*subscriber]struct{}{}
	}
	h.subs[s] = struct{}{}
	return s
}

func (h *hub) unsubscribe(s *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs, s)
}

// subscriber is one reader's bounded queue.
type subscriber struct {
	mu     sync.Mutex
	queue  ring
	ended  bool
	wakeup chan struct{}
	// next is the offset that the reader has not seen yet, per stream. Only the reader's goroutine uses it.
	next map[sandboxv1.Stream]uint64
}

func (s *subscriber) push(c chunk) {
	s.mu.Lock()
	s.queue.push(c)
	s.mu.Unlock()
	s.wake()
}

func (s *subscriber) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.wake()
}

func (s *subscriber) wake() {
	select {
	case s.wakeup <- struct{}{}:
	default:
	}
}

// receive waits for the next chunk. nil and no error: the command has ended and everything was given.
func (s *subscriber) receive(ctx context.Context) (*sandboxv1.OutputChunk, error) {
	for {
		s.mu.Lock()
		c, ok := s.queue.pop()
		ended := s.ended
		s.mu.Unlock()
		if ok {
			if out := s.trim(c); out != nil {
				return out, nil
			}
			continue
		}
		if ended {
			return nil, nil
		}
		select {
		case <-s.wakeup:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// trim cuts off what the reader has already, and counts what it missed.
func (s *subscriber) trim(c chunk) *sandboxv1.OutputChunk {
	next, end := s.next[c.stream], c.offset+uint64(len(c.data))
	if end <= next {
		return nil
	}
	lost := uint64(0)
	if c.offset > next {
		lost = c.offset - next
	} else {
		c.data = c.data[next-c.offset:]
		c.offset = next
	}
	s.next[c.stream] = end
	return &sandboxv1.OutputChunk{Stream: c.stream, Offset: c.offset, Data: c.data, LostBytes: lost}
}
