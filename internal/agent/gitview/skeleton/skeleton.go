// Package skeleton makes the folder that stands at the base clone's .git in the shared layout: mount points for the
// base's own folders, and a place for what Git writes beside them. Deciding what is mounted there is mounts.New's; what
// a command leaves in it is the workspace's alone, so promise P11 holds for the base clone's top folder. Only
// internal/agent and the packages below it may import it.
package skeleton

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Base is the folder of a skeleton where the base clone's own .git is mounted, read-only.
const Base = "base"

// The folder is sticky and belongs to neither the owner nor anyone that runs inside, the owner's group may write: a
// command can make files in it (packed-refs.lock, FETCH_HEAD, gc.pid), and can't rename, replace or delete what it was
// made with (inode(7), S_ISVTX).
const folderMode = unix.S_ISVTX | 0o775

// headBytes bounds a HEAD: "ref: " and the longest path there can be.
const headBytes = 8192

// Make makes the skeleton of commonDir in dir, or puts the one that is there right: what commands left goes, and what
// belongs there is as it was made. What is right already stays the same file, so a sandbox that goes on keeps its mount
// points. The folder above dir must be the agent's alone. An error wraps hostfs.ErrRefused when dir or the base clone
// is not what it has to be.
func Make(dir, commonDir string, owner hostfs.Owner) error {
	want, err := entries(commonDir)
	if err != nil {
		return err
	}
	m := maker{dir: dir, uid: mounts.SkeletonUID(owner.UID), gid: owner.GID}
	if err := m.folder(); err != nil {
		return err
	}
	if err := m.removeOthers(want); err != nil {
		return err
	}
	for _, e := range want {
		if err := m.put(e); err != nil {
			return err
		}
	}
	return nil
}

// entry is one name in the skeleton.
type entry struct {
	name string
	kind fs.FileMode // fs.ModeDir, fs.ModeSymlink or 0
	// text is the content of a file, the target of a link.
	text string
}

// entries are what a skeleton holds.
func entries(commonDir string) ([]entry, error) {
	head, err := readHead(commonDir)
	if err != nil {
		return nil, err
	}
	out := []entry{{name: "HEAD", text: head}, {name: "config"}}
	for _, name := range []string{Base, "hooks", "info", "objects", "refs", "worktrees"} {
		out = append(out, entry{name: name, kind: fs.ModeDir})
	}
	for _, name := range []string{"logs", "reftable"} {
		if mounts.Exists(filepath.Join(commonDir, name)) {
			out = append(out, entry{name: name, kind: fs.ModeDir})
		}
	}
	if mounts.Exists(filepath.Join(commonDir, "shallow")) {
		out = append(out, entry{name: "shallow", kind: fs.ModeSymlink, text: Base + "/shallow"})
	}
	return append(out, packedRefs()...), nil
}

// packedRefsLinks is how many links lead from packed-refs to the base clone's.
const packedRefsLinks = 7

// packedRefs is a chain of links to the base clone's packed-refs. The kernel follows up to 40 and reads what the
// file there holds now. Git follows five when it makes the lock (lockfile.c, MAXDEPTH), so packed-refs.lock, without
// which no ref can be deleted, lies in the skeleton. Git then renames a rewritten packed-refs over the sixth link,
// which the sticky folder refuses, before it deletes a loose ref: deleting a packed ref, and pack-refs, fail and
// change nothing.
func packedRefs() []entry {
	name := func(i int) string {
		if i == 0 {
			return "packed-refs"
		}
		return ".packed-refs-" + strconv.Itoa(i)
	}
	var out []entry
	for i := range packedRefsLinks {
		target := name(i + 1)
		if i == packedRefsLinks-1 {
			target = Base + "/packed-refs"
		}
		out = append(out, entry{name: name(i), kind: fs.ModeSymlink, text: target})
	}
	return out
}

