// Package mounts turns a workspace into a mount plan, applies it inside a container's mount namespace by
// descriptor, and reads back what is mounted.
//
// Deciding (New, DecideOwnership) is pure; doing needs the kernel and CAP_SYS_ADMIN, and happens in three steps, so
// that everything which can fail for a reason of the host fails before a container exists:
//
//	Open    every source, without following a symlink, checked against the plan
//	Clone   a detached copy of each, with its flags and id mapping already set
//	Attach  the copies, from a thread inside the container's mount namespace
//
// It keeps promise P11. The system calls of the new mount API (open_tree, mount_setattr, move_mount) are in this
// package and nowhere else. It imports nothing of the project.
package mounts
