package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func sessionCommand() *cli.Command {
	return &cli.Command{
		Name:  "session",
		Usage: "make, look at and end sessions: a worktree and the sandbox that runs its commands",
		Commands: []*cli.Command{
			sessionCreateCommand(),
			{
				Name: "get", Usage: "show one session", ArgsUsage: "SESSION",
				Flags: clientFlags(), Action: runSessionGet,
			},
			{
				Name: "list", Usage: "list the sessions of this node",
				Flags: clientFlags(), Action: runSessionList,
			},
			{
				Name: "grants", Usage: "replace a session's grants, all of them; what has the old ones is ended", ArgsUsage: "SESSION",
				Description: "A command finds a grant's files in /run/grants/NAME, in memory and read-only, and its variables in its environment.\n" +
					"The running command is ended, those that wait never run, the sandbox is retired, and the next generation is\n" +
					"started. The file of --grants is JSON:\n" +
					"{\"grants\": [{\"name\": …, \"files\": [{\"path\": …, \"content\": base64}], \"env\": {…}, \"expiresAt\": \"2030-01-01T00:00:00Z\"}]}.",
				Flags: clientFlags(append(grantFlags(), ownerEpochFlag(),
					&cli.BoolFlag{Name: "none", Usage: "take all grants away"})...),
				Action: runSessionGrants,
			},
			{
				Name: "harvest", Usage: "bring a session's Git work to the base clone now, for example after a conflict was resolved", ArgsUsage: "SESSION",
				Description: "The agent does this after every command. The exit code is 1 when there is a conflict, or it failed.",
				Flags:       clientFlags(ownerEpochFlag()), Action: runSessionHarvest,
			},
			{
				Name: "retire", Usage: "stop a session's sandbox and wait for the evidence; the workspace stays", ArgsUsage: "SESSION",
				Flags: clientFlags(ownerEpochFlag(),
					&cli.Uint64Flag{HideDefault: true, Name: "generation", Usage: "only the sandbox of this generation"}),
				Action: runSessionRetire,
			},
			{
				Name: "delete", Usage: "stop the sandbox with evidence and forget the session; the worktree stays on disk", ArgsUsage: "SESSION",
				Flags: clientFlags(ownerEpochFlag()), Action: runSessionDelete,
			},
		},
	}
}

func ownerEpochFlag() cli.Flag {
	return &cli.Uint64Flag{HideDefault: true, Name: "owner-epoch", Usage: "refuse if the session has another owner"}
}

func sessionCreateCommand() *cli.Command {
	return &cli.Command{
		Name:  "create",
		Usage: "make a session for a repository, and start its sandbox",
		Description: "The session works in a linked worktree of the repository: an existing one (--worktree), or a new one on\n" +
			"a new branch (--branch). Prints the session's id.",
		Flags: clientFlags(append(grantFlags(),
			&cli.StringFlag{Name: "repo", Usage: "the base clone, `PATH`"},
			&cli.StringFlag{Name: "branch", Usage: "branch of a worktree that is made"},
			&cli.StringFlag{Name: "worktree", Usage: "the worktree's `PATH` (default: <first workspace root>/<session>)"},
			&cli.StringFlag{Name: "base", Usage: "what the branch starts from, a `REF` (default: the repository's HEAD)"},
			&cli.StringFlag{Name: "session", Usage: "the session's id, [A-Za-z0-9._-], 1-64 (default: a new one)"},
			&cli.StringFlag{Name: "runtime", Usage: "embedded, runc, gvisor or kata (default: the node's)"},
			&cli.StringFlag{Name: "min-isolation", Usage: "the least `CLASS` of isolation that will do: namespaces, separate-kernel or virtual-machine"},
			&cli.StringFlag{Name: "git-layout", Usage: "isolated or shared (default: the node's)"},
			&cli.StringFlag{Name: "network", Usage: "none, bridge or cni (default: the node's)"},
			&cli.StringFlag{Name: "egress", Usage: "none, open or allowlist: what the network reaches (default: the node's)"},
			&cli.StringSliceFlag{Name: "network-allow", Usage: "with allowlist, a `DESTINATION`: \"HOST:PORT REASON\", within the node's list; can be given again"},
			&cli.StringSliceFlag{Name: "cache", Usage: "`NAME=PATH`: a folder below HOME that stays with the workspace; can be given again"},
			&cli.StringSliceFlag{Name: "cache-ro", Usage: "`NAME` of one of the node's shared caches, read-only; can be given again"},
			&cli.StringSliceFlag{Name: "env", Usage: "`KEY=VALUE` for every command; can be given again"},
			&cli.FloatFlag{HideDefault: true, Name: "cpus", Usage: "CPUs of a command, in cores"},
			&cli.StringFlag{Name: "memory", Usage: "memory of a command: bytes, or with KiB, MiB, GiB"},
			&cli.Int64Flag{HideDefault: true, Name: "pids", Usage: "processes and threads of a command"},
		)...),
		Action: runSessionCreate,
	}
}

