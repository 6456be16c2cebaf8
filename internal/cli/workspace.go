package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func workspaceCommand() *cli.Command {
	return &cli.Command{
		Name:  "workspace",
		Usage: "delete worktrees, with what the agent keeps for them",
		Commands: []*cli.Command{{
			Name: "delete", Usage: "delete a session's worktree, its private Git state, its caches, and the session", ArgsUsage: "SESSION|PATH",
			Description: "Give the session, or, when no session has the worktree any more, the worktree's path (with a slash in it).\n" +
				"The sandbox is stopped with evidence, and Git work is brought to the base clone first. What is neither\n" +
				"committed nor in the base clone then is named, and nothing is deleted, unless --force is given.",
			Flags: clientFlags(ownerEpochFlag(),
				&cli.BoolFlag{Name: "force", Usage: "also throw away work that nobody else has"}),
			Action: runWorkspaceDelete,
		}},
	}
}

func runWorkspaceDelete(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION|PATH")
	if err != nil {
		return err
	}
	if err := checkText("SESSION|PATH", a[0]); err != nil {
		return withCode(ExitUsage, err)
	}
	req := &sandboxv1.DeleteWorkspaceRequest{SessionId: a[0], OwnerEpoch: c.Uint64("owner-epoch"), Force: c.Bool("force")}
	if strings.Contains(a[0], "/") {
		if req.Worktree, err = absolute("worktree", a[0]); err != nil {
			return withCode(ExitUsage, err)
		}
		req.SessionId = ""
	}
	cl := newClient(c)
	res, err := cl.Sessions.DeleteWorkspace(ctx, req)
	if err != nil {
		return cl.Explain("deleting the workspace of "+a[0], err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, res)
	}
	for _, what := range res.Removed {
		fmt.Fprintf(c.Root().Writer, "removed %s\n", what)
	}
	if res.Evidence == nil {
		return nil
	}
	return printEvidence(c.Root().Writer, res.Evidence)
}
