package runtimes

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
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
	// conceded are the tests of it that have to fail: one that passes makes the list wrong.
	conceded map[string]conceded
}

// conceded is why a test has to fail, and what it says then.
type conceded struct{ why, says string }

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

// gvisorSuites are chosen by what they are worth under gVisor: each sandbox takes seconds there (doc.go).
var gvisorSuites = []suite{
	{
		pkg: "escape",
		short: "^(TestP3NothingOfACommandIsAliveWhenItIsAnswered|TestP3ACommandCannotEndOrStopPid1|" +
			"TestP3AndP4TheNextCommandFindsNoProcessNoSocketAndNoSharedMemoryOfTheOneBefore|TestHole10NoSocketOfACommandSendsAfterItsAnswer|" +
			"TestHole4ACommandSurvivesTheAgentAndItsAnswerIsNotLost|TestHole6NoCallOnPid1Succeeds|TestP9ACommandCannotReadOrTracePid1|" +
			"TestP9ACommandCannotSeeReceiptsControlSocketKeysOrState|TestP9NothingElseOfTheNodeIsSeen|TestP10NoListenerOfTheNodeIsReached|" +
			"TestP11ASealedFileIsReachedByNoOtherName|TestHole1ACommandMakesNoSetIDFileOnTheNode|TestHole2AForkBombEndsAsTheCommandsOwnResult|" +
			"TestP13AFloodIsBoundedAndYetCountedAndHashedInFull|TestP16ATmpOrHomeWithoutInodesIsTheCommandsOwnError)$",
		// Nothing shows arguments of a thread whose leader is gone: gVisor's /proc lists a group's threads as long as it has its
		// leader. What is stopped, in the group of the command itself, brings that a SIGHUP (docs/gvisor.md): "stopped, in a session
		// of its own" is run. The others do what "detached" does, and less.
		skip: "^TestP3NothingOfACommandIsAliveWhenItIsAnswered$/" +
			"^(as_a_thread_whose_leader_is_gone|stopped|in_the_background|behind_nohup,_holding_the_output_open|in_a_process_group_of_its_own)$",
		conceded: map[string]conceded{
			"TestHole10NoSocketOfACommandSendsAfterItsAnswer":     {"gVisor's network stack sends what a closed connection still holds, and nothing can destroy it", `actual  : "more"`},
			"TestP9NothingElseOfTheNodeIsSeen":                    {"gVisor's /dev has its own fuse and tun devices, which are none of the node's", "Messages:   \t/dev/fuse"},
			"TestP16ATmpOrHomeWithoutInodesIsTheCommandsOwnError": {"runsc takes no bound of a file system's inodes", `actual  : "no bound\n"`},
		},
	},
	{pkg: "git", short: "TestP11Attack05|TestP11Attack07", skip: "^$"},
	{
		pkg: "egress", short: "^(TestACommandReachesWhatIsListedAndIsToldWhatIsNot|TestP3NothingArrivesAfterTheAnswer)$", skip: "^$",
		conceded: map[string]conceded{"TestP3NothingArrivesAfterTheAnswer/gone": {"as in the sandbox: what a closed connection still holds is sent", "after 600000 bytes"}},
	},
}

// testPatience bounds a whole suite, for the case that it hangs.
const testPatience = 30 * time.Minute

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

func TestTheSuitesHoldOverEveryRuntimeOfContainerd(t *testing.T) {
	long := os.Getenv("SANDBOX_TEST_LONG") != ""
	built := testkit.StateDir(t) // one program for all runtimes
	for _, of := range []struct {
		runtime string
		suites  []suite
		long    bool
	}{{"runc", suites, long}, {"gvisor", gvisorSuites, false}} {
		t.Run(of.runtime, func(t *testing.T) {
			containerd.Need(t, of.runtime)
			for _, s := range of.suites {
				t.Run(s.pkg, func(t *testing.T) { s.run(t, built, of.runtime, of.long) })
			}
		})
	}
}

var (
	began   = regexp.MustCompile(`(?m)^=== RUN   ([^/\s]+)$`)
	passed  = regexp.MustCompile(`(?m)^\s*--- PASS: (\S+)`)
	failed  = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)
	skipped = regexp.MustCompile(`(?m)^\s*--- SKIP: (\S+).*$`)
)

// names are what an expression's group matched.
func names(re *regexp.Regexp, out []byte) (list []string) {
	for _, m := range re.FindAllSubmatch(out, -1) {
		list = append(list, string(m[1]))
	}
	return list
}

// innermost leaves out the tests that have failed for a test in them.
func innermost(failed []string) (list []string) {
	for _, name := range failed {
		if !slices.ContainsFunc(failed, func(other string) bool { return strings.HasPrefix(other, name+"/") }) {
			list = append(list, name)
		}
	}
	return list
}

// program is that of the package's tests in the folder built, which is made by the first suite that has it.
func (s suite) program(t *testing.T, built, dir string) string {
	t.Helper()
	program := filepath.Join(built, s.pkg+".test")
	if _, err := os.Stat(program); err == nil {
		return program
	}
	build := exec.Command("go", "test", "-c", "-o", program, ".")
	build.Dir = dir
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

// run runs the package's tests where its sources are.
func (s suite) run(t *testing.T, built, runtime string, long bool) {
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	dir := filepath.Join(root, "tests", s.pkg)
	program := s.program(t, built, dir)
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
	out, err := cmd.CombinedOutput()
	require.Equal(t, len(s.conceded) == 0, err == nil, "%v\n%s", err, out)
	require.ElementsMatch(t, slices.Collect(maps.Keys(s.conceded)), innermost(names(failed, out)), "what is conceded fails, and nothing else: %v\n%s", s.conceded, out)
	for name, c := range s.conceded {
		require.Contains(t, string(out), c.says, "%s fails for the reason that is conceded: %s", name, c.why)
	}
	for _, name := range names(began, out) {
		require.True(t, slices.Contains(slices.Concat(names(passed, out), names(failed, out), names(skipped, out)), name), "%s did not come to its end\n%s", name, out)
	}
	require.NotEmpty(t, names(passed, out), "the table names tests that are there")
	for _, line := range skipped.FindAll(out, -1) {
		t.Logf("left out: %s", line)
	}
	t.Logf("%d passed", len(names(passed, out)))
}
