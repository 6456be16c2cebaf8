package receiptd

import (
	"context"
	"sync"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
)

const (
	// streamBytes bounds what waits for a reader that is slower than the command. What does not fit is dropped and said.
	streamBytes = 2 << 20
	// chunkBytes is the most that pieces are put together to while they wait, chunkCost about what a chunk takes in memory
	// besides its data: 2 MiB of output that comes byte by byte would take more than 200 MiB of this process, which no limit of
	// the command's holds (P16).
	chunkBytes = 32 << 10
	chunkCost  = 128
)

// stream carries an execution's output to the connection that started it. The command's side never waits for the
// reader's.
type stream struct {
	mu      sync.Mutex
	queue   []*receiptdv1.Output
	bytes   int       // with chunkCost for each
	lost    [3]uint64 // by Stream: dropped since the last chunk
	gone    bool      // nobody reads any more
	changed chan struct{}
	ended   bool
}

func newStream() *stream { return &stream{changed: make(chan struct{}, 1)} }

func (s *stream) sink(name receiptdv1.Stream) nsexec.Sink {
	return func(offset uint64, data []byte) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.gone {
			return
		}
		if s.extend(name, data) {
			return
		}
		if s.bytes+len(data)+chunkCost > streamBytes {
			s.lost[name] += uint64(len(data))
			return
		}
		s.queue = append(s.queue, &receiptdv1.Output{Stream: name, Offset: offset, Data: append([]byte(nil), data...), LostBytes: s.lost[name]})
		s.bytes += len(data) + chunkCost
		s.lost[name] = 0
		s.wake()
	}
}

// extend puts data into the newest chunk, if that still waits and data follows it. Caller holds mu.
func (s *stream) extend(name receiptdv1.Stream, data []byte) bool {
	if len(s.queue) == 0 || s.lost[name] > 0 || s.bytes+len(data) > streamBytes {
		return false
	}
	last := s.queue[len(s.queue)-1]
	if last.GetStream() != name || len(last.GetData())+len(data) > chunkBytes {
		return false
	}
	last.Data = append(last.Data, data...)
	s.bytes += len(data)
	return true
}

func (s *stream) wake() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.wake()
}

// take gives what waits, and whether that was the last.
func (s *stream) take() (chunks []*receiptdv1.Output, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	chunks, s.queue, s.bytes = s.queue, nil, 0
	return chunks, s.ended
}

func (s *stream) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone, s.queue, s.bytes = true, nil, 0
}

// serve sends the output until the execution has ended and all of it is sent, or the reader is gone.
func (s *stream) serve(ctx context.Context, srv receiptdv1.Receiptd_ExecServer) error {
	defer s.abandon()
	for {
		select {
		case <-s.changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		chunks, ended := s.take()
		for _, c := range chunks {
			if err := srv.Send(&receiptdv1.ExecEvent{Event: &receiptdv1.ExecEvent_Output{Output: c}}); err != nil {
				return err
			}
		}
		if ended {
			return nil
		}
	}
}

// last is the event that ends the stream.
func (e *execution) last() *receiptdv1.ExecEvent {
	switch {
	case e.notStarted != "":
		return &receiptdv1.ExecEvent{Event: &receiptdv1.ExecEvent_NotStarted{NotStarted: &receiptdv1.NotStarted{ExecId: e.id, Reason: e.notStarted}}}
	case e.lost != nil:
		return &receiptdv1.ExecEvent{Event: &receiptdv1.ExecEvent_Lost{Lost: &receiptdv1.Lost{ExecId: e.id, Reason: e.lost.Error()}}}
	}
	return &receiptdv1.ExecEvent{Event: &receiptdv1.ExecEvent_Done{Done: &receiptdv1.Done{ExecId: e.id, ReceiptSha256: e.sha}}}
}
