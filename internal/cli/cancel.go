package cli

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func cancelCommand() *cli.Command {
	return &cli.Command{
		Name:  "cancel",
		Usage: "end a command, or take it out of the queue, and wait for the evidence", ArgsUsage: "SESSION EXEC-ID",
		Description: "A command that has not started certainly never runs: NOT_STARTED. A running one is ended, and its sandbox\n" +
			"stopped with evidence: CANCELLED; it may have run partly. One that had ended by itself keeps its answer.\n" +
			"Prints what became of it. The exit code is 0, but 120 when that is UNCERTAIN.",
		Flags: clientFlags(ownerEpochFlag()), Action: runCancel,
	}
}

func runCancel(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION", "EXEC-ID")
	if err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.CancelExec(ctx, &sandboxv1.CancelExecRequest{SessionId: a[0], ExecId: a[1], OwnerEpoch: c.Uint64("owner-epoch")})
	if res == nil {
		return cl.Explain("cancelling exec "+a[1], err)
	}
	if err := showCancelled(c, res.ExecResult); err != nil {
		return err
	}
	if res.GetStatus() == sandboxv1.ExecResult_UNCERTAIN {
		return &exitError{code: ExitUncertain, err: errSilent}
	}
	return nil
}

func showCancelled(c *cli.Command, r *sandboxv1.ExecResult) error {
	if c.Bool("json") {
		return printJSON(c.Root().Writer, r)
	}
	if _, err := fmt.Fprintf(c.Root().Writer, "exec %s: %s\n", r.GetExecId(), outcome(r)); err != nil {
		return err
	}
	if r.GetEvidence() == nil {
		return nil
	}
	return printEvidence(c.Root().Writer, r.GetEvidence())
}
