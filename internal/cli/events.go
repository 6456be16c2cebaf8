package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v3"
	"google.golang.org/protobuf/encoding/protojson"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
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
	cl := newClient(c)
	for e, err := range cl.WatchEvents(ctx, &sandboxv1.WatchEventsRequest{
		SessionId: c.String("session"), Cursor: c.String("cursor"), UntilNow: !c.Bool("follow"),
	}) {
		if err != nil {
			return cl.Explain("reading events", err)
		}
		if err := showEvent(c.Root().Writer, e, c.Bool("json")); err != nil {
			return fmt.Errorf("writing the events: %w", err)
		}
	}
	return nil
}

func showEvent(w io.Writer, e *sandboxv1.Event, asJSON bool) error {
	if asJSON {
		b, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(e)
		if err != nil {
			return err
		}
		var line bytes.Buffer
		if err := json.Compact(&line, b); err != nil { // see marshalJSON
			return err
		}
		line.WriteByte('\n')
		_, err = w.Write(line.Bytes())
		return err
	}
	or := func(s string) string {
		if s == "" {
			return "-"
		}
		return s
	}
	_, err := fmt.Fprintf(w, "%s  %s  %s  %s  %s  %s\n", e.GetCursor(), e.GetAt().AsTime().Format(time.RFC3339Nano),
		or(e.GetSessionId()), e.GetKind(), or(e.GetExecId()), e.GetDetail())
	return err
}
