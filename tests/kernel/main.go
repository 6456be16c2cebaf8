package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// suites are the packages whose tests run in the guest.
var suites = []string{"pkg/mounts", "pkg/nsexec", "pkg/nsexec/seccomp", "internal/receiptd", "internal/runtime/embedded", "pkg/kata"}

type options struct {
	cache, dir, run, skip, append, suites string
	timeout                               time.Duration
	parallel                              int
}

func main() {
	var o options
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = "/var/tmp"
	}
	flag.StringVar(&o.cache, "cache", filepath.Join(cache, "sandbox-agent", "kernels"), "where scripts/kernels.sh has put the kernels")
	flag.StringVar(&o.dir, "dir", "", "scratch folder, kept (default: a temporary one, removed)")
	flag.StringVar(&o.run, "run", "", "only tests that match (go test -run)")
	flag.StringVar(&o.skip, "skip", "", "tests to leave out (go test -skip)")
	flag.StringVar(&o.suites, "suites", strings.Join(suites, ","), "packages, comma-separated")
	flag.StringVar(&o.append, "append", "", "more of the kernel's command line")
	flag.DurationVar(&o.timeout, "timeout", 15*time.Minute, "bound of one guest")
	flag.IntVar(&o.parallel, "parallel", 2, "guests at a time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := test(ctx, o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "kernel:", err)
		os.Exit(1)
	}
}

// test boots each kernel whose version begins with one of the prefixes.
func test(ctx context.Context, o options, prefixes []string) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("the guests' programs are this machine's own, and its kernels are amd64's: run it there and not on %s", runtime.GOARCH)
	}
	ks, err := vm.Kernels(o.cache, prefixes)
	if err != nil {
		return err
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("/var/tmp", "sandbox-agent-kernel-"); err != nil {
			return err
		}
		defer os.RemoveAll(o.dir)
	}
	p, err := build(o)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	var failed atomic.Int32
	slots := make(chan struct{}, max(o.parallel, 1))
	for _, k := range ks {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if err := testOne(ctx, o, k, p); err != nil {
				failed.Add(1)
				fmt.Printf("%s: %v\n", k.Version, err)
			}
		})
	}
	wg.Wait()
	if n := failed.Load(); n > 0 {
		return fmt.Errorf("%d of %d kernels failed", n, len(ks))
	}
	return nil
}

// build makes everything that does not depend on the kernel: the init, the disk and the plan.
func build(o options) (plan.Plan, error) {
	stage := vm.Root{Dir: filepath.Join(o.dir, "root")}
	p := plan.Plan{Controllers: []string{"cpuset", "cpu", "io", "memory", "pids"}, Env: vm.Env()}
	if err := os.RemoveAll(stage.Dir); err != nil {
		return p, err
	}
	if err := stage.Fill(); err != nil {
		return p, fmt.Errorf("making the guest's root file system: %w", err)
	}
	if err := vm.BuildInit(filepath.Join(o.dir, "init")); err != nil {
		return p, err
	}
	if err := stage.AddProduct(); err != nil {
		return p, err
	}
	args := []string{"-test.timeout", o.timeout.String()}
	if o.run != "" {
		args = append(args, "-test.run", o.run)
	}
	if o.skip != "" {
		args = append(args, "-test.skip", o.skip)
	}
	for _, s := range strings.Split(o.suites, ",") {
		r, err := stage.AddSuite(s, args...)
		if err != nil {
			return p, err
		}
		p.Runs = append(p.Runs, r)
	}
	return p, stage.Image(filepath.Join(o.dir, "root.ext4"))
}

func testOne(ctx context.Context, o options, k vm.Kernel, p plan.Plan) error {
	dir := filepath.Join(o.dir, k.Version)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	initramfs := filepath.Join(dir, "initramfs")
	if err := (vm.Initramfs{Init: filepath.Join(o.dir, "init"), Modules: vm.Modules, Plan: text}).Write(initramfs, k); err != nil {
		return err
	}
	image, err := k.Image()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	started := time.Now()
	c, err := vm.Machine{Kernel: image, Initramfs: initramfs, Disk: filepath.Join(o.dir, "root.ext4"), Append: o.append, Dir: dir}.Test(ctx)
	fmt.Printf("%s%s%s: %d passed, %d failed, %d skipped in %s\n", c.Shown(), c.Skips(), k.Version, c.Passed, c.Failed, c.Skipped, time.Since(started).Round(time.Second))
	return err
}
