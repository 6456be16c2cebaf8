package cli

import (
	"github.com/urfave/cli/v3"

	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
)

// clientFlags are the flags of a client command: its own, and those that every one has.
func clientFlags(own ...cli.Flag) []cli.Flag {
	return append(own, socketFlag(), jsonFlag())
}

func socketFlag() cli.Flag {
	return &cli.StringFlag{
		Name: "socket", Usage: "the agent's unix socket", Value: DefaultSocket,
		Sources: cli.EnvVars("SANDBOX_AGENT_SOCKET"),
	}
}

func jsonFlag() cli.Flag {
	return &cli.BoolFlag{Name: "json", Usage: "print the answer as JSON"}
}

func newClient(c *cli.Command) *client.Client { return client.New(c.String("socket")) }
