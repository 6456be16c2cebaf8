package gitview

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	// mostNamed bounds how many files a sentence names, mostLooked how many refs are looked at.
	mostNamed  = 3
	mostLooked = 500
)

// uncommitted makes a sentence of what git status --porcelain printed.
func uncommitted(status string) []string {
	lines := strings.Split(strings.TrimSuffix(status, "\n"), "\n")
	if lines[0] == "" {
		return nil
	}
	named := make([]string, 0, mostNamed)
	for _, line := range lines[:min(len(lines), mostNamed)] {
		named = append(named, strings.TrimSpace(line[min(len(line), 3):]))
	}
	more := ""
	if len(lines) > mostNamed {
		more = ", …"
	}
	return []string{fmt.Sprintf("Not committed: %s (%s%s).", count(len(lines), "file"), strings.Join(named, ", "), more)}
}

// unsavedCommits finds what only the session's refs and HEAD lead to.
func (v *View) unsavedCommits(ctx context.Context) (out []string, err error) {
	j := v.jails(ctx)
	defer j.close()
	tips := refs{}
	if v.o.Layout == mounts.Shared {
		head, err := sharedHead(ctx, v, j)
		if err != nil {
			return nil, err
		}
		tips["HEAD"] = head
	} else if tips, out, err = v.sessionTips(ctx, j); err != nil {
		return nil, err
	}
	base, err := j.inBase()
	if err != nil {
		return nil, err
	}
	names := sortedKeys(tips)
	more := len(names) - mostLooked
	names = names[:min(len(names), mostLooked)]
	ids := make([]string, 0, len(names))
	for _, name := range names {
		if tips[name] != "" {
			ids = append(ids, tips[name])
		}
	}
	types, err := objectTypes(ctx, base, ids)
	if err != nil {
		return nil, err
	}
	saved := map[string]bool{}
	for _, name := range names {
		id := tips[name]
		if id == "" || saved[id] {
			continue
		}
		if kind := types[id]; kind != "" && kind != "commit" {
			lost, err := unsavedObject(ctx, base, name, id, kind)
			if err != nil {
				return nil, err
			}
			out = append(out, lost...)
		}
		r, err := base.Do(ctx, gitjail.Call{Args: []string{"rev-list", "--max-count=1", id, "--not", "--branches", "--tags", "--remotes"}})
		if err != nil {
			return nil, err
		}
		if saved[id] = r.ExitCode == 0 && len(r.Stdout) == 0; !saved[id] {
			out = append(out, fmt.Sprintf("No branch or tag of the base clone has the commits of the session's %s (%s).", name, id))
		}
	}
	if more > 0 {
		out = append(out, fmt.Sprintf("Not looked at: %s of the session.", count(more, "more ref")))
	}
	return out, nil
}

// unsavedObject finds what a ref names that is no commit, and that the base clone has no ref of: an annotated tag says more
// than the commit that it is of, which a branch may have.
func unsavedObject(ctx context.Context, base *gitjail.Session, name, id, kind string) ([]string, error) {
	same, err := base.Run(ctx, "for-each-ref", "--count=1", "--points-at="+id, "refs/heads/", "refs/tags/", "refs/remotes/")
	if err != nil || same != "" {
		return nil, err
	}
	return []string{fmt.Sprintf("No branch or tag of the base clone is the session's %s, a %s (%s): git tag NAME %[3]s in the base clone keeps it.", name, kind, id)}, nil
}

func sharedHead(ctx context.Context, v *View, j *jails) (string, error) {
	s, err := j.inBase()
	if err != nil {
		return "", err
	}
	head, err := headOf(ctx, s, v.inMeta())
	if err != nil || strings.HasPrefix(head, "ref: ") {
		return "", err
	}
	return head, nil
}

// sessionTips are the ids of the session's refs that the base clone has not at that name, and of its HEAD.
func (v *View) sessionTips(ctx context.Context, j *jails) (tips refs, out []string, err error) {
	s, err := j.inPrivate()
	if err != nil {
		return nil, nil, err
	}
	list, err := v.listPrivateRefs(ctx, s)
	if err != nil {
		return nil, nil, err
	}
	if list.ids[stashRef] != "" {
		out = append(out, "There are stashes.")
		delete(list.ids, stashRef)
	}
	tips = refs{}
	for name, id := range list.ids {
		if v.snapshot().ids[name] != id {
			tips[name] = id
		}
	}
	head, err := v.privateHead()
	if err != nil {
		return nil, append(out, fmt.Sprintf("It can't be told what HEAD stands for (%v).", err)), nil
	}
	if !strings.HasPrefix(head, "ref: ") {
		tips["HEAD"] = head
	} else if id := list.ids[strings.TrimPrefix(head, "ref: ")]; id != "" {
		tips[strings.TrimPrefix(head, "ref: ")] = id
	}
	return tips, out, nil
}

// Remove deletes the private folder and what the base clone keeps under refs/sandboxes/ for the workspace's sessions, and
// says what it removed. Caches stay. It can be called again after it failed.
func (v *View) Remove(ctx context.Context) ([]string, error) { return Discard(ctx, v.o.Dir) }

// Discard is Remove for a folder whose view can't be opened, because the worktree is another one now or is gone.
func Discard(ctx context.Context, dir string) ([]string, error) {
	r, found, err := Options{Dir: dir}.load()
	if err != nil {
		return nil, err
	}
	var removed []string
	if found && mounts.Exists(r.CommonDir) {
		if removed, err = r.removeMirror(ctx); err != nil {
			return removed, err
		}
	}
	// The record goes last: it says where the refs are.
	for _, name := range []string{gitName, newGitName, scratchName, asideName, stateName, snapshotName, listingName, recordName} {
		path := filepath.Join(dir, name)
		if !mounts.Exists(path) {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return removed, fmt.Errorf("removing what is kept for the workspace: %w", err)
		}
		removed = append(removed, path)
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) && mounts.Exists(dir) {
		if entries, readErr := os.ReadDir(dir); readErr != nil || len(entries) == 0 {
			return removed, fmt.Errorf("removing what is kept for the workspace: %w", err)
		}
	}
	return removed, nil
}

// removeMirror deletes the refs of all sessions of a workspace.
func (r record) removeMirror(ctx context.Context) ([]string, error) {
	owner, err := hostfs.StatDir("the repository's Git folder", r.CommonDir)
	if err != nil {
		return nil, err
	}
	v := &View{o: Options{}}
	v.o.Workspace.CommonDir, v.o.Workspace.Owner = r.CommonDir, owner
	j := v.jails(ctx)
	defer j.close()
	s, err := j.inBase()
	if err != nil {
		return nil, err
	}
	var removed []string
	for _, session := range r.Sessions {
		out, err := s.Run(ctx, "for-each-ref", "--format=%(refname)", mirrorOf(session))
		if err != nil {
			return removed, err
		}
		var moves []move
		for _, name := range strings.Fields(out) {
			moves = append(moves, move{ref: name, old: anyOld})
		}
		if len(moves) == 0 {
			continue
		}
		if err := runMoves(unbroken(ctx), s, nil, "sandbox-agent: workspace deleted", moves); err != nil {
			return removed, err
		}
		removed = append(removed, fmt.Sprintf("%s/ (%s)", mirrorOf(session), count(len(moves), "ref")))
	}
	return removed, nil
}
