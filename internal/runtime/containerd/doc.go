// Package containerd hosts sandboxes in the node's containerd, with the runtimes that it has: runc, gVisor, Kata.
//
// A sandbox is a container of that containerd, in a namespace of its own, with a spec of ours (spec.go). With runc it is
// made in two steps: containerd creates the container, whose init then waits; the agent attaches every bind mount by
// descriptor in that one's mount namespace, as package embedded does (hostkernel), so that containerd and runc never look a
// path of the workspace up and never see a grant; only then is it started. The descriptors of the commands' cgroups follow
// over a socket (handover.go).
//
// A guest, which has a kernel of its own, is made in one step: every mount is in its spec, and what is secret comes in over a pipe
// (guest.go, grants.go); gvisor.go and kata.go have what is particular to each.
//
// receiptd is reached over its socket where the kernel is shared, and otherwise over the standard streams of a
// "receiptd attach" that containerd starts in the container (attach.go).
//
// Every call of containerd has a deadline. What containerd says of a container's end is never enough, and what it doesn't
// know any more says nothing: the evidence is the end of the recorded init (pidfd, pid and start time), the exit that
// containerd reports or that it has no task, its deletion of the container, and cgroups that are empty and gone (promise P5).
// A creation that was cut short is looked for twice, since it may still bring a task.
//
// Only cmd/sandbox-agent and tests import it; it imports pkg/*, internal/runtime, hostkernel and provenance.
package containerd
