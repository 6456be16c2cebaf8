// Command nested runs the tests of sandboxes in Kata's virtual machines (tests/kata/vm) across a real boundary of one, as "make
// test-kata-vm" calls it, on a machine that has neither KVM nor Kata:
//
//	go run ./tests/kata/nested [-run PATTERN] [-dir FOLDER]
//
// A guest of Linux 6.12 under qemu's software emulation is the node: its emulated processor has virtualisation, so its KVM
// runs virtual machines. containerd, the agent and the tests run there. What stands for Kata is the tests' own shim
// (tests/kata/shim/vm), which boots a virtual machine for each sandbox with Debian's QEMU and virtiofsd.
// Nothing imports this package.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// The release that node and guests run.
const release = "6.12"

// Where the parts are on the node, as kata-deploy has them.
const (
	kataShim   = "/opt/kata/runtime-rs/bin/containerd-shim-kata-v2"
	kataKernel = "/opt/kata/share/kata-containers/vmlinux"
	kataInitrd = "/opt/kata/share/kata-containers/initrd"
	kataConfig = "/opt/kata/share/defaults/kata-containers/runtime-rs/configuration.toml"
	qemu       = "/usr/bin/qemu-system-x86_64"
	virtiofsd  = "/usr/lib/qemu/virtiofsd"
)

// configuration is what kata-deploy installs, as far as anything here looks at it. Without a cache in the guest each start of a
// program would read it again, through two kernels of which one is emulated.
const configuration = `[hypervisor.qemu]
path = "` + qemu + `"
kernel = "` + kataKernel + `"
initrd = "` + kataInitrd + `"
shared_fs = "virtio-fs"
virtio_fs_daemon = "` + virtiofsd + `"
virtio_fs_cache = "auto"
disable_vhost_net = true
enable_annotations = []

[runtime]
hypervisor_name = "qemu"
sandbox_cgroup_only = true
`

// nodeModules are what the node has beyond vm.Modules; guestModules what a guest on it has.
var (
	nodeModules  = []string{"tun", "fuse"}
	guestModules = []string{"virtio_pci", "virtiofs", "vmw_vsock_virtio_transport", "vsock_loopback"}
)

type options struct {
	cache, dir, run string
	timeout         time.Duration
	again           bool
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
	flag.BoolVar(&o.again, "again", false, "boot what an earlier run left in the scratch folder, and build nothing")
	flag.DurationVar(&o.timeout, "timeout", 15*time.Minute, "bound of the node")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := test(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "nested:", err)
		os.Exit(1)
	}
}

func test(ctx context.Context, o options) error {
	if runtime.GOARCH != "amd64" {
		return fmt.Errorf("node and guests are amd64's, and this machine is %s", runtime.GOARCH)
	}
	ks, err := vm.Kernels(o.cache, []string{release})
	if err != nil {
		return err
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("/var/tmp", "sandbox-agent-nested-"); err != nil {
			return err
		}
		defer os.RemoveAll(o.dir)
	}
	m, err := build(o, ks[0])
	if err != nil {
		return err
	}
	started := time.Now()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	c, err := m.Test(ctx)
	fmt.Printf("%s%s%s: %d passed, %d failed, %d skipped in %s\n", c.Shown(), c.Skips(), ks[0].Version, c.Passed, c.Failed, c.Skipped, time.Since(started).Round(time.Second))
	if err == nil && (c.Passed == 0 || c.Skipped > 0) {
		err = fmt.Errorf("tests were left out, which run nowhere else")
	}
	return err
}

