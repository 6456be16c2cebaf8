package vm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// BinDir is where the programs of a build are in the guest.
const BinDir = "/var/lib/sandbox-agent-test"

// Env is the environment of the guest's programs.
func Env() []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "SANDBOX_TEST_BIN_DIR=" + BinDir,
		"PYTHONDONTWRITEBYTECODE=1",
	}
}

// Build builds a program of this module, without cgo unless it is said; the working directory is the module's.
func Build(cgo bool, out, pkg string) error {
	cmd := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED="+map[bool]string{false: "0", true: "1"}[cgo])
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w: %s", pkg, err, b)
	}
	return nil
}

// BuildInit builds the init of a guest that follows a plan.
func BuildInit(out string) error { return Build(false, out, "./internal/testkit/vm/guest") }

// AddProduct builds the agent, receiptd and pid1 into the root file system, or copies them from where they are ready-built
// (testkit.BinDirEnv).
func (r Root) AddProduct() error {
	var all []error
	for _, name := range []string{"receiptd", "pid1", "sandbox-agent"} {
		out := r.Path(filepath.Join(BinDir, name))
		if dir := os.Getenv(testkit.BinDirEnv); dir != "" {
			all = append(all, os.MkdirAll(filepath.Dir(out), 0o755), Run("cp", filepath.Join(dir, name), out))
			continue
		}
		all = append(all, Build(name == "sandbox-agent", out, "./cmd/"+name))
	}
	// The agent is linked against the machine's C library.
	return errors.Join(append(all, r.Program("/lib64/ld-linux-x86-64.so.2"))...)
}

// AddRuntime copies a part of scripts/containerd.sh, and the script, by which the guest's tests find it. Where the host has not
// built it, the guest does not have it either.
func (r Root) AddRuntime(part string) error {
	const script = "scripts/containerd.sh"
	out, err := exec.Command(script, "-n", part).Output()
	if err != nil {
		return nil // the tests that need it are skipped, and say so
	}
	runtimes := r.Path("root/.cache/sandbox-agent/runtimes")
	return errors.Join(os.MkdirAll(runtimes, 0o755), os.MkdirAll(r.Path("src/scripts"), 0o755),
		Run("cp", "-r", strings.TrimSpace(string(out)), runtimes), Run("cp", script, r.Path("src/scripts")))
}

// AddSuite builds a package's tests and puts them into the root file system, in a folder like that of the package, with the
// package's own files. args are the test program's.
func (r Root) AddSuite(pkg string, args ...string) (plan.Run, error) {
	name := strings.ReplaceAll(pkg, "/", "-") + ".test"
	run := plan.Run{Name: pkg, Dir: filepath.Join("/src", pkg), Argv: append([]string{filepath.Join(BinDir, name), "-test.v"}, args...)}
	out := r.Path(filepath.Join(BinDir, name))
	cmd := exec.Command("go", "test", "-c", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", out, "./"+pkg)
	if b, err := cmd.CombinedOutput(); err != nil {
		return run, fmt.Errorf("building the tests of %s: %w: %s", pkg, err, b)
	}
	if err := r.Program("/lib64/ld-linux-x86-64.so.2"); err != nil {
		return run, err
	}
	if err := os.MkdirAll(r.Path(run.Dir), 0o755); err != nil {
		return run, err
	}
	// Some tests compare with their own package's files.
	sources, err := filepath.Glob(filepath.Join(pkg, "*.go"))
	if err != nil {
		return run, err
	}
	if err := Run("cp", append(sources, r.Path(run.Dir))...); err != nil {
		return run, err
	}
	data := filepath.Join(pkg, "testdata")
	if _, err := os.Stat(data); err == nil {
		if err := Run("cp", "-a", data, r.Path(run.Dir)); err != nil {
			return run, err
		}
	}
	helpers, err := filepath.Glob(filepath.Join(data, "*", "main.go"))
	if err != nil {
		return run, err
	}
	for _, h := range helpers {
		dir := filepath.Dir(h)
		if err := Build(false, r.Path(filepath.Join(BinDir, filepath.Base(dir))), "./"+dir); err != nil {
			return run, err
		}
	}
	return run, Run("cp", "go.mod", r.Path("/src"))
}
