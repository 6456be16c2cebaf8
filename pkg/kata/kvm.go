package kata

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// The numbers of <linux/kvm.h>: _IO(0xAE, n) and, with a size, _IOW and _IOR.
const (
	kvmGetAPIVersion  = 0xAE00
	kvmCreateVM       = 0xAE01
	kvmGetVCPUMmap    = 0xAE04
	kvmCreateVCPU     = 0xAE41
	kvmSetTSSAddr     = 0xAE47
	kvmRun            = 0xAE80
	kvmSetMemory      = 0x4020AE46
	kvmAPIVersion     = 12 // has not changed since Linux 2.6.22, and never will (Documentation/virt/kvm/api.rst)
	kvmExitHLT        = 5
	kvmExitOffset     = 8 // of exit_reason in struct kvm_run
	kvmMinimumRunArea = 16
	// kvmRunTime bounds the run of one instruction.
	kvmRunTime = 5 * time.Second
)

// tryKVM makes a virtual machine with one processor and has it run one instruction: /dev/kvm can be there, open and
// answer, and yet run no guest (a machine that is a guest itself, without nested virtualisation).
func tryKVM(path string) Item {
	it := Item{Name: "kvm"}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return it.no(fmt.Errorf("opening %s: %w", path, err), "load kvm_intel or kvm_amd; turn on virtualisation in the firmware, or nested virtualisation on the host of this machine")
	}
	defer unix.Close(fd)
	version, err := unix.IoctlRetInt(fd, kvmGetAPIVersion)
	switch {
	case err != nil:
		return it.no(fmt.Errorf("KVM_GET_API_VERSION: %w", err), path+" is not KVM's; make the node again: mknod "+path+" c 10 232")
	case version != kvmAPIVersion:
		return it.no(fmt.Errorf("KVM_GET_API_VERSION says %d, not %d", version, kvmAPIVersion), "use a kernel with the stable KVM API")
	}
	vm, err := unix.IoctlRetInt(fd, kvmCreateVM)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOMEM) {
		return it.unsure(fmt.Errorf("KVM_CREATE_VM: %w", err), "another hypervisor has the processor, or memory is short: stop it and check again")
	} else if err != nil {
		return it.no(fmt.Errorf("KVM_CREATE_VM: %w", err), "turn on virtualisation in the firmware, or nested virtualisation on the host of this machine")
	}
	defer unix.Close(vm)
	return tryVCPU(it, fd, vm)
}

func tryVCPU(it Item, kvm, vm int) Item {
	const remedy = "turn on nested virtualisation on the host of this machine, or use a machine with KVM of its own"
	prepared, err := prepareVM(vm)
	if err != nil {
		return it.no(err, remedy)
	}
	defer prepared()
	cpu, err := unix.IoctlRetInt(vm, kvmCreateVCPU)
	if err != nil {
		return it.no(fmt.Errorf("KVM_CREATE_VCPU: %w", err), remedy)
	}
	defer unix.Close(cpu)
	if !canRunOne {
		return it.yes("a VM with a processor can be made; whether it runs is not tried on " + runtime.GOARCH)
	}
	size, err := unix.IoctlRetInt(kvm, kvmGetVCPUMmap)
	if err == nil && size < kvmMinimumRunArea {
		err = fmt.Errorf("%d bytes", size)
	}
	if err != nil {
		return it.no(fmt.Errorf("KVM_GET_VCPU_MMAP_SIZE: %w", err), remedy)
	}
	area, err := unix.Mmap(cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return it.no(fmt.Errorf("mapping the processor: %w", err), remedy)
	}
	defer unix.Munmap(area) //nolint:errcheck // a mapping of one's own
	switch err := runOnce(cpu); {
	case errors.Is(err, unix.EINTR):
		return it.unsure(fmt.Errorf("one instruction had not run after %s", kvmRunTime), "the machine is very busy, or KVM does not work here: check again, and see the kernel's log")
	case err != nil:
		return it.no(fmt.Errorf("KVM_RUN: %w", err), remedy)
	}
	if reason := area[kvmExitOffset]; reason != kvmExitHLT {
		return it.no(fmt.Errorf("KVM_RUN ended for reason %d, not with the guest's HLT", reason), remedy)
	}
	return it.yes("a VM ran an instruction")
}

// runOnce runs the processor on a thread of its own, and interrupts that thread when the time is up: KVM_RUN ends with
// EINTR at any signal. SIGURG is the one that Go's own runtime sends to its threads and handles.
func runOnce(cpu int) error {
	tid := make(chan int, 1)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		tid <- unix.Gettid()
		_, err := unix.IoctlRetInt(cpu, kvmRun)
		done <- err
	}()
	thread := <-tid
	for limit := kvmRunTime; ; limit = 10 * time.Millisecond { // the signal may come before the call
		select {
		case err := <-done:
			return err
		case <-time.After(limit):
			if err := unix.Tgkill(os.Getpid(), thread, unix.SIGURG); err != nil {
				return <-done
			}
		}
	}
}
