package kernel

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
	"github.com/sandbox-agent/sandbox-agent/tests/kernel/seen"
)

var (
	flagKernels    = flag.String("kernels", "", "names or version prefixes of kernels, with spaces between (default: those of every run, with -all and -full all)")
	flagAll        = flag.Bool("all", false, "all kernels, and every variation on each")
	flagFull       = flag.Bool("full", false, "the same with whole suites: hours")
	flagOwn        = flag.Bool("own", false, "the kernel of the environment: KERNEL=vmlinuz MODULES=lib/modules/VERSION")
	flagWrite      = flag.Bool("write", false, "write docs/kernels.md")
	flagCache      = flag.String("cache", "", "where scripts/kernels.sh has put the kernels (default: the user's cache)")
	flagDir        = flag.String("dir", "", "scratch folder, kept: consoles and what the guests said (default: a temporary one, removed)")
	flagSuites     = flag.String("suites", "", "packages, comma-separated; \"none\": only variations")
	flagVariations = flag.String("variations", "", "names of variations, separated by \"; \"; \"none\": only suites")
	flagRun        = flag.String("guest.run", "", "only tests that match (go test -run), instead of the part of every run")
	flagSkip       = flag.String("guest.skip", "", "tests to leave out (go test -skip)")
	flagAppend     = flag.String("append", "", "more of every kernel's command line")
)

// bootBound ends a guest that neither ends nor panics.
const bootBound = 40 * time.Minute

// TestMain runs in the module's folder, where its programs are built.
func TestMain(m *testing.M) {
	flag.Parse()
	root, err := testkit.ModuleRoot()
	if err == nil {
		err = os.Chdir(root)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestKernels boots the kernels, two at a time.
func TestKernels(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the guests' programs are this machine's own, and the kernels are amd64's")
	}
	testkit.Need(t, testkit.Root, testkit.Program("qemu-system-x86_64"), testkit.Program("mkfs.ext4"), testkit.Program("modprobe"), testkit.Program("xz"),
		testkit.Git, testkit.Program("python3"), testkit.Program("nft"))
	chosen := chosenKernels(t)
	require.NotEmpty(t, chosen, "-kernels %q names none of internal/testkit/vm/kernels.txt", *flagKernels)
	b := &bench{results: map[string]*result{}}
	b.stage(t)
	t.Cleanup(func() { b.write(t) })
	for _, c := range chosen {
		t.Run(c.Name, func(t *testing.T) {
			if c.err != nil {
				if os.Getenv(testkit.MustRun) == "1" {
					t.Fatalf("%s=1 forbids to leave a kernel out: %v", testkit.MustRun, c.err)
				}
				t.Skip(c.err)
			}
			t.Parallel()
			b.test(t, c)
		})
	}
}

// chosenKernel is one to boot, or why it can't be.
type chosenKernel struct {
	vm.Listed
	vm.Fetched
	err error
}

func chosenKernels(t *testing.T) (out []chosenKernel) {
	if *flagOwn {
		k, err := vm.OwnKernel(t.TempDir(), os.Getenv("KERNEL"), os.Getenv("MODULES"))
		require.NoError(t, err)
		return []chosenKernel{{Listed: vm.Listed{Name: "own"}, Fetched: vm.Fetched{Kernel: k}}}
	}
	cache := *flagCache
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			dir = "/var/tmp"
		}
		cache = filepath.Join(dir, "sandbox-agent", "kernels")
	}
	wanted := strings.Fields(*flagKernels)
	for _, l := range vm.List() {
		f, err := l.Fetched(cache)
		is := func(w string) bool {
			return w == l.Name || strings.HasPrefix(l.Name, w+"-") || strings.HasPrefix(f.Version, w+".")
		}
		if len(wanted) == 0 && (l.Always || everywhere()) || slices.ContainsFunc(wanted, is) {
			out = append(out, chosenKernel{l, f, err})
		}
	}
	return out
}

// everywhere says whether what is not part of every run is tried, too.
func everywhere() bool { return *flagAll || *flagFull }

// bench is what all guests are made of, and what came of them.
type bench struct {
	dir     string
	runs    []plan.Run
	mu      sync.Mutex
	results map[string]*result
}

