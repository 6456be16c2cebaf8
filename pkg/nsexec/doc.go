// Package nsexec runs one command in fresh namespaces and establishes its boundary: the moment from which on nothing
// that the command started is alive.
//
// It is the parent's side and links into receiptd: the standard library, x/sys/unix and package pid1's constants. A
// View holds the thread whose mount namespace is what commands see; Prepare starts a pid1 and a launcher in it ahead
// of need; Start hands one of them a command; Wait returns once wait4 on pid1 has returned, which the kernel lets
// happen only when the PID namespace is empty (zap_pid_ns_processes).
//
// It keeps promises P3, P9, P13 (Capture) and the part of P16 that concerns processes and memory.
package nsexec
