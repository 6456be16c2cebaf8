package cli

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:        "check",
		Usage:       "what this node's kernel and runtimes can do, with a remedy for what they can't",
		Description: "Asks the agent, which makes no sandbox for it. The exit code is 1 when something is missing.",
		Flags:       clientFlags(),
		Action:      runCheck,
	}
}

func runCheck(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.Node.CheckNode(ctx, &sandboxv1.CheckNodeRequest{})
	if err != nil {
		return cl.Explain("checking the node", err)
	}
	missing := false
	for _, k := range res.Checks {
		missing = missing || k.Outcome == sandboxv1.CheckOutcome_CHECK_NO
	}
	if c.Bool("json") {
		err = printJSON(c.Root().Writer, res)
	} else {
		err = errors.Join(showChecks(c, res.Checks), showConcessions(c, res.Runtimes))
	}
	if err == nil && missing {
		err = withCode(ExitError, errSilent)
	}
	return err
}

func showChecks(c *cli.Command, checks []*sandboxv1.NodeCheck) error {
	word := map[sandboxv1.CheckOutcome]string{
		sandboxv1.CheckOutcome_CHECK_YES: "yes", sandboxv1.CheckOutcome_CHECK_NO: "NO", sandboxv1.CheckOutcome_CHECK_INCONCLUSIVE: "can't say",
	}
	w := tabwriter.NewWriter(c.Root().Writer, 0, 8, 2, ' ', 0)
	for _, k := range checks {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", word[k.Outcome], k.Feature, k.Purpose, k.Detail)
		if k.Outcome != sandboxv1.CheckOutcome_CHECK_YES && k.Remedy != "" {
			fmt.Fprintf(w, "\t\t%s\t\n", k.Remedy)
		}
	}
	return w.Flush()
}

// showConcessions says what the sandboxes of a runtime can't keep by their nature, and which one only ends what it has.
func showConcessions(c *cli.Command, runtimes []*sandboxv1.RuntimeStatus) error {
	w := tabwriter.NewWriter(c.Root().Writer, 0, 8, 2, ' ', 0)
	for _, r := range runtimes {
		if !r.Allowed {
			fmt.Fprintf(w, "note\truntime %s\tis not in runtime.allowed: it only ends the sandboxes that it has\n", r.Name)
		}
		for _, x := range r.Concessions {
			fmt.Fprintf(w, "note\truntime %s\tdoes not keep %s: %s: %s\n", r.Name, x.Promise, x.What, x.Why)
		}
	}
	return w.Flush()
}

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "print this program's version, and with --agent the running agent's",
		Flags: clientFlags(&cli.BoolFlag{Name: "agent", Usage: "ask the agent too"}),
		Action: func(ctx context.Context, c *cli.Command) error {
			if _, err := args(c); err != nil {
				return err
			}
			return runVersion(ctx, c)
		},
	}
}

func runVersion(ctx context.Context, c *cli.Command) error {
	if !c.Bool("agent") {
		if c.Bool("json") {
			_, err := fmt.Fprintf(c.Root().Writer, "{\"version\": %q, \"go\": %q, \"platform\": %q}\n", Version, runtime.Version(), runtime.GOOS+"/"+runtime.GOARCH)
			return err
		}
		_, err := fmt.Fprintf(c.Root().Writer, "%s %s (%s, %s/%s)\n", program, Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		return err
	}
	cl := newClient(c)
	info, err := cl.Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
	if err != nil {
		return cl.Explain("asking for the agent's version", err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, info)
	}
	_, err = fmt.Fprintf(c.Root().Writer, "%s %s (%s, %s/%s)\nagent %s, kernel %s, runtime %s, %d sessions\n", program, Version,
		runtime.Version(), runtime.GOOS, runtime.GOARCH, info.Version, info.Kernel, info.DefaultRuntime, info.Sessions)
	return err
}