// stage makes everything that does not depend on the kernel: the init, and the disk with the product and the suites.
func (b *bench) stage(t *testing.T) {
	b.dir = *flagDir
	if b.dir == "" {
		dir, err := os.MkdirTemp("/var/tmp", "sa-kernel-") // short, for sockets
		require.NoError(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		b.dir = dir
	}
	root := vm.Root{Dir: filepath.Join(b.dir, "root")}
	require.NoError(t, os.RemoveAll(root.Dir))
	require.NoError(t, root.Fill())
	require.NoError(t, root.AddProduct())
	require.NoError(t, vm.BuildInit(filepath.Join(b.dir, "init")))
	require.NoError(t, vm.Build(false, root.Path(observer), "./tests/kernel/observe"))
	require.NoError(t, root.AddRuntime("cni"))
	for _, s := range suites {
		asked := slices.Contains(strings.Split(*flagSuites, ","), s.pkg)
		if *flagSuites != "" && !asked || s.onlyFull && !*flagFull && !asked {
			continue
		}
		run, err := root.AddSuite(s.pkg, s.args()...)
		require.NoError(t, err)
		b.runs = append(b.runs, run)
	}
	require.NoError(t, root.Image(filepath.Join(b.dir, "root.ext4")))
	require.NoError(t, os.RemoveAll(root.Dir))
}

const observer = vm.BinDir + "/observe"

// args are those of the suite's test program. test2json reads its output.
func (s suite) args() []string {
	args := []string{"-test.v=test2json", "-test.timeout", bootBound.String()}
	run, skip := s.run, *flagSkip
	if *flagFull || *flagRun != "" {
		run = *flagRun
	}
	if run != "" {
		args = append(args, "-test.run", run)
	}
	if skip != "" {
		args = append(args, "-test.skip", skip)
	}
	return args
}

// shortened says whether a kernel is spared what takes the longest.
func shortened(kernel string) bool {
	asked := *flagKernels + *flagSuites + *flagRun + *flagSkip
	return asked == "" && !*flagFull && !*flagOwn && kernel != thorough
}

// test is everything that is done with one kernel.
func (b *bench) test(t *testing.T, c chosenKernel) {
	r := &result{kernel: c, began: time.Now(), full: *flagFull, suites: map[string]counts{}, variations: map[string]string{}}
	b.mu.Lock()
	b.results[c.Name] = r
	b.mu.Unlock()
	g := guests{bench: b, kernel: c, result: r}
	runs := g.ofSuites()
	together, alone := chosenVariations()
	// Much of a short run is boots: its suites and the nodes of one boot share a guest.
	var shared *guest
	if !*flagFull && len(runs) > 0 && len(together) > 0 {
		shared = g.boot(t, "all", plan.Plan{Runs: append(slices.Clone(runs), together.run(t))}, variation{})
	}
	if len(runs) > 0 {
		t.Run("suites", func(t *testing.T) { g.suites(t, runs, shared) })
	}
	if len(together)+len(alone) > 0 {
		t.Run("variations", func(t *testing.T) { g.variations(t, together, alone, shared) })
	}
}

// guests are those of one kernel.
type guests struct {
	*bench
	kernel chosenKernel
	result *result
}

// guest is what came of one.
type guest struct {
	said *vm.Results
	done string // its last line: the programs' exit codes
	err  error  // its bad end; what it said before is there all the same
}

// boot boots a guest that follows a plan.
func (g guests) boot(t *testing.T, name string, p plan.Plan, v variation) *guest {
	t.Helper()
	dir := filepath.Join(g.dir, g.kernel.Name, name)
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.MkdirAll(dir, 0o755))
	p.Controllers, p.Env = []string{"cpuset", "cpu", "io", "memory", "pids"}, append(vm.Env(), "SANDBOX_TEST_PATIENCE=10m")
	text, err := json.Marshal(p)
	require.NoError(t, err)
	lacks := func(m string) bool { return slices.Contains(v.without, m) }
	in := vm.Initramfs{Init: filepath.Join(g.dir, "init"), Plan: text}
	needed, optional := vm.Modules, slices.Concat([]string{"overlay", "br_netfilter"}, vm.NetworkModules, vm.TapModules)
	if g.kernel.Own {
		needed, optional = vm.BootModules, append(optional, vm.NodeModules...)
	}
	in.Modules = slices.DeleteFunc(slices.Clone(needed), lacks)
	in.Optional = slices.DeleteFunc(optional, lacks)
	initramfs := filepath.Join(dir, "initramfs")
	require.NoError(t, in.Write(initramfs, g.kernel.Kernel))
	image, err := g.kernel.Image()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), bootBound)
	defer cancel()
	log, err := os.Create(filepath.Join(dir, "said.log"))
	require.NoError(t, err)
	defer log.Close()
	said := &vm.Results{}
	m := vm.Machine{Kernel: image, Initramfs: initramfs, Disk: filepath.Join(g.dir, "root.ext4"), Append: strings.TrimSpace(v.boot + " " + *flagAppend), Dir: dir}
	done, err := m.Boot(ctx, func(line string) {
		fmt.Fprintln(log, line)
		said.Line(line)
	})
	return &guest{said, done, err}
}

