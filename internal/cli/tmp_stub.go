package cli

import "github.com/urfave/cli/v3"

func serveCommand() *cli.Command { return &cli.Command{Name: "serve"} }
