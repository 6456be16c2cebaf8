package cli

import (
	"errors"
	"fmt"
)

// errSilent: everything has been said already, only the exit code is left.
var errSilent = errors.New("")

// exitError is an error with the exit code that it stands for.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// withCode gives err an exit code; an error that has one already keeps it.
func withCode(code int, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		return e
	}
	return &exitError{code: code, err: err}
}

// usagef is an error of the one who typed the command.
func usagef(format string, args ...any) error {
	return &exitError{code: ExitUsage, err: fmt.Errorf(format, args...)}
}
