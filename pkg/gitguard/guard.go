package gitguard

import (
	"context"
	"errors"
)

var (
	// ErrConfig: a configuration file could not be read as Git reads it; the message names the file and the reason.
	ErrConfig = errors.New("git configuration refused")
	// ErrIndex: an index holds an entry that trusted Git must not follow; the message names the path.
	ErrIndex = errors.New("git index refused")
	// ErrRefName: a ref's name is none that Git would make.
	ErrRefName = errors.New("ref name refused")
	// ErrNotAllowed: a Git command or option is not on the list; the message names the word and what is allowed.
	ErrNotAllowed = errors.New("git command refused")
	// ErrNoRepository: a path is no Git repository and no worktree of one.
	ErrNoRepository = errors.New("not a git repository")
)

// Kind groups findings by what they could do.
type Kind string

// The kinds of findings.
const (
	Include    Kind = "include"
	Filter     Kind = "filter"
	Program    Kind = "program"
	PathMoving Kind = "path"
	Remote     Kind = "remote"
	Extension  Kind = "extension"
	Unknown    Kind = "unknown"
	Layout     Kind = "layout"
	Attribute  Kind = "attribute"
	Clone      Kind = "clone"
	// Note never refuses: it tells what will be different in a sandbox.
	Note Kind = "note"
)

// Finding is one thing in a repository that could make Git run a program, leave the repository or hang.
type Finding struct {
	// Key is as Git spells it, or empty when the finding is not about a key.
	Key  string `json:"key"`
	File string `json:"file"`
	// Line of File, from 1; 0: not known, or not about a line.
	Line   int    `json:"line"`
	Why    string `json:"why"`
	Remedy string `json:"remedy"`
	Kind   Kind   `json:"kind"`
}

// Entry is one line of a configuration as Git understood it.
type Entry struct {
	// Key is as Git prints it: section and variable in lower case, the subsection verbatim.
	Key   string
	Value string
	// HasValue is false for a key without "=", which Git takes as true.
	HasValue bool
}

// Config is a configuration file as it was read once.
type Config struct {
	Path string
	// SHA256 of the file's bytes, lower-case hex.
	SHA256  string
	Entries []Entry
	raw     []byte
}

// SanitiseOptions are what a sanitised configuration may keep.
type SanitiseOptions struct {
	// Hooks leaves core.hooksPath alone: the repository's hooks run.
	Hooks bool
}

// Report is what a check of a repository found.
type Report struct {
	Repository string    `json:"repository"`
	CommonDir  string    `json:"commonDir"`
	Findings   []Finding `json:"findings"`
}

// Runner runs Git in the repository and gives its standard output.
type Runner func(ctx context.Context, args ...string) (string, error)

// GitCommand is a Git command that may run in a session's jail.
type GitCommand struct {
	Args []string
	// Writes says that it changes the index, refs, objects or the worktree.
	Writes bool
}

var errUnfinished = errors.New("not built yet")

func ReadConfig(ctx context.Context, path string) (Config, error) { return Config{}, errUnfinished }

func ParseList(b []byte) ([]Entry, error) { return nil, errUnfinished }

func (f Finding) Refuses(layout string) bool { return true }

func (c Config) Judge() []Finding { return nil }

func (c Config) Sanitise(opt SanitiseOptions) (text []byte, leftOut []Finding, err error) {
	return nil, nil, errUnfinished
}

func (c Config) Locate(ctx context.Context, findings []Finding) []Finding { return findings }

func CheckRepository(ctx context.Context, path string, run Runner) (Report, error) {
	return Report{}, errUnfinished
}

func CheckIndex(lsFilesStageZ []byte) (ids []string, err error) { return nil, errUnfinished }

func CheckRefName(ref string) error { return errUnfinished }

func Matches(pattern, ref string) bool { return false }

func AllowGit(args []string) (GitCommand, error) { return GitCommand{}, errUnfinished }
