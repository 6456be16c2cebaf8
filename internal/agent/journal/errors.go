package journal

import "errors"

// Errors that callers tell apart with errors.Is.
var (
	// ErrNotFound: there is no such key.
	ErrNotFound = errors.New("not in the journal")
	// ErrLocked: another process has the folder.
	ErrLocked = errors.New("the journal is in use")
	// ErrCorrupt: records that were durable are lost or changed. Nothing was written.
	ErrCorrupt = errors.New("the journal is corrupt")
	// ErrNoSpace: the file system has too little room left; the change was not made, and the journal is unharmed.
	ErrNoSpace = errors.New("no space for the journal")
	// ErrPoisoned: an earlier write or sync failed; whether its changes are on disk is unknown until the next Open.
	ErrPoisoned = errors.New("the journal has failed and takes no more changes")
	// ErrClosed: the journal was closed.
	ErrClosed = errors.New("the journal is closed")
	// ErrBadKey: a key or a value is out of bounds.
	ErrBadKey = errors.New("bad journal record")
	// ErrStop, returned by Scan's function, ends the scan without an error.
	ErrStop = errors.New("stop")
)
