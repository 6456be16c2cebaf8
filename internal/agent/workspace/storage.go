package workspace

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	storagePrefix = ".sandbox-storage-"
	// storagePatience bounds a check that takes some milliseconds on storage that answers.
	storagePatience = 30 * time.Second
)

// CheckStorage tries in a folder of its own inside dir, as the owner, what Git does with files: exclusive creation (Git's
// locks), atomic replacement, modes, links, times, and that one mount of it shows what was written through another. It fails
// with ErrRefused that names the first operation which did not do what it must, and takes away what it made in any case.
//
// Hard links and case sensitivity are not required: Git renames where it can't link, and has core.ignoreCase.
func CheckStorage(ctx context.Context, dir string, owner Owner) error {
	ctx, cancel := context.WithTimeout(ctx, storagePatience)
	defer cancel()
	done := make(chan error, 1)
	// A file system whose server is gone holds a system call without bound: then the check is given up, not its goroutine,
	// which takes its folder away once the server is back.
	go func() { done <- checkStorage(dir, owner) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: the storage of %s did not answer (%w): see that its server is up; left may be a folder %s* in it",
			ErrRefused, dir, ctx.Err(), storagePrefix)
	}
}

func checkStorage(dir string, owner Owner) error {
	parent, err := hostfs.OpenDir("the folder", dir)
	if err != nil {
		return err
	}
	defer parent.Close()
	s := &storage{owner: owner}
	err = hostfs.AsOwner(owner, func() error { return s.in(parent) })
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: the storage of %s can't do what Git needs: %w (%s)", ErrRefused, dir, err, storageRemedy(err, owner))
}

// storageRemedy says what usually stands behind a failure.
func storageRemedy(err error, owner Owner) string {
	switch {
	case errors.Is(err, unix.EROFS):
		return "mount it read-write"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return "make room: df, df -i and the owner's quota say of what"
	case errors.Is(err, unix.EACCES):
		return fmt.Sprintf("let its owner, %s, write there: chown, chmod u+rwx", owner)
	}
	return "choose a folder on a local file system such as ext4, xfs or btrfs; findmnt -T says what this one is"
}

// storage is one check: a folder, and the same folder through another mount.
type storage struct {
	owner      Owner
	dir, other *os.File
}

