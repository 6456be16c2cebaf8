// Package vm boots guests under qemu's software emulation and has them run test programs: kernels from a cache
// (scripts/kernels.sh), an initramfs with an init (guest) and modules, a root file system made of the machine's own programs,
// results over a virtio port. tests/kernel and tests/kata use it, as any test may that needs a kernel other than the machine's.
//
// A guest counts only if it says in its last line that it is done and then switches itself off: one that panics, hangs, or
// never says anything is an error with the end of its console, within a time limit, and nothing of it is left behind.
//
// It emulates always: where there is a /dev/kvm, it is not certain to run a guest, and a result has to mean the same everywhere.
package vm
