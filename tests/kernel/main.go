package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandbox-agent/sandbox-agent/tests/kernel/plan"
)

// suites are the packages whose tests run in the guest.
var suites = []string{"pkg/mounts", "pkg/nsexec", "pkg/nsexec/seccomp", "internal/receiptd", "internal/runtime/embedded", "pkg/kata"}

// guestBin is where the programs are in the guest.
const guestBin = "/var/lib/sandbox-agent-test"

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
	ks, err := kernels(o.cache, prefixes)
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
				fmt.Printf("%s: %v\n", k.version, err)
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
	stage := root{filepath.Join(o.dir, "root")}
	p := plan.Plan{
		Controllers: []string{"cpuset", "cpu", "io", "memory", "pids"},
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "SANDBOX_TEST_BIN_DIR=" + guestBin,
			"PYTHONDONTWRITEBYTECODE=1",
		},
	}
	if err := os.RemoveAll(stage.dir); err != nil {
		return p, err
	}
	if err := stage.fill(); err != nil {
		return p, fmt.Errorf("making the guest's root file system: %w", err)
	}
	if err := goBuild("0", filepath.Join(o.dir, "init"), "./tests/kernel/guest"); err != nil {
		return p, err
	}
	for _, name := range []string{"receiptd", "pid1"} {
		if err := goBuild("0", stage.path(filepath.Join(guestBin, name)), "./cmd/"+name); err != nil {
			return p, err
		}
	}
	if err := goBuild("1", stage.path(filepath.Join(guestBin, "sandbox-agent")), "./cmd/sandbox-agent"); err != nil {
		return p, err
	}
	for _, s := range strings.Split(o.suites, ",") {
		r, err := addSuite(stage, s, o)
		if err != nil {
			return p, err
		}
		p.Runs = append(p.Runs, r)
	}
	return p, stage.image(filepath.Join(o.dir, "root.ext4"))
}

// addSuite builds a package's tests and puts them into the root file system, in a folder like that of the package.
func addSuite(stage root, pkg string, o options) (plan.Run, error) {
	name := strings.ReplaceAll(pkg, "/", "-") + ".test"
	r := plan.Run{Name: pkg, Dir: filepath.Join("/src", pkg), Argv: []string{filepath.Join(guestBin, name), "-test.v", "-test.timeout", o.timeout.String()}}
	if o.run != "" {
		r.Argv = append(r.Argv, "-test.run", o.run)
	}
	if o.skip != "" {
		r.Argv = append(r.Argv, "-test.skip", o.skip)
	}
	out := stage.path(filepath.Join(guestBin, name))
	cmd := exec.Command("go", "test", "-c", "-trimpath", "-o", out, "./"+pkg)
	if b, err := cmd.CombinedOutput(); err != nil {
		return r, fmt.Errorf("building the tests of %s: %w: %s", pkg, err, b)
	}
	if err := stage.program("/lib64/ld-linux-x86-64.so.2"); err != nil {
		return r, err
	}
	if err := os.MkdirAll(stage.path(r.Dir), 0o755); err != nil {
		return r, err
	}
	// Some tests compare with their own package's files.
	sources, err := filepath.Glob(filepath.Join(pkg, "*.go"))
	if err != nil {
		return r, err
	}
	if err := run("cp", append(sources, stage.path(r.Dir))...); err != nil {
		return r, err
	}
	data := filepath.Join(pkg, "testdata")
	if _, err := os.Stat(data); err == nil {
		if err := run("cp", "-a", data, stage.path(r.Dir)); err != nil {
			return r, err
		}
	}
	helpers, err := filepath.Glob(filepath.Join(data, "*", "main.go"))
	if err != nil {
		return r, err
	}
	for _, h := range helpers {
		dir := filepath.Dir(h)
		if err := goBuild("0", stage.path(filepath.Join(guestBin, filepath.Base(dir))), "./"+dir); err != nil {
			return r, err
		}
	}
	return r, run("cp", "go.mod", stage.path("/src"))
}

func goBuild(cgo, out, pkg string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w: %s", pkg, err, b)
	}
	return nil
}

func testOne(ctx context.Context, o options, k kernel, p plan.Plan) error {
	dir := filepath.Join(o.dir, k.version)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	initramfs := filepath.Join(dir, "initramfs")
	if err := k.initramfs(initramfs, filepath.Join(o.dir, "init"), p); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "tests.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	image, err := k.image()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	m := machine{kernel: image, initramfs: initramfs, disk: filepath.Join(o.dir, "root.ext4"), append: o.append, dir: dir}
	started := time.Now()
	var c counter
	done, err := m.boot(ctx, func(line string) {
		fmt.Fprintln(log, line)
		c.line(line)
	})
	fmt.Printf("%s%s%s: %d passed, %d failed, %d skipped in %s\n", c.shown.String(), c.skips(), k.version, c.passed, c.failed, c.skipped, time.Since(started).Round(time.Second))
	if err != nil {
		return err
	}
	for _, r := range strings.Fields(done) {
		if !strings.HasSuffix(r, "=0") {
			return fmt.Errorf("failed: %s", done)
		}
	}
	return nil
}
