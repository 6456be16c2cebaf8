package gitview

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// What the agent keeps of a workspace, in its folder. All but git and scratch is root's.
const (
	gitName      = "git"
	newGitName   = "git.new"
	scratchName  = "scratch"
	recordName   = "workspace.json"
	stateName    = "state.json"
	snapshotName = "snapshot"
	listingName  = "index"
	asideName    = "conflicts"
)

// record says whose the folder is.
type record struct {
	Worktree  string `json:"worktree"`
	CommonDir string `json:"commonDir"`
	MetaDir   string `json:"metaDir"`
	Layout    string `json:"layout"`
	// Device and Inode of MetaDir: another worktree that was made at the same path is another workspace.
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	// Branch is the last one that a session had when it was made. A later session that finds HEAD detached goes on with it.
	Branch string `json:"branch,omitempty"`
	// Sessions that may have refs under refs/sandboxes/; the last one is the latest.
	Sessions []string `json:"sessions"`
}

// state is how far the base clone and the private folder agree.
type state struct {
	// Created are the branches that this workspace made in the base clone.
	Created map[string]bool `json:"created,omitempty"`
	// Mirror is what was written below refs/sandboxes/.
	Mirror map[string]string `json:"mirror,omitempty"`
	// HEAD of the worktree as it was last made the same, in the private folder and in the base clone: "ref: NAME" or an id.
	Head     string `json:"head"`
	BaseHead string `json:"baseHead"`
	// Listing is the digest of the index's entries that both had last.
	Listing string `json:"listing"`
	// BaseIndex is the digest of the base clone's index file that has those entries.
	BaseIndex string `json:"baseIndex,omitempty"`
	// Log is the digest of the private logs/HEAD that both had last.
	Log string `json:"log,omitempty"`
	// Apart are the base clone's values of refs that it had changed otherwise than the session, when Base was taken; empty
	// for one that it has no more.
	Apart refs `json:"apart,omitempty"`
	// Told are the conflicts of refs that harvests have told of, as long as they are there.
	Told []Conflict `json:"told,omitempty"`
	// Kept are the new branches that are not made in the base clone and that harvests have told of, as they are: names in
	// UTF-8 (stateKey) and ids.
	Kept refs `json:"kept,omitempty"`
	// Clean is the private folder's print when all of it had been harvested; Base the base clone's when all of it had been
	// brought in.
	Clean print `json:"clean"`
	Base  print `json:"base"`
	// Pending: there is something to harvest, whatever the prints say.
	Pending bool `json:"pending,omitempty"`
	// Held back is why changes of the base clone could not be brought in.
	HeldBack string `json:"heldBack,omitempty"`
}

// refs maps names to ids.
type refs map[string]string

// snapshot is the base clone's refs as the private folder has them too.
type snapshot struct {
	ids refs
	// symbolic maps names to the ref that they name; what a session does to those stays private.
	symbolic refs
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// snapshot is the base clone's refs as the private folder has them too; what is changed in its maps is changed.
func (v *View) snapshot() snapshot {
	if v.known == nil {
		known := v.text.decode()
		v.known, v.text = &known, refText{}
	}
	return *v.known
}

func (v *View) path(name string) string { return filepath.Join(v.o.Dir, name) }

// load reads the record of a workspace that was opened before; found is false when there is none.
func (o Options) load() (r record, found bool, err error) {
	b, err := os.ReadFile(filepath.Join(o.Dir, recordName))
	if errors.Is(err, os.ErrNotExist) {
		return r, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		return r, false, fmt.Errorf("reading %s of the workspace %s: %w", recordName, o.Workspace.Worktree, err)
	}
	return r, true, nil
}

// identity is what tells this worktree's folder in the base clone from another one of the same name.
func (o Options) identity() (device, inode uint64, err error) {
	f, err := hostfs.OpenDir("the worktree's Git folder", o.Workspace.MetaDir)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("looking at %s: fstat: %w", o.Workspace.MetaDir, err)
	}
	return st.Dev, st.Ino, nil
}

func (o Options) newRecord() (record, error) {
	device, inode, err := o.identity()
	return record{
		Worktree: o.Workspace.Worktree, CommonDir: o.Workspace.CommonDir, MetaDir: o.Workspace.MetaDir, Layout: o.Layout,
		Device: device, Inode: inode,
	}, err
}

// check refuses what belongs to another worktree, or to another layout.
func (r record) check(o Options) error {
	want, err := o.newRecord()
	if err != nil {
		return err
	}
	want.Sessions = r.Sessions
	var what, instead string
	switch {
	case r.Layout != want.Layout:
		what = fmt.Sprintf("has the Git layout %s and not %s", r.Layout, want.Layout)
		instead = ": leave git_layout out or name " + r.Layout
	case r.Worktree != want.Worktree || r.CommonDir != want.CommonDir || r.MetaDir != want.MetaDir:
		what = fmt.Sprintf("was kept for %s of %s", r.Worktree, r.CommonDir)
	case r.Device != want.Device || r.Inode != want.Inode:
		what = "was kept for an earlier worktree at this path, which was removed since"
	default:
		return nil
	}
	return &KeptError{
		Why:    "the workspace of " + o.Workspace.Worktree + " " + what,
		Remedy: fmt.Sprintf("%s; or delete what is kept (sandbox-agent workspace delete %s)", instead, o.Workspace.Worktree),
	}
}

// settle gives the session's branch, and keeps it for a session that has none.
func (r *record) settle(branch string) string {
	if branch != "" {
		r.Branch = branch
	}
	return r.Branch
}

func (r *record) add(session string) {
	r.Sessions = append(slices.DeleteFunc(r.Sessions, func(s string) bool { return s == session }), session)
}

func writeJSON(path string, x any) error {
	b, err := json.MarshalIndent(x, "", "  ")
	if err != nil {
		return err
	}
	return writeOwn(path, append(b, '\n'))
}

func (v *View) loadState() error {
	b, err := os.ReadFile(v.path(stateName))
	if err == nil {
		err = json.Unmarshal(b, &v.state)
	}
	if err != nil {
		return fmt.Errorf("reading the state of the workspace %s: %w", v.o.Workspace.Worktree, err)
	}
	if b, err = os.ReadFile(v.path(snapshotName)); err == nil {
		v.text, err = parseRefText(b)
	}
	if err != nil {
		return fmt.Errorf("reading the snapshot of the workspace %s: %w", v.o.Workspace.Worktree, err)
	}
	return nil
}

// save keeps the snapshot and then the state: a kill between the two makes the next harvest look again at what the
// snapshot has already, which changes nothing.
func (v *View) save(snapshotToo bool) error {
	if snapshotToo {
		text := v.text
		if v.known != nil {
			text = v.known.encode()
		}
		if err := writeOwn(v.path(snapshotName), text.lines); err != nil {
			return err
		}
	}
	return writeJSON(v.path(stateName), v.state)
}
