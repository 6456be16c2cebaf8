package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// BinDirEnv names a folder with ready-built receiptd and pid1, so that several test processes build them once.
const BinDirEnv = "SANDBOX_TEST_BIN_DIR"

var binaries struct {
	sync.Mutex
	dir string
}

// Binaries gives the paths of static receiptd and pid1: from SANDBOX_TEST_BIN_DIR, or built once per test process.
// Whoever calls it without that variable should run Clean at the end of TestMain.
func Binaries(t testing.TB) (receiptd, pid1 string) {
	t.Helper()
	dir, err := binDir()
	if err != nil {
		t.Fatalf("building receiptd and pid1: %v", err)
	}
	return filepath.Join(dir, "receiptd"), filepath.Join(dir, "pid1")
}

// Clean, at the end of TestMain, removes what Binaries built, and the cgroup that agents keep on the node, unless the tests came
// upon it.
func Clean() {
	removeAgentsCgroup()
	binaries.Lock()
	defer binaries.Unlock()
	if binaries.dir != "" && binaries.dir != os.Getenv(BinDirEnv) {
		os.RemoveAll(binaries.dir)
	}
	binaries.dir = ""
}

func binDir() (string, error) {
	binaries.Lock()
	defer binaries.Unlock()
	if binaries.dir != "" {
		return binaries.dir, nil
	}
	if dir := os.Getenv(BinDirEnv); dir != "" {
		for _, name := range []string{"receiptd", "pid1"} {
			if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
				return "", fmt.Errorf("%s=%s lacks %s: %w", BinDirEnv, dir, name, err)
			}
		}
		binaries.dir = dir
		return dir, nil
	}
	removeStaleBinaries()
	dir, err := scratch(fmt.Sprintf("bin-%d", os.Getpid()))
	if err != nil {
		return "", err
	}
	for _, name := range []string{"receiptd", "pid1"} {
		if err := BuildStatic("./cmd/"+name, filepath.Join(dir, name)); err != nil {
			os.RemoveAll(dir)
			return "", err
		}
	}
	binaries.dir = dir
	return dir, nil
}

// removeStaleBinaries removes the folders of test processes that ended without Clean, for example by a panic.
func removeStaleBinaries() {
	dirs, _ := filepath.Glob(filepath.Join(scratchRoot, "sa-bin-*-*"))
	for _, dir := range dirs {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), "sa-bin-"), "-")
		if _, err := os.Stat("/proc/" + pid); os.IsNotExist(err) {
			os.RemoveAll(dir)
		}
	}
}

// BuildStatic builds a package (relative to the module's root, or an absolute folder) as a static program, the way
// that the product is built.
func BuildStatic(pkg, out string) error { return build(pkg, out, "CGO_ENABLED=0") }

// BuildAgent builds sandbox-agent.
func BuildAgent(out string) error { return build("./cmd/sandbox-agent", out, "CGO_ENABLED=1") }

// build copies the program where SANDBOX_TEST_BIN_DIR has one of that name: a machine that tests run on need not have Go.
func build(pkg, out, cgo string) error {
	if dir := os.Getenv(BinDirEnv); dir != "" {
		if b, err := os.ReadFile(filepath.Join(dir, filepath.Base(pkg))); err == nil {
			return os.WriteFile(out, b, 0o755)
		}
	}
	root, err := ModuleRoot()
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), cgo)
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", pkg, err, b)
	}
	return nil
}

// ModuleRoot is the folder of go.mod, found upwards from the working directory (a test's is its package's folder).
func ModuleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("no go.mod above the working directory")
		}
		dir = parent
	}
}
