// Package attack is the attack suite: what an untrusted command would try against the promises (docs/architecture.md), as rows of a
// table, and what runs them against a running agent.
//
// Deciding is apart from doing. Table (table.go) are the attacks, each with what must be seen; a Runner (run.go) has one run as a
// command of a session, over the public client, and looks at the node meanwhile and after it (witness.go); Judge (judge.go) makes a
// verdict of what was Seen, and looks at nothing. An attack that did not come to its end, or could not be looked at, is never held.
//
// The parts of attacks that bash can't do are in the package inside, which becomes a command's program.
//
// cmd/sandbox-agent-selftest runs the table on an operator's node, tests/escape on a test's, so that there is only one of it. The
// attacks that need another party than a command, or make the agent crash, are tests of their own there.
package attack
