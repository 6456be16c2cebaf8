// Package clients has no code of its own. Its tests use a real agent as other people's programs do: through the public Go
// client, from Python with the standard library, with grpcurl, and as the programs in examples/. The agent is killed and
// restarted under them, and something that lies is put between: promises P2, P6, P7 and P8 as a caller sees them.
package clients
