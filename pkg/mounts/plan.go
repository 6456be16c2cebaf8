package mounts

import (
	"fmt"
	"path/filepath"
	"sort"
	"strings"
)

// The layouts of a workspace's Git folders (git.md, section 2).
const (
	// Isolated: the command has a Git folder of its own at CommonDir; nothing that it can write is the base clone's.
	Isolated = "isolated"
	// Shared: the base clone's objects, refs and logs are writable. It suits one trust domain only.
	Shared = "shared"
)

// Mount is one bind mount of a plan. Source and Target are absolute and clean.
type Mount struct {
	// Source is the path on the node. It is Target too (P11), but for what the agent keeps for the workspace.
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
	// Sticky is a writable folder of SkeletonUID's, mode 1775, with the owner's group: commands add to it, and can't
	// rename, replace or delete what it was made with (inode(7), S_ISVTX).
	Sticky bool `json:"sticky,omitempty"`
	// Cache marks Workspace.Extra: it is no part of the worktree or its repository.
	Cache bool `json:"cache,omitempty"`
}

// Plan is the mounts of a workspace, in the order in which they are made: a parent before what lies in it.
type Plan struct {
	Worktree string `json:"worktree"`
	// Layout is Isolated or Shared.
	Layout string `json:"layout,omitempty"`
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
	// Layout is Isolated or Shared.
	Layout string
	// Private is the folder that the agent keeps for the workspace and mounts at CommonDir: with Isolated the
	// command's own Git folder, with Shared the skeleton that holds the mount points.
	Private string
	// Hooks says that, also with Isolated, the base clone's hooks are the command's: sealed, and run by its own Git.
	Hooks bool
	// Extra are folders beside the workspace's: caches. They are no seals: their mount points lie in folders of the
	// command's, which may rename them. One that is not ReadOnly belongs to the owner.
	Extra []Mount
}

