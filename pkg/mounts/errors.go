package mounts

import "errors"

// Errors that callers tell apart with errors.Is.
var (
	// ErrWorkspace: the workspace can't be mounted as it is; the message names the path and the remedy.
	ErrWorkspace = errors.New("workspace can't be mounted")
	// ErrNoIdmap: a file system can't do idmapped mounts (mount_setattr(2), EINVAL).
	ErrNoIdmap = errors.New("file system can't do idmapped mounts")
	// ErrChanged: a source or a target is not what it was when it was looked at.
	ErrChanged = errors.New("changed since it was checked")
)
