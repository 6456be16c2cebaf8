package kata

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Role is what a process does for a VM.
type Role string

// The roles. RoleOther are processes of the sandbox's cgroup, or below the shim, that are none of the three.
const (
	RoleShim      Role = "shim"
	RoleVMM       Role = "vmm"
	RoleVirtiofsd Role = "virtiofsd"
	RoleOther     Role = "other"
)

// Process is one process beyond doubt, for as long as the machine is up: pids are used again, a pid with its start time is not.
type Process struct {
	Role Role `json:"role"`
	Pid  int  `json:"pid"` // in the agent's PID namespace, which has to be the host's
	// StartTime is field 22 of /proc/PID/stat, clock ticks since boot.
	StartTime uint64 `json:"startTime"`
}

// Program is a file that is run, by what identifies it also once it has been replaced.
type Program struct {
	Role Role   `json:"role"`
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
}

// VM names everything of one VM on the host. It is written down before a VM is relied on, and waited for after.
type VM struct {
	SandboxID string    `json:"sandboxId"`
	BootID    string    `json:"bootId"`
	Processes []Process `json:"processes"`
	Programs  []Program `json:"programs"`
	// Cgroups are absolute folders that hold nothing but this VM's.
	Cgroups []string `json:"cgroups"`
}

// Lookup says where a VM's processes are looked for.
type Lookup struct {
	SandboxID string
	// ShimPid is the shim's, from its management socket (Shim.Pid) or from the file shim.pid of containerd's bundle. Never the pid
	// of a TaskExit or a task: the Rust shim gives its own there, the Go one the VMM's or none.
	ShimPid int
	// Config says which programs VMM and virtiofsd are.
	Config Config
	// Cgroups are absolute folders that hold nothing but this VM's. A cgroup that is not there is empty.
	Cgroups []string
	// Shim is the shim's program, which Sweep looks for.
	Shim string
	// VMDirs hold a folder for each VM, with QEMU's pid file; by default /run/vc/vm.
	VMDirs []string
}

// FindVM finds the processes of a running VM: the shim, what descends from it, what is in the sandbox's cgroups, and those
// that run the configured VMM or virtiofsd with this sandbox's id among their arguments or in QEMU's pid file (QEMU
// becomes a daemon: it descends from no shim). A name alone is never enough. An error wraps ErrNoVMM: its end could not be
// shown, so such a VM may not be used.
func FindVM(l Lookup) (VM, error) {
	vm, err := l.find()
	if err != nil {
		return VM{}, fmt.Errorf("sandbox %.130q: %w: %w", l.SandboxID, ErrNoVMM, err)
	}
	return vm, nil
}

func (l Lookup) find() (VM, error) {
	if err := CheckID(l.SandboxID); err != nil {
		return VM{}, err
	}
	boot, err := bootID()
	if err != nil {
		return VM{}, err
	}
	vm := VM{SandboxID: l.SandboxID, BootID: boot, Cgroups: slices.Clone(l.Cgroups)}
	if err := l.programs(&vm); err != nil {
		return VM{}, err
	}
	all, err := processes()
	if err != nil {
		return VM{}, err
	}
	found := map[int]bool{}
	descendants(all, l.ShimPid, found)
	if !found[l.ShimPid] {
		return VM{}, fmt.Errorf("no process %d, which should be its shim", l.ShimPid)
	}
	for _, dir := range l.Cgroups {
		pids, err := members(dir)
		if err != nil {
			return VM{}, err
		}
		for _, pid := range pids {
			found[pid] = true
		}
	}
	l.named(vm, all, found)
	return vm, l.record(&vm, all, found)
}

// named adds what runs one of the VM's programs, and by its arguments or by QEMU's pid file for this sandbox.
func (l Lookup) named(vm VM, all map[int]proc, found map[int]bool) {
	pidFile := l.pidFile()
	for pid, p := range all {
		role := vm.role(p)
		if role == RoleVMM && pid == pidFile || role != RoleOther && p.mentions(l.SandboxID) {
			found[pid] = true
		}
	}
}

