package kata

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Answer is what a check came to.
type Answer string

// Inconclusive: it could not be told now; the remedy says what to do to find out.
const (
	Yes          Answer = "yes"
	No           Answer = "no"
	Inconclusive Answer = "inconclusive"
)

// Item is one thing that Kata needs of a node.
type Item struct {
	// Name is "shim", "config", "kvm", "vhost", "vhost-net", "vhost-vsock", "tun", "kernel", "image", "vmm", "virtiofsd" or "hugepages".
	Name   string
	Answer Answer
	// Purpose says what it is for; Detail what was seen; Remedy what to do, empty when the answer is yes.
	Purpose, Detail, Remedy string
}

func (it Item) yes(detail string) Item { it.Answer, it.Detail = Yes, detail; return it }
func (it Item) no(err error, remedy string) Item {
	it.Answer, it.Detail, it.Remedy = No, err.Error(), remedy
	return it
}
func (it Item) unsure(err error, remedy string) Item {
	it.Answer, it.Detail, it.Remedy = Inconclusive, err.Error(), remedy
	return it
}

// Report is the KATA part of a node check.
type Report struct {
	Shim     ShimInfo
	Config   Config
	Items    []Item
	Findings []Finding
}

// Err is nil when a sandbox may be started with Kata here. Otherwise it names everything that stands in the way, with its
// remedy. What is inconclusive does not stand in the way: a VM that can't start is an error of its own.
func (r Report) Err() error {
	var all []error
	for _, it := range r.Items {
		if it.Answer == No {
			all = append(all, fmt.Errorf("kata needs %s (%s): %s; %s", it.Name, it.Purpose, it.Detail, it.Remedy))
		}
	}
	return errors.Join(append(all, Refused(r.Findings))...)
}

// Check looks at everything that Kata needs. It starts no VM beyond one that runs a single instruction, takes well
// under a second, and changes nothing. ctx ends the asking of the shim for its version.
func Check(ctx context.Context, p Places) Report {
	var r Report
	r.add(tryKVM(p.dev("kvm")), "runs the guest")
	shim, err := Find(ctx, p)
	r.Shim = shim
	item := Item{Name: "shim"}
	if err != nil {
		r.add(item.no(err, "install Kata Containers "+oldest.String()+" or newer"), "what containerd starts for a sandbox")
		r.devices(p, Config{Hypervisor: "qemu"}) // the default of every installer, and the one that needs most
		return r
	}
	r.add(item.yes(fmt.Sprintf("%s, %s %s", shim.Path, shim.Flavour, shim.Version)), "what containerd starts for a sandbox")
	r.Config, err = p.readConfig(shim)
	item = Item{Name: "config"}
	if err != nil {
		r.add(item.no(err, "mend the configuration: it is judged before it is used"), "what the shim does")
		r.Findings = JudgeVersion(shim.Flavour, shim.Version, "")
		r.devices(p, Config{Hypervisor: "qemu"})
		return r
	}
	r.add(item.yes(fmt.Sprintf("%s and %d drop-ins, hypervisor %s", r.Config.Path, len(r.Config.DropIns), r.Config.Hypervisor)), "what the shim does")
	r.devices(p, r.Config)
	r.files(r.Config)
	r.hugepages(p, r.Config)
	r.Findings = Judge(shim, r.Config)
	return r
}

// CheckFiles says whether the programs and files that a configuration names are there and root's alone: without them no VM starts,
// and what one leaves can't be told.
func CheckFiles(c Config) error {
	var r Report
	r.files(c)
	return r.Err()
}

func (p Places) readConfig(shim ShimInfo) (Config, error) {
	path, err := FindConfig(p, shim)
	if err != nil {
		return Config{}, err
	}
	return ReadConfig(path, shim.Flavour)
}

func (p Places) dev(name string) string {
	if p.Dev == "" {
		return filepath.Join("/dev", name)
	}
	return filepath.Join(p.Dev, name)
}

