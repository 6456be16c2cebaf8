// Package hostkernel is what the runtimes have in common whose sandboxes share the node's kernel, or get their files from
// it: embedded, and containerd.
//
// Deciding is pure: rootfs.go (the root's skeleton), cgroup.go (which hierarchies, which limits), spec.go (ids, limits,
// the small file systems), check.go (is this node able). Doing is in the files named for what they do: attach.go and
// grants.go (mounts, by descriptor, into the container's mount namespace), skeleton.go, cgroupfs.go, userns.go, pidfd.go,
// record.go (what a runtime keeps of a sandbox), keeper.go (how each sandbox begins and ends), held.go (one that is watched),
// evidence.go.
//
// It keeps promises P5 (pidfd checked by pid and start time, empty cgroups), P9 (receipts and control only for receiptd),
// P15 (grants in memory, of one sandbox alone) and P16 (disk and inodes of /tmp and HOME; receiptd outside the limits).
//
// Only packages below internal/runtime import it; it imports pkg/* and internal/runtime.
package hostkernel