// build makes the node: its disk, with the guests' kernel and initramfs on it, and its own initramfs.
func build(o options, k vm.Kernel) (vm.Machine, error) {
	m := vm.Machine{Initramfs: filepath.Join(o.dir, "initramfs"), Disk: filepath.Join(o.dir, "root.ext4"), Memory: 3072, Dir: o.dir}
	var err error
	if m.Kernel, err = k.Image(); err != nil {
		return m, err
	}
	if o.again {
		return m, nil
	}
	stage := vm.Root{Dir: filepath.Join(o.dir, "root")}
	if err := os.RemoveAll(stage.Dir); err != nil {
		return m, err
	}
	if err := stage.Fill(); err != nil {
		return m, fmt.Errorf("making the node's root file system: %w", err)
	}
	for _, add := range []func() error{
		stage.AddProduct,
		func() error { return addRuntimes(stage) },
		func() error { return addVMM(stage) },
		func() error { return addKata(o, stage, k, m.Kernel) },
	} {
		if err := add(); err != nil {
			return m, err
		}
	}
	args := []string{"-test.timeout", o.timeout.String()}
	if o.run != "" {
		args = append(args, "-test.run", o.run)
	}
	suite, err := stage.AddSuite("tests/kata/vm", args...)
	if err != nil {
		return m, err
	}
	text, err := json.Marshal(plan.Plan{Controllers: []string{"cpuset", "cpu", "io", "memory", "pids"}, Env: vm.Env(), Runs: []plan.Run{suite}})
	if err != nil {
		return m, err
	}
	if err := stage.Image(m.Disk); err != nil {
		return m, err
	}
	init := filepath.Join(o.dir, "init")
	if err := vm.BuildInit(init); err != nil {
		return m, err
	}
	return m, vm.Initramfs{Init: init, Modules: append(nodeModules, vm.Modules...), Plan: text}.Write(m.Initramfs, k)
}

// addRuntimes puts what scripts/containerd.sh has built on the node, and a script of that name that says where.
func addRuntimes(stage vm.Root) error {
	for _, part := range []string{"containerd", "runc"} {
		folder, err := builtFolder(part)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(stage.Path("/opt/"+part), 0o755); err != nil {
			return err
		}
		if err := vm.Run("cp", filepath.Join(folder, part), stage.Path("/opt/"+part+"/"+part)); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(stage.Path("/src/scripts"), 0o755); err != nil {
		return err
	}
	const script = "#!/bin/sh\nshift\nfor part; do echo /opt/$part; done\n"
	return os.WriteFile(stage.Path("/src/scripts/containerd.sh"), []byte(script), 0o755)
}

func builtFolder(part string) (string, error) {
	out, err := exec.Command("scripts/containerd.sh", "-n", part).Output()
	if err != nil {
		return "", fmt.Errorf("looking for %s: %w: build it with make runtimes", part, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// addVMM puts QEMU and virtiofsd on the node, and what QEMU loads.
func addVMM(stage vm.Root) error {
	for _, program := range []string{qemu, virtiofsd} {
		if _, err := os.Stat(program); err != nil {
			return fmt.Errorf("%w: install qemu-system-x86", err)
		}
		if err := stage.Program(program); err != nil {
			return err
		}
	}
	for _, file := range []string{"/usr/share/qemu/pvh.bin", "/usr/share/qemu/linuxboot_dma.bin", "/usr/share/qemu/kvmvapic.bin", "/usr/share/seabios/bios-256k.bin"} {
		if err := stage.File(file); err != nil {
			return err
		}
	}
	return nil
}

// addKata puts the shim, its configuration, and kernel and initramfs of the guests on the node.
func addKata(o options, stage vm.Root, k vm.Kernel, image string) error {
	guest := filepath.Join(o.dir, "guest")
	for out, pkg := range map[string]string{stage.Path(kataShim): "./vm", guest: "./guest"} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
		cmd.Dir = "tests/kata/shim" // a module of its own
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if b, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("building the tests' shim: %w: %s", err, b)
		}
	}
	for _, path := range []string{kataConfig, kataKernel} {
		if err := os.MkdirAll(filepath.Dir(stage.Path(path)), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(stage.Path(kataConfig), []byte(configuration), 0o644); err != nil {
		return err
	}
	if err := vm.Run("cp", image, stage.Path(kataKernel)); err != nil {
		return err
	}
	runc, err := builtFolder("runc")
	if err != nil {
		return err
	}
	files := vm.Linked(filepath.Join(runc, "runc"))
	files["usr/bin/runc"] = filepath.Join(runc, "runc")
	return vm.Initramfs{Init: guest, Modules: guestModules, Files: files}.Write(stage.Path(kataInitrd), k)
}
