package gitguard

import "errors"

var (
	// ErrConfig: a configuration file could not be read as Git reads it; the message names the file and the reason.
	ErrConfig = errors.New("git configuration refused")
	// ErrIndex: an index holds an entry that trusted Git must not follow; the message names the path.
	ErrIndex = errors.New("git index refused")
	// ErrRefName: a ref's name is none that Git would make.
	ErrRefName = errors.New("ref name refused")
	// ErrNotAllowed: a Git command or option is not on the list; the message names the word and what is allowed.
	ErrNotAllowed = errors.New("git command refused")
	// ErrNoRepository: a path is no Git repository and no linked worktree of one.
	ErrNoRepository = errors.New("not a git repository")
)
