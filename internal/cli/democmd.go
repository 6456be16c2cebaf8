package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v3"

	"github.com/sandbox-agent/sandbox-agent/internal/cli/demo"
)

func demoCommand() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "a guided run on a real repository, every claim checked; needs root",
		Description: "Starts an agent of its own with a temporary state folder, makes a session with a worktree and a branch of\n" +
			"its own on the repository, and runs through what the sandbox promises. The exit code is 0 only if every\n" +
			"check holds. It removes what it made, also on Ctrl-C.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "repo", Usage: "a `PATH` in a Git clone", Value: "."},
			libexecFlag(),
		},
		Action: runDemo,
	}
}

func runDemo(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("the demo needs root: it starts an agent, which makes namespaces, cgroups and idmapped mounts on this machine")
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding this program: %w", err)
	}
	// A reader that goes ("make demo | head") must not end the demo before it has cleaned up: the write fails, that's all.
	// Caught and not ignored, because what is ignored stays so in every child.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	out := c.Root().Writer
	f, isFile := out.(*os.File)
	return demo.Run(ctx, demo.Options{
		Repo: c.String("repo"), Program: self, LibexecDir: c.String("libexec-dir"),
		Out: out, Colour: isFile && demo.UseColour(f),
	})
}
