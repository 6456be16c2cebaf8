// Package receipt is the evidence that a command ended and left nothing running: what a receipt says, how it is
// signed and stored, and how anyone checks it offline.
//
// A receipt is an in-toto Statement in a DSSE envelope, signed with an Ed25519 key that receiptd makes at its
// start and never lets out. It keeps promises P2 (answered only with a receipt that verifies), P9 (can't be
// forged) and P13 (output counted and hashed in full).
//
// This package imports the standard library only, because receiptd links it; package verify, beside it, is for
// everyone else and uses the DSSE library.
package receipt
