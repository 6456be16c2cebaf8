package workspace

import "errors"

var (
	// ErrRefused: the workspace cannot be used as it is; the message names the path and the remedy.
	ErrRefused = errors.New("workspace refused")
	// ErrGit: Git itself failed; the message carries the end of what it printed.
	ErrGit = errors.New("git failed")
)
