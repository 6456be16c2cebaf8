package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"text/tabwriter"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:  "check",
		Usage: "what this node has of what the promises stand on, with a remedy for what it has not",
		Description: "Asks the agent when one listens at the socket, and looks at the node itself otherwise: run it as root then. A socket\n" +
			"that is named has to answer. With --local, or a configuration, it looks itself in any case. It makes no sandbox and\n" +
			"leaves nothing behind. Each line is explained in docs/host-requirements.md. The exit code is 0 when all is well, 1\n" +
			"when something is degraded or could not be looked at, 2 when something that is configured can't be had, and 125 when\n" +
			"the check itself failed.",
		Flags: clientFlags(
			&cli.StringSliceFlag{Name: "runtime", Usage: "also look at what the `RUNTIME` needs (embedded, runc, gvisor or kata); can be given again"},
			&cli.BoolFlag{Name: "local", Usage: "look at the node without asking the agent"},
			&cli.StringFlag{Name: "config", Usage: "look at what the configuration in this YAML `FILE` needs"},
			&cli.StringFlag{Name: "state-dir", Usage: "the `FOLDER` of journal, receipts and keys, instead of the configured one"},
			&cli.StringSliceFlag{Name: "workspace-root", Usage: "a `FOLDER` for workspaces, instead of the configured ones; can be given again"},
		),
		Action: runCheck,
	}
}

func runCheck(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	res, who, err := checkNode(ctx, c)
	if err != nil {
		return withCode(ExitRefused, err)
	}
	if c.Bool("json") {
		fmt.Fprintln(c.Root().ErrWriter, who)
		err = printJSON(c.Root().Writer, res)
	} else {
		fmt.Fprintf(c.Root().Writer, "%s\n%s\n", who, res.GetNode())
		err = errors.Join(showChecks(c, res.GetChecks()), showConcessions(c, res.GetRuntimes()))
	}
	if code := nodecheck.ExitCode(res.GetVerdict()); err == nil && code != 0 {
		return withCode(code, errSilent)
	}
	return withCode(ExitRefused, err)
}

// checkNode asks the agent, or looks. who says which it was.
func checkNode(ctx context.Context, c *cli.Command) (res *sandboxv1.CheckNodeResponse, who string, err error) {
	for _, flag := range []string{"local", "config", "state-dir", "workspace-root"} {
		if c.IsSet(flag) {
			res, err = lookAtNode(ctx, c)
			return res, fmt.Sprintf("looked at this node as uid %d", os.Geteuid()), err
		}
	}
	cl := newClient(c)
	res, err = cl.Node.CheckNode(ctx, &sandboxv1.CheckNodeRequest{Runtimes: c.StringSlice("runtime")})
	if err == nil {
		return res, "asked the agent at " + cl.Socket, nil
	}
	if c.IsSet("socket") || !client.NeverSent(err) {
		return nil, "", cl.Explain("checking the node", err)
	}
	why := cl.Explain("asking the agent", err)
	res, err = lookAtNode(ctx, c)
	return res, fmt.Sprintf("looked at this node as uid %d; %v", os.Geteuid(), why), err
}

func lookAtNode(ctx context.Context, c *cli.Command) (*sandboxv1.CheckNodeResponse, error) {
	cfg, err := serveConfig(c)
	if err != nil {
		return nil, err
	}
	needs, err := nodecheck.NeedsOf(&cfg, c.StringSlice("runtime"))
	if err != nil {
		return nil, err
	}
	return nodecheck.Check(ctx, needs, nodecheck.Everything).Proto(), nil
}

func showChecks(c *cli.Command, checks []*sandboxv1.NodeCheck) error {
	for _, k := range checks {
		if _, err := io.WriteString(c.Root().Writer, nodecheck.Text(k)); err != nil {
			return err
		}
	}
	return nil
}

// refuseNode is an error when this node can't keep the promises of a configuration: the agent must not start then.
func refuseNode(ctx context.Context, cfg *config.Config) error {
	needs, err := nodecheck.NeedsOf(cfg, nil)
	if err != nil {
		return err
	}
	return nodecheck.Check(ctx, needs, nodecheck.Promises).Refusal()
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
