package mounts

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Opened holds the sources of a plan by descriptor: from here on no path on the host is looked up again.
type Opened struct {
	plan    Plan
	sources []*os.File
	stats   []unix.Stat_t
}

// Open opens every source of a plan without following a symlink and checks it: a folder or a regular file, the
// folders that are mounted writable owned as the plan says.
func Open(p Plan) (_ *Opened, err error) {
	o := &Opened{plan: p}
	defer func() {
		if err != nil {
			o.Close()
		}
	}()
	for _, m := range p.Mounts {
		f, err := OpenSource(m.Source)
		if err != nil {
			return nil, fmt.Errorf("opening the mount source %q: %w: %w", m.Source, ErrWorkspace, err)
		}
		o.sources = append(o.sources, f)
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return nil, fmt.Errorf("looking at the mount source %q: %w", m.Source, err)
		}
		o.stats = append(o.stats, st)
		if err := checkSource(p, m, st); err != nil {
			return nil, err
		}
	}
	return o, nil
}

func checkSource(p Plan, m Mount, st unix.Stat_t) error {
	kind := st.Mode & unix.S_IFMT
	switch {
	case kind != unix.S_IFDIR && kind != unix.S_IFREG:
		return fmt.Errorf("%w: %q is neither a folder nor a regular file", ErrWorkspace, m.Source)
	case (!m.ReadOnly || m.Cache) && kind != unix.S_IFDIR:
		return fmt.Errorf("%w: %q is not a folder", ErrWorkspace, m.Source)
	case m.Sticky:
		return checkSkeleton(p, m, st)
	case !m.ReadOnly && (st.Uid != p.OwnerUID || st.Gid != p.OwnerGID):
		return fmt.Errorf("%w: %q belongs to uid %d, gid %d, and not to the worktree's owner %d, %d: make them the same (chown -R)",
			ErrWorkspace, m.Source, st.Uid, st.Gid, p.OwnerUID, p.OwnerGID)
	}
	return nil
}

// checkSkeleton: with another owner, group or mode the command could replace what the folder was made with.
func checkSkeleton(p Plan, m Mount, st unix.Stat_t) error {
	const mode = unix.S_ISVTX | 0o775
	if uid := SkeletonUID(p.OwnerUID); st.Uid != uid || st.Gid != p.OwnerGID || st.Mode&0o7777 != mode {
		return fmt.Errorf("%w: %q belongs to uid %d, gid %d with mode %o, and not to %d, %d with mode %o: something else than the agent changed it; delete the workspace and make it again",
			ErrWorkspace, m.Source, st.Uid, st.Gid, st.Mode&0o7777, uid, p.OwnerGID, mode)
	}
	return nil
}

// Close closes the sources.
func (o *Opened) Close() error {
	closeAll(o.sources)
	o.sources = nil
	return nil
}

// Clone makes the detached mounts of the plan. idmap maps the on-disk owner to the command; nil leaves ids alone
// (Ownership). The error wraps ErrNoIdmap when a file system can't do it.
//
// The copies are not recursive: what somebody else mounted below the worktree is no part of the plan, may have
// another id mapping, and would come in with flags of its own.
func (o *Opened) Clone(idmap *os.File) (_ *Detached, err error) {
	d := &Detached{plan: o.plan, stats: o.stats}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	for i, m := range o.plan.Mounts {
		if m.Empty {
			tree, err := o.plan.emptyFolder(i)
			if err != nil {
				return nil, fmt.Errorf("making an empty folder for %q: %w", m.Target, err)
			}
			d.trees = append(d.trees, tree)
			continue
		}
		a := Attr{ReadOnly: m.ReadOnly}
		if m.Idmap {
			a.Idmap = idmap
		}
		tree, err := Clone(o.sources[i], a)
		if err != nil {
			return nil, fmt.Errorf("cloning the mount of %q: %w", m.Source, err)
		}
		d.trees = append(d.trees, tree)
	}
	return d, nil
}

// emptyFolder makes the file system of an Empty mount: with a mount point for each mount of the plan that lies directly
// in it.
func (p Plan) emptyFolder(i int) (_ *os.File, err error) {
	tree, err := NewTmpfs(map[string]string{"mode": "0755", "size": "64k", "nr_inodes": "16"})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			tree.Close()
		}
	}()
	for j, m := range p.Mounts {
		if p.host(j) != i || filepath.Dir(m.Target) != p.Mounts[i].Target {
			continue
		}
		if err := unix.Mkdirat(int(tree.Fd()), filepath.Base(m.Target), 0o755); err != nil {
			return nil, fmt.Errorf("making the mount point %q: %w", m.Target, err)
		}
	}
	return tree, SetAttr(tree, Attr{ReadOnly: true, NoExec: true})
}

// Detached holds the mounts of a plan, ready to be attached.
type Detached struct {
	plan  Plan
	trees []*os.File
	stats []unix.Stat_t
}

// Close lets go of the mounts; those that were not attached vanish.
func (d *Detached) Close() error {
	closeAll(d.trees)
	d.trees = nil
	return nil
}

// Attach puts the mounts below root, the container's root folder opened in its mount namespace, which must be the
// calling thread's. Each target is opened beneath root without following a symlink; one that lies in an earlier mount
// of the plan must be the very file that was opened as its source, else a seal could come to lie on a decoy. It
// reads each mount back and answers with what the kernel says.
func (d *Detached) Attach(root *os.File) ([]State, error) {
	states := make([]State, 0, len(d.trees))
	for i, m := range d.plan.Mounts {
		if err := d.attachOne(root, i); err != nil {
			return nil, err
		}
		s, err := ReadBack(root, m.Target)
		if err != nil {
			return nil, err
		}
		if err := d.checkState(i, s); err != nil {
			return nil, err
		}
		states = append(states, s)
	}
	return states, nil
}

func (d *Detached) attachOne(root *os.File, i int) error {
	m := d.plan.Mounts[i]
	target, err := OpenBeneath(root, m.Target)
	if err != nil {
		return fmt.Errorf("opening the mount target %q: %w", m.Target, err)
	}
	defer target.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(target.Fd()), &st); err != nil {
		return fmt.Errorf("looking at the mount target %q: %w", m.Target, err)
	}
	if h := d.plan.host(i); h >= 0 && !d.plan.Mounts[h].Empty && m.Source == d.plan.sourceIn(h, m.Target) && (st.Dev != d.stats[i].Dev || st.Ino != d.stats[i].Ino) {
		return fmt.Errorf("mounting over %q: %w: something replaces it while the sandbox starts; end what writes there and try again",
			m.Target, ErrChanged)
	}
	return Attach(d.trees[i], target)
}

func (d *Detached) checkState(i int, s State) error {
	m, st := d.plan.Mounts[i], d.stats[i]
	if m.Empty && s.MountPoint && s.ReadOnly && s.NoSuid && s.NoDev && s.Device != st.Dev {
		return nil
	}
	if !s.MountPoint || s.Inode != st.Ino || s.Device != st.Dev || m.ReadOnly && !s.ReadOnly || !s.NoSuid || !s.NoDev {
		return fmt.Errorf("reading back the mount at %q: %w: found %+v", m.Target, ErrChanged, s)
	}
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
