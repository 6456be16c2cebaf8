// Package kata holds what this project knows of Kata Containers: what is installed, whether it may be used, how its
// shim and its guest are reached, and what shows that a VM is gone.
//
// Kata has no Go library to link: it is driven by its public contracts, each written down in docs/kata.md with the place
// where it comes from. Deciding is pure (Judge, Config, ParseAgentURL, PlanMounts); reading and dialing are thin.
//
//	Find, ReadConfig   the shim, its flavour and version; its configuration with drop-ins
//	Judge              findings: what is refused and what is only warned about, with the advisory and the remedy
//	Check              the node: KVM that runs an instruction, vhost, vsock, the files; one answer and remedy for each
//	Shim               the shim's management socket: where the guest's agent listens, metrics
//	Endpoint           vsock and hybrid vsock as net.Conn
//	FindVM, VM.Wait    evidence that shim, VMM and file server are gone, by pidfd
//	PlanMounts         one OCI mount for each mount: a nested one would vanish on its way into the guest
//
// It keeps promises P5 (evidence of a VM: never an exit status) and P14 (what may not be used is refused, with the reason), and the host's side
// of P11. It imports nothing of the project; internal/runtime/containerd and the agent's node check use it.
package kata
