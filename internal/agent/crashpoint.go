//go:build !crashpoints

package agent

// point names a step between two things that last: a change of the journal, of a folder, of a sandbox. Built with the tag
// crashpoints the agent can be killed there (tests/faults); otherwise it is nothing.
func point(string) {}
