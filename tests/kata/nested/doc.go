// Package nested runs what takes another node than the machine on emulated ones: guests of Linux 6.12 under qemu's software emulation,
// with pure cgroup v2, a real containerd and the agent.
//
// One hosts the sandboxes of the runtime kata across the boundary of real virtual machines (tests/kata/vm): its emulated processor has
// virtualisation, so its KVM runs them. What stands for Kata there is the tests' own shim (tests/kata/shim/vm), which boots a virtual
// machine for each sandbox with Debian's QEMU and virtiofsd. The other one runs containerd's sandboxes by runc
// (internal/runtime/containerd).
//
// Both boot at the same time, and each test that ran on one is a subtest here. For one's own use:
//
//	go test ./tests/kata/nested -v [-run /Kata|/Runc] [-only PATTERN] [-scratch FOLDER [-again]]
package nested
