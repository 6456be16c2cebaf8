// Command sandbox-agent is the node's agent and its command line (internal/cli).
package main

import (
	"context"
	"os"

	"github.com/sandbox-agent/sandbox-agent/internal/cli"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
)

func main() {
	// Before anything else: a sandbox begins with this program, started again as its first stage.
	embedded.Init()
	ctx, stop := cli.WithSignals(context.Background())
	code := cli.Run(ctx, os.Args, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
