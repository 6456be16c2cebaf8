// Package embedded hosts sandboxes with libcontainer in the agent's own process: nothing else has to be installed.
//
// A sandbox is a container in its own user, PID, mount, IPC, UTS, network and cgroup namespaces, whose init is
// receiptd. libcontainer makes the namespaces, /proc, /dev and the small file systems; every bind mount (root file
// system, worktree, receipts, control) is cloned beforehand with its flags and id mapping and attached by descriptor
// in a CreateRuntime hook (package mounts). Limits are on two cgroups that commands take turns in, never on receiptd.
//
// Deciding is pure: config.go (what libcontainer is told). What it has in common with other runtimes is in package
// hostkernel.
//
// It keeps promises P5 (termination evidence: pidfd, empty cgroups, nothing left), P9 (receipts and control only for
// receiptd), P14 (a failure is an error) and P16 (disk and inodes of /tmp and HOME; receiptd outside the limits).
//
// The program that imports it must call Init before anything else in main. Only cmd/sandbox-agent and tests may
// import it; it imports pkg/*, internal/runtime and hostkernel.
package embedded
