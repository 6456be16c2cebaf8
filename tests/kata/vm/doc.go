// Package vm runs the agent's sandboxes in Kata's virtual machines, across the boundary of real ones: commands, receipts,
// seals inside the guest, vsock, a VMM that is killed or hangs. It needs a node with KVM and Kata: "make test-kata" runs it where one
// is installed, "make test-kata-vm" on an emulated node with the tests' own shim (tests/kata/nested).
package vm
