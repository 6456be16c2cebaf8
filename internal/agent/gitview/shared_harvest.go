package gitview

import (
	"errors"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// In the shared layout commands write the base clone themselves: there is nothing to bring in or out. What is left to do
// is to clean up after a command that was killed: its locks in the worktree's own folder and beside the base clone's.

const worktreeConfig = "config.worktree"

// noteLocks takes note of the locks that were there before the command: those are somebody else's.
func (v *View) noteLocks() error {
	locks, err := v.sharedLocks()
	if err != nil {
		return err
	}
	v.locks = set(locks)
	if mounts.Exists(v.tableLock()) {
		v.locks[v.tableLock()] = true
	}
	return v.inMetaFolder(func(m folder) error {
		_, there, err := m.lstat(worktreeConfig)
		v.worktreeConfig = there || errors.Is(err, unix.ELOOP)
		return nil
	})
}

// sharedLocks are the lock files in the worktree's folder, with its table of refs, and in the skeleton, absolute.
func (v *View) sharedLocks() ([]string, error) {
	var out []string
	for _, dir := range []string{v.o.Workspace.MetaDir, v.Private(), filepath.Join(v.o.Workspace.MetaDir, tables)} {
		names, err := namesIn(dir)
		if filepath.Base(dir) == tables && err != nil {
			continue // not every repository has it, and a command can put anything there
		}
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if strings.HasSuffix(name, ".lock") {
				out = append(out, filepath.Join(dir, name))
			}
		}
	}
	return out, nil
}

func namesIn(path string) ([]string, error) {
	d, err := hostfs.OpenDir("the workspace's Git folder", path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

func (v *View) harvestShared() Harvest {
	h := &harvest{v: v}
	h.Status = Shared
	for _, clean := range []func(*harvest) error{v.cleanLocks, v.cleanConfig, v.sayTableLock} {
		if err := clean(h); err != nil {
			h.say("%v", err)
		}
	}
	h.speakable()
	h.bound()
	return h.Harvest
}

// cleanLocks removes the command's locks. One that can't be removed is named, and holds back no other.
func (v *View) cleanLocks(h *harvest) error {
	locks, err := v.sharedLocks()
	if err != nil {
		return err
	}
	for _, path := range locks {
		if v.locks == nil || v.locks[path] {
			continue
		}
		err := inFolder("the workspace's Git folder", filepath.Dir(path), v.o.Workspace.Owner, func(d folder) error {
			return removeEither(d, filepath.Base(path))
		})
		if name, inSkeleton := strings.CutPrefix(path, v.Private()); inSkeleton {
			path = v.o.Workspace.CommonDir + name
		}
		if err != nil {
			h.say("the lock %s stays (rm -rf it in the session): %v", shortened(path), err)
			continue
		}
		h.StaleLocks = append(h.StaleLocks, path)
	}
	return nil
}

// removeEither takes a file or an empty folder away.
func removeEither(d folder, name string) error {
	err := d.remove(name)
	if !errors.Is(err, unix.EISDIR) {
		return err
	}
	if err := unix.Unlinkat(int(d.Fd()), name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return d.fail("removing", name, err)
	}
	return nil
}

// cleanConfig removes what the command made of the worktree's configuration.
func (v *View) cleanConfig(h *harvest) error {
	return v.inMetaFolder(func(m folder) error {
		if _, there, err := m.lstat(worktreeConfig); v.worktreeConfig || err == nil && !there {
			return nil
		}
		// Git reads it once extensions.worktreeConfig is on, which the host may turn on later.
		h.say("the command made %s/%s, which would be configuration: it was removed", v.o.Workspace.MetaDir, worktreeConfig)
		return removeEither(m, worktreeConfig)
	})
}

// tableLock is the one lock of all refs that a repository's worktrees share, where they are in a table.
func (v *View) tableLock() string {
	return filepath.Join(v.o.Workspace.CommonDir, tables, "tables.list.lock")
}

// sayTableLock tells of such a lock that came with the command. It stays: it may be that of a Git that is at work in the
// base clone or in another session.
func (v *View) sayTableLock(h *harvest) error {
	if path := v.tableLock(); v.locks != nil && !v.locks[path] && mounts.Exists(path) {
		h.say("%s is there since the command: until it is gone no ref can be changed in the repository; remove it if no Git is at work there (rm)", path)
	}
	return nil
}
