package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	public "github.com/sandbox-agent/sandbox-agent/client"
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
			"  125 the agent refused, or it could not be reached: nothing ran\n" +
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
		client: client.NewRetrying(c.String("socket"), c.Duration("retry-for")), req: req, json: c.Bool("json"), retryFor: c.Duration("retry-for"),
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
		req.ExecId = public.NewExecID()
	}
	return req, nil
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

	// How much of each stream was passed on.
	stdoutShown, stderrShown uint64
}

// run gives the command's result, whatever it is. What is an error instead has an exit code.
func (x *execCall) run(ctx context.Context) (*sandboxv1.ExecResult, error) {
	res, err := x.ask(ctx)
	if res != nil {
		return res.ExecResult, nil
	}
	if ctx.Err() != nil {
		return x.interrupted(ctx)
	}
	if final, ok := errors.AsType[*exitError](err); ok {
		return nil, final
	}
	explained := x.client.Explain("running exec "+x.req.ExecId, err)
	if errors.Is(err, public.ErrNotStarted) {
		return nil, withCode(ExitRefused, explained)
	}
	if client.ConnectionLost(err) {
		explained = fmt.Errorf("%w; the connection was lost and the agent did not come back within %s", explained, x.retryFor)
	}
	return nil, withCode(ExitUncertain, fmt.Errorf("%w: the command may have run. Ask again with --exec-id %s and the same command", explained, x.req.ExecId))
}

func (x *execCall) ask(ctx context.Context) (*public.Result, error) {
	if x.json {
		return x.client.Exec(ctx, x.req)
	}
	return x.client.Stream(ctx, &sandboxv1.StreamExecRequest{Exec: x.req}, x.chunk)
}

// chunk passes output on.
func (x *execCall) chunk(c public.Chunk) error {
	w, shown := x.stdout, &x.stdoutShown
	if c.Stream == sandboxv1.Stream_STDERR {
		w, shown = x.stderr, &x.stderrShown
	}
	if _, err := w.Write(c.Data); err != nil {
		return withCode(ExitUncertain, fmt.Errorf("writing the output of exec %s: %w: the command may go on; ask for its result with --exec-id %s and the same command",
			x.req.ExecId, err, x.req.ExecId))
	}
	*shown += uint64(len(c.Data))
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
	res, err := x.client.CancelExec(cctx, &sandboxv1.CancelExecRequest{
		SessionId: x.req.SessionId, OwnerEpoch: x.req.OwnerEpoch, ExecId: x.req.ExecId,
	})
	if res == nil {
		return nil, withCode(ExitUncertain, fmt.Errorf("%w; %s", x.client.Explain("cancelling exec "+x.req.ExecId, err), goesOn))
	}
	return res.ExecResult, nil
}

// finish shows the result and turns it into the exit code.
func (x *execCall) finish(res *sandboxv1.ExecResult, file *resultFile, verbose bool) error {
	if err := file.write(res); err != nil {
		return withCode(ExitUncertain, err)
	}
	if x.json {
		if err := printJSON(x.stdout, res); err != nil {
			return withCode(ExitUncertain, err)
		}
	}
	x.say(res, verbose)
	if code := execExitCode(res); code != 0 {
		return &exitError{code: code, err: errSilent}
	}
	return nil
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
