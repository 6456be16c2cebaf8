package receipt

import "errors"

// Errors that callers tell apart with errors.Is.
var (
	// ErrExecID: the text can't be an exec id.
	ErrExecID = errors.New("bad exec id")
	// ErrExists: the exec already has a receipt; receipts are never overwritten.
	ErrExists = errors.New("receipt exists already")
	// ErrNotFound: the folder has no such receipt or kept output.
	ErrNotFound = errors.New("receipt not found")
	// ErrNoSpace: the space that a receipt may need can't be had; nothing may start.
	ErrNoSpace = errors.New("no space for receipts")
	// ErrTooLarge: a file, an envelope or an output is above its bound.
	ErrTooLarge = errors.New("too large")
	// ErrMalformed: the bytes are not a receipt as a Signer writes it.
	ErrMalformed = errors.New("malformed receipt")
	// ErrInconsistent: a predicate and its kept output contradict each other.
	ErrInconsistent = errors.New("inconsistent receipt")
	// ErrOutput: a kept output file is missing, or not the one that the receipt describes.
	ErrOutput = errors.New("kept output does not match its receipt")
	// ErrFailed: an earlier write to the folder failed after it could not be undone; the store takes nothing more.
	ErrFailed = errors.New("receipt store has failed")
)
