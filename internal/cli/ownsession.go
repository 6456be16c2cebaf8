package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// ownSessionTime bounds the removal of a session that a command has made for itself.
const ownSessionTime = 2 * time.Minute

func repoFlag() cli.Flag {
	return &cli.StringFlag{Name: "repo", Usage: "instead of a SESSION: make one on this base clone, a `PATH`, and remove it with its worktree in the end"}
}

// withOwnSession gives a command the session that it is called with, or with --repo one of its own, with the node's
// default runtime, network and policy.
func withOwnSession(do func(ctx context.Context, c *cli.Command, session string) error) cli.ActionFunc {
	return func(ctx context.Context, c *cli.Command) error {
		if !c.IsSet("repo") {
			got, err := args(c, "SESSION")
			if err != nil {
				return err
			}
			return do(ctx, c, got[0])
		}
		if _, err := args(c); err != nil {
			return err
		}
		repo, err := absolute("repo", c.String("repo"))
		if err != nil {
			return withCode(ExitUsage, err)
		}
		cl := newClient(c)
		id := fmt.Sprintf("own-%x", time.Now().UnixNano())
		s, err := cl.CreateSession(ctx, &sandboxv1.CreateSessionRequest{SessionId: id, Workspace: &sandboxv1.Workspace{Repository: repo, Branch: id}})
		if err != nil {
			return cl.Explain("creating a session", err)
		}
		err = do(ctx, c, s.GetSessionId())
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ownSessionTime)
		defer cancel()
		// The branch stays: without a commit of its own it is no more than a name.
		_, gone := cl.Sessions.DeleteWorkspace(ctx, &sandboxv1.DeleteWorkspaceRequest{SessionId: s.GetSessionId(), Force: true})
		if gone != nil {
			return errors.Join(err, cl.Explain("removing session "+s.GetSessionId(), gone))
		}
		return err
	}
}