// SkeletonUID owns the folder of the shared layout on disk: a uid that is not the worktree's owner, and that nobody
// runs as inside.
func SkeletonUID(owner uint32) uint32 {
	const nobody = 65534
	if owner == nobody {
		return nobody - 1
	}
	return nobody
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

// New makes the plan of a workspace: the worktree and its Git folders, writable as the layout says, at their own paths,
// and over them the read-only seals of what must not change: the pointers, the configuration and the hooks through which
// trusted Git would run a program or leave the repository (git.md, section 3, attacks 1 to 10). exists says whether a
// path is there (Exists asks the file system): what a repository may lack can't be sealed and is listed in Plan.Missing.
//
// Every folder between a mount and a seal is a mount of its own: renaming a mount point is EBUSY, so the seal can't be
// taken away with a parent ("mv .git/worktrees x").
func New(w Workspace, exists func(path string) bool) (Plan, error) {
	if err := w.validate(); err != nil {
		return Plan{}, err
	}
	p := Plan{Worktree: w.Worktree, Layout: w.Layout, OwnerUID: w.OwnerUID, OwnerGID: w.OwnerGID}
	p.open(w.Worktree, w.Worktree)
	p.seal(filepath.Join(w.Worktree, ".git"), filepath.Join(w.Worktree, ".git"))
	if w.Layout == Isolated {
		p.isolated(w)
	} else {
		p.shared(w, exists)
	}
	for _, m := range w.Extra {
		m.Cache = true
		p.Mounts = append(p.Mounts, m)
	}
	p.order()
	p.fill()
	return p, nil
}

// isolated puts the command's own Git folder where the base clone's is. Of the base it has the objects, read-only.
func (p *Plan) isolated(w Workspace) {
	at := func(names ...string) (string, string) {
		rel := filepath.Join(names...)
		return filepath.Join(w.Private, rel), filepath.Join(w.CommonDir, rel)
	}
	p.open(w.Private, w.CommonDir)
	p.open(at("objects"))
	p.seal(at("objects", "info")) // alternates: other repositories' objects, as if they were here
	p.seal(filepath.Join(w.CommonDir, "objects"), filepath.Join(w.CommonDir, "base-objects"))
	for _, name := range []string{"config", "hooks", "info"} {
		source, target := at(name)
		if name == "hooks" && w.Hooks {
			source = target
		}
		p.seal(source, target)
	}
	name := filepath.Base(w.MetaDir)
	p.empty(at("worktrees"))
	p.open(at("worktrees", name))
	for _, pointer := range pointers {
		p.seal(at("worktrees", name, pointer))
	}
}

// pointers are the files of a worktree's Git folder that say where everything else is.
var pointers = []string{"commondir", "gitdir", "config.worktree"}

// shared puts a skeleton where the base clone's Git folder is, and the base's own folders into it.
func (p *Plan) shared(w Workspace, exists func(string) bool) {
	base := func(names ...string) string { return filepath.Join(append([]string{w.CommonDir}, names...)...) }
	p.Mounts = append(p.Mounts, Mount{Source: w.Private, Target: w.CommonDir, Idmap: true, Sticky: true})
	for _, name := range []string{"objects", "refs"} {
		p.open(base(name), base(name))
	}
	for _, name := range []string{"logs", "reftable"} { // neither is in every repository
		if exists(base(name)) {
			p.open(base(name), base(name))
		}
	}
	p.seal(base("objects", "info"), base("objects", "info"))
	p.seal(base("config"), base("config"))
	for _, name := range []string{"hooks", "info"} {
		source := base(name)
		if !exists(source) {
			source = filepath.Join(w.Private, name) // the skeleton's, which is empty
		}
		p.seal(source, base(name))
	}
	p.seal(w.CommonDir, base("base"))
	p.empty(base("worktrees"), base("base", "worktrees"))
	// Of the repository's worktrees only the session's own: another one's HEAD or index, written here, would make that
	// session commit to where it did not mean to; and "git worktree prune" removes those whose folder it can't see.
	p.empty(base("worktrees"), base("worktrees"))
	p.open(w.MetaDir, w.MetaDir)
	for _, name := range pointers {
		path := filepath.Join(w.MetaDir, name)
		if !exists(path) {
			p.Missing = append(p.Missing, path)
			continue
		}
		p.seal(path, path)
	}
}

func (p *Plan) open(source, target string) {
	p.Mounts = append(p.Mounts, Mount{Source: source, Target: target, Idmap: true})
}

// seal maps ids as well: a file that only its owner may read must be the command's to read.
func (p *Plan) seal(source, target string) {
	p.Mounts = append(p.Mounts, Mount{Source: source, Target: target, ReadOnly: true, Seal: true, Idmap: true})
}

func (p *Plan) empty(source, target string) {
	p.Mounts = append(p.Mounts, Mount{Source: source, Target: target, ReadOnly: true, Seal: true, Empty: true})
}

// order puts shorter paths first: a parent is always shorter than what lies in it.
func (p *Plan) order() {
	sort.SliceStable(p.Mounts, func(i, j int) bool { return depth(p.Mounts[i].Target) < depth(p.Mounts[j].Target) })
}

// fill makes a mount of each folder between a mount and one that lies deeper in it, as when the base clone lies in the
// worktree: a command could rename such a folder, and what is mounted below would go with it.
func (p *Plan) fill() {
	there := map[string]bool{}
	for _, m := range p.Mounts {
		there[m.Target] = true
	}
	for i, n := 0, len(p.Mounts); i < n; i++ {
		h := p.host(i)
		if h < 0 {
			continue
		}
		for dir := filepath.Dir(p.Mounts[i].Target); within(dir, p.Mounts[h].Target); dir = filepath.Dir(dir) {
			if !there[dir] {
				there[dir] = true
				p.open(p.sourceIn(h, dir), dir)
			}
		}
	}
	p.order()
}

// sourceIn is the node's path of what a path is in mount h.
func (p Plan) sourceIn(h int, path string) string {
	return p.Mounts[h].Source + strings.TrimPrefix(path, p.Mounts[h].Target)
}

func (w Workspace) validate() error {
	if w.Layout != Isolated && w.Layout != Shared {
		return fmt.Errorf("%w: there is no layout %q: name %s or %s", ErrWorkspace, w.Layout, Isolated, Shared)
	}
	for _, f := range []struct{ name, path string }{
		{"worktree", w.Worktree}, {"common Git folder", w.CommonDir}, {"worktree's Git folder", w.MetaDir},
		{"agent's folder for the workspace", w.Private},
	} {
		if err := checkPath(f.name, f.path); err != nil {
			return err
		}
	}
	if filepath.Dir(w.MetaDir) != filepath.Join(w.CommonDir, "worktrees") {
		return fmt.Errorf("%w: the worktree's Git folder %q is not one of %q: give a linked worktree of the repository (git worktree list)",
			ErrWorkspace, w.MetaDir, filepath.Join(w.CommonDir, "worktrees"))
	}
	if touch(w.Worktree, w.CommonDir) && !within(w.CommonDir, w.Worktree) {
		return fmt.Errorf("%w: the worktree %q lies inside the common Git folder %q: move it out (git worktree move)",
			ErrWorkspace, w.Worktree, w.CommonDir)
	}
	if touch(w.Private, w.Worktree) || touch(w.Private, w.CommonDir) {
		return fmt.Errorf("%w: the agent's folder %q and the workspace's %q and %q lie in one another: give the agent another state folder",
			ErrWorkspace, w.Private, w.Worktree, w.CommonDir)
	}
	return w.validateExtra()
}

func (w Workspace) validateExtra() error {
	taken := []string{w.Worktree, w.CommonDir}
	for _, m := range w.Extra {
		for _, path := range []string{m.Source, m.Target} {
			if err := checkPath("cache's path", path); err != nil {
				return err
			}
		}
		if m.Seal || m.Empty || m.Sticky {
			return fmt.Errorf("%w: the cache at %q can't be sealed: its mount point lies in a folder of the command's", ErrWorkspace, m.Target)
		}
		for _, t := range taken {
			if touch(m.Target, t) {
				return fmt.Errorf("%w: the cache's place %q and %q lie in one another: choose another place", ErrWorkspace, m.Target, t)
			}
		}
		taken = append(taken, m.Target)
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

// touch says whether two paths are the same or one lies below the other.
func touch(a, b string) bool { return a == b || within(a, b) || within(b, a) }

func depth(path string) int { return strings.Count(path, "/") }
