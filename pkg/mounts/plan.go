package mounts

import (
	"fmt"
	"path/filepath"
	"sort"
	"strings"
)

// Mount is one bind mount of a plan. Source and Target are absolute and clean; a workspace's are equal (P11).
type Mount struct {
	Source string `json:"source"`
	Target string `json:"target"`
	// ReadOnly mounts are seals when Seal is set: they are re-checked at each command's start and end.
	ReadOnly bool `json:"readOnly"`
	Seal     bool `json:"seal"`
	// Idmap maps the on-disk owner to the command's uid. Mounts that only receiptd sees have their own mapping.
	Idmap bool `json:"idmap"`
	// Empty stands for a folder whose content is not shown: a read-only file system with nothing in it but mount points
	// for the plan's own mounts in that folder.
	Empty bool `json:"empty,omitempty"`
}

// Plan is the mounts of a workspace, in the order in which they are made: a parent before what lies in it.
type Plan struct {
	Worktree string `json:"worktree"`
	// OwnerUID and OwnerGID own the worktree on disk.
	OwnerUID uint32  `json:"ownerUid"`
	OwnerGID uint32  `json:"ownerGid"`
	Mounts   []Mount `json:"mounts"`
	// Missing are the places that would be sealed and don't exist on disk. No stub is made on the host (P11), so
	// whatever appears there later is not sealed.
	Missing []string `json:"missing,omitempty"`
}

// Workspace is what a plan is made of: a linked worktree and the base clone that it belongs to.
type Workspace struct {
	// Worktree is the worktree's absolute path.
	Worktree string
	// CommonDir is the absolute path of the base clone's .git (git rev-parse --git-common-dir).
	CommonDir string
	// MetaDir is CommonDir/worktrees/NAME (git rev-parse --git-dir in the worktree).
	MetaDir string
	// OwnerUID and OwnerGID own the worktree on disk.
	OwnerUID, OwnerGID uint32
}

// Roots are the mounts of a plan that lie in no other one: for these the container's root needs a mount point.
func (p Plan) Roots() []string {
	var roots []string
	for i, m := range p.Mounts {
		if p.host(i) < 0 {
			roots = append(roots, m.Target)
		}
	}
	return roots
}

// Seals are the targets that are re-checked at each command's start and end, in plan order.
func (p Plan) Seals() []string {
	var seals []string
	for _, m := range p.Mounts {
		if m.Seal {
			seals = append(seals, m.Target)
		}
	}
	return seals
}

// host is the index of the latest mount before i whose target contains that of mount i, or -1.
func (p Plan) host(i int) int {
	for j := i - 1; j >= 0; j-- {
		if within(p.Mounts[i].Target, p.Mounts[j].Target) {
			return j
		}
	}
	return -1
}

// New makes the plan of a workspace: the worktree and the base clone's .git, writable, at their own paths, and over
// them the read-only seals of what must not change. exists says whether a path is there (Exists asks the file system);
// what is not there can't be sealed and is listed in Plan.Missing.
//
// Every folder between a mount and a seal is a mount of its own: renaming a mount point is EBUSY, so the seal can't be
// taken away with a parent ("mv .git/worktrees x").
func New(w Workspace, exists func(path string) bool) (Plan, error) {
	if err := w.validate(); err != nil {
		return Plan{}, err
	}
	p := Plan{Worktree: w.Worktree, OwnerUID: w.OwnerUID, OwnerGID: w.OwnerGID}
	for _, path := range []string{w.Worktree, w.CommonDir, filepath.Join(w.CommonDir, "objects"), w.MetaDir} {
		p.Mounts = append(p.Mounts, Mount{Source: path, Target: path, Idmap: true})
	}
	// Of the repository's worktrees only the session's own: another one's HEAD or index, written here, would make that
	// session commit to where it did not mean to; and "git worktree prune" removes those whose folder it can't see.
	all := filepath.Dir(w.MetaDir)
	p.Mounts = append(p.Mounts, Mount{Source: all, Target: all, ReadOnly: true, Seal: true, Empty: true})
	for _, path := range sealed(w) {
		if !exists(path) {
			p.Missing = append(p.Missing, path)
			continue
		}
		p.Mounts = append(p.Mounts, Mount{Source: path, Target: path, ReadOnly: true, Seal: true, Idmap: true})
	}
	// Shorter paths first: a parent is always shorter than what lies in it.
	sort.SliceStable(p.Mounts, func(i, j int) bool {
		return depth(p.Mounts[i].Target) < depth(p.Mounts[j].Target)
	})
	return p, nil
}

// sealed are the pointers, the configuration and the hooks through which trusted Git would run a program or leave
// the repository (git.md, section 3, attacks 1 to 10).
func sealed(w Workspace) []string {
	return []string{
		filepath.Join(w.Worktree, ".git"),
		filepath.Join(w.CommonDir, "config"),
		filepath.Join(w.CommonDir, "hooks"),
		filepath.Join(w.CommonDir, "info"),
		filepath.Join(w.CommonDir, "objects", "info"), // alternates: other repositories' objects, as if they were here
		filepath.Join(w.MetaDir, "commondir"),
		filepath.Join(w.MetaDir, "gitdir"),
	}
}

func (w Workspace) validate() error {
	for _, f := range []struct{ name, path string }{
		{"worktree", w.Worktree}, {"common Git folder", w.CommonDir}, {"worktree's Git folder", w.MetaDir},
	} {
		if err := checkPath(f.name, f.path); err != nil {
			return err
		}
	}
	if filepath.Dir(w.MetaDir) != filepath.Join(w.CommonDir, "worktrees") {
		return fmt.Errorf("%w: the worktree's Git folder %q is not one of %q: give a linked worktree of the repository (git worktree list)",
			ErrWorkspace, w.MetaDir, filepath.Join(w.CommonDir, "worktrees"))
	}
	if w.Worktree == w.CommonDir || within(w.Worktree, w.CommonDir) {
		return fmt.Errorf("%w: the worktree %q lies inside the common Git folder %q: move it out (git worktree move)",
			ErrWorkspace, w.Worktree, w.CommonDir)
	}
	return nil
}

func checkPath(name, path string) error {
	switch {
	case !filepath.IsAbs(path):
		return fmt.Errorf("%w: the %s %q is not an absolute path", ErrWorkspace, name, path)
	case filepath.Clean(path) != path:
		return fmt.Errorf("%w: the %s %q is not clean: write it as %q", ErrWorkspace, name, path, filepath.Clean(path))
	case path == "/":
		return fmt.Errorf("%w: the %s can't be the root folder", ErrWorkspace, name)
	case strings.ContainsRune(path, 0):
		return fmt.Errorf("%w: the %s %q has a NUL byte", ErrWorkspace, name, path)
	}
	return nil
}

// within says whether path lies below dir (and is not dir).
func within(path, dir string) bool { return strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") }

func depth(path string) int { return strings.Count(path, "/") }
