package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
)

type options struct {
	rounds, warmup int
	pause          time.Duration
	only           *regexp.Regexp
	json, dir, bin string
}

func main() {
	// First of all: a sandbox of the embedded runtime begins with this program, started again as its first stage.
	embedded.Init()
	// That package keeps the main goroutine on the process's first thread; measured there, each hand-over to another
	// goroutine would cost a switch of threads that the agent doesn't have.
	code := make(chan int)
	go func() { code <- benchMain() }()
	os.Exit(<-code)
}

func benchMain() int {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err == nil && os.Geteuid() != 0 {
		err = errors.New("this needs root: it makes sandboxes on this machine")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// After the first signal the usual handling is back: a second one ends a clean-up that hangs.
	context.AfterFunc(ctx, stop)
	defer stop()
	// Printed once everything is removed: a reader that goes away ("make bench | head") ends this program on the spot.
	r, err := run(ctx, o)
	if r != nil && ctx.Err() == nil {
		err = errors.Join(err, r.write(os.Stdout, o.json))
	}
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "bench: interrupted; what it made is removed")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.IntVar(&o.rounds, "rounds", 200, "measured rounds; each takes one sample of every case")
	f.IntVar(&o.warmup, "warmup", 20, "rounds before these, not counted")
	f.DurationVar(&o.pause, "pause", 15*time.Millisecond, "rest before each sample, so that what the one before left to do is not charged to it")
	f.StringVar(&o.json, "json", "", "also write the results to this `FILE`")
	f.StringVar(&o.dir, "dir", "/var/tmp", "`FOLDER` on the file system to measure, for state and worktrees")
	f.StringVar(&o.bin, "bin", "bin", "`FOLDER` of sandbox-agent, receiptd and pid1")
	only := f.String("only", "", "only the cases and sections whose name matches this regular `EXPRESSION`; ratios need both their sides")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 || o.rounds < 1 || o.warmup < 0 {
		return o, fmt.Errorf("give no arguments, rounds above 0 and warmup 0 or more")
	}
	o.only, err = regexp.Compile(*only)
	return o, err
}

func (o options) wants(name string) bool { return o.only.MatchString(name) }

// run measures everything. What it makes is gone when it returns, also after an interruption; if not, that is the
// error, with the report.
func run(ctx context.Context, o options) (r *report, err error) {
	p, err := newPlace(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	a, err := startAgent(ctx, p)
	if err != nil {
		return nil, err
	}
	s, err := a.newSession(ctx)
	if err != nil {
		return nil, err
	}
	if r, err = newReport(ctx, o, a); err != nil {
		return nil, err
	}
	if err := r.measure(ctx, o, p, a, s); err != nil {
		return nil, err
	}
	r.judge()
	return r, nil
}

// measure fills the report, in an order that matters: memory first, while there is one sandbox only. Programs that run
// twice share pages, and so count for less.
func (r *report) measure(ctx context.Context, o options, p *place, a *agent, s *session) (err error) {
	if o.wants("memory") {
		if r.Memory, err = measureMemory(ctx, a, s); err != nil {
			return err
		}
	}
	if r.Latency, err = measureLatency(ctx, o, p, s); err != nil {
		return err
	}
	if o.wants("throughput") {
		if r.Throughput, err = measureThroughput(ctx, p, a, s); err != nil {
			return err
		}
	}
	if o.wants("memory") {
		if err := r.Memory.addAgent(a); err != nil {
			return err
		}
	}
	if o.wants("sizes") {
		r.Sizes, err = measureSizes(p)
	}
	return err
}