// in makes the folder, tries everything, and takes it away again.
func (s *storage) in(parent *os.File) (err error) {
	name := storagePrefix + rand.Text()
	if err := unix.Mkdirat(int(parent.Fd()), name, 0o700); err != nil {
		return fmt.Errorf("making a folder: mkdirat: %w", err)
	}
	defer func() {
		if e := s.remove(parent, name); e != nil {
			err = errors.Join(err, fmt.Errorf("removing files: %w; left is the folder %s: remove it", e, name))
		}
	}()
	if s.dir, err = s.openDir(parent, name); err != nil {
		return err
	}
	if s.other, err = mounts.Clone(s.dir, mounts.Attr{}); err != nil {
		return fmt.Errorf("mounting it a second time: %w", err)
	}
	for _, step := range []struct {
		what string
		try  func() error
	}{
		{"making a file for its owner", s.ownership},
		{"exclusive creation, which Git's locks are", s.exclusive},
		{"writing, appending and syncing", s.writing},
		{"replacing a file by renaming", s.replacing},
		{"a second name for a file", s.linking},
		{"changing a file's mode", s.modes},
		{"symbolic links", s.symlinks},
		{"setting a file's time", s.times},
		{"changing a file's length", s.truncating},
		{"mapping a file into memory", s.mapping},
		{"removing a file that is open", s.unlinking},
		{"a name of 200 bytes", s.longNames},
		{"folders in it", s.folders},
		{"showing through one mount what was written through another", s.mountsAgree},
	} {
		if err := step.try(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

func (s *storage) openDir(parent *os.File, name string) (*os.File, error) {
	fd, err := hostfs.Beneath(parent, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a new folder: openat2: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// remove takes the folder away with all that a step that failed may have left in it.
func (s *storage) remove(parent *os.File, name string) error {
	var errs []error
	if s.other != nil {
		errs = append(errs, s.other.Close())
	}
	if s.dir != nil {
		_ = unix.Unlinkat(int(s.dir.Fd()), "folder/file", 0)
		names, err := s.dir.Readdirnames(-1)
		errs = append(errs, err)
		for _, n := range names {
			err := unix.Unlinkat(int(s.dir.Fd()), n, 0)
			if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
				err = unix.Unlinkat(int(s.dir.Fd()), n, unix.AT_REMOVEDIR)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("unlinkat %s: %w", n, err))
			}
		}
		errs = append(errs, s.dir.Close())
	}
	if err := unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR); err != nil {
		errs = append(errs, fmt.Errorf("unlinkat: %w", err))
	}
	return errors.Join(errs...)
}

func open(dir *os.File, name string, flags int) (*os.File, error) {
	fd, err := hostfs.Beneath(dir, name, flags, modeFor(flags))
	if err != nil {
		return nil, fmt.Errorf("openat2: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// modeFor is 0 without O_CREAT: openat2(2) refuses a mode then.
func modeFor(flags int) uint64 {
	if flags&unix.O_CREAT == 0 {
		return 0
	}
	return 0o644
}

// make makes a file with a content, which must not exist.
func (s *storage) make(dir *os.File, name, content string) error {
	f, err := open(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Close())
}

// holds says whether a file has a content.
func (s *storage) holds(dir *os.File, name, content string) error {
	f, err := open(dir, name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	return fileHolds(f, content)
}

func fileHolds(f *os.File, content string) error {
	b := make([]byte, len(content)+1)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if string(b[:n]) != content {
		return fmt.Errorf("it holds %q instead of %q", b[:n], content)
	}
	return nil
}

// absent says whether a name leads to nothing.
func (s *storage) absent(name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(s.dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err == nil:
		return fmt.Errorf("the name %s is still there", name)
	}
	return fmt.Errorf("fstatat: %w", err)
}

func (s *storage) stat(name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(s.dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return st, fmt.Errorf("fstatat: %w", err)
	}
	return st, nil
}

func (s *storage) ownership() error {
	if err := s.make(s.dir, "file", "old"); err != nil {
		return err
	}
	st, err := s.stat("file")
	if err == nil && st.Uid != s.owner.UID {
		err = fmt.Errorf("it belongs to uid %d instead of %d", st.Uid, s.owner.UID)
	}
	return err
}

func (s *storage) exclusive() error {
	if err := s.make(s.dir, "file.lock", "new"); err != nil {
		return err
	}
	switch err := s.make(s.dir, "file.lock", "second"); {
	case err == nil:
		return errors.New("a second one got the same name")
	case !errors.Is(err, unix.EEXIST):
		return fmt.Errorf("a second one was refused, but not because the name was taken: %w", err)
	}
	return s.holds(s.dir, "file.lock", "new")
}

func (s *storage) writing() error {
	f, err := open(s.dir, "file.lock", unix.O_WRONLY|unix.O_APPEND)
	if err != nil {
		return err
	}
	_, err = f.WriteString("er")
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return s.holds(s.dir, "file.lock", "newer")
}

// replacing renames over a file: the name leads to the new one, and whoever had the old one open still has that.
func (s *storage) replacing() error {
	old, err := open(s.dir, "file", unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer old.Close()
	if err := unix.Renameat(int(s.dir.Fd()), "file.lock", int(s.dir.Fd()), "file"); err != nil {
		return fmt.Errorf("renameat: %w", err)
	}
	if err := s.holds(s.dir, "file", "newer"); err != nil {
		return err
	}
	if err := fileHolds(old, "old"); err != nil {
		return fmt.Errorf("the replaced file that is still open: %w", err)
	}
	return s.absent("file.lock")
}

// linking may be refused, but must not pretend.
func (s *storage) linking() error {
	linked := unix.Linkat(int(s.dir.Fd()), "file", int(s.dir.Fd()), "name", 0) == nil
	if !linked {
		return nil
	}
	return s.holds(s.dir, "name", "newer")
}

func (s *storage) modes() error {
	for _, mode := range []uint32{0o755, 0o644} {
		if err := unix.Fchmodat(int(s.dir.Fd()), "file", mode, 0); err != nil {
			return fmt.Errorf("fchmodat: %w", err)
		}
		st, err := s.stat("file")
		if err != nil {
			return err
		}
		if st.Mode&0o777 != mode {
			return fmt.Errorf("it has mode %04o instead of %04o", st.Mode&0o777, mode)
		}
	}
	return nil
}

func (s *storage) symlinks() error {
	const target = "no such/file"
	if err := unix.Symlinkat(target, int(s.dir.Fd()), "link"); err != nil {
		return fmt.Errorf("symlinkat: %w", err)
	}
	b := make([]byte, 64)
	n, err := unix.Readlinkat(int(s.dir.Fd()), "link", b)
	if err != nil {
		return fmt.Errorf("readlinkat: %w", err)
	}
	if string(b[:n]) != target {
		return fmt.Errorf("one to %q leads to %q", target, b[:n])
	}
	return nil
}

// times asks for the second: Git tells by a file's time whether it has changed. An odd one, because some keep every other.
func (s *storage) times() error {
	const second = 981173107
	ts := []unix.Timespec{{Sec: second}, {Sec: second}}
	if err := unix.UtimesNanoAt(int(s.dir.Fd()), "file", ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("utimensat: %w", err)
	}
	st, err := s.stat("file")
	if err == nil && st.Mtim.Sec != second {
		err = fmt.Errorf("it is %d seconds off", st.Mtim.Sec-second)
	}
	return err
}

func (s *storage) truncating() error {
	f, err := open(s.dir, "file", unix.O_RDWR)
	if err != nil {
		return err
	}
	defer f.Close()
	for size, content := range map[int64]string{3: "new", 0: ""} {
		if _, err := f.WriteAt([]byte("newer"), 0); err != nil {
			return err
		}
		if err := f.Truncate(size); err != nil {
			return err
		}
		if err := fileHolds(f, content); err != nil {
			return err
		}
	}
	_, err = f.WriteAt([]byte("newer"), 0)
	return err
}

// mapping lets the kernel read the mapped file, by writing it to a pipe: a page that can't be had is then an error (EFAULT),
// where it would end this program if it read it itself (SIGBUS).
func (s *storage) mapping() error {
	const content = "newer"
	f, err := open(s.dir, "file", unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	defer func() { _ = unix.Munmap(b) }()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = w.Write(b)
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	got, err := io.ReadAll(r)
	if err == nil && !bytes.Equal(got, []byte(content)) {
		err = fmt.Errorf("it holds %q instead of %q", got, content)
	}
	return err
}

func (s *storage) unlinking() error {
	if err := s.make(s.dir, "gone", "content"); err != nil {
		return err
	}
	f, err := open(s.dir, "gone", unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Unlinkat(int(s.dir.Fd()), "gone", 0); err != nil {
		return fmt.Errorf("unlinkat: %w", err)
	}
	if err := s.absent("gone"); err != nil {
		return err
	}
	return fileHolds(f, "content")
}

func (s *storage) longNames() error {
	name := strings.Repeat("n", 200)
	if err := s.make(s.dir, name, "content"); err != nil {
		return err
	}
	return s.holds(s.dir, name, "content")
}

func (s *storage) folders() error {
	if err := unix.Mkdirat(int(s.dir.Fd()), "folder", 0o755); err != nil {
		return fmt.Errorf("mkdirat: %w", err)
	}
	if err := unix.Renameat(int(s.dir.Fd()), "file", int(s.dir.Fd()), "folder/file"); err != nil {
		return fmt.Errorf("renameat into one: %w", err)
	}
	if err := s.holds(s.dir, "folder/file", "newer"); err != nil {
		return err
	}
	if err := unix.Unlinkat(int(s.dir.Fd()), "folder/file", 0); err != nil {
		return fmt.Errorf("unlinkat in one: %w", err)
	}
	if err := unix.Unlinkat(int(s.dir.Fd()), "folder", unix.AT_REMOVEDIR); err != nil {
		return fmt.Errorf("unlinkat: %w", err)
	}
	return s.absent("folder")
}

// mountsAgree makes a file through each of two mounts, looks at it through the other one, and has the locks hold across.
func (s *storage) mountsAgree() error {
	for _, way := range []struct {
		name     string
		from, to *os.File
	}{{"there", s.dir, s.other}, {"back", s.other, s.dir}} {
		if err := s.make(way.from, way.name, way.name); err != nil {
			return err
		}
		if err := s.holds(way.to, way.name, way.name); err != nil {
			return err
		}
		if err := s.make(way.to, way.name, "second"); !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("a second file got the same name: %v", err)
		}
	}
	return nil
}