func (p Places) sys(name string) string {
	if p.Sys == "" {
		return filepath.Join("/sys", name)
	}
	return filepath.Join(p.Sys, name)
}

func (r *Report) add(it Item, purpose string) {
	it.Purpose = purpose
	r.Items = append(r.Items, it)
}

func (r *Report) devices(p Places, c Config) {
	it := Item{Name: "vhost"}
	if _, err := os.Stat(p.sys("module/vhost")); err != nil {
		// Built in without parameters it has no such folder: the devices below say more.
		it = it.unsure(err, "modprobe vhost")
	} else {
		it = it.yes("the module is there")
	}
	r.add(it, "lets the kernel serve the guest's devices")
	if !c.DisableVhostNet {
		r.add(device("vhost-net", p.dev("vhost-net"), "vhost_net"), "the guest's network")
	}
	if !c.HybridVsock() {
		r.add(device("vhost-vsock", p.dev("vhost-vsock"), "vhost_vsock"), "the way to the guest's agent")
	}
	r.add(device("tun", p.dev("net/tun"), "tun"), "the guest's network interface")
}

// device opens a device as the VMM would. Opening these makes nothing that outlives the descriptor.
func device(name, path, module string) Item {
	it := Item{Name: name}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return it.unsure(&os.PathError{Op: "open", Path: path, Err: err}, "free what is in use and check again")
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return it.no(&os.PathError{Op: "open", Path: path, Err: err}, "modprobe "+module)
	case err != nil:
		return it.no(&os.PathError{Op: "open", Path: path, Err: err}, "let the agent open it: run it as root, and let its device cgroup have "+path)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return it.no(fmt.Errorf("%s is no character device", path), "remove it, and modprobe "+module)
	}
	return it.yes(path + " opens")
}

func (r *Report) files(c Config) {
	r.file("kernel", c.Kernel, "the guest's kernel")
	if c.Initrd != "" {
		r.file("image", c.Initrd, "the guest's own root file system")
	} else {
		r.file("image", c.Image, "the guest's own root file system")
	}
	if !c.VMMInShim() {
		r.file("vmm", c.VMM, "the virtual machine's process")
	}
	if c.SharedFS == "virtio-fs" {
		r.file("virtiofsd", c.VirtioFSDaemon, "serves the worktree to the guest")
	}
}

func (r *Report) file(name, path, purpose string) {
	it := Item{Name: name}
	if path == "" {
		r.add(it.unsure(errors.New("the configuration does not name it; the shim takes a path from when it was built"), "set it in the configuration"), purpose)
		return
	}
	real, err := regular(path)
	if err == nil {
		err = unix.Faccessat(unix.AT_FDCWD, real, unix.R_OK, unix.AT_EACCESS)
	}
	if err != nil {
		r.add(it.no(fmt.Errorf("%s: %w", path, err), "install it again, as root's own, or mend the path in the configuration"), purpose)
		return
	}
	r.add(it.yes(real), purpose)
}

// hugepages looks for one free huge page, only where the configuration wants them: without any, no VM starts.
func (r *Report) hugepages(p Places, c Config) {
	if !c.HugePages {
		return
	}
	it := Item{Name: "hugepages"}
	const purpose = "the guest's memory (enable_hugepages is set)"
	sizes, err := filepath.Glob(p.sys("kernel/mm/hugepages/hugepages-*/free_hugepages"))
	if err != nil || len(sizes) == 0 {
		r.add(it.no(errors.New("this kernel has no huge pages"), "set enable_hugepages = false"), purpose)
		return
	}
	free := 0
	for _, f := range sizes {
		data, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
		free += n
	}
	if free == 0 {
		r.add(it.no(errors.New("none is free"), "set vm.nr_hugepages, or enable_hugepages = false"), purpose)
		return
	}
	r.add(it.yes(fmt.Sprintf("%d free", free)), purpose)
}
