package vm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// BootModules are what a guest can't do without, where its kernel does not have it built in: the disk and the result port.
var BootModules = []string{"virtio_pci", "virtio_blk", "virtio_console", "ext4"}

// NodeModules are what a node gets through modprobe by itself, and what a node that hosts VMs has (the emulated processor is
// AMD's, with SVM). Debian's kernels have them all.
var NodeModules = []string{"tcp_diag", "udp_diag", "veth", "kvm_amd", "vhost_vsock", "vsock_loopback"}

// Modules are both.
var Modules = slices.Concat(BootModules, NodeModules)

// TapModules are what leads a machine's frames to the network of a sandbox, as Kata does. Debian's kernels have them all.
var TapModules = []string{"tun", "sch_ingress", "cls_u32", "act_mirred"}

// NetworkModules are what a node's networks load; kernels differ in which of them they have.
var NetworkModules = []string{
	"bridge", "nf_tables", "nf_conntrack_netlink", "nfnetlink_log", "nft_ct", "nft_fib_inet", "nft_fib_netdev", "nft_reject_inet", "nft_reject_netdev",
	"nft_meta_bridge", "nft_reject_bridge", "nf_conntrack_bridge",
	"nft_nat", "nft_masq", "nft_chain_nat", "nft_log", "nft_limit", "nft_quota", "nft_connlimit", "nft_objref",
}

// Kernel is one in a cache that scripts/kernels.sh has filled, or one's own.
type Kernel struct {
	Cache, Version string
	// Monolithic: it has no modules, or none that a guest is to load.
	Monolithic bool
	// Own: it is somebody's own, and need not have what Debian's have.
	Own bool
}

// OwnKernel is a kernel from elsewhere: its vmlinuz (or vmlinux), and the folder of its modules, as depmod(8) left it in
// lib/modules; empty: all that a guest needs is built in. cache is an empty folder for what is made of it. An error says what is
// wrong with which of the two.
func OwnKernel(cache, image, modules string) (Kernel, error) {
	k := Kernel{Cache: cache, Monolithic: modules == "", Own: true}
	if image == "" {
		return k, errors.New("no kernel is named: KERNEL=/path/to/vmlinuz, and MODULES=/path/to/lib/modules/VERSION where it has modules")
	}
	b, err := os.ReadFile(image)
	if err != nil {
		return k, fmt.Errorf("the kernel KERNEL: %w", err)
	}
	elf, err := unpacked(b)
	if err != nil {
		return k, fmt.Errorf("the kernel KERNEL, %s: %w: name a vmlinuz (bzImage) or vmlinux", image, err)
	}
	if k.Version = release(elf); k.Version == "" {
		return k, fmt.Errorf("the kernel KERNEL, %s, does not say its version: it is no Linux kernel", image)
	}
	if err := errors.Join(os.MkdirAll(filepath.Join(cache, "k", "lib", "modules"), 0o755), os.WriteFile(k.elf(), elf, 0o644)); err != nil {
		return k, err
	}
	if modules == "" {
		return k, nil
	}
	return k, k.useModules(modules)
}

// useModules has the modules of a folder be the kernel's own, if they are.
func (k Kernel) useModules(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	dep, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return fmt.Errorf("the modules MODULES: %w: name the folder lib/modules/VERSION, and run depmod for it", err)
	}
	if first, _, found := strings.Cut(string(dep), ":"); found {
		magic, err := exec.Command("modinfo", "-F", "vermagic", filepath.Join(dir, first)).Output()
		if err != nil {
			return fmt.Errorf("the modules MODULES, %s: reading %s with modinfo: %w", dir, first, err)
		}
		if of, _, _ := strings.Cut(strings.TrimSpace(string(magic)), " "); of != k.Version {
			return fmt.Errorf("the modules MODULES, %s, are those of Linux %s, and the kernel KERNEL is %s: name those of the same build", dir, of, k.Version)
		}
	}
	return os.Symlink(dir, filepath.Join(k.Cache, "k", "lib", "modules", k.Version))
}

// banner is what each kernel's image has of its version (init/version.c).
var banner = regexp.MustCompile(`Linux version (\d[^\s(]*) \(`)

// release is the version of a kernel's ELF, as uname(1) gives it; empty: it is no kernel's.
func release(elf []byte) string {
	if m := banner.FindSubmatch(elf); m != nil {
		return string(m[1])
	}
	return ""
}

// Kernels are those in the cache whose version begins with one of the prefixes; without prefixes all. Those of the
// cloud flavour, which are the smallest, come first.
func Kernels(cache string, prefixes []string) ([]Kernel, error) {
	entries, err := os.ReadDir(filepath.Join(cache, "k", "lib", "modules"))
	if err != nil {
		return nil, fmt.Errorf("looking for kernels: %w: fetch them with scripts/kernels.sh", err)
	}
	var cloud, others []Kernel
	for _, e := range entries {
		match := func(p string) bool { return strings.HasPrefix(e.Name(), p+".") || e.Name() == p }
		if len(prefixes) == 0 || slices.ContainsFunc(prefixes, match) {
			k := Kernel{Cache: cache, Version: e.Name()}
			if strings.Contains(k.Version, "-cloud-") {
				cloud = append(cloud, k)
			} else {
				others = append(others, k)
			}
		}
	}
	out := append(cloud, others...)
	if len(out) == 0 {
		return nil, fmt.Errorf("none of the kernels in %s has the version %s", cache, strings.Join(prefixes, " or "))
	}
	return out, nil
}

