// Package agent owns the sessions of one node: a workspace each, the sandbox that runs its commands, the fencing
// tokens, and the record of every exec.
//
// Deciding is apart from doing. The state machines (sessionstate.go, execstate.go), the checks of requests
// (validate.go), a command's environment (environment.go) and the translation of a receipt into an answer
// (result.go) are pure. Around them, a session is an actor: all that touches its sandbox runs on one goroutine, one
// thing after the other (session.go), so that promise P4 needs no lock.
//
// It keeps P1 (the intent is durable before anything starts), P2 (an answer needs a receipt that verifies), P4, P5
// (a workspace is released on evidence), P6 (after a crash: the receipt or UNCERTAIN), P7 (exec ids), P8 (fencing),
// P13's half of the output, P14 (no fallback) and P16 (limits).
//
// Only internal/rpc and cmd may import it. It imports internal/runtime's interface, never an implementation.
package agent