func runSessionCreate(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	req, err := createRequest(c)
	if err != nil {
		return withCode(ExitUsage, err)
	}
	cl := newClient(c)
	s, err := cl.CreateSession(ctx, req)
	if err != nil {
		return cl.Explain("creating a session", err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, s)
	}
	_, err = fmt.Fprintln(c.Root().Writer, s.GetSessionId())
	return err
}

func createRequest(c *cli.Command) (*sandboxv1.CreateSessionRequest, error) {
	repo, err := absolute("repo", c.String("repo"))
	if err != nil {
		return nil, err
	}
	if repo == "" {
		return nil, errors.New("session create needs --repo: the path of the base clone")
	}
	worktree, err := absolute("worktree", c.String("worktree"))
	if err != nil {
		return nil, err
	}
	for flag, text := range map[string]string{"repo": repo, "worktree": worktree, "branch": c.String("branch"), "base": c.String("base")} {
		if err := checkText("--"+flag, text); err != nil {
			return nil, err
		}
	}
	env, err := keyValues("env", c.StringSlice("env"))
	if err != nil {
		return nil, err
	}
	caches, err := cacheFlags(c)
	if err != nil {
		return nil, err
	}
	grants, err := grantsOf(c)
	if err != nil {
		return nil, err
	}
	isolation, err := parseIsolation(c.String("min-isolation"))
	if err != nil {
		return nil, err
	}
	memory, err := parseBytes(c.String("memory"))
	if err != nil {
		return nil, fmt.Errorf("--memory: %w", err)
	}
	return &sandboxv1.CreateSessionRequest{
		SessionId: c.String("session"),
		Workspace: &sandboxv1.Workspace{
			Repository: repo, Worktree: worktree, Branch: c.String("branch"), BaseRef: c.String("base"), GitLayout: c.String("git-layout"),
		},
		Runtime:      c.String("runtime"),
		MinIsolation: isolation,
		Resources:    &sandboxv1.Resources{Cpus: c.Float("cpus"), MemoryBytes: memory, Pids: c.Int64("pids")},
		Network:      &sandboxv1.Network{Mode: c.String("network"), Egress: c.String("egress"), Allow: c.StringSlice("network-allow")},
		Env:          env,
		Caches:       caches,
		Grants:       grants,
	}, nil
}

// isolationText is a class as people write it: "separate-kernel".
func isolationText(i sandboxv1.Isolation) string {
	return strings.ReplaceAll(strings.ToLower(i.String()), "_", "-")
}

// parseIsolation reads what isolationText writes; "" asks for nothing.
func parseIsolation(s string) (sandboxv1.Isolation, error) {
	if s == "" {
		return sandboxv1.Isolation_ISOLATION_UNSPECIFIED, nil
	}
	var names []string
	for i := sandboxv1.Isolation_NAMESPACES; int(i) < len(sandboxv1.Isolation_name); i++ {
		if isolationText(i) == s {
			return i, nil
		}
		names = append(names, isolationText(i))
	}
	return 0, fmt.Errorf("--min-isolation %q: use %s", s, strings.Join(names, ", "))
}

// cacheFlags reads --cache and --cache-ro.
func cacheFlags(c *cli.Command) ([]*sandboxv1.Cache, error) {
	own, err := keyValues("cache", c.StringSlice("cache"))
	if err != nil {
		return nil, err
	}
	var out []*sandboxv1.Cache
	for _, name := range slices.Sorted(maps.Keys(own)) {
		out = append(out, &sandboxv1.Cache{Name: name, Path: own[name]})
	}
	for _, name := range c.StringSlice("cache-ro") {
		out = append(out, &sandboxv1.Cache{Name: name, ReadOnly: true})
	}
	return out, nil
}

