package cli

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/interrupt"
)

func execCommand() *cli.Command {
	return &cli.Command{
		Name:      "exec",
		Usage:     "run a command in a session's sandbox",
		ArgsUsage: "SESSION -- 'COMMAND'",
		Description: "Runs bash -c COMMAND in the session's worktree and waits until nothing of it is left. Its output goes to\n" +
			"this program's own; nothing is read from standard input. A lost connection is asked again with the same\n" +
			"exec id, so the command never runs twice.\n\n" +
			"The exit code is the command's own, or 128+n when signal n ended it, or\n" +
			"  120 UNCERTAIN: it may have run, wholly, partly or not at all: look before you repeat it\n" +
			"  121 cancelled   122 not started   123 killed (for example by the memory limit)   124 timed out\n" +
			"  125 the agent refused or failed, or it could not be reached: nothing ran\n" +
			"A command can return these numbers too: --json and --result-file say which it was beyond doubt.\n\n" +
			"Ctrl-C has the agent cancel the command, as \"cancel\" does, and waits for what became of it; SIGTERM and\n" +
			"SIGHUP leave it running.",
		Flags: clientFlags(
			&cli.DurationFlag{HideDefault: true, Name: "timeout", Usage: "end the command after this time (default: the node's)"},
			&cli.StringFlag{Name: "exec-id", Usage: "the exec's id, [A-Za-z0-9._-], 1-128 (default: a new one)"},
			&cli.Uint64Flag{HideDefault: true, Name: "generation", Usage: "refuse if the sandbox is of another generation"},
			&cli.Uint64Flag{HideDefault: true, Name: "owner-epoch", Usage: "refuse if the session has another owner"},
			&cli.StringSliceFlag{Name: "label", Usage: "`KEY=VALUE` to record and sign; can be given again"},
			&cli.StringFlag{Name: "result-file", Usage: "write the ExecResult as JSON to `FILE`, whatever the exit code"},
			&cli.DurationFlag{Name: "retry-for", Usage: "how long to ask again after a lost connection", Value: time.Minute},
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "print the exec id before, and how it ended after"},
		),
		Action: runExec,
	}
}

func runExec(ctx context.Context, c *cli.Command) error {
	req, err := execRequest(c)
	if err != nil {
		return withCode(ExitRefused, err)
	}
	file, err := newResultFile(c.String("result-file"))
	if err != nil {
		return withCode(ExitRefused, err)
	}
	defer file.discard()

	x := &execCall{
		client: newClient(c), req: req, json: c.Bool("json"), retryFor: c.Duration("retry-for"),
		stdout: c.Root().Writer, stderr: c.Root().ErrWriter,
	}
	verbose := c.Bool("verbose")
	if verbose {
		fmt.Fprintf(x.stderr, "exec id: %s\n", req.ExecId)
	}
	res, err := x.run(ctx)
	if err != nil {
		return err
	}
	return x.finish(res, file, verbose)
}

// execRequest reads the flags and the two arguments.
func execRequest(c *cli.Command) (*sandboxv1.ExecRequest, error) {
	got := c.Args().Slice()
	switch {
	case len(got) < 2:
		return nil, fmt.Errorf("exec takes SESSION -- 'COMMAND', got %d arguments (see %s --help)", len(got), c.FullName())
	case len(got) > 2:
		return nil, fmt.Errorf("exec takes exactly one COMMAND, a line for bash, got %d words after the session: quote it: -- '%s'",
			len(got)-1, strings.Join(got[1:], " "))
	}
	req := &sandboxv1.ExecRequest{
		SessionId: got[0], Command: got[1], ExecId: c.String("exec-id"),
		Generation: c.Uint64("generation"), OwnerEpoch: c.Uint64("owner-epoch"),
		Text: c.Bool("json") || c.String("result-file") != "",
	}
	if c.IsSet("timeout") {
		seconds := c.Duration("timeout").Seconds()
		req.TimeoutSeconds = &seconds
	}
	labels, err := keyValues("label", c.StringSlice("label"))
	if err != nil {
		return nil, err
	}
	req.Labels = labels
	if req.ExecId == "" {
		if c.IsSet("exec-id") {
			return nil, errors.New("--exec-id is empty: give 1 to 128 of [A-Za-z0-9._-], or leave the flag out")
		}
		req.ExecId = newExecID(time.Now())
	}
	return req, nil
}

// newExecID makes an id that nobody else makes, and that sorts by time.
func newExecID(now time.Time) string {
	var b [6]byte
	rand.Read(b[:])
	return "x-" + now.UTC().Format("20060102T150405") + "-" + hex.EncodeToString(b[:])
}

