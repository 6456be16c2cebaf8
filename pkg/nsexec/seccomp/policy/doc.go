// Package policy is what the seccomp filters of package seccomp say, as data, and the small assembler that turns it
// into programs of the kernel.
//
// command.go is the list of refusals for a command, one rule with its reason each; container.go the allow list for
// everything in a sandbox. Both are pure: Decide answers for one call without a kernel, Assemble gives the program,
// Dump the text a reviewer reads. A command runs under both filters; the kernel takes the stricter answer.
//
// Only the generator (tools/seccomp) and tests import this package. pid1 and receiptd link the generated programs of
// package seccomp alone, so nothing is assembled at run time. It imports the standard library only.
//
// It keeps parts of P3 (no namespaces, no ways round them), P9 and P10 (socket families, foreign system-call ABIs),
// and the first hole of facts.md: set-id bits on files that the node's own programs will see.
package policy
