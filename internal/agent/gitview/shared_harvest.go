package gitview

import (
	"errors"
	"io"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// In the shared layout commands write the base clone themselves: there is nothing to bring in or out. What is left to do
// is to clean up after a command that was killed: its locks in the worktree's own folder and beside the base clone's.

const worktreeConfig = "config.worktree"

// mostRemoved bounds how many locks a harvest removes or can't remove: the session waits for it.
const mostRemoved = 10 * mostLocks

// noteLocks takes note of the locks that were there before the command: those are somebody else's. Where there are more than
// mostLocks none is known, and none is removed.
func (v *View) noteLocks() error {
	v.locks, v.manyLocks = map[string]bool{}, false
	err := v.eachLock(func(path string) {
		if v.locks == nil {
			return
		}
		if v.locks[path] = true; len(v.locks) > mostLocks {
			v.locks, v.manyLocks = nil, true
		}
	})
	if err != nil {
		v.locks = nil
		return err
	}
	if v.locks != nil && mounts.Exists(v.tableLock()) {
		v.locks[v.tableLock()] = true
	}
	return v.inMetaFolder(func(m folder) error {
		_, there, err := m.lstat(worktreeConfig)
		v.worktreeConfig = there || errors.Is(err, unix.ELOOP)
		return nil
	})
}

// eachLock gives the lock files in the worktree's folder, with its table of refs, and in the skeleton, absolute. A command makes
// as many as it likes.
func (v *View) eachLock(do func(path string)) error {
	for _, dir := range []string{v.o.Workspace.MetaDir, v.Private(), filepath.Join(v.o.Workspace.MetaDir, tables)} {
		err := eachName(dir, func(name string) {
			if strings.HasSuffix(name, ".lock") {
				do(filepath.Join(dir, name))
			}
		})
		if filepath.Base(dir) == tables && err != nil {
			continue // not every repository has it, and a command can put anything there
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// eachName gives the names in a folder, which may be too many to hold.
func eachName(path string, do func(name string)) error {
	d, err := hostfs.OpenDir("the workspace's Git folder", path)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(1 << 10)
		for _, name := range names {
			do(name)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
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
	if v.manyLocks {
		h.say("there were more than %d lock files before the command, so that none of its own is known: they stay (remove them in the session: find %s -name '*.lock' -delete)",
			mostLocks, v.o.Workspace.MetaDir)
	}
	if v.locks == nil {
		return nil
	}
	tried, more, stay := 0, 0, 0 // more are removed and not named, stay are left as they are
	err := v.eachLock(func(path string) {
		if v.locks[path] {
			return
		}
		if tried == mostRemoved {
			stay++
			return
		}
		tried++
		err := inFolder("the workspace's Git folder", filepath.Dir(path), v.o.Workspace.Owner, func(d folder) error {
			return removeEither(d, filepath.Base(path))
		})
		if name, inSkeleton := strings.CutPrefix(path, v.Private()); inSkeleton {
			path = v.o.Workspace.CommonDir + name
		}
		switch {
		case err != nil:
			h.say("the lock %s stays (rm -rf it in the session): %v", shortened(path), err)
		case len(h.StaleLocks) == mostLocks:
			more++
		default:
			h.StaleLocks = append(h.StaleLocks, path)
		}
	})
	if more > 0 {
		h.say("%s besides %d that are listed", countOf(more, "lock file was removed", "lock files were removed"), mostLocks)
	}
	if stay > 0 {
		h.say("%s (remove them in the session: find %s -name '*.lock' -delete)", countOf(stay, "more lock file stays", "more lock files stay"), v.o.Workspace.MetaDir)
	}
	return err
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
