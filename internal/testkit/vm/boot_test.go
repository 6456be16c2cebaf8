package vm

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// rig is what the guests of a test are made of.
type rig struct {
	dir, image, odd string
	kernel          Kernel
}

// fetched is a kernel of the cache.
func fetched(t *testing.T) Kernel {
	t.Helper()
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	f, err := List()[2].Fetched(filepath.Join(cache, "sandbox-agent", "kernels"))
	if err != nil {
		if os.Getenv(testkit.MustRun) == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return f.Kernel
}

func newRig(t *testing.T) rig {
	t.Helper()
	testkit.Need(t, testkit.Program("qemu-system-x86_64"), testkit.Program("mkfs.ext4"), testkit.Program("modprobe"), testkit.Program("xz"), testkit.Program("ip"))
	r := rig{kernel: fetched(t)}
	var err error
	r.dir, err = os.MkdirTemp("/var/tmp", "sa-boot-") // short, for sockets
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(r.dir) })
	r.odd = filepath.Join(r.dir, "odd")
	require.NoError(t, Build(false, r.odd, "./testdata/odd"))
	require.NoError(t, Build(false, filepath.Join(r.dir, "init"), "./guest"))
	root := Root{Dir: filepath.Join(r.dir, "root")}
	for _, d := range []string{"dev", "proc", "sys", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"} {
		require.NoError(t, os.MkdirAll(root.Path(d), 0o755))
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		require.NoError(t, os.Symlink("usr/"+d, root.Path(d)))
	}
	ip, err := exec.LookPath("ip")
	require.NoError(t, err)
	require.NoError(t, root.Program(ip))
	require.NoError(t, Run("cp", r.odd, root.Path("odd")))
	require.NoError(t, root.Image(filepath.Join(r.dir, "root.ext4")))
	r.image, err = r.kernel.Image()
	require.NoError(t, err)
	return r
}

// machine is one whose guest runs the program odd, to the end of that name.
func (r rig) machine(t *testing.T, end string) Machine {
	t.Helper()
	dir := filepath.Join(r.dir, end)
	require.NoError(t, os.Mkdir(dir, 0o755))
	text, err := json.Marshal(plan.Plan{Runs: []plan.Run{{Name: "odd", Dir: "/", Argv: []string{"/odd", end}}}})
	require.NoError(t, err)
	initramfs := filepath.Join(dir, "initramfs")
	in := Initramfs{Init: filepath.Join(r.dir, "init"), Modules: BootModules, Files: map[string]string{"silent": r.odd}, Plan: text}
	require.NoError(t, in.Write(initramfs, r.kernel))
	return Machine{Kernel: r.image, Initramfs: initramfs, Disk: filepath.Join(r.dir, "root.ext4"), Memory: 512, Dir: dir}
}

// nothing asserts that of a machine its console and what the test made is left, and no process.
func nothing(t *testing.T, m Machine) {
	t.Helper()
	entries, err := os.ReadDir(m.Dir)
	require.NoError(t, err)
	for _, e := range entries {
		require.Contains(t, []string{"initramfs", "console.log"}, e.Name())
	}
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range found {
		b, _ := os.ReadFile(path)
		require.NotContains(t, string(b), m.Dir+"/", path)
	}
}

func TestAGuestThatIsDoneIsAndNoOtherOne(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		end, append string
		// says is in the error; console: the guest's own words about its end are, too.
		says, console string
	}{
		{end: "well"},
		{end: "fail", says: "odd=3"},
		{end: "panic", says: "guest-reset", console: "sysrq triggered crash"},
		{end: "lie", says: "guest-reset", console: "sysrq triggered crash"},
		{end: "reset", says: "guest-reset", console: "its console ends"},
		{end: "off", says: "does not say that it is done", console: "its console ends"},
		{end: "hang", says: context.Canceled.Error(), console: "its console ends"},
		{end: "silent", append: "rdinit=/silent", says: "never said anything", console: "its console ends"},
		{end: "no-init", append: "rdinit=/none init=/none", says: "guest-reset", console: "Kernel panic"},
	} {
		t.Run(c.end, func(t *testing.T) {
			t.Parallel() // so that guests run beside each other, and each is answered for itself
			m := r.machine(t, c.end)
			m.Append = c.append
			if c.end == "silent" {
				m.Quiet = 10 * time.Second
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var said []string
			done, err := m.Boot(ctx, func(line string) {
				said = append(said, line)
				if c.end == "hang" && strings.HasPrefix(line, "hello") {
					cancel()
				}
			})
			if c.end != "silent" && c.end != "no-init" {
				require.Equal(t, []string{plan.Begin + "odd", "hello from " + c.end}, said, "what was said before is there, and nothing of another guest: %v", err)
			}
			if c.console == "" {
				require.NoError(t, err)
				require.Equal(t, "odd="+map[bool]string{true: "0", false: "3"}[c.end == "well"], done)
			} else {
				require.ErrorContains(t, err, c.says)
				require.ErrorContains(t, err, c.console)
				require.Empty(t, done)
			}
			require.FileExists(t, filepath.Join(m.Dir, "console.log"))
			nothing(t, m)
		})
	}
}

// kernelText is the ELF of no kernel, but one that says its version.
func kernelText(version string) []byte {
	return []byte("\x7fELF\x00Linux version " + version + " (somebody@somewhere) (gcc)\x00and so on")
}

