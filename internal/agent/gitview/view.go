package gitview

import (
	"crypto/sha256"
	"encoding/hex"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// ErrRefused: the workspace cannot be used as it is; the message names what is in the way, and the remedy.
var ErrRefused = hostfs.ErrRefused

// KeptError: what is kept for a workspace can't be used. Its message ends with the remedy, the workspace's deletion; for
// whoever does delete it, Why is all there is to say. It wraps ErrRefused.
type KeptError struct{ Why, Remedy string }

func (e *KeptError) Error() string { return ErrRefused.Error() + ": " + e.Why + e.Remedy }

func (e *KeptError) Unwrap() error { return ErrRefused }

// Options say what a view is of.
type Options struct {
	// Dir is <state>/workspaces/<Key(worktree)>; its parent must exist.
	Dir string
	// SessionID names the folder of refs/sandboxes/ that the session's work is kept under.
	SessionID string
	// Layout is mounts.Isolated or mounts.Shared.
	Layout    string
	Workspace workspace.Workspace
	// Config is the base clone's, judged already.
	Config gitguard.Config
	// Export are the operator's patterns of refs that are exported besides the session's own branches.
	Export []string
	// Env is added to the environment of Git: who the author and committer of its commits is.
	Env []string
	// Hooks says that the repository's hooks run in the sandbox, as part of the untrusted command. Trusted Git runs none.
	Hooks bool
	// Base is the caller's jail of the base clone (workspace.BaseGit), if it has one. Open works in it and does not keep it.
	Base *gitjail.Kept
	// Live says that a sandbox on the workspace may be alive (the agent was restarted): what it has sealed is left as it
	// is. The next Open without it writes the configuration anew.
	Live bool
}

// View is a workspace's Git folder, opened for one session.
type View struct {
	o       Options
	leftOut []gitguard.Finding
	// sessions are those that may have refs under refs/sandboxes/.
	sessions []string
	state    state
	// text is the base clone's refs as the private folder has them too, until somebody looks into them: known has them then.
	text  refText
	known *snapshot
	// settled: everything in the private folder has been harvested, and no command has run since.
	settled bool
	// locks and worktreeConfig are what the shared layout had before the command.
	locks          map[string]bool
	manyLocks      bool // before the command: none of them is known
	worktreeConfig bool
	// before is the private folder's print at the last Refresh.
	before print
	// own is what the last harvest wrote, while that can be told from what others did; nil when it can't.
	own *ownMoves
	// flood is the print of more refs than are looked at; empty when there are not.
	flood string
}

// Key is the name of a worktree's folder among the agent's workspaces: 32 hex digits.
func Key(worktree string) string {
	sum := sha256.Sum256([]byte(worktree))
	return hex.EncodeToString(sum[:16])
}

// Statuses of a harvest, as the API has them.
const (
	Unchanged = "UNCHANGED"
	Harvested = "HARVESTED"
	Conflicts = "CONFLICT"
	Failed    = "FAILED"
	Shared    = "SHARED"
)

// Harvest says what of a session's Git work arrived in the base clone.
type Harvest struct {
	Status string `json:"status"`
	// Refs of the base clone that were written.
	Refs []string `json:"refs,omitempty"`
	// Conflicts are those that no earlier harvest told of.
	Conflicts []Conflict `json:"conflicts,omitempty"`
	// Standing are conflicts that an earlier harvest told of, and that were there when the refs were last compared.
	Standing []Conflict `json:"standing,omitempty"`
	// Objects that were brought over.
	Objects uint64 `json:"objects,omitempty"`
	// StaleLocks are lock files that a command left behind and that were removed, absolute paths.
	StaleLocks []string `json:"staleLocks,omitempty"`
	// Detail is why it failed, or what was left where it was.
	Detail string `json:"detail,omitempty"`
}

// Conflict is a ref, HEAD or the index that both the session and somebody else changed. The ids are empty where there is
// none.
type Conflict struct {
	Ref       string `json:"ref"`
	BaseID    string `json:"baseId,omitempty"`
	SessionID string `json:"sessionId,omitempty"`
	BeforeID  string `json:"beforeId,omitempty"`
	Remedy    string `json:"remedy"`
}

// Private is the folder that is mounted at the base clone's Git folder.
func (v *View) Private() string { return v.o.Dir + "/" + gitName }

// LeftOut are the configuration keys that the sanitised config does not have.
func (v *View) LeftOut() []gitguard.Finding { return v.leftOut }
