// Package demo is the guided run of "sandbox-agent demo": it starts a real agent as a child process with a temporary
// state folder, makes a session with a worktree of its own on a real repository, and walks through what the sandbox
// promises. Every step is a command through the public API; every claim it prints is checked: against the receipt,
// against the receipt's file with the sandbox's key, and against the machine itself (the kernel's process list, the
// worktree on disk). A claim that does not hold is shown as such and makes the exit code 1.
//
// It leaves nothing behind, also when it is interrupted: sandbox, agent, worktree, branch and state folder are gone.
// Killed outright, it takes its agent and the sandbox along; worktree, branch and folder stay then.
//
// It imports the API's client, internal/cli/interrupt, internal/config and pkg/receipt; only internal/cli imports it. It
// attacks P2, P3, P7, P9 and P13 the way a person would first think of; the hard attacks are in tests/escape.
package demo
