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
// There are two layouts. In both, the worktree is writable, and its .git, the configuration, hooks, info, objects/info and
// the pointers of the worktree's Git folder are seals: read-only mounts, checked around each command. Every folder
// between a mount and a seal is a mount too.
//
//	Isolated  a private folder at the base clone's .git and at the worktree's Git folder; the base's objects, read-only
//	Shared    a skeleton that holds mount points for the base's objects, refs, logs and the worktree's Git folder,
//	          writable, and for the rest of its .git, read-only
//
// In the shared layout a command can't write the base clone's packed-refs: deleting a ref that is packed, pack-refs
// and gc fail, and change nothing. Git older than 2.44 needs that file for branch -d, tag -d, bisect and fetch --prune
// (which says so and exits 0) also where the ref is not in it; update-ref -d does not.
//
// No mount has nosymfollow (Linux 5.14). A worktree needs links; elsewhere the one who would follow a command's link is
// that command, or trusted Git, whose jail holds nothing that the command can't reach.
//
// It keeps promise P11. The system calls of the new mount API (open_tree, mount_setattr, move_mount) are in this
// package and nowhere else. It imports nothing of the project.
package mounts
