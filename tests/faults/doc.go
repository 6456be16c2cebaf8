// Package faults breaks the product on purpose, over its public API: a real agent process, real sandboxes, real Git. Parts
// of it are killed, stopped, cut off or lose their disk, at named points and at random ones, and what the agent says
// afterwards is compared with what the commands really did: each appends a byte to a file of its own in the worktree,
// which lies outside of everything that the agent keeps.
//
// The agent is built with the tag crashpoints (internal/runtime/crashpoint). SANDBOX_TEST_LONG=1 tries every point in
// every operation, and 10,000 random histories instead of some hundreds.
//
// What is not tried here, because this can't be had without another machine: a jump of the node's wall clock (a time
// namespace moves the monotonic clock alone; internal/agent has tests with clocks of their own), and storage that answers no
// more (a task in uninterruptible sleep).
package faults
