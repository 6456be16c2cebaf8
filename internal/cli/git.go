package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func gitCommand() *cli.Command {
	return &cli.Command{
		Name:      "git",
		Usage:     "run Git on a session's worktree from outside, safely: in a jail, between two commands",
		ArgsUsage: "SESSION -- ARGUMENT...",
		Description: "Plain Git in a worktree that commands have written to can run what they left there. This runs it in the\n" +
			"session's jail: no network, nothing of the node in sight, no hooks or filters. It waits for its turn among the\n" +
			"session's commands. Subcommands and options are those of a list, for example:\n" +
			"  sandbox-agent git SESSION -- status --short\n" +
			"  sandbox-agent git SESSION -- log --oneline -5\n" +
			"  sandbox-agent git SESSION -- commit -a -m 'Keep this'\n" +
			"What is committed is brought to the base clone, as after a command. What Git prints is made of what commands\n" +
			"wrote: don't trust it.\n\n" +
			"The exit code is Git's own, or 125 when the agent refused or failed.",
		Flags: clientFlags(ownerEpochFlag(),
			&cli.DurationFlag{HideDefault: true, Name: "timeout", Usage: "end Git after this time, at most 10m (default: 1m)"}),
		Action: runGit,
	}
}

func runGit(ctx context.Context, c *cli.Command) error {
	a := c.Args().Slice()
	if len(a) < 2 {
		return withCode(ExitRefused, fmt.Errorf("git takes SESSION -- ARGUMENT..., got %d arguments (see %s --help)", len(a), c.FullName()))
	}
	for _, word := range a {
		if err := checkText("the argument", word); err != nil {
			return withCode(ExitRefused, err)
		}
	}
	req := &sandboxv1.GitRequest{SessionId: a[0], OwnerEpoch: c.Uint64("owner-epoch"), Args: a[1:]}
	if c.IsSet("timeout") {
		seconds := c.Duration("timeout").Seconds()
		req.TimeoutSeconds = &seconds
	}
	cl := newClient(c)
	res, err := cl.Git.Git(ctx, req)
	if err != nil {
		return withCode(ExitRefused, cl.Explain("running git in session "+a[0], err))
	}
	if c.Bool("json") {
		err = printJSON(c.Root().Writer, res)
	} else {
		err = showGit(c.Root().Writer, c.Root().ErrWriter, res)
	}
	switch {
	case err != nil:
		return withCode(ExitRefused, err)
	case res.ExitCode != 0:
		return withCode(int(res.ExitCode), errSilent)
	}
	return nil
}

func showGit(out, errOut io.Writer, res *sandboxv1.GitResponse) error {
	_, err := out.Write(res.Stdout)
	_, errErr := errOut.Write(res.Stderr)
	if res.Truncated {
		fmt.Fprintf(errOut, "%s: the output was cut (limits.output_bytes)\n", program)
	}
	sayHarvest(errOut, "git", res.Harvest)
	return errors.Join(err, errErr)
}

// sayHarvest says in one sentence each what of the Git work did not arrive in the base clone; nothing when all did.
func sayHarvest(w io.Writer, what string, h *sandboxv1.Harvest) {
	if h == nil {
		return
	}
	if h.Status == "FAILED" {
		fmt.Fprintf(w, "%s: %s: its Git work has not arrived in the base clone yet: %s\n", program, what, h.Detail)
		return
	}
	if h.Conflict != "" {
		more := ""
		if n := len(h.Conflicts); n > 1 {
			more = fmt.Sprintf(" (and %s: --json shows them)", count(n-1, "more conflict"))
		}
		fmt.Fprintf(w, "%s: %s: conflict with the base clone: %s%s\n", program, what, h.Conflict, more)
	}
	if h.Detail != "" {
		fmt.Fprintf(w, "%s: %s: %s\n", program, what, h.Detail)
	}
}

func runSessionHarvest(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION")
	if err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.Git.Harvest(ctx, &sandboxv1.HarvestRequest{SessionId: a[0], OwnerEpoch: c.Uint64("owner-epoch")})
	if err != nil {
		return cl.Explain("harvesting session "+a[0], err)
	}
	h := res.GetHarvest()
	if c.Bool("json") {
		err = printJSON(c.Root().Writer, res)
	} else {
		_, err = fmt.Fprintln(c.Root().Writer, harvestText(h))
		sayHarvest(c.Root().ErrWriter, "harvest", h)
	}
	if err == nil && (h.GetStatus() == "FAILED" || h.GetStatus() == "CONFLICT") {
		err = withCode(ExitError, errSilent)
	}
	return err
}

// harvestText is a harvest in one line.
func harvestText(h *sandboxv1.Harvest) string {
	if h == nil {
		return ""
	}
	s := h.Status
	if len(h.Refs) > 0 {
		s += ", wrote " + strings.Join(h.Refs, " ")
	}
	if h.Objects > 0 {
		s += ", " + count(h.Objects, "object")
	}
	if n := len(h.StaleLocks); n > 0 {
		s += ", removed " + count(n, "stale lock file")
	}
	return s
}
