package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sandbox-agent/sandbox-agent/internal/cli/interrupt"
	"github.com/sandbox-agent/sandbox-agent/internal/mcp"
)

// Bounds of what a result shows of each stream, bytes: a model reads all of it, every time.
const (
	defaultTextBytes = 32 << 10
	leastTextBytes   = 256
	mostTextBytes    = 1 << 20
)

func mcpCommand() *cli.Command {
	return &cli.Command{
		Name:  "mcp",
		Usage: "be an MCP server on standard input and output, with the one tool \"bash\" for a session",
		Description: "An AI agent's client starts this program and gives its model the tool. The tool takes a command and a time and\n" +
			"nothing else: session, socket and everything that a command gets are decided here, by who starts the program.\n" +
			"Standard output carries JSON-RPC alone; the log goes to standard error, without any command's text or output.\n\n" +
			"A cancelled request is ended with evidence, and so is what runs when the client closes standard input or this\n" +
			"program gets SIGTERM. Without an agent the tool answers with an error; it never runs anything itself.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "session", Usage: "the session's id (required)"},
			socketFlag(),
			&cli.Uint64Flag{HideDefault: true, Name: "owner-epoch", Usage: "start nothing once the session has another owner"},
			&cli.StringSliceFlag{Name: "label", Usage: "`KEY=VALUE` to record and sign with each command; can be given again"},
			&cli.Int64Flag{Name: "text-bytes", Usage: "what a result shows of each stream, head and tail, bytes", Value: defaultTextBytes},
			&cli.DurationFlag{Name: "progress", Usage: "time between two progress notifications", Value: time.Second},
			&cli.DurationFlag{Name: "retry-for", Usage: "how long to ask again after a lost connection to the agent", Value: time.Minute},
			&cli.StringFlag{Name: "log-level", Usage: "debug, info, warn or error", Value: "info"},
		},
		Action: runMCP,
	}
}

func runMCP(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	o, err := mcpOptions(c)
	if err != nil {
		return err
	}
	// A client that died closes the pipe: that is an error of a write, in whose course what runs is cancelled, and not the
	// end of this program.
	signal.Ignore(syscall.SIGPIPE)
	server := mcp.New(o)
	interrupt.Describe(ctx, interrupt.CleanUp{Left: func() []string {
		var lines []string
		for _, id := range server.Running() {
			lines = append(lines, fmt.Sprintf("not seen to be cancelled: %s cancel %s %s", program, o.Session, id))
		}
		slices.Sort(lines)
		return lines
	}})
	err = server.Run(ctx, c.Root().Reader, c.Root().Writer)
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) {
		return nil // the client has gone, and what it had started was seen to end
	}
	return err
}

// mcpOptions reads the flags.
func mcpOptions(c *cli.Command) (mcp.Options, error) {
	o := mcp.Options{
		Client: newClient(c), Session: c.String("session"), OwnerEpoch: c.Uint64("owner-epoch"), Version: Version,
		TextBytes: int(c.Int64("text-bytes")), ProgressEvery: c.Duration("progress"), RetryFor: c.Duration("retry-for"),
	}
	switch {
	case o.Session == "":
		return o, usagef("%s needs --session, the session that its commands run in (see %s --help)", c.FullName(), c.FullName())
	case o.TextBytes < leastTextBytes || o.TextBytes > mostTextBytes:
		return o, usagef("--text-bytes %d: allowed are %d to %d", o.TextBytes, leastTextBytes, mostTextBytes)
	case o.ProgressEvery < 10*time.Millisecond:
		return o, usagef("--progress %s: give 10ms or more", o.ProgressEvery)
	case o.RetryFor < 0:
		return o, usagef("--retry-for %s is negative", o.RetryFor)
	}
	var err error
	if o.Labels, err = keyValues("label", c.StringSlice("label")); err != nil {
		return o, withCode(ExitUsage, err)
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.String("log-level"))); err != nil {
		return o, usagef("--log-level %q: use debug, info, warn or error", c.String("log-level"))
	}
	o.Log = slog.New(slog.NewJSONHandler(c.Root().ErrWriter, &slog.HandlerOptions{Level: level}))
	return o, nil
}
