package workspace

import (
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

var (
	// ErrRefused: the workspace cannot be used as it is; the message names the path and the remedy.
	ErrRefused = hostfs.ErrRefused
	// ErrGit: Git itself failed; the message carries the end of what it printed.
	ErrGit = gitjail.ErrGit
)