// Image is the path of the kernel's ELF, unpacked once: under emulation that takes longer than all the rest of a boot.
func (k Kernel) Image() (string, error) {
	path := k.elf()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	b, err := os.ReadFile(filepath.Join(k.Cache, "k", "boot", "vmlinuz-"+k.Version))
	if errors.Is(err, os.ErrNotExist) {
		b, err = os.ReadFile(filepath.Join(k.Cache, "k", "lib", "modules", k.Version, "vmlinuz")) // since 7.0
	}
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w", k.Version, err)
	}
	elf, err := unpacked(b)
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w", k.Version, err)
	}
	if err := os.WriteFile(path+"~", elf, 0o644); err != nil {
		return "", err
	}
	return path, os.Rename(path+"~", path)
}

func (k Kernel) elf() string { return filepath.Join(k.Cache, "k", "vmlinux-"+k.Version) }

// unpacked is the ELF of an image that is one, or has one packed.
func unpacked(image []byte) ([]byte, error) {
	if bytes.HasPrefix(image, []byte("\x7fELF")) {
		return image, nil
	}
	return unpack(image)
}

// unpack takes the ELF out of a bzImage (the kernel's Documentation/arch/x86/boot.rst: setup_sects at 0x1f1,
// payload_offset and payload_length at 0x248).
func unpack(b []byte) ([]byte, error) {
	const header = 0x250
	if len(b) < header {
		return nil, errors.New("its image is cut short")
	}
	sects := int(b[0x1f1])
	if sects == 0 {
		sects = 4
	}
	start := (sects+1)*512 + int(binary.LittleEndian.Uint32(b[0x248:]))
	end := start + int(binary.LittleEndian.Uint32(b[0x24c:]))
	if start > end || end > len(b) {
		return nil, errors.New("its image is cut short")
	}
	payload := b[start:end]
	for magic, program := range map[string][]string{
		"\x02!L\x18": {"lz4", "-dc"}, "\xfd7zXZ\x00": {"xz", "-dc", "--single-stream"}, "\x28\xb5\x2f\xfd": {"zstd", "-dc"}, "\x1f\x8b": {"gzip", "-dc"},
	} {
		if !bytes.HasPrefix(payload, []byte(magic)) {
			continue
		}
		cmd := exec.Command(program[0], program[1:]...)
		cmd.Stdin = bytes.NewReader(payload)
		out, err := cmd.Output()
		// The size that the kernel's build appends is trailing garbage for the program.
		if !bytes.HasPrefix(out, []byte("\x7fELF")) {
			return nil, fmt.Errorf("unpacking its image with %s: %w", program[0], err)
		}
		return out, nil
	}
	return nil, errors.New("its image is packed in an unknown way")
}

// modulePaths are the files of modules and of what they depend on, in the order in which they are loaded.
func (k Kernel) modulePaths(modules []string) ([]string, error) {
	if k.Monolithic {
		return nil, nil
	}
	var out []string
	for _, m := range modules {
		b, err := exec.Command("modprobe", "-d", filepath.Join(k.Cache, "k"), "-S", k.Version, "--show-depends", m).Output()
		if err != nil {
			return nil, fmt.Errorf("kernel %s: finding the module %s: %w", k.Version, m, err)
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) > 1 && f[0] == "insmod" && !slices.Contains(out, f[1]) {
				out = append(out, f[1])
			}
		}
	}
	return out, nil
}

// Initramfs is what one holds.
type Initramfs struct {
	// Init is the path of the init, a static program.
	Init string
	// Modules are the names of kernel modules; what they depend on comes with them. The init finds their files, in the order in
	// which they are to be loaded, in plan.Order.
	Modules []string
	// Optional are modules that are left out where the kernel does not have them.
	Optional []string
	// Files are more programs: the name in the initramfs, without a leading slash, and the path here.
	Files map[string]string
	// Plan is the content of plan.Path; nil: there is none.
	Plan []byte
}

// Write writes an initramfs for the kernel.
func (i Initramfs) Write(path string, k Kernel) error {
	modules := slices.Clone(i.Modules)
	for _, m := range i.Optional {
		if _, err := k.modulePaths([]string{m}); err == nil {
			modules = append(modules, m)
		}
	}
	paths, err := k.modulePaths(modules)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	c := &cpio{w: &b}
	c.dir(".") // its mode would be 0700 otherwise
	c.parents(slices.Concat([]string{"dev/.", "proc/.", "sys/.", "root/.", "modules/."}, slices.Sorted(maps.Keys(i.Files))))
	c.copyFile("init", i.Init, 0o755)
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		c.copyFile(name, i.Files[name], 0o755)
	}
	var order strings.Builder
	for _, m := range paths {
		content, err := readModule(m)
		if err != nil {
			return err
		}
		file := filepath.Base(m)
		name := "modules/" + file[:strings.LastIndex(file, ".ko")+len(".ko")]
		c.file(name, 0o644, content)
		fmt.Fprintln(&order, "/"+name)
	}
	c.file(strings.TrimPrefix(plan.Order, "/"), 0o644, []byte(order.String()))
	if i.Plan != nil {
		c.file(strings.TrimPrefix(plan.Path, "/"), 0o644, i.Plan)
	}
	if err := c.close(); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

// unpackers are the programs for modules that are packed: distributions differ in how.
var unpackers = map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"}

func readModule(path string) ([]byte, error) {
	program := unpackers[filepath.Ext(path)]
	if program == "" {
		return os.ReadFile(path)
	}
	b, err := exec.Command(program, "-dc", path).Output()
	if err != nil {
		return nil, fmt.Errorf("unpacking %s: %w: install %s", path, err, program)
	}
	return b, nil
}
