package config

import "errors"

// ErrInvalid is wrapped by every error about the file's content; the message names key, value and allowed range.
var ErrInvalid = errors.New("invalid configuration")

// ErrPath is wrapped by every refusal of a workspace path; the message names path and remedy.
var ErrPath = errors.New("workspace path refused")
