package cli

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

func receiptCommand() *cli.Command {
	return &cli.Command{
		Name:  "receipt",
		Usage: "show and verify receipts, offline",
		Commands: []*cli.Command{
			{
				Name: "show", Usage: "print what a receipt says, without checking it", ArgsUsage: "FILE",
				Flags: []cli.Flag{jsonFlag()}, Action: runReceiptShow,
			},
			{
				Name: "verify", Usage: "check one receipt, or all of a sandbox and their chain", ArgsUsage: "FILE | --all DIR",
				Description: "Checks the signature, that the file is of the exec that its name says, and that the kept output beside\n" +
					"it is the one that was hashed. With --all also that no receipt of the sandbox is missing, doubled or\n" +
					"out of order, but for the first ones where the node's retention removed them, which is said. A folder\n" +
					"without receipts, of a sandbox that never had a key, is counted and said, and is no failure. DIR is\n" +
					"<state>/receipts/<sandbox>, or <state>/receipts for every sandbox of the node.\n" +
					"The exit code is 0 only if everything holds. No agent is needed.",
				Flags: []cli.Flag{
					&cli.StringFlag{Name: "all", Usage: "every receipt in `DIR`, and their chain"},
					&cli.StringFlag{Name: "key", Usage: "the sandbox's public key, a PEM `FILE` (default: <state>/keys/<sandbox>.pub, found from the receipt's place)"},
					&cli.BoolFlag{Name: "envelope-only", Usage: "check the signature alone: for a receipt that was taken from an ExecResult, without the kept output beside it"},
					jsonFlag(),
				},
				Action: runReceiptVerify,
			},
		},
	}
}

func runReceiptShow(_ context.Context, c *cli.Command) error {
	a, err := args(c, "FILE")
	if err != nil {
		return err
	}
	b, err := readEnvelope(a[0])
	if err != nil {
		return err
	}
	e, err := receipt.Parse(b)
	if err != nil {
		return fmt.Errorf("reading %s: %w", a[0], err)
	}
	if c.Bool("json") {
		return printPredicate(c.Root().Writer, &e.Predicate)
	}
	if err := showPredicate(c.Root().Writer, &e.Predicate); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.Root().Writer, "\nNOT checked: \"%s receipt verify %s\" does that.\n", program, a[0])
	return err
}

func runReceiptVerify(_ context.Context, c *cli.Command) error {
	if dir := c.String("all"); c.IsSet("all") {
		if _, err := args(c); err != nil {
			return err
		}
		if c.Bool("envelope-only") {
			return usagef("--all checks the kept output too: --envelope-only is for one FILE")
		}
		return verifyAll(c, dir)
	}
	a, err := args(c, "FILE")
	if err != nil {
		return err
	}
	pub, err := keyFor(c, filepath.Dir(a[0]))
	if err != nil {
		return err
	}
	p, err := verifyOne(a[0], pub, c.Bool("envelope-only"))
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return printPredicate(c.Root().Writer, &p)
	}
	if err := showPredicate(c.Root().Writer, &p); err != nil {
		return err
	}
	what := "signature and kept output hold"
	if c.Bool("envelope-only") {
		what = "the signature holds (the kept output was not looked at)"
	}
	_, err = fmt.Fprintf(c.Root().Writer, "\nverified: %s\n", what)
	return err
}

func verifyOne(path string, pub ed25519.PublicKey, envelopeOnly bool) (receipt.Predicate, error) {
	if !envelopeOnly {
		return verify.File(path, pub)
	}
	b, err := readEnvelope(path)
	if err != nil {
		return receipt.Predicate{}, err
	}
	p, err := verify.Envelope(b, pub)
	if err != nil {
		err = fmt.Errorf("verifying %s: %w", path, err)
	}
	return p, err
}

func readEnvelope(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the receipt: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, receipt.MaxEnvelope+1))
	if err != nil {
		return nil, fmt.Errorf("reading the receipt %s: %w", path, err)
	}
	return b, nil
}

