// Package crashpoint names the steps between two things that last: a change of the journal, of a folder, of the base clone,
// of a sandbox. Built with the tag crashpoints the agent can be killed there, which is what tests/faults does; otherwise a
// point is nothing. The agent, what it keeps of Git (internal/agent/gitview) and the runtimes have points.
package crashpoint
