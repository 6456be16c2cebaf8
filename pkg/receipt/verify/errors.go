package verify

import "errors"

// Errors that callers tell apart with errors.Is. Those of package receipt (ErrMalformed, ErrNotFound, ErrTooLarge,
// ErrOutput) come through as well.
var (
	// ErrSignature: the envelope was not signed with that key, or was changed since.
	ErrSignature = errors.New("receipt signature does not verify")
	// ErrMismatch: a genuine receipt, but not of what was expected; the message names the field.
	ErrMismatch = errors.New("receipt is not the expected one")
	// ErrKey: a file is no Ed25519 public key.
	ErrKey = errors.New("not an Ed25519 public key")
)
