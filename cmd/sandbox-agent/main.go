// Command sandbox-agent is the node's agent and its command line (internal/cli).
package main

import (
	"context"
	"os"

	"github.com/sandbox-agent/sandbox-agent/internal/cli"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/interrupt"
	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
)

func main() {
	// Before anything else: a sandbox begins with this program, started again as its first stage, and so does what a check of
	// the node tries.
	embedded.Init()
	nodecheck.Init()
	// The import of embedded keeps the main goroutine on the process's first thread, where each hand-over to another
	// goroutine costs a switch of threads: the work is done on another one.
	code := make(chan int)
	go func() {
		ctx, stop := interrupt.Catch(context.Background(), os.Stderr)
		defer stop()
		code <- cli.Run(ctx, os.Args, os.Stdout, os.Stderr)
	}()
	os.Exit(<-code)
}
