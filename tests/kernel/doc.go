// Command kernel runs tests of this module on other Linux versions than that of the machine, and on cgroup v2 whatever
// the machine has, as "make test-kernel" calls it:
//
//	go run ./tests/kernel [flags] [version prefix]...        for example: go run ./tests/kernel -run Posture 6.1 7
//
// It boots each kernel in its cache (scripts/kernels.sh, internal/testkit/vm) under qemu's software emulation, with a root file system made of
// the machine's own programs, and has an init (guest) run the packages' test programs. A panic ends qemu like a power-off:
// only a guest that says that it is done counts.
//
// Every promise of the embedded runtime, nsexec, receiptd and the mounts is checked here as their own tests check it, and
// what pkg/kata does with a KVM that runs and a vsock that connects.
// Tests that need what a guest lacks (a compiler, the Internet) skip themselves. Nothing imports this package.
package main
