// Package receipt is the evidence that a command ended and left nothing running: what a receipt says, how it is
// signed and stored, and how the agent reads it back.
//
// A receipt is an in-toto Statement in a DSSE envelope, signed with an Ed25519 key that receiptd makes at its
// start and never lets out. It keeps promises P2 (answered only with a receipt that verifies), P6 (a crash leaves a
// receipt that verifies, or none), P9 (can't be forged), P13 (output counted and hashed in full, kept beside the
// receipt) and the receipt's part of P16 (a full disk does not lose the receipt of a command that was let start).
//
// Deciding and doing are apart: request.go, names.go, envelope.go and sign.go are pure; store.go, spare.go and
// durable.go write (receiptd's side); read.go reads (the agent's side).
//
// This package imports the standard library and x/sys/unix only, because receiptd links it; package verify, beside
// it, is for everyone else and checks signatures with the DSSE library. Anything may import both.
package receipt
