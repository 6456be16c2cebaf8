// Package cli is the command line: each command's flags, what it asks of the agent, how it shows the answer, and
// which exit code that is. cmd/sandbox-agent calls Run, with the signals of internal/cli/interrupt, and nothing else;
// nobody imports this package besides it.
//
// Client commands speak the public API over the agent's unix socket, as any other client would; "receipt" works on
// files, without an agent; "serve" puts the agent together and runs it; the demo is in internal/cli/demo.
//
// Promises kept here: P7 as a caller keeps it (the exec id is made before the request is sent, and a lost connection
// is asked again with the same id), and P14 (an agent that can't be reached is an error, never a reason to run the
// command some other way).
package cli
