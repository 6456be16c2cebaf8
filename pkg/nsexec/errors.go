package nsexec

import "errors"

var (
	// ErrNotStarted: the command certainly never ran.
	ErrNotStarted = errors.New("the command was not started")
	// ErrClosed: the View was closed.
	ErrClosed = errors.New("the view is closed")
)
