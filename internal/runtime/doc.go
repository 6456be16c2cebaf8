// Package runtime is the hosting of a sandbox: one interface, with one implementation for each way to host.
//
// A runtime starts a container whose init is receiptd, finds it again after the agent's restart, and ends it with
// typed evidence (promise P5). It knows nothing of sessions, execs or receipts. Implementations may import pkg/*,
// never internal/agent.
package runtime