// readHead gives the content of the base clone's HEAD. As a link, which old repositories have, it counts as the ref
// that it names (gitrepository-layout(5)).
func readHead(commonDir string) (string, error) {
	dir, err := hostfs.OpenDir("the common Git folder", commonDir)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	path := filepath.Join(commonDir, "HEAD")
	fd, err := hostfs.Beneath(dir, "HEAD", unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) {
		target, err := os.Readlink(path)
		return "ref: " + target + "\n", err
	}
	if err != nil {
		return "", fmt.Errorf("%w: reading %s: openat2: %w", hostfs.ErrRefused, path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return "", fmt.Errorf("%w: %s is not a regular file (%v): make it one (git symbolic-ref HEAD refs/heads/BRANCH)", hostfs.ErrRefused, path, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, headBytes+1))
	if err == nil && len(b) > headBytes {
		err = fmt.Errorf("%w: more than %d bytes", hostfs.ErrRefused, headBytes)
	}
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", path, err)
	}
	return string(b), nil
}

// maker makes one skeleton.
type maker struct {
	dir      string
	uid, gid uint32
}

// folder makes the folder itself, or checks the one that is there.
func (m maker) folder() error {
	var st unix.Stat_t
	err := unix.Lstat(m.dir, &st)
	if errors.Is(err, unix.ENOENT) {
		return m.make(m.dir, func(tmp string) error { return os.Mkdir(tmp, 0o700) }, folderMode)
	}
	if err != nil {
		return fmt.Errorf("looking at %s: %w", m.dir, os.NewSyscallError("lstat", err))
	}
	if st.Mode != unix.S_IFDIR|folderMode || st.Uid != m.uid || st.Gid != m.gid {
		return fmt.Errorf("%w: %s belongs to uid %d, gid %d with mode %o, and not to %d, %d with mode %o: it is no folder of the shared layout; delete the workspace and make it again",
			hostfs.ErrRefused, m.dir, st.Uid, st.Gid, st.Mode, m.uid, m.gid, unix.S_IFDIR|folderMode)
	}
	return nil
}

func (m maker) removeOthers(want []entry) error {
	names := map[string]bool{}
	for _, e := range want {
		names[e.name] = true
	}
	there, err := os.ReadDir(m.dir)
	if err != nil {
		return fmt.Errorf("listing %s: %w", m.dir, err)
	}
	for _, e := range there {
		if names[e.Name()] {
			continue
		}
		if err := os.RemoveAll(filepath.Join(m.dir, e.Name())); err != nil {
			return fmt.Errorf("removing what commands left: %w", err)
		}
	}
	return nil
}

// put has an entry be there as it should.
func (m maker) put(e entry) error {
	path := filepath.Join(m.dir, e.name)
	if m.isRight(path, e) {
		return nil
	}
	if err := os.RemoveAll(path); err != nil {
		return fmt.Errorf("removing what a command put at %s: %w", path, err)
	}
	switch e.kind {
	case fs.ModeDir:
		return m.make(path, func(tmp string) error { return os.Mkdir(tmp, 0o700) }, 0o755)
	case fs.ModeSymlink:
		return m.make(path, func(tmp string) error { return os.Symlink(e.text, tmp) }, 0)
	default:
		return m.make(path, func(tmp string) error { return os.WriteFile(tmp, []byte(e.text), 0o600) }, 0o644)
	}
}

// isRight says whether an entry is there. What is mounted over its content is not looked at.
func (m maker) isRight(path string, e entry) bool {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil || st.Uid != m.uid || st.Gid != m.gid {
		return false
	}
	switch e.kind {
	case fs.ModeDir:
		return st.Mode == unix.S_IFDIR|0o755
	case fs.ModeSymlink:
		target, err := os.Readlink(path)
		return err == nil && target == e.text
	default:
		// Safe to read: only the agent makes regular files of this uid here.
		b, err := os.ReadFile(path)
		return err == nil && st.Mode == unix.S_IFREG|0o644 && string(b) == e.text
	}
}

// make makes something beside the skeleton, in the agent's own folder, and moves it to its place when it has its owner
// and mode: a command that still runs finds it there whole, and can't have put anything in its place before.
func (m maker) make(path string, create func(tmp string) error, mode uint32) error {
	tmp := filepath.Join(filepath.Dir(m.dir), filepath.Base(path)+".new")
	err := os.RemoveAll(tmp)
	if err == nil {
		err = create(tmp)
	}
	if err == nil {
		err = unix.Fchownat(unix.AT_FDCWD, tmp, int(m.uid), int(m.gid), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil && mode != 0 {
		err = unix.Chmod(tmp, mode) // after chown(2), which clears bits; past the umask
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("making %s: %w", path, err), os.RemoveAll(tmp))
	}
	return nil
}