// record fills in the processes, and refuses a set that lacks one, or that can't be a VM's.
func (l Lookup) record(vm *VM, all map[int]proc, found map[int]bool) error {
	have := map[Role]bool{}
	for _, pid := range slices.Sorted(maps.Keys(found)) {
		p, ok := all[pid]
		if !ok || p.kernel {
			continue // it has ended, or is the kernel's own (vhost) and ends with the VMM
		}
		if pid == 1 || pid == os.Getpid() || pid == os.Getppid() {
			return fmt.Errorf("process %d, which is not a VM's, is in its cgroup or below its shim", pid)
		}
		role := vm.role(p)
		if pid == l.ShimPid {
			role = RoleShim
		}
		have[role] = true
		vm.Processes = append(vm.Processes, Process{role, pid, p.start})
	}
	if !have[RoleShim] {
		return fmt.Errorf("process %d, which should be its shim, is the kernel's", l.ShimPid)
	}
	for _, p := range vm.Programs {
		if !have[p.Role] {
			return fmt.Errorf("no process of it runs the configured %s", p.Role)
		}
	}
	return nil
}

func (l Lookup) programs(vm *VM) error {
	if !l.Config.VMMInShim() {
		if err := vm.add(RoleVMM, l.Config.VMM); err != nil {
			return err
		}
	}
	if l.Config.SharedFS == "virtio-fs" {
		return vm.add(RoleVirtiofsd, l.Config.VirtioFSDaemon)
	}
	return nil
}

func (vm *VM) add(role Role, path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("the configured %s: %w", role, &os.PathError{Op: "stat", Path: path, Err: err})
	}
	vm.Programs = append(vm.Programs, Program{role, st.Dev, st.Ino})
	return nil
}

func (vm VM) role(p proc) Role {
	for _, program := range vm.Programs {
		if p.ino != 0 && p.dev == program.Dev && p.ino == program.Ino {
			return program.Role
		}
	}
	return RoleOther
}

// pidFile is the pid that QEMU wrote down for itself; 0 when there is none. It only points at a process: that one has
// to run the configured VMM.
func (l Lookup) pidFile() int {
	dirs := l.VMDirs
	if dirs == nil {
		dirs = []string{"/run/vc/vm"}
	}
	for _, dir := range dirs {
		data, err := readSmall(filepath.Join(dir, l.SandboxID, "pid"))
		if err != nil {
			continue
		}
		if pid, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
			return pid
		}
	}
	return 0
}

// EvidenceItem is one observation that a VM is gone.
type EvidenceItem struct {
	// Source is "shim_pidfd", "vmm_pidfd", "virtiofsd_pidfd", "other_pidfd", "cgroup_empty", "no_process_left" or "boot_id".
	Source     string    `json:"source"`
	Detail     string    `json:"detail"`
	ObservedAt time.Time `json:"observedAt"`
}

// Evidence is what was seen of a VM's end. Complete says that nothing is missing: every recorded process ended, the
// cgroups are empty, and no other process of this sandbox is left.
type Evidence struct {
	SandboxID string         `json:"sandboxId"`
	Items     []EvidenceItem `json:"items"`
	Complete  bool           `json:"complete"`
}

func (e *Evidence) add(source, format string, args ...any) {
	e.Items = append(e.Items, EvidenceItem{source, fmt.Sprintf(format, args...), time.Now()})
}

// Wait waits until the VM is gone and says what showed it. It kills nothing. A task's exit event, its status and an
// answer of containerd's count for nothing here: under some of Kata's modes a lost VM yields 255, or 0. Without complete
// evidence the error wraps ErrNoEvidence and says what is missing; what was seen is returned all the same.
func (vm VM) Wait(ctx context.Context) (Evidence, error) {
	ev := Evidence{SandboxID: vm.SandboxID}
	if err := vm.wait(ctx, &ev); err != nil {
		return ev, fmt.Errorf("sandbox %s: %w: %w", vm.SandboxID, ErrNoEvidence, err)
	}
	ev.Complete = true
	return ev, nil
}

func (vm VM) wait(ctx context.Context, ev *Evidence) error {
	boot, err := bootID()
	switch {
	case err != nil:
		return err
	case vm.BootID == "" || len(vm.Processes) == 0:
		return errors.New("its processes were never written down")
	case boot != vm.BootID:
		ev.add("boot_id", "the machine was started again: %s, then %s", vm.BootID, boot)
		return nil
	}
	if err := vm.awaitProcesses(ctx, ev); err != nil {
		return err
	}
	for _, dir := range vm.Cgroups {
		if err := awaitEmpty(ctx, dir); err != nil {
			return err
		}
		ev.add("cgroup_empty", "%s", dir)
	}
	return vm.nothingLeft(ev)
}

