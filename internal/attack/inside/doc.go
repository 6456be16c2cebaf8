// Package inside is the part of an attack that runs as a command in a sandbox: what bash can't do alone. A program that imports
// it is its own helper: with the argument Word it becomes an attacker (Main). It is put into a session's worktree for that, so it
// should be a static program.
//
// Everything here is said in lines on the standard output: "got …" for what the attacker should not have got, "tried N" at its end.
// An attack that has said nothing of the second kind did not come to its end, and proves nothing.
//
// Nothing here may harm a machine on which the defence is missing, since that is what it looks for: what uses something up has a
// bound of its own a little above the limit that is tried, what forks ends by itself, and a file of the node is opened for writing
// and never written.
//
// internal/attack imports it, and programs that run attacks.
package inside
