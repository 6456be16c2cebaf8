package kata

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const canRunOne = true

// A processor starts at 0xfffffff0, in real mode. One page of memory lies there, and it halts.
const (
	resetPage   = 0xfffff000
	resetOffset = 0xff0
	hlt         = 0xf4
	// tssAddress: three pages that Intel's real mode needs, anywhere below 4 GiB where no memory is.
	tssAddress = 0xfffbd000
)

// memoryRegion is struct kvm_userspace_memory_region.
type memoryRegion struct {
	slot, flags         uint32
	guest, size, memory uint64
}

// prepareVM gives a VM its memory; the function that is returned takes it back.
func prepareVM(vm int) (func(), error) {
	size := unix.Getpagesize()
	page, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("memory for a VM: %w", err)
	}
	free := func() { _ = unix.Munmap(page) }
	page[resetOffset] = hlt
	if err := unix.IoctlSetInt(vm, kvmSetTSSAddr, tssAddress); err != nil {
		free()
		return nil, fmt.Errorf("KVM_SET_TSS_ADDR: %w", err)
	}
	r := memoryRegion{guest: resetPage, size: uint64(size), memory: uint64(uintptr(unsafe.Pointer(&page[0])))}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(vm), kvmSetMemory, uintptr(unsafe.Pointer(&r))); errno != 0 {
		free()
		return nil, fmt.Errorf("KVM_SET_USER_MEMORY_REGION: %w", errno)
	}
	return free, nil
}
