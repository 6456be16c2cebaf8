package client

import (
	"context"
	"errors"
	"io"
	"iter"
	"math"

	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// WatchEvents gives the events after r.Cursor, of one session or of the node, each with the cursor to store. With
// UntilNow it ends with the newest one. Otherwise it goes on with what comes until ctx ends, and across restarts of the
// agent, for as long as they take: once an agent has answered, it is asked again from the last cursor on.
//
// An error ends it. ErrFailedPrecondition: events after the cursor are no longer kept, and the message names the oldest
// cursor to go on from.
func (c *Client) WatchEvents(ctx context.Context, r *sandboxv1.WatchEventsRequest) iter.Seq2[*sandboxv1.Event, error] {
	return func(yield func(*sandboxv1.Event, error) bool) {
		w := &watch{client: c, req: proto.CloneOf(r), yield: yield}
		p := &patience{window: math.MaxInt64, next: firstWait}
		for {
			from := w.req.GetCursor()
			err := failed(ctx, "reading events", w.once(ctx))
			switch {
			case w.left, err == nil && w.req.GetUntilNow(), ctx.Err() != nil && !w.req.GetUntilNow():
				return
			case w.req.GetUntilNow(), err != nil && (!w.reached || !lost(err) && !errors.Is(err, ErrUnavailable)):
				yield(nil, err)
				return
			}
			if w.req.GetCursor() != from {
				p.progress()
			}
			p.wait(ctx)
		}
	}
}

// watch is one reading of the events, over as many connections as it takes.
type watch struct {
	client *Client
	req    *sandboxv1.WatchEventsRequest
	yield  func(*sandboxv1.Event, error) bool
	// reached: an agent has answered. left: the caller has left the loop.
	reached, left bool
}

// once reads one stream to its end. Each event moves the cursor on.
func (w *watch) once(ctx context.Context) error {
	stream, err := w.client.api.Sessions.WatchEvents(ctx, w.req)
	if err != nil {
		return err
	}
	defer stream.Close()
	for {
		m, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		w.reached = true
		w.req.Cursor = m.GetEvent().GetCursor()
		if w.left = !w.yield(m.GetEvent(), nil); w.left {
			return nil
		}
	}
}