func TestAKernelOfOnesOwnIsUsedFromWhereItIs(t *testing.T) {
	const version = "6.9.0-mine"
	image := filepath.Join(t.TempDir(), "vmlinux")
	require.NoError(t, os.WriteFile(image, kernelText(version), 0o600))
	k, err := OwnKernel(t.TempDir(), image, "")
	require.NoError(t, err)
	require.Equal(t, version, k.Version, "its own word, which what older kernels lack is judged by")
	path, err := k.Image()
	require.NoError(t, err)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, kernelText(version), b)
	paths, err := k.modulePaths(Modules)
	require.NoError(t, err)
	require.Empty(t, paths, "a kernel without modules has what it needs built in")

	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err = w.Write(kernelText(version))
	require.NoError(t, errors.Join(err, w.Close()))
	require.NoError(t, os.WriteFile(image, bzImage(packed.Bytes()), 0o600))
	k, err = OwnKernel(t.TempDir(), image, "")
	require.NoError(t, err)
	require.Equal(t, version, k.Version)
}

// A real module says which kernel it is of; one of another kernel would fail in the guest, minutes later.
func TestModulesOfAnotherKernelAreRefusedAndThoseOfTheSameFound(t *testing.T) {
	testkit.Need(t, testkit.Program("modprobe"), testkit.Program("modinfo"))
	f := fetched(t)
	modules := filepath.Join(f.Cache, "k", "lib", "modules", f.Version)
	image := filepath.Join(t.TempDir(), "vmlinux")
	require.NoError(t, os.WriteFile(image, kernelText("6.9.0-mine"), 0o600))
	_, err := OwnKernel(t.TempDir(), image, modules)
	require.ErrorContains(t, err, "are those of Linux "+f.Version+", and the kernel KERNEL is 6.9.0-mine")

	elf, err := f.Image()
	require.NoError(t, err)
	elsewhere := filepath.Join(t.TempDir(), "modules") // under any name
	require.NoError(t, os.Symlink(modules, elsewhere))
	k, err := OwnKernel(t.TempDir(), elf, elsewhere)
	require.NoError(t, err)
	require.Equal(t, f.Version, k.Version)
	paths, err := k.modulePaths([]string{"overlay"})
	require.NoError(t, err)
	require.NotEmpty(t, paths)
}

func TestWhatIsNoKernelOfOnesOwnIsRefusedWithWhatToName(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		return path
	}
	good := write("vmlinux", kernelText("6.9.0-mine"))
	for _, c := range []struct{ name, image, modules, says string }{
		{"none is named", "", "", "KERNEL=/path/to/vmlinuz"},
		{"it is not there", filepath.Join(dir, "none"), "", "KERNEL: open " + filepath.Join(dir, "none")},
		{"it is a folder", dir, "", "is a directory"},
		{"it is something else", write("text", bytes.Repeat([]byte("text "), 1000)), "", "name a vmlinuz"},
		{"it is another program", write("program", []byte("\x7fELF and so on")), "", "no Linux kernel"},
		{"the modules are not there", good, filepath.Join(dir, "none"), "MODULES: open " + filepath.Join(dir, "none")},
		{"the modules have no index", good, dir, "run depmod"},
	} {
		_, err := OwnKernel(t.TempDir(), c.image, c.modules)
		require.ErrorContains(t, err, c.says, c.name)
	}
}

// A module is unpacked however its distribution packs it: the guest's init hands the kernel what it takes.
func TestModulesAreUnpackedHoweverTheyArePacked(t *testing.T) {
	dir := t.TempDir()
	for ext, program := range unpackers {
		testkit.Need(t, testkit.Program(program))
		path := filepath.Join(dir, "a.ko"+ext)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "a.ko"), []byte("a module"), 0o600))
		require.NoError(t, Run("sh", "-c", program+" -q -c < "+filepath.Join(dir, "a.ko")+" > "+path))
		b, err := readModule(path)
		require.NoError(t, err)
		require.Equal(t, "a module", string(b), ext)
	}
	b, err := readModule(filepath.Join(dir, "a.ko"))
	require.NoError(t, err)
	require.Equal(t, "a module", string(b))
}

func TestAKernelThatWasNotFetchedIsAnErrorThatSaysHow(t *testing.T) {
	cache := t.TempDir()
	l := Listed{Name: "6.1-cloud"}
	_, err := l.Fetched(cache)
	require.ErrorContains(t, err, "scripts/kernels.sh")
	text := "6.1-cloud\t6.1.0-57-cloud-amd64\tbookworm-security\tlinux-image-6.1.0-57-cloud-amd64\t6.1.192-3\tabc\nbroken\tline\n"
	require.NoError(t, os.WriteFile(filepath.Join(cache, "manifest.tsv"), []byte(text), 0o600))
	f, err := l.Fetched(cache)
	require.NoError(t, err)
	require.Equal(t, "6.1.0-57-cloud-amd64", f.Version)
	require.Equal(t, []Package{{"bookworm-security", "linux-image-6.1.0-57-cloud-amd64", "6.1.192-3", "abc"}}, f.Packages)
	_, err = Listed{Name: "broken"}.Fetched(cache)
	require.Error(t, err)
	always := 0
	for _, l := range List() {
		if l.Always {
			always++
		}
	}
	require.Equal(t, 4, always, "5.10, 6.1, 6.12 and the newest are in every run")
}
