package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v3"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

func guardCommand() *cli.Command {
	return &cli.Command{
		Name:      "guard",
		Usage:     "check a repository before sessions share it",
		ArgsUsage: "PATH",
		Description: "PATH is a clone, a bare repository or a linked worktree. Prints each configuration key, file and attribute\n" +
			"that could make Git run a program, leave the repository or hang, or that a sandbox leaves out, with its\n" +
			"place and a remedy (docs/git-guard.md). Nothing is changed, and no agent is needed. As root it also looks at\n" +
			"the attributes in HEAD's tree, with Git in a jail. The exit code is 0 when the repository can be shared as it\n" +
			"is, 1 when something is refused or left out, and 2 when it could not be checked.",
		Flags:  []cli.Flag{jsonFlag()},
		Action: runGuard,
	}
}

func runGuard(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "PATH")
	if err != nil {
		return err
	}
	r, err := guard(ctx, a[0])
	switch {
	case errors.Is(err, gitguard.ErrConfig):
		return withCode(ExitError, err)
	case err != nil:
		return withCode(ExitUsage, err)
	}
	if c.Bool("json") {
		err = showGuardJSON(c.Root().Writer, r)
	} else {
		err = showGuard(c.Root().Writer, r)
	}
	if err == nil && !guardClean(r) {
		err = withCode(ExitError, errSilent)
	}
	return err
}

// guard resolves the links in the path that was typed; in the repository itself none is followed.
func guard(ctx context.Context, path string) (gitguard.Report, error) {
	path, err := filepath.Abs(path)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return gitguard.Report{}, fmt.Errorf("finding the repository: %w", err)
	}
	_, common, err := gitguard.FindRepository(path)
	if err != nil {
		return gitguard.Report{}, err
	}
	run, err := guardRunner(common)
	if err != nil {
		return gitguard.Report{}, err
	}
	return gitguard.CheckRepository(ctx, path, run)
}

// guardRunner is Git in a jail that sees the repository's Git folder, read-only; only root can make one.
func guardRunner(common string) (gitguard.Runner, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	owner, err := hostfs.StatDir("the repository's Git folder", common)
	if err != nil {
		return nil, err
	}
	jail := gitjail.Jail{
		Owner: owner, Dir: common, Env: []string{"GIT_DIR=" + common, "GIT_COMMON_DIR=" + common},
		Mounts: []gitjail.Mount{{Source: common, Target: common, ReadOnly: true}},
	}
	return jail.Run, nil
}

// guardClean: notes are no findings.
func guardClean(r gitguard.Report) bool {
	for _, f := range r.Findings {
		if f.Kind != gitguard.Note {
			return false
		}
	}
	return true
}

func showGuardJSON(w io.Writer, r gitguard.Report) error {
	if r.Findings == nil {
		r.Findings = []gitguard.Finding{}
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the report as JSON: %w", err)
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

func showGuard(w io.Writer, r gitguard.Report) error {
	p := &guardPrinter{w: w}
	for _, f := range r.Findings {
		p.finding(f)
	}
	isolated, shared := len(r.Refused("isolated")), len(r.Refused("shared"))
	p.printf("%q: %d findings; isolated: %s, shared: %s\n", r.CommonDir, len(r.Findings), guardVerdict(isolated), guardVerdict(shared))
	if !r.Attributes {
		why := "run it as root"
		if os.Geteuid() == 0 {
			why = "what refuses it must go first"
		}
		p.printf("the attributes and submodules in HEAD's tree were not looked at: %s\n", why)
	}
	return p.err
}

func guardVerdict(refused int) string {
	if refused == 0 {
		return "can be shared"
	}
	return fmt.Sprintf("REFUSED (%d)", refused)
}

type guardPrinter struct {
	w   io.Writer
	err error
}

func (p *guardPrinter) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *guardPrinter) finding(f gitguard.Finding) {
	what := string(f.Kind)
	if f.Key != "" {
		what = f.Key
	}
	p.printf("%s\n  %s", what, f.File)
	if f.Line > 0 {
		p.printf(":%d", f.Line)
	}
	p.printf(": %s\n  %s: %s\n  %s\n", guardEffect(f), f.Kind, f.Why, f.Remedy)
}

// guardEffect says what session create makes of a finding.
func guardEffect(f gitguard.Finding) string {
	switch {
	case f.Refuses("isolated"):
		return "refused in both layouts"
	case f.Refuses("shared"):
		return "refused in shared, left out in isolated"
	case f.Kind == gitguard.Note:
		return "not refused"
	default:
		return "left out in isolated"
	}
}