func keyValues(flag string, in []string) (map[string]string, error) {
	out := make(map[string]string, len(in))
	for _, kv := range in {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return nil, fmt.Errorf("--%s %q: want KEY=VALUE", flag, kv)
		}
		if _, twice := out[k]; twice {
			return nil, fmt.Errorf("--%s: %q is given twice", flag, k)
		}
		out[k] = v
	}
	return out, nil
}

// execCall is one exec, over as many connections as it takes.
type execCall struct {
	client         *client.Client
	req            *sandboxv1.ExecRequest
	json           bool
	retryFor       time.Duration
	stdout, stderr io.Writer

	// sent: a request may have reached the agent, so the command may have run.
	sent bool
	// Where each stream goes on after a lost connection, and how much of it was passed on.
	stdoutOffset, stderrOffset uint64
	stdoutShown, stderrShown   uint64
}

// Waits between two attempts: the agent's restart takes about a second.
const (
	firstRetryWait = 50 * time.Millisecond
	maxRetryWait   = 2 * time.Second
)

// run sends the request, and sends it again with the same exec id while only the connection is at fault.
func (x *execCall) run(ctx context.Context) (*sandboxv1.ExecResult, error) {
	what := "running exec " + x.req.ExecId
	wait := firstRetryWait
	var lostSince time.Time
	for {
		before := x.stdoutOffset + x.stderrOffset
		res, err := x.once(ctx)
		if err == nil {
			return res, nil
		}
		if ctx.Err() != nil {
			return x.interrupted(ctx)
		}
		if final, ok := errors.AsType[*exitError](err); ok {
			return nil, final
		}
		if !client.ConnectionLost(err) || (!x.sent && client.NeverSent(err)) {
			return nil, withCode(ExitRefused, x.client.Explain(what, err))
		}
		x.sent = true
		if lostSince.IsZero() || x.stdoutOffset+x.stderrOffset > before {
			lostSince, wait = time.Now(), firstRetryWait
		}
		if time.Since(lostSince) > x.retryFor {
			return nil, withCode(ExitUncertain, fmt.Errorf(
				"%w; the connection was lost and the agent did not come back within %s: the command may have run. Ask again with --exec-id %s and the same command",
				x.client.Explain(what, err), x.retryFor, x.req.ExecId))
		}
		select {
		case <-time.After(wait):
			wait = min(2*wait, maxRetryWait)
		case <-ctx.Done():
			return x.interrupted(ctx)
		}
	}
}

// once is one attempt.
func (x *execCall) once(ctx context.Context) (*sandboxv1.ExecResult, error) {
	if x.json {
		res, err := x.client.Execs.Exec(ctx, x.req)
		return res.GetResult(), err
	}
	stream, err := x.client.Execs.StreamExec(ctx, &sandboxv1.StreamExecRequest{
		Exec: x.req, StdoutOffset: x.stdoutOffset, StderrOffset: x.stderrOffset,
	})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for {
		msg, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil, io.ErrUnexpectedEOF // a stream without a result is a cut stream
		}
		if err != nil {
			return nil, err
		}
		x.sent = true
		if res := msg.GetResult(); res != nil {
			return res, nil
		}
		if err := x.chunk(msg.GetOutput()); err != nil {
			return nil, withCode(ExitUncertain, err)
		}
	}
}

// chunk passes output on, exactly once whatever the connections did.
func (x *execCall) chunk(o *sandboxv1.OutputChunk) error {
	if o == nil {
		return nil
	}
	w, offset, shown := x.stdout, &x.stdoutOffset, &x.stdoutShown
	if o.Stream == sandboxv1.Stream_STDERR {
		w, offset, shown = x.stderr, &x.stderrOffset, &x.stderrShown
	}
	data := o.Data
	if o.Offset < *offset {
		data = data[min(uint64(len(data)), *offset-o.Offset):]
	}
	*offset = max(*offset, o.Offset+uint64(len(o.Data)))
	if _, err := w.Write(data); err != nil {
		return fmt.Errorf("writing the output of exec %s: %w: the command may go on; ask for its result with --exec-id %s and the same command",
			x.req.ExecId, err, x.req.ExecId)
	}
	*shown += uint64(len(data))
	return nil
}

