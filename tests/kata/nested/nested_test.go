package nested

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
)

var (
	scratch = flag.String("scratch", "", "folder for disks and logs, which is kept (default: a temporary one, removed)")
	again   = flag.Bool("again", false, "boot what an earlier run left in the scratch folder, and build nothing")
	only    = flag.String("only", "", "on the nodes, only tests that match (go test -run)")
)

// patience bounds a node from its boot to its end; nothing passes or fails by it on a machine that gets on at all.
const patience = 20 * time.Minute

// dump is what a node has left to show the goroutines of tests that hang.
const dump = 2 * time.Minute

// slow is the environment of tests that wait for things which an emulated processor does, maybe of a busy machine.
var slow = []string{testkit.MustRun + "=1", "SANDBOX_TEST_PATIENCE=10m", long + "=" + os.Getenv(long)}

// long is set to 1 where everything is to be tried.
const long = "SANDBOX_TEST_LONG"

// runcTests are those of internal/runtime/containerd that show what depends on cgroups, mounts and namespaces, once for each way
// to do it. The rest is the same on every node, and runs on the machine itself.
var runcTests = strings.Join([]string{
	"^TestP5ASandboxRunsCommandsAndStopsWithCompleteEvidence$", "^TestTheContainerIsMadeAsTheEmbeddedRuntimeMakesIt$",
	"^TestP16WhatTheMemoryLimitEndsIsTheCommandAlone$",
}, "|")

// tooMuch takes an emulated processor longer than the minute that its command has.
const tooMuch = "^TestP16WhatTheMemoryLimitEndsIsTheCommandAlone$/many_at_once"

// another are the tests that boot one more machine, which takes minutes.
const another = "^TestAnImageServesAsRootFileSystemOfAMachine$|^TestP10AMachineReachesWhatItsNetworkLetsAndNothingOfTheNode$"

// kataArgs leave tests out that take too long for every run.
func kataArgs() []string {
	if os.Getenv(long) == "1" {
		return pattern("")
	}
	return append(pattern(""), "-test.skip", another)
}

// emulate is set to 1 where the nodes are to be emulated: it takes a processor twelve minutes.
const emulate = "SANDBOX_TEST_KATA_VM"

func TestOnEmulatedNodes(t *testing.T) {
	if os.Getenv(emulate) != "1" {
		t.Skipf("asked for by hand only, with %s=1 (make test-kata-vm): it takes a processor twelve minutes", emulate)
	}
	p, dir := build(t)
	for name, n := range map[string]node{
		"Kata": {
			suite: "tests/kata/vm", args: kataArgs(), env: append([]string{"SANDBOX_TEST_KATA=1"}, slow...), memory: 2560,
			modules: slices.Concat(vm.TapModules, []string{"fuse", "overlay"}), optional: vm.NetworkModules, add: addKata,
		},
		"Runc": {suite: "internal/runtime/containerd", args: append(pattern(runcTests), "-test.skip", tooMuch), env: slow, memory: 2048, modules: []string{"overlay"}},
	} {
		t.Run(name, func(t *testing.T) {
			n.dir = filepath.Join(dir, name)
			require.NoError(t, os.MkdirAll(n.dir, 0o755))
			m, err := n.machine(p)
			require.NoError(t, err)
			t.Parallel()
			boot(t, m)
		})
	}
}

func pattern(usual string) []string {
	args := []string{"-test.timeout", (patience - dump).String()}
	if *only != "" {
		usual = *only
	}
	if usual != "" {
		args = append(args, "-test.run", usual)
	}
	return args
}

// build makes what the nodes share, and answers with the folder that it is in.
func build(t *testing.T) (parts, string) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("qemu-system-x86_64"), testkit.Program("mkfs.ext4"), testkit.Program("modprobe"))
	containerd.Need(t, "runc")
	if runtime.GOARCH != "amd64" {
		t.Skipf("the nodes run this machine's own programs, and their kernels are amd64's: this machine is %s", runtime.GOARCH)
	}
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	t.Chdir(root)
	k := kernel(t)
	dir := *scratch
	if dir == "" {
		dir, err = os.MkdirTemp("/var/tmp", "sandbox-agent-nested-")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	}
	if *again {
		image, err := k.Image()
		require.NoError(t, err)
		return parts{image: image}, dir
	}
	p, err := prepare(dir, k)
	require.NoError(t, err)
	return p, dir
}

// kernel is that of nodes and guests. Without one the test is skipped, or fails where tests must run.
func kernel(t *testing.T) vm.Kernel {
	t.Helper()
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	ks, err := vm.Kernels(filepath.Join(cache, "sandbox-agent", "kernels"), []string{release})
	for _, k := range ks {
		if strings.Contains(k.Version, flavour) {
			return k
		}
	}
	require.NotEqual(t, "1", os.Getenv(testkit.MustRun), "this test needs Linux %s%s, and %s=1 forbids to skip it: %v", release, flavour, testkit.MustRun, err)
	t.Skipf("this test needs Linux %s%s: fetch it with scripts/kernels.sh: %v", release, flavour, err)
	return vm.Kernel{}
}

// boot runs a machine to its end, and tells what the tests on it said.
func boot(t *testing.T, m vm.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	log, err := os.Create(filepath.Join(m.Dir, "tests.log"))
	require.NoError(t, err)
	defer log.Close()
	var results vm.Results
	done, err := m.Boot(ctx, func(line string) {
		_, _ = log.WriteString(line + "\n")
		results.Line(line)
	})
	results.Report(t)
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(done, "=0"), "the tests' program said: %s", done)
}