// ofSuites are the packages' test programs that this kernel is to run.
func (g guests) ofSuites() (runs []plan.Run) {
	for _, r := range g.runs {
		i := slices.IndexFunc(suites, func(s suite) bool { return s.pkg == r.Name })
		if suites[i].agent && older(g.kernel.Version, tooOld.before) {
			continue // that it refuses is one of the variations
		}
		if suites[i].once != "" && shortened(g.kernel.Name) {
			r.Argv = append(slices.Clone(r.Argv), "-test.skip", suites[i].once)
		}
		runs = append(runs, r)
	}
	return runs
}

// suites runs the packages' tests, if the guest of all has not, and repeats what came of each as a subtest.
func (g guests) suites(t *testing.T, runs []plan.Run, in *guest) {
	if in == nil {
		in = g.boot(t, "suites", plan.Plan{Runs: runs}, variation{})
	}
	for _, r := range runs {
		lines, began := in.said.Of(r.Name)
		t.Run(strings.ReplaceAll(r.Name, "/", "-"), func(t *testing.T) {
			require.True(t, began || in.err == nil, "the guest ended before")
			tests, readErr := vm.ReadTests(r.Name, lines)
			require.NoError(t, readErr)
			g.result.add(r.Name, counts(tests.Count()))
			tests.Repeat(t, guestLacksRE.MatchString)
			if code := r.Name + "=0"; in.err == nil && !t.Failed() && !slices.Contains(strings.Fields(in.done), code) {
				t.Errorf("the test program failed and no test of it: %s\n%s", in.done, strings.Join(lines[max(0, len(lines)-30):], "\n"))
			}
		})
	}
	if in.err != nil {
		t.Errorf("%s: %v\nthe last that it said:\n%s", g.kernel.Version, in.err, in.said.Last())
	}
}

// observing are the changes that one run of the observer makes.
type observing []seen.Change

func (changes observing) run(t *testing.T) plan.Run {
	t.Helper()
	stdin, err := json.Marshal(changes)
	require.NoError(t, err)
	return plan.Run{Name: "observe", Dir: "/", Argv: []string{observer}, Stdin: string(stdin)}
}

// chosenVariations are nodes on which something is otherwise: those of one boot, and those of a boot of their own.
func chosenVariations() (together observing, alone []variation) {
	for _, v := range variations {
		switch {
		case *flagVariations != "" && !slices.Contains(strings.Split(*flagVariations, "; "), v.Name):
		case !v.every && !everywhere() && *flagVariations == "":
		case !v.ofBoot():
			together = append(together, v.Change)
		default:
			alone = append(alone, v)
		}
	}
	return together, alone
}

// variations tries them. in is the guest of those of one boot, if it has been.
func (g guests) variations(t *testing.T, together observing, alone []variation, in *guest) {
	if len(together) > 0 {
		g.vary(t, variation{}, together, in)
	}
	for _, v := range alone {
		g.vary(t, v, observing{v.Change}, nil)
	}
}

// vary boots a guest with a variation of the boot, if it has not been, and judges what it saw under the changes.
func (g guests) vary(t *testing.T, v variation, changes observing, in *guest) {
	if in == nil {
		in = g.boot(t, "vary-"+fileName(v.Name), plan.Plan{CgroupV1: v.cgroupV1, Runs: []plan.Run{changes.run(t)}}, v)
	}
	results := map[string]seen.Result{}
	lines, _ := in.said.Of("observe")
	for _, line := range lines {
		if text, ok := strings.CutPrefix(line, seen.Mark); ok {
			var r seen.Result
			require.NoError(t, json.Unmarshal([]byte(text), &r), text)
			results[r.Change] = r
		}
	}
	for _, c := range changes {
		t.Run(c.Name, func(t *testing.T) {
			r, there := results[c.Name]
			require.True(t, there, "the guest did not try it: %v\n%s", in.err, in.said.Last())
			verdict, problems := judge(g.kernel.Kernel, find(c.Name), r)
			g.result.vary(c.Name, verdict)
			if r.NotRun != "" {
				t.Skip(r.NotRun)
			}
			require.Empty(t, problems)
		})
	}
	if in.err != nil {
		t.Errorf("%s, %s: %v", g.kernel.Version, v.Name, in.err)
	}
}

func find(name string) variation {
	i := slices.IndexFunc(variations, func(v variation) bool { return v.Name == name })
	return variations[i]
}

// fileName is a name without what a path or a socket's path can't have.
func fileName(name string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '-'
	}, name)
}