// absolute lets a person type a relative path; the API takes none. Links are left alone: the agent refuses them.
func absolute(flag, path string) (string, error) {
	if path == "" {
		return "", nil
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("--%s %s: %w", flag, path, err)
	}
	return abs, nil
}

var byteUnits = []struct {
	suffix string
	factor int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}}

// parseBytes reads "1073741824" or "1GiB"; "" is 0.
func parseBytes(s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	number, factor := s, int64(1)
	for _, u := range byteUnits {
		if n, ok := strings.CutSuffix(s, u.suffix); ok {
			number, factor = n, u.factor
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > (1<<62)/factor {
		return 0, fmt.Errorf("%q is no size: give a whole number of bytes above 0, or one with KiB, MiB, GiB or TiB", s)
	}
	return n * factor, nil
}

func runSessionGet(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION")
	if err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: a[0]})
	if err != nil {
		return cl.Explain("reading session "+a[0], err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, res.GetSession())
	}
	return showSession(c.Root().Writer, res.GetSession())
}

func showSession(out io.Writer, s *sandboxv1.Session) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "%s\t%s\n", name, value)
		}
	}
	row("session", s.SessionId)
	row("state", s.State.String())
	row("reason", s.Reason)
	row("owner epoch", strconv.FormatUint(s.OwnerEpoch, 10))
	row("generation", strconv.FormatUint(s.Generation, 10))
	row("repository", s.GetWorkspace().GetRepository())
	row("worktree", s.GetWorkspace().GetWorktree())
	row("branch", s.GetWorkspace().GetBranch())
	row("git layout", s.GetWorkspace().GetGitLayout())
	for _, x := range s.Caches {
		row("cache", cacheText(x))
	}
	row("grants", strings.Join(s.GrantNames, " "))
	if b := s.GetSandbox(); b != nil {
		row("sandbox", fmt.Sprintf("%s (%s, %s, isolation %s)", b.Id, b.Runtime, b.State, isolationText(b.Isolation)))
		row("made of", provenanceText(b.Provenance))
		if b.StartedAt != nil {
			row("started", b.StartedAt.AsTime().Format(time.RFC3339))
		}
		held := 0
		for _, p := range b.Proof {
			switch {
			case p.Holds:
				held++
			case p.Conceded:
				row("conceded", fmt.Sprintf("%s: %s: %s", p.Promise, p.What, p.Detail))
			default:
				row("proof", fmt.Sprintf("%s does NOT hold: %s: %s", p.Promise, p.What, p.Detail))
			}
		}
		row("proved", fmt.Sprintf("%d of %d", held, len(b.Proof)))
		showEvidence(row, b.Evidence)
	}
	if s.MinIsolation != sandboxv1.Isolation_ISOLATION_UNSPECIFIED {
		row("promised", isolationText(s.MinIsolation)+" at least")
	}
	row("running", s.RunningExecId)
	row("queued", strings.Join(s.QueuedExecIds, " "))
	row("last harvest", harvestText(s.LastHarvest))
	row("conflict", s.GetLastHarvest().GetConflict())
	for _, n := range s.Notes {
		row("note", n)
	}
	for _, f := range s.LeftOut {
		row("left out", findingText(f))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return showMounts(out, s)
}

func cacheText(x *sandboxv1.Cache) string {
	if x.ReadOnly {
		return fmt.Sprintf("%s at ~/%s, shared and read-only", x.Name, x.Path)
	}
	return fmt.Sprintf("%s at ~/%s", x.Name, x.Path)
}

// findingText is what the guard says of one thing of a repository.
func findingText(f *sandboxv1.GuardFinding) string {
	where := f.File
	if f.Line > 0 {
		where += ":" + strconv.FormatUint(uint64(f.Line), 10)
	}
	var head []string
	for _, s := range []string{f.Key, where} {
		if s != "" {
			head = append(head, s)
		}
	}
	return strings.Join(append(head, f.Why), ": ")
}

