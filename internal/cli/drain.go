package cli

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func drainCommand() *cli.Command {
	return &cli.Command{
		Name:  "drain",
		Usage: "start nothing new on this node, and stop every sandbox with evidence",
		Description: "Commands that run may go on for --timeout, then they are ended; those that wait never run. Workspaces stay. The\n" +
			"agent goes on answering what is known, and is drained until it is restarted. The exit code is 1 when a sandbox\n" +
			"could not be seen to be gone.",
		Flags:  clientFlags(&cli.DurationFlag{HideDefault: true, Name: "timeout", Usage: "how long running commands may go on, for example 5m (default: the node's lifetime.drain_grace)"}),
		Action: runDrain,
	}
}

func runDrain(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	timeout := c.Duration("timeout")
	if c.IsSet("timeout") && timeout < time.Millisecond {
		return usagef("--timeout %s: give 1ms or more; without it the node's lifetime.drain_grace counts", timeout)
	}
	cl := newClient(c)
	res, err := cl.Node.DrainNode(ctx, &sandboxv1.DrainNodeRequest{TimeoutSeconds: timeout.Seconds()})
	if err != nil {
		return cl.Explain("draining the node", err)
	}
	if c.Bool("json") {
		err = printJSON(c.Root().Writer, res)
	} else {
		err = showDrained(c, res.GetSessions())
	}
	for _, s := range res.GetSessions() {
		if err == nil && s.GetEvidence() != nil && !s.GetEvidence().GetComplete() {
			err = withCode(ExitError, errSilent)
		}
	}
	return err
}

func showDrained(c *cli.Command, list []*sandboxv1.DrainedSession) error {
	w := tabwriter.NewWriter(c.Root().Writer, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "SESSION\tEVIDENCE\tREASON")
	for _, s := range list {
		evidence := "not needed"
		switch {
		case s.GetEvidence().GetComplete():
			evidence = "complete"
		case s.GetEvidence() != nil:
			evidence = "NOT complete"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", s.GetSessionId(), evidence, s.GetReason())
	}
	return w.Flush()
}
