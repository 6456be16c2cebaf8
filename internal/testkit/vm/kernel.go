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
	"slices"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// Modules are what a guest loads, where its kernel does not have it built in: the disk and the result port, what a
// node gets through modprobe by itself, and what a node that hosts VMs has (the emulated processor is AMD's, with SVM).
var Modules = []string{"virtio_pci", "virtio_blk", "virtio_console", "ext4", "tcp_diag", "udp_diag", "veth", "kvm_amd", "vhost_vsock", "vsock_loopback"}

// NetworkModules are what a node's networks load; kernels differ in which of them they have.
var NetworkModules = []string{
	"bridge", "nf_tables", "nf_conntrack_netlink", "nfnetlink_log", "nft_ct", "nft_fib_inet", "nft_fib_netdev", "nft_reject_inet", "nft_reject_netdev",
	"nft_nat", "nft_masq", "nft_chain_nat", "nft_log", "nft_limit", "nft_quota", "nft_connlimit", "nft_objref",
}

// Kernel is one in a cache that scripts/kernels.sh has filled, or one's own.
type Kernel struct {
	Cache, Version string
	// Monolithic: it has no modules, or none that a guest is to load.
	Monolithic bool
}

// OwnKernel is a kernel from elsewhere: its vmlinuz (or vmlinux), and the folder of its modules, as depmod(8) left it in
// lib/modules; empty: all that a guest needs is built in. cache is an empty folder for what is made of it.
func OwnKernel(cache, image, modules string) (Kernel, error) {
	k := Kernel{Cache: cache, Version: "own", Monolithic: modules == ""}
	tree := filepath.Join(cache, "k", "lib", "modules")
	if err := errors.Join(os.MkdirAll(tree, 0o755), os.MkdirAll(filepath.Join(cache, "k", "boot"), 0o755)); err != nil {
		return k, err
	}
	links := map[string]string{}
	if modules != "" {
		k.Version = filepath.Base(modules)
		links[filepath.Join(tree, k.Version)] = modules
		if _, err := os.Stat(filepath.Join(modules, "modules.dep")); err != nil {
			return k, fmt.Errorf("the modules of %s: %w: name the folder lib/modules/VERSION, and run depmod for it", image, err)
		}
	}
	links[filepath.Join(cache, "k", "boot", "vmlinuz-"+k.Version)] = image
	for link, target := range links {
		target, err := filepath.Abs(target)
		if err == nil {
			_, err = os.Stat(target)
		}
		if err != nil {
			return k, err
		}
		if err := os.Symlink(target, link); err != nil {
			return k, err
		}
	}
	return k, nil
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
	path := filepath.Join(k.Cache, "k", "vmlinux-"+k.Version)
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
	elf := b
	if !bytes.HasPrefix(b, []byte("\x7fELF")) {
		elf, err = unpack(b)
	}
	if err != nil {
		return "", fmt.Errorf("kernel %s: %w", k.Version, err)
	}
	if err := os.WriteFile(path+"~", elf, 0o644); err != nil {
		return "", err
	}
	return path, os.Rename(path+"~", path)
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
		name := "modules/" + strings.TrimSuffix(filepath.Base(m), ".xz")
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

func readModule(path string) ([]byte, error) {
	if !strings.HasSuffix(path, ".xz") {
		return os.ReadFile(path)
	}
	b, err := exec.Command("xz", "-dc", path).Output()
	if err != nil {
		return nil, fmt.Errorf("unpacking %s: %w", path, err)
	}
	return b, nil
}
