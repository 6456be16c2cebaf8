// Package runtimes runs the suites of promises and attacks over the runtimes of containerd: the same tests, the same real
// agent, another runtime below it (testkit/node, RuntimeEnv). What a table leaves out it names, with the reason.
//
// Under gVisor a sandbox takes seconds, so its table has what may turn out otherwise there:
//
//   - what outlives a command (processes, threads, sockets, System V IPC) and what ends it (its tasks, its PID namespace, its
//     /proc and its limit of processes are gVisor's);
//   - what a command sees and may do (/proc, /dev, mounts, ids of files, its own system calls);
//   - how it is reached (the attach transport over a restart of the agent, a flood of output);
//   - the network, which is gVisor's inside and the node's outside (tests/network has the rest of it).
//
// It leaves out what looks at the node for what is inside gVisor alone (its cgroups, receiptd's socket, oom_score_adj), and what
// every runtime shares: the agent, receipts and their forgery, descriptors and the environment (pid1's), the base clone, trusted
// Git, the journal. Further what another case shows as well: TestP3TheEndOfTheTime and TestP3ACommandThatForks (a fork bomb that
// is ended when its time is up), TestP3ACommandCannotHide and TestHole11 (filters, which pid1 loads as everywhere), TestP4 (receiptd's),
// TestP13AReader (the flood), TestP16AFullTmp (TestP16ATmp), TestHole3 (TestP11), TestHole5 (the runtime's own test of the memory limit).
package runtimes
