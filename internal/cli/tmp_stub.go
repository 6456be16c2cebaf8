package cli

import "github.com/urfave/cli/v3"

func serveCommand() *cli.Command   { return &cli.Command{Name: "serve"} }
func receiptCommand() *cli.Command { return &cli.Command{Name: "receipt"} }
func demoCommand() *cli.Command    { return &cli.Command{Name: "demo"} }