// keyFor takes the key that was named, or the one that the agent left for the sandbox whose receipts folder dir is.
func keyFor(c *cli.Command, dir string) (ed25519.PublicKey, error) {
	if k := c.String("key"); k != "" {
		return verify.LoadKey(k)
	}
	path, err := defaultKey(dir)
	if err != nil {
		return nil, err
	}
	return verify.LoadKey(path)
}

// defaultKey is <state>/keys/<sandbox>.pub for <state>/receipts/<sandbox>.
func defaultKey(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("finding the key of %s: %w", dir, err)
	}
	sandbox, receipts := filepath.Base(abs), filepath.Dir(abs)
	if filepath.Base(receipts) != "receipts" {
		return "", fmt.Errorf("finding the key: %s is not <state>/receipts/<sandbox>, so the key's place can't be told from it: name the key with --key", abs)
	}
	return filepath.Join(filepath.Dir(receipts), "keys", sandbox+".pub"), nil
}

// verifyAll checks a sandbox's folder, or each sandbox's folder in it.
func verifyAll(c *cli.Command, dir string) error {
	dirs, err := sandboxDirs(dir)
	if err != nil {
		return err
	}
	if len(dirs) > 1 && c.String("key") != "" {
		return usagef("--key is one sandbox's, and %s holds %d of them: leave it out, or name one sandbox's folder", dir, len(dirs))
	}
	bad, unused := 0, 0
	for _, d := range dirs {
		never, err := neverUsed(c, d)
		if err != nil {
			return err
		}
		if never {
			unused++
			if err := showUnused(c, d); err != nil {
				return err
			}
			continue
		}
		report := chainOf(c, d)
		if !report.OK() {
			bad++
		}
		if err := showChain(c, d, report); err != nil {
			return err
		}
	}
	if unused > 0 && !c.Bool("json") {
		if _, err := fmt.Fprintf(c.Root().Writer, "%d folders without receipts, of sandboxes that never had a key\n", unused); err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d receipts folders do not verify", bad, len(dirs))
	}
	return nil
}

// neverUsed says of a folder that it is of a sandbox that was ended before it had a key: there is none, and no trace of a
// receipt, of one that was removed, or of kept output.
func neverUsed(c *cli.Command, dir string) (bool, error) {
	if _, err := keyFor(c, dir); c.String("key") != "" || !errors.Is(err, os.ErrNotExist) {
		return false, nil // chainOf says what is wrong with it
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, fmt.Errorf("reading the receipts folder: %w", err)
	}
	return !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !receipt.IsSpare(e.Name()) }), nil
}

func showUnused(c *cli.Command, dir string) error {
	out := c.Root().Writer
	if !c.Bool("json") {
		_, err := fmt.Fprintf(out, "%s: no receipts, and no key\n", dir)
		return err
	}
	b, err := json.MarshalIndent(struct {
		Dir       string `json:"dir"`
		OK        bool   `json:"ok"`
		Receipts  int    `json:"receipts"`
		NeverUsed bool   `json:"neverUsed"`
	}{dir, true, 0, true}, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the report as JSON: %w", err)
	}
	_, err = fmt.Fprintf(out, "%s\n", b)
	return err
}

// chainOf is a folder's report. A folder that can't be checked at all, without a key for example, is one that does not
// verify: it must not hide what is wrong with the others.
func chainOf(c *cli.Command, dir string) verify.ChainReport {
	pub, err := keyFor(c, dir)
	if err != nil {
		return verify.ChainReport{Problems: []string{err.Error()}}
	}
	report, err := verify.Chain(dir, pub)
	if err != nil {
		report.Problems = append(report.Problems, err.Error())
	}
	return report
}

// sandboxDirs: a folder without receipts of its own, but with folders, is one of many sandboxes.
func sandboxDirs(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading the receipts folder: %w", err)
	}
	var sub []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".json") || e.Name() == receipt.RemovedName {
			return []string{dir}, nil
		}
		if e.IsDir() {
			sub = append(sub, filepath.Join(dir, e.Name()))
		}
	}
	if len(sub) == 0 {
		return nil, fmt.Errorf("reading the receipts folder: %s holds no receipt", dir)
	}
	return sub, nil
}

