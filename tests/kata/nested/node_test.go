package nested

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// The release that nodes and guests run, and the flavour of its build.
const (
	release = "6.12"
	flavour = "-cloud-"
)

// quick leaves out of a kernel what an emulated processor has no use for, and what takes it long.
const quick = "mitigations=off random.trust_cpu=on rcupdate.rcu_expedited=1 nokaslr no_timer_check"

// processor is everything that qemu emulates but CMPXCHG16B. Where that is interrupted by the end of a guest's turn, qemu 7.2 loses the
// flags, and a kernel that uses it for its memory panics, now and then.
const processor = "max,-cx16"

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

// guestModules are what a guest on a node has.
var guestModules = []string{"virtio_pci", "virtiofs", "virtio_net", "vmw_vsock_virtio_transport", "vsock_loopback"}

// parts are what a node is made of.
type parts struct {
	kernel vm.Kernel
	image  string // the kernel's ELF
	init   string
	// bare is a root file system that every node has: Debian's programs, the product, containerd and runc.
	bare vm.Root
}

// prepare makes what the nodes share, in the folder dir; the working directory is the module's.
func prepare(dir string, k vm.Kernel) (p parts, err error) {
	p = parts{kernel: k, init: filepath.Join(dir, "init"), bare: vm.Root{Dir: filepath.Join(dir, "bare")}}
	if p.image, err = k.Image(); err != nil {
		return p, err
	}
	for _, add := range []func() error{
		func() error { return vm.BuildInit(p.init) },
		p.bare.Fill,
		p.bare.AddProduct,
		func() error { return addRuntimes(p.bare) },
	} {
		if err := add(); err != nil {
			return p, fmt.Errorf("making the nodes' root file system: %w", err)
		}
	}
	return p, nil
}

// node is one machine, and what it is to do.
type node struct {
	dir     string // its own
	suite   string
	args    []string // of the suite's program
	env     []string
	modules []string // beyond vm.Modules
	// optional are left out where the kernel does not have them.
	optional []string
	memory   int // MiB
	// add, unless nil, puts more on its disk.
	add func(p parts, stage vm.Root) error
}

// machine makes the node's disk and its initramfs.
func (n node) machine(p parts) (vm.Machine, error) {
	m := vm.Machine{
		Kernel: p.image, Initramfs: filepath.Join(n.dir, "initramfs"), Disk: filepath.Join(n.dir, "root.ext4"), Dir: n.dir,
		Memory: n.memory, CPUs: 1, CPU: processor, Append: quick,
	}
	if *again {
		return m, nil
	}
	stage := vm.Root{Dir: filepath.Join(n.dir, "root")}
	if err := vm.Run("cp", "-al", p.bare.Dir, stage.Dir); err != nil {
		return m, err
	}
	defer os.RemoveAll(stage.Dir)
	if n.add != nil {
		if err := n.add(p, stage); err != nil {
			return m, err
		}
	}
	run, err := stage.AddSuite(n.suite, n.args...)
	if err != nil {
		return m, err
	}
	if err := stage.Image(m.Disk); err != nil {
		return m, err
	}
	text, err := json.Marshal(plan.Plan{Controllers: []string{"cpuset", "cpu", "io", "memory", "pids"}, Env: append(vm.Env(), n.env...), Runs: []plan.Run{run}})
	if err != nil {
		return m, err
	}
	return m, vm.Initramfs{Init: p.init, Modules: append(n.modules, vm.Modules...), Optional: n.optional, Plan: text}.Write(m.Initramfs, p.kernel)
}

// addRuntimes puts what scripts/containerd.sh has built on the node, and a script of that name that says where.
func addRuntimes(stage vm.Root) error {
	for part, programs := range map[string][]string{"containerd": {"containerd", "containerd-shim-runc-v2"}, "runc": {"runc"}} {
		folder, err := builtFolder(part)
		if err != nil {
			return err
		}
		to := stage.Path("/opt/" + part)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		for _, name := range programs {
			program := filepath.Join(folder, name)
			if err := vm.Run("cp", program, to); err != nil {
				return err
			}
			for _, library := range vm.Linked(program) {
				if err := stage.File(library); err != nil {
					return err
				}
			}
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

// addKata puts the VMM, the shim, its configuration, and kernel and initramfs of the guests on the node.
func addKata(p parts, stage vm.Root) error {
	if err := addVMM(stage); err != nil {
		return err
	}
	guest := stage.Path("/opt/guest")
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
	if err := vm.Run("cp", p.image, stage.Path(kataKernel)); err != nil {
		return err
	}
	runc, err := builtFolder("runc")
	if err != nil {
		return err
	}
	files := vm.Linked(filepath.Join(runc, "runc"))
	files["usr/bin/runc"] = filepath.Join(runc, "runc")
	ip, err := exec.LookPath("ip")
	if err != nil {
		return fmt.Errorf("%w: install iproute2", err)
	}
	maps.Copy(files, vm.Linked(ip))
	files["usr/bin/ip"] = ip
	return vm.Initramfs{Init: guest, Modules: guestModules, Files: files}.Write(stage.Path(kataInitrd), p.kernel)
}
