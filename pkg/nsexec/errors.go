package nsexec

import "errors"

// ErrNotStarted: the command certainly never ran.
var ErrNotStarted = errors.New("the command was not started")