func showChain(c *cli.Command, dir string, r verify.ChainReport) error {
	out := c.Root().Writer
	if c.Bool("json") {
		b, err := json.MarshalIndent(struct {
			Dir      string   `json:"dir"`
			OK       bool     `json:"ok"`
			Receipts int      `json:"receipts"`
			Problems []string `json:"problems"`
			Last     string   `json:"lastSha256"`
			// Removed is the number of the newest receipt that was removed on purpose.
			Removed uint64 `json:"removedThrough,omitempty"`
		}{dir, r.OK(), len(r.Receipts), r.Problems, r.LastSHA256, r.Removed.Sequence}, "", "  ")
		if err != nil {
			return fmt.Errorf("writing the report as JSON: %w", err)
		}
		_, err = fmt.Fprintf(out, "%s\n", b)
		return err
	}
	word := "verified"
	if !r.OK() {
		word = "NOT verified"
	}
	if r.Removed.Sequence > 0 {
		word += fmt.Sprintf(" (those up to number %d were removed on purpose, the last at %s)", r.Removed.Sequence, r.Removed.At.UTC().Format(time.RFC3339))
	}
	_, err := fmt.Fprintf(out, "%s: %d receipts, %s\n", dir, len(r.Receipts), word)
	for _, p := range r.Problems {
		_, perr := fmt.Fprintf(out, "  %s\n", p)
		err = errors.Join(err, perr)
	}
	return err
}

func printPredicate(w io.Writer, p *receipt.Predicate) error {
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the receipt as JSON: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

func showPredicate(out io.Writer, p *receipt.Predicate) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("exec", "%s", p.ExecID)
	row("session", "%s", p.SessionID)
	row("sandbox", "%s, generation %d", p.SandboxID, p.Generation)
	row("status", "%s", predicateOutcome(p))
	row("time", "%s, %s", p.StartedAt.Format(time.RFC3339Nano), p.EndedAt.Sub(p.StartedAt).Round(100*time.Microsecond))
	row("boundary", "%s of PID namespace %d: pid1 %s, cgroup %s", p.Boundary.Method, p.Boundary.PIDNamespace, p.Boundary.Pid1, p.Boundary.Cgroup)
	row("stdout", "%s", streamFacts(p.Stdout))
	row("stderr", "%s", streamFacts(p.Stderr))
	row("seals", "%s", sealFacts(p))
	row("usage", "user %s, system %s, largest process %d KiB", p.Usage.UserCPU.Round(time.Microsecond), p.Usage.SystemCPU.Round(time.Microsecond), p.Usage.MaxRSS>>10)
	if n := p.Usage.Network; n != (receipt.Network{}) {
		row("network", "%d bytes sent, %d received", n.SentBytes, n.ReceivedBytes)
	}
	for _, k := range slices.Sorted(maps.Keys(p.Labels)) {
		row("label", "%s=%s", k, p.Labels[k])
	}
	row("request", "%s", p.RequestDigest)
	row("nonce", "%s", p.Nonce)
	row("chain", "number %d, after %s", p.Sequence, orNone(p.Previous))
	return w.Flush()
}

func predicateOutcome(p *receipt.Predicate) string {
	s := string(p.Status)
	switch p.Status {
	case receipt.Exited:
		s += fmt.Sprintf(" with code %d", p.ExitCode)
	case receipt.Signaled:
		s += fmt.Sprintf(" by %d (%s)", p.Signal, signalName(int32(p.Signal)))
	}
	if p.OOM {
		s += ", out of memory"
	}
	if p.Cancelled {
		s += ", cancelled"
	}
	if p.Reason != "" {
		s += ": " + p.Reason
	}
	return s
}

func streamFacts(o receipt.Output) string {
	s := fmt.Sprintf("%d bytes, SHA-256 %s", o.Bytes, o.SHA256)
	if o.Truncated() {
		s += fmt.Sprintf(", %d bytes from %d on not kept", o.OmittedBytes, o.OmittedFrom)
	}
	return s
}

func sealFacts(p *receipt.Predicate) string {
	if p.SealsIntact {
		return "intact"
	}
	return "BROKEN: " + strings.Join(p.SealsBroken, ", ")
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
