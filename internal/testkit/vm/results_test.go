package vm

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// guestOutput is what guests say whose programs were one that holds, one that fails, one that is skipped and one that is cut off.
var guestOutput = map[string]string{
	"holds":  plan.Begin + "pkg/a\n=== RUN   TestA\n=== RUN   TestA/x:_y\nquiet\n--- PASS: TestA (0.10s)\n    --- PASS: TestA/x:_y (0.00s)\nPASS\n",
	"slash":  plan.Begin + "pkg/a\n=== RUN   TestA\n=== RUN   TestA/a_/proc,_covered\n--- PASS: TestA (0.10s)\n    --- PASS: TestA/a_/proc,_covered (0.00s)\nPASS\n",
	"fails":  plan.Begin + "pkg/a\n=== RUN   TestA\n=== RUN   TestA/x\n    a_test.go:1: loud\n=== NAME  TestA\n--- FAIL: TestA (0.10s)\n    --- FAIL: TestA/x (0.00s)\n",
	"skips":  plan.Begin + "pkg/a\n=== RUN   TestB\n    b_test.go:1: for a reason\n--- SKIP: TestB (0.00s)\nPASS\n",
	"cut":    plan.Begin + "pkg/a\n=== RUN   TestC\npanic: it said\n",
	"empty":  plan.Begin + "pkg/a\ntesting: warning: no tests to run\nPASS\n",
	"silent": "",
	"hole":   plan.Begin + "pkg/a\n=== RUN   TestB\n    b_test.go:1: not today\n--- SKIP: TestB (0.00s)\nPASS\n",
}

const guestEnv = "TEST_GUEST_OUTPUT"

// TestReported is what the test below runs in a process of its own, whose outcome it looks at.
func TestReported(t *testing.T) {
	name, ok := os.LookupEnv(guestEnv)
	if !ok {
		return
	}
	var r Results
	for line := range strings.Lines(guestOutput[name]) {
		r.Line(strings.TrimSuffix(line, "\n"))
	}
	if name != "hole" {
		r.Report(t)
		return
	}
	lines, began := r.Of("pkg/a")
	require.True(t, began)
	tests, err := ReadTests("pkg/a", lines)
	require.NoError(t, err)
	tests.Repeat(t, func(said string) bool { return strings.Contains(said, "for a reason") })
}

func TestAGuestsTestsAreToldWithTheirOwnVerdicts(t *testing.T) {
	for name, c := range map[string]struct {
		holds bool
		says  []string
	}{
		"holds":  {true, []string{"--- PASS: TestReported/pkg/a/TestA (", "--- PASS: TestReported/pkg/a/TestA/x:_y ("}},
		"slash":  {true, []string{"--- PASS: TestReported/pkg/a/TestA/a_/proc,_covered ("}},
		"fails":  {false, []string{"--- FAIL: TestReported/pkg/a/TestA/x (", "loud"}},
		"skips":  {true, []string{"--- SKIP: TestReported/pkg/a/TestB (", "for a reason"}},
		"cut":    {false, []string{"--- FAIL: TestReported/pkg/a/TestC (", "never ended", "panic: it said"}},
		"empty":  {false, []string{"no test ran", "no tests to run"}},
		"hole":   {false, []string{"--- FAIL: TestReported/TestB (", "none in a guest", "not today"}},
		"silent": {false, []string{"the guest ran no program"}},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run", "^TestReported$", "-test.v")
			cmd.Env = append(os.Environ(), guestEnv+"="+name)
			out, err := cmd.CombinedOutput()
			require.Equal(t, c.holds, err == nil, "%s", out)
			for _, text := range c.says {
				require.Contains(t, string(out), text)
			}
		})
	}
}

func TestWhatAGuestsTestsSaidIsReadTestByTest(t *testing.T) {
	const mark = "\x16" // -test.v=test2json
	got, err := ReadTests("some/package", []string{
		mark + "=== RUN   TestA", mark + "=== RUN   TestA/one", "    a_test.go:1: loud", mark + "=== NAME  TestA", mark + "--- FAIL: TestA (0.00s)",
		"    " + mark + "--- FAIL: TestA/one (0.00s)", mark + "=== RUN   TestB", "    b_test.go:7: this test needs gcc: install it", mark + "--- SKIP: TestB (0.00s)",
		mark + "=== RUN   TestC", mark + "--- PASS: TestC (0.10s)", mark + "=== RUN   TestD", "and then the kernel panicked",
	})
	require.NoError(t, err)
	below := got.root.below
	require.Len(t, below, 4)
	require.Equal(t, "fail", below[0].below[0].action)
	require.Contains(t, below[0].below[0].said(), "loud")
	require.Contains(t, below[1].said(), "needs gcc")
	require.NotEqual(t, "pass", below[3].action, "a test that never ended has not passed")
	require.Equal(t, Counts{Passed: 1, Failed: 3, Skipped: 1}, got.Count())
	got, err = ReadTests("some/package", []string{
		mark + "=== RUN   TestA", mark + "=== RUN   TestA/of_/proc", mark + "--- PASS: TestA (0.00s)", "    " + mark + "--- PASS: TestA/of_/proc (0.00s)", mark + "PASS",
	})
	require.NoError(t, err)
	require.Equal(t, Counts{Passed: 2}, got.Count(), "a slash in a name makes no test")
}
