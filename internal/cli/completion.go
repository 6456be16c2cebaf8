package cli

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
)

// bashCompletion needs bash alone: the library's own script calls functions of the bash-completion package, and without
// it every Tab is an error message.
const bashCompletion = `_sandbox_agent() {
  local current=${COMP_WORDS[COMP_CWORD]} line
  local -a request=("${COMP_WORDS[@]:0:COMP_CWORD}")
  [[ $current == -* ]] && request+=("$current")
  COMPREPLY=()
  while IFS= read -r line; do
    line=${line%%:*}
    [[ $line == "$current"* ]] && COMPREPLY+=("$line")
  done < <("${request[@]}" --generate-shell-completion 2>/dev/null)
}
complete -o default -F _sandbox_agent sandbox-agent
`

// configureCompletion leaves the shells that this project tests (the agent runs on Linux only).
func configureCompletion(c *cli.Command) {
	c.Hidden = false
	c.Usage = "print the completion script of a shell: bash, zsh or fish"
	c.Description = "Load it into a running shell:\n" +
		"  bash  source <(" + program + " completion bash)\n" +
		"  zsh   source <(" + program + " completion zsh)\n" +
		"  fish  " + program + " completion fish | source"
	var kept []*cli.Command
	for _, shell := range c.Commands {
		switch shell.Name {
		case "pwsh":
			continue
		case "bash":
			shell.Action = func(_ context.Context, c *cli.Command) error {
				_, err := fmt.Fprint(c.Root().Writer, bashCompletion)
				return err
			}
		}
		kept = append(kept, shell)
	}
	c.Commands = kept
	prepare(c) // the library adds this command too late for newApp's own call
}

// completionWait bounds how long a Tab may take when the agent doesn't answer.
const completionWait = 500 * time.Millisecond

// completeSession suggests flags, and where a session's id stands the sessions of the agent, if one answers.
func completeSession(ctx context.Context, c *cli.Command) {
	if words := c.Args().Slice(); len(words) > 0 {
		if strings.HasPrefix(words[len(words)-1], "-") {
			cli.DefaultCompleteWithFlags(ctx, c)
		}
		return
	}
	// The library reads the environment only for a command that runs.
	socket := c.String("socket")
	if !c.IsSet("socket") {
		socket = cmp.Or(os.Getenv("SANDBOX_AGENT_SOCKET"), socket)
	}
	ctx, cancel := context.WithTimeout(ctx, completionWait)
	defer cancel()
	list, err := client.New(socket).Sessions.ListSessions(ctx, &sandboxv1.ListSessionsRequest{})
	if err != nil {
		return // nothing to suggest; the command itself will say why
	}
	for _, s := range list.Sessions {
		fmt.Fprintf(c.Root().Writer, "%s:%s\n", s.SessionId, s.State)
	}
}
