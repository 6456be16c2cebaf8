package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

func guardCommand() *cli.Command {
	return &cli.Command{
		Name:      "guard",
		Usage:     "check a repository before sessions share it",
		ArgsUsage: "PATH",
		Description: "PATH is a clone, a bare repository or a linked worktree. Prints each configuration key, file and attribute\n" +
			"that could make Git run a program, leave the repository or hang, or that a sandbox leaves out, with its\n" +
			"place and a remedy (docs/git-guard.md), and what each layout makes of it. Nothing is changed, and no agent is\n" +
			"needed. As root it also looks at the attributes in the tree of HEAD, and of a linked worktree's, with Git in a\n" +
			"jail. The exit code is 0 when the repository can be shared as it is, 1 when something is refused or left out,\n" +
			"and 2 when it could not be checked.",
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
	if err != nil && !errors.Is(err, gitguard.ErrConfig) { // which is a finding
		return withCode(ExitUsage, err)
	}
	if c.Bool("json") {
		err = showGuardJSON(c.Root().Writer, a[0], r)
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
	typed := printable(path)
	path, err := filepath.Abs(path)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return gitguard.Report{}, fmt.Errorf("finding the repository %s: %w", typed, underlying(err))
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

// underlying is the error without the path, which the caller has named in a form fit for a terminal.
func underlying(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
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

// guardReport is a report as it is printed as JSON.
type guardReport struct {
	// Path is the one that was named.
	Path string `json:"path"`
	gitguard.Report
	// Layouts has what each layout makes of the repository.
	Layouts map[string]string `json:"layouts"`
}

func showGuardJSON(w io.Writer, path string, r gitguard.Report) error {
	if r.Findings == nil {
		r.Findings = []gitguard.Finding{}
	}
	layouts := map[string]string{}
	for _, l := range guardLayouts {
		layouts[l] = r.Verdict(l)
	}
	r.Repository, r.CommonDir = printable(r.Repository), printable(r.CommonDir)
	b, err := json.MarshalIndent(guardReport{Path: printable(path), Report: r, Layouts: layouts}, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the report as JSON: %w", err)
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

var guardLayouts = []string{config.IsolatedLayout, config.SharedLayout}

func showGuard(w io.Writer, r gitguard.Report) error {
	p := &guardPrinter{w: w}
	for _, f := range r.Findings {
		p.finding(f)
	}
	p.printf("%q: %s\n", r.CommonDir, count(len(r.Findings), "finding"))
	for _, l := range guardLayouts {
		p.printf("%s: %s\n", l, guardVerdict(r, l))
	}
	if !r.Attributes {
		why := "run it as root"
		if os.Geteuid() == 0 {
			why = "what refuses it must go first"
		}
		p.printf("the attributes and submodules in HEAD's tree were not looked at: %s\n", why)
	}
	return p.err
}

// guardVerdict is a layout's verdict in words.
func guardVerdict(r gitguard.Report, layout string) string {
	verdict := r.Verdict(layout)
	switch left, found := strings.CutPrefix(verdict, "left out "); {
	case found:
		return "can be shared, with " + left + " left out"
	case verdict == "refused":
		return fmt.Sprintf("REFUSED (%d)", len(r.Refused(layout)))
	default:
		return "can be shared"
	}
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
