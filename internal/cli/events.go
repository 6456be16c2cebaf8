package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect/v2"
	"github.com/urfave/cli/v3"
	"google.golang.org/protobuf/encoding/protojson"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
)

func eventsCommand() *cli.Command {
	return &cli.Command{
		Name:  "events",
		Usage: "show what happened to sessions, their sandboxes and their commands",
		Description: "Prints the events that the agent keeps (events.keep), one per line: cursor, time, session, kind, exec and detail.\n" +
			"With --cursor only those after it; with --follow also those to come, until Ctrl-C, across restarts of the agent.\n" +
			"--json prints one JSON object per line. No event holds a command's text or output.",
		Flags: clientFlags(
			&cli.StringFlag{Name: "session", Usage: "only the events of this `SESSION`"},
			&cli.StringFlag{Name: "cursor", Usage: "go on after the event of this `CURSOR`"},
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on with what happens from now on"},
		),
		Action: runEvents,
	}
}

func runEvents(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	w := &eventWatch{
		client: newClient(c), out: c.Root().Writer, asJSON: c.Bool("json"),
		req: &sandboxv1.WatchEventsRequest{SessionId: c.String("session"), Cursor: c.String("cursor"), UntilNow: !c.Bool("follow")},
	}
	wait := firstRetryWait
	for {
		seen := w.req.GetCursor()
		err := w.once(ctx)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil && !w.req.GetUntilNow():
			return nil // that is how following ends
		case w.req.GetUntilNow() || !w.comesBack(err):
			return w.client.Explain("reading events", err)
		}
		if w.req.GetCursor() != seen {
			wait = firstRetryWait
		}
		select {
		case <-time.After(wait):
			wait = min(2*wait, maxRetryWait)
		case <-ctx.Done():
			return nil
		}
	}
}

// eventWatch is one reading of the events, over as many connections as it takes.
type eventWatch struct {
	client *client.Client
	req    *sandboxv1.WatchEventsRequest
	out    io.Writer
	asJSON bool
	// reached: an agent has answered.
	reached bool
}

// errOutput: this program's own output can't be written.
var errOutput = errors.New("writing the events")

// once reads one stream to its end. Each event moves the cursor on.
func (w *eventWatch) once(ctx context.Context) error {
	stream, err := w.client.Sessions.WatchEvents(ctx, w.req)
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
		if err := w.show(m.GetEvent()); err != nil {
			return fmt.Errorf("%w: %w", errOutput, err)
		}
		w.req.Cursor = m.GetEvent().GetCursor()
	}
}

// comesBack says whether a follower asks again: the agent was there, and is being restarted.
func (w *eventWatch) comesBack(err error) bool {
	if !w.reached || errors.Is(err, errOutput) {
		return false
	}
	return client.ConnectionLost(err) || connect.CodeOf(err) == connect.CodeUnavailable
}

func (w *eventWatch) show(e *sandboxv1.Event) error {
	if w.asJSON {
		b, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(e)
		if err != nil {
			return err
		}
		var line bytes.Buffer
		if err := json.Compact(&line, b); err != nil { // see marshalJSON
			return err
		}
		line.WriteByte('\n')
		_, err = w.out.Write(line.Bytes())
		return err
	}
	or := func(s string) string {
		if s == "" {
			return "-"
		}
		return s
	}
	_, err := fmt.Fprintf(w.out, "%s  %s  %s  %s  %s  %s\n", e.GetCursor(), e.GetAt().AsTime().Format(time.RFC3339Nano),
		or(e.GetSessionId()), e.GetKind(), or(e.GetExecId()), e.GetDetail())
	return err
}