// provenanceText is what a sandbox was made of, on one line.
func provenanceText(p *sandboxv1.Provenance) string {
	if p == nil {
		return ""
	}
	root := p.RootfsKind + " " + p.Rootfs
	if p.RootfsKind == p.Rootfs {
		root = "the node's own files"
	}
	if p.RootfsDigest != "" && !strings.HasSuffix(p.Rootfs, p.RootfsDigest) {
		root += " (" + p.RootfsDigest + ")"
	}
	return fmt.Sprintf("%s, receiptd sha256 %s, pid1 sha256 %s", root, p.ReceiptdSha256, p.Pid1Sha256)
}

// showMounts shows the mount plan, in the order in which it is made, with what was seen of its seals.
func showMounts(out io.Writer, s *sandboxv1.Session) error {
	if len(s.Mounts) == 0 {
		return nil
	}
	seals := map[string]*sandboxv1.Seal{}
	for _, x := range s.GetSandbox().GetSeals() {
		seals[x.Path] = x
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "\nMOUNT\tACCESS\tSOURCE\tSEAL")
	for _, m := range s.Mounts {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", m.Target, accessText(m), sourceText(m), sealText(m, seals[m.Target]))
	}
	return w.Flush()
}

func accessText(m *sandboxv1.Mount) string {
	if m.ReadOnly {
		return "read-only"
	}
	return "writable"
}

func sourceText(m *sandboxv1.Mount) string {
	switch {
	case m.Empty:
		return "(empty)"
	case m.Source == "":
		return "(memory)"
	case m.Source == m.Target:
		return "(the same)"
	}
	return m.Source
}

func sealText(m *sandboxv1.Mount, x *sandboxv1.Seal) string {
	switch {
	case !m.Seal:
		return ""
	case x == nil:
		return "sealed"
	}
	text := fmt.Sprintf("mount %d, device %d, inode %d", x.MountId, x.Device, x.Inode)
	if x.Sha256 != "" {
		text += ", sha256 " + x.Sha256
	}
	return text
}

func showEvidence(row func(name, value string), e *sandboxv1.Evidence) {
	if e == nil {
		return
	}
	complete := "complete"
	if !e.Complete {
		complete = "NOT complete"
	}
	row("evidence", complete)
	for _, i := range e.Items {
		row("  "+i.Source, i.Detail)
	}
}

func runSessionList(ctx context.Context, c *cli.Command) error {
	if _, err := args(c); err != nil {
		return err
	}
	cl := newClient(c)
	all := &sandboxv1.ListSessionsResponse{}
	for token := ""; ; {
		page, err := cl.Sessions.ListSessions(ctx, &sandboxv1.ListSessionsRequest{PageToken: token})
		if err != nil {
			return cl.Explain("listing sessions", err)
		}
		all.Sessions = append(all.Sessions, page.Sessions...)
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, all)
	}
	w := tabwriter.NewWriter(c.Root().Writer, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "SESSION\tSTATE\tGENERATION\tBRANCH\tWORKTREE")
	for _, s := range all.Sessions {
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\n", s.SessionId, s.State, s.Generation, s.GetWorkspace().GetBranch(), s.GetWorkspace().GetWorktree())
	}
	return w.Flush()
}

func runSessionRetire(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION")
	if err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.Sessions.RetireSandbox(ctx, &sandboxv1.RetireSandboxRequest{
		SessionId: a[0], OwnerEpoch: c.Uint64("owner-epoch"), Generation: c.Uint64("generation"),
	})
	if err != nil {
		return cl.Explain("retiring the sandbox of session "+a[0], err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, res)
	}
	return printEvidence(c.Root().Writer, res.GetEvidence())
}

func runSessionDelete(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION")
	if err != nil {
		return err
	}
	cl := newClient(c)
	res, err := cl.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{
		SessionId: a[0], OwnerEpoch: c.Uint64("owner-epoch"),
	})
	if err != nil {
		return cl.Explain("deleting session "+a[0], err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, res)
	}
	return printEvidence(c.Root().Writer, res.GetEvidence())
}

func printEvidence(out io.Writer, e *sandboxv1.Evidence) error {
	if e == nil {
		_, err := fmt.Fprintln(out, "there was no sandbox to stop")
		return err
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	showEvidence(func(name, value string) {
		if value != "" {
			fmt.Fprintf(w, "%s\t%s\n", name, value)
		}
	}, e)
	return w.Flush()
}