// interrupted: the person's Ctrl-C cancels, any other signal leaves the command to go on.
func (x *execCall) interrupted(ctx context.Context) (*sandboxv1.ExecResult, error) {
	goesOn := fmt.Sprintf("the command may go on; ask for its result with --exec-id %s and the same command", x.req.ExecId)
	sig, _ := interrupt.By(ctx)
	if sig != syscall.SIGINT {
		return nil, withCode(ExitUncertain, fmt.Errorf("exec %s: %w: %s", x.req.ExecId, context.Cause(ctx), goesOn))
	}
	fmt.Fprintf(x.stderr, "\n%s: cancelling exec %s (Ctrl-C again: leave it)\n", program, x.req.ExecId)
	cctx, stop := interrupt.Catch(context.WithoutCancel(ctx), x.stderr)
	defer stop()
	res, err := x.client.Execs.CancelExec(cctx, &sandboxv1.CancelExecRequest{
		SessionId: x.req.SessionId, OwnerEpoch: x.req.OwnerEpoch, ExecId: x.req.ExecId,
	})
	if err != nil {
		return nil, withCode(ExitUncertain, fmt.Errorf("%w; %s", x.client.Explain("cancelling exec "+x.req.ExecId, err), goesOn))
	}
	return res.GetResult(), nil
}

// finish shows the result and turns it into the exit code.
func (x *execCall) finish(res *sandboxv1.ExecResult, file *resultFile, verbose bool) error {
	if res == nil {
		return withCode(ExitUncertain, fmt.Errorf("exec %s: the agent answered without a result", x.req.ExecId))
	}
	if err := file.write(res); err != nil {
		return withCode(ExitUncertain, err)
	}
	var err error
	if x.json {
		err = printJSON(x.stdout, res)
	} else {
		err = x.rest(res)
	}
	if err != nil {
		return withCode(ExitUncertain, err)
	}
	x.say(res, verbose)
	if code := execExitCode(res); code != 0 {
		return &exitError{code: code, err: errSilent}
	}
	return nil
}

// rest shows what the result holds and the stream did not bring: it ran on while no agent was there to pass it on, or
// this reader was too slow for its end.
func (x *execCall) rest(res *sandboxv1.ExecResult) error {
	for _, c := range append(
		kept(sandboxv1.Stream_STDOUT, res.Stdout, res.StdoutInfo),
		kept(sandboxv1.Stream_STDERR, res.Stderr, res.StderrInfo)...,
	) {
		if err := x.chunk(c); err != nil {
			return err
		}
	}
	return nil
}

// kept is a result's kept output as chunks: the head, and the tail behind what was left out.
func kept(stream sandboxv1.Stream, b []byte, info *sandboxv1.OutputInfo) []*sandboxv1.OutputChunk {
	head := uint64(len(b))
	if info.GetTruncated() {
		head = min(head, info.GetOmittedFrom())
	}
	return []*sandboxv1.OutputChunk{
		{Stream: stream, Data: b[:head]},
		{Stream: stream, Offset: head + info.GetOmittedBytes(), Data: b[head:]},
	}
}

// say puts on stderr what the exit code alone doesn't tell.
func (x *execCall) say(res *sandboxv1.ExecResult, verbose bool) {
	plain := res.Status == sandboxv1.ExecResult_EXITED || res.Status == sandboxv1.ExecResult_SIGNALED
	if !plain || verbose || res.Oom || res.Reason != "" {
		fmt.Fprintf(x.stderr, "%s: exec %s: %s\n", program, res.ExecId, outcome(res))
	}
	if x.json {
		return
	}
	sayHarvest(x.stderr, "exec "+res.ExecId, res.Harvest)
	for _, s := range []struct {
		name  string
		shown uint64
		info  *sandboxv1.OutputInfo
	}{{"stdout", x.stdoutShown, res.StdoutInfo}, {"stderr", x.stderrShown, res.StderrInfo}} {
		if s.shown < s.info.GetBytes() {
			fmt.Fprintf(x.stderr, "%s: exec %s: %d of %d bytes of %s are not shown (this reader was too slow, or they were not kept); the receipt counts and hashes all of them\n",
				program, res.ExecId, s.info.GetBytes()-s.shown, s.info.GetBytes(), s.name)
		}
	}
}

// outcome is a result in one line.
func outcome(res *sandboxv1.ExecResult) string {
	s := res.Status.String()
	switch res.Status {
	case sandboxv1.ExecResult_EXITED:
		s = fmt.Sprintf("EXITED with code %d", res.ExitCode)
	case sandboxv1.ExecResult_SIGNALED:
		s = fmt.Sprintf("SIGNALED by %d (%s)", res.Signal, signalName(res.Signal))
	}
	if res.Oom {
		s += ", out of memory"
	}
	if res.Duration != nil {
		s += fmt.Sprintf(" after %s", res.Duration.AsDuration().Round(time.Microsecond*100))
	}
	if res.Reason != "" {
		s += ": " + res.Reason
	}
	return s
}
