package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"
)

// Version is set by the linker (see the Makefile).
var Version = "unknown"

// DefaultSocket is where an agent listens that was not told otherwise.
const DefaultSocket = "/run/sandbox-agent/exec.sock"

const program = "sandbox-agent"

// Run runs one command line (args[0] is the program) and gives its exit code. Only mcp reads standard input.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	app := newApp(stdout, stderr)
	err := app.Run(ctx, args)
	if unknown, ok := app.Metadata[unknownCommand].(error); ok {
		err = unknown
	}
	if err == nil {
		return 0
	}
	code := ExitError
	if e, ok := errors.AsType[*exitError](err); ok {
		code = e.code
	}
	if !errors.Is(err, errSilent) {
		fmt.Fprintf(stderr, "%s: %v\n", program, err)
	}
	return code
}

func newApp(stdout, stderr io.Writer) *cli.Command {
	app := &cli.Command{
		Name:    program,
		Usage:   "run a command in a sandbox on a Git worktree, and get a receipt",
		Version: Version,
		Description: "Start the agent with \"serve\" (as root). Then, from another terminal, make a session for a\n" +
			"repository with \"session create\" and run commands in it with \"exec\". Each command is answered with a\n" +
			"receipt that proves that nothing of it is left running; \"receipt verify\" checks one offline.",
		Commands: []*cli.Command{
			serveCommand(),
			sessionCommand(),
			execCommand(),
			mcpCommand(),
			cancelCommand(),
			gitCommand(),
			guardCommand(),
			workspaceCommand(),
			egressCommand(),
			eventsCommand(),
			receiptCommand(),
			drainCommand(),
			checkCommand(),
			versionCommand(),
			uninstallCommand(),
			demoCommand(),
		},
		EnableShellCompletion:           true,
		ConfigureShellCompletionCommand: configureCompletion,
		Suggest:                         true,
		HideHelpCommand:                 true,
		Metadata:                        map[string]any{},
		Writer:                          stdout,
		ErrWriter:                       stderr,
		// Run prints the error and picks the code; the library must not exit by itself.
		ExitErrHandler: func(context.Context, *cli.Command, error) {},
	}
	prepare(app)
	return app
}

// prepare gives every command what the library doesn't inherit.
func prepare(c *cli.Command) {
	c.OnUsageError = usageError
	c.CommandNotFound = helpForNone
	// Values hold commas: --env A=1,2 is one variable.
	c.DisableSliceFlagSeparator = true
	if c.Action == nil {
		c.Action = group
	}
	if strings.HasPrefix(c.ArgsUsage, "SESSION") {
		c.ShellComplete = completeSession
	}
	for _, sub := range c.Commands {
		prepare(sub)
	}
}

// usageError says what is wrong with the flags in one line; the library would print the whole help.
func usageError(_ context.Context, c *cli.Command, err error, _ bool) error {
	msg := err.Error()
	msg = strings.ToLower(msg[:1]) + msg[1:]
	// The flag package's own words for time.ParseDuration.
	if text, _, ok := strings.Cut(msg, ": time: "); ok {
		msg = text + ": give a time with its unit, for example 1s, 500ms or 2m"
	}
	return withCode(usageCode(c), fmt.Errorf("%s (see %s --help)", msg, c.FullName()))
}

// unknownCommand is where helpForNone leaves its error: the library gives it no other way out.
const unknownCommand = "unknown command"

// helpForNone is called when --help stands with a word that is no command: "sesion --help" is a mistake, but
// "exec SESSION --help" is a question.
func helpForNone(_ context.Context, c *cli.Command, name string) {
	if len(c.VisibleCommands()) == 0 {
		cli.HelpPrinter(c.Root().Writer, cli.CommandHelpTemplate, c)
		return
	}
	c.Root().Metadata[unknownCommand] = noCommand(c, name)
}

// usageCode is 2, but 125 for exec, git and check: there, 2 would be taken for the command's own code, or the node's.
func usageCode(c *cli.Command) int {
	if c.Name == "exec" || c.Name == "git" || c.Name == "check" {
		return ExitRefused
	}
	return ExitUsage
}

// group is the action of a command that only has subcommands.
func group(_ context.Context, c *cli.Command) error {
	if !c.Args().Present() {
		return cli.ShowSubcommandHelp(c)
	}
	return noCommand(c, c.Args().First())
}

func noCommand(c *cli.Command, name string) error {
	msg := fmt.Sprintf("%s has no command %q", c.FullName(), name)
	if s := cli.SuggestCommand(c.Commands, name); s != "" {
		msg += fmt.Sprintf(", did you mean %q?", s)
	}
	return usagef("%s (see %s --help)", msg, c.FullName())
}

// args checks the number of positional arguments; names are for the message.
func args(c *cli.Command, names ...string) ([]string, error) {
	got := c.Args().Slice()
	if len(got) == len(names) {
		for i, v := range got {
			if v == "" {
				return nil, withCode(usageCode(c), fmt.Errorf("%s: %s is empty", c.FullName(), names[i]))
			}
		}
		return got, nil
	}
	want := "no argument"
	if len(names) > 0 {
		want = strings.Join(names, " ")
	}
	return nil, withCode(usageCode(c), fmt.Errorf("%s takes %s, got %d arguments (see %s --help)", c.FullName(), want, len(got), c.FullName()))
}
