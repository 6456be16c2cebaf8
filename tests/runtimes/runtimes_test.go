package runtimes

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// A suite is a package of tests and what of it is run over a runtime.
type suite struct {
	pkg string
	// short is what every run has; with SANDBOX_TEST_LONG it is all but skip.
	short string
	skip  string
}

var suites = []suite{
	{
		pkg: "escape",
		short: "TestP3NothingOfACommandIsAlive|TestP3ACommandCannotHide|TestP3ACommandCannotEndOrStopPid1|TestP3AndP4|TestHole[1367]|TestHole4|TestHole5Memory|" +
			"TestHole1[01]|TestP9|TestP10|TestP11|TestP16AFullTmp",
		// It lists what the agent's process holds to the last descriptor, with the default runtime's alone.
		skip: "TestThePostureOfTheAgentIsExactlyThis",
	},
	{pkg: "git", short: "TestP11Attack0|TestP12Attack1[1-5]|TestP12Attack28", skip: "^$"},
}

// testPatience bounds a whole suite, for the case that it hangs.
const testPatience = 30 * time.Minute

func TestMain(m *testing.M) {
	code := m.Run()
	testkit.CleanBinaries()
	os.Exit(code)
}

func TestTheSuitesHoldOverEveryRuntimeOfContainerd(t *testing.T) {
	long := os.Getenv("SANDBOX_TEST_LONG") != ""
	for _, runtime := range []string{"runc"} {
		t.Run(runtime, func(t *testing.T) {
			containerd.Need(t, runtime)
			for _, s := range suites {
				t.Run(s.pkg, func(t *testing.T) { s.run(t, runtime, long) })
			}
		})
	}
}

var (
	passed  = regexp.MustCompile(`(?m)^\s*--- PASS: `)
	skipped = regexp.MustCompile(`(?m)^\s*--- SKIP: .*$`)
)

// run builds the package's tests and runs them where its sources are.
func (s suite) run(t *testing.T, runtime string, long bool) {
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	dir := filepath.Join(root, "tests", s.pkg)
	program := filepath.Join(testkit.StateDir(t), s.pkg+".test")
	build := exec.Command("go", "test", "-c", "-o", program, ".")
	build.Dir = dir
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	args := []string{"-test.v", "-test.timeout", testPatience.String(), "-test.skip", s.skip}
	if !long {
		args = append(args, "-test.run", s.short)
	}
	ctx, cancel := context.WithTimeout(context.Background(), testPatience+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), node.RuntimeEnv+"="+runtime)
	// A killed test would leave its agents' sandboxes.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err = cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NotEmpty(t, passed.FindAll(out, -1), "the table names tests that are there")
	for _, line := range skipped.FindAll(out, -1) {
		t.Logf("left out: %s", line)
	}
	t.Logf("%d passed", len(passed.FindAll(out, -1)))
}