// awaitProcesses waits for all at once: what is missing should be said of each.
func (vm VM) awaitProcesses(ctx context.Context, ev *Evidence) error {
	results := make([]error, len(vm.Processes))
	done := make(chan struct{})
	for i, p := range vm.Processes {
		go func() {
			results[i] = ended(ctx, p)
			done <- struct{}{}
		}()
	}
	for range vm.Processes {
		<-done
	}
	for i, p := range vm.Processes {
		if results[i] == nil {
			ev.add(string(p.Role)+"_pidfd", "process %d, start time %d, has ended", p.Pid, p.StartTime)
		}
	}
	return errors.Join(results...)
}

func ended(ctx context.Context, p Process) error {
	pidfd, there, err := hold(p)
	if err != nil {
		return fmt.Errorf("%s, process %d: %w", p.Role, p.Pid, err)
	}
	if !there {
		return nil
	}
	defer pidfd.Close()
	if err := await(ctx, pidfd); err != nil {
		return fmt.Errorf("%s, process %d, has not ended: %w", p.Role, p.Pid, err)
	}
	return nil
}

// awaitEmpty waits for a cgroup's last process to leave. The kernel's own threads for the VM leave a moment after it; cgroup v1 tells of
// no event to wait for.
func awaitEmpty(ctx context.Context, dir string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		pids, err := members(dir)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cgroup %s still holds %v: %w", dir, pids, ctx.Err())
		case <-tick.C:
		}
	}
}

// nothingLeft looks once more over all processes: a VMM that was started after the others were written down would be missed.
func (vm VM) nothingLeft(ev *Evidence) error {
	all, err := processes()
	if err != nil {
		return err
	}
	for pid, p := range all {
		if vm.role(p) != RoleOther && p.mentions(vm.SandboxID) {
			return fmt.Errorf("process %d runs the %s with this sandbox's id; it was started later", pid, vm.role(p))
		}
	}
	ev.add("no_process_left", "no VMM and no virtiofsd of %s among %d processes", vm.SandboxID, len(all))
	return nil
}

// Sweep ends what runs of a sandbox whose processes were never written down, because its start was cut short: whatever runs
// the shim (Lookup.Shim), the configured VMM or virtiofsd with this sandbox's id among its arguments, or is named by QEMU's pid
// file. It answers after a look that finds none of them. The caller sees to it that nothing starts them again. An error wraps
// ErrNoEvidence.
func Sweep(ctx context.Context, l Lookup) (Evidence, error) {
	ev := Evidence{SandboxID: l.SandboxID}
	if err := l.sweep(ctx, &ev); err != nil {
		return ev, fmt.Errorf("sandbox %.130q: %w: %w", l.SandboxID, ErrNoEvidence, err)
	}
	ev.Complete = true
	return ev, nil
}

func (l Lookup) sweep(ctx context.Context, ev *Evidence) error {
	if err := CheckID(l.SandboxID); err != nil {
		return err
	}
	vm := VM{SandboxID: l.SandboxID}
	if err := l.programs(&vm); err != nil {
		return err
	}
	if l.Shim != "" {
		if err := vm.add(RoleShim, l.Shim); err != nil {
			return err
		}
	}
	var err error
	if vm.BootID, err = bootID(); err != nil {
		return err
	}
	for {
		all, err := processes()
		if err != nil {
			return err
		}
		found := map[int]bool{}
		l.named(vm, all, found)
		if len(found) == 0 {
			return vm.nothingLeft(ev)
		}
		vm.Processes = nil
		for _, pid := range slices.Sorted(maps.Keys(found)) {
			vm.Processes = append(vm.Processes, Process{vm.role(all[pid]), pid, all[pid].start})
		}
		if err := vm.Kill(); err != nil {
			return err
		}
		if err := vm.awaitProcesses(ctx, ev); err != nil {
			return err
		}
	}
}

// Kill ends every recorded process that is still there, the VMM before the shim, by pidfd: never another process that
// has the pid by now. It waits for nothing: see Wait. It is for a shim that does not answer.
func (vm VM) Kill() error {
	boot, err := bootID()
	if err != nil || boot != vm.BootID {
		return err
	}
	order := []Role{RoleVMM, RoleVirtiofsd, RoleOther, RoleShim}
	var all []error
	for _, role := range order {
		for _, p := range vm.Processes {
			if p.Role == role {
				all = append(all, killOne(p))
			}
		}
	}
	return errors.Join(all...)
}

func killOne(p Process) error {
	pidfd, there, err := hold(p)
	if err == nil && there {
		defer pidfd.Close()
		err = kill(pidfd)
	}
	if err != nil {
		return fmt.Errorf("ending the %s, process %d: %w", p.Role, p.Pid, err)
	}
	return nil
}
