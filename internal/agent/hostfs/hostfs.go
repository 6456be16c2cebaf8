package hostfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Owner is who owns a folder on disk.
type Owner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

func (o Owner) String() string { return fmt.Sprintf("uid %d, gid %d", o.UID, o.GID) }

// OpenDir opens a folder of which no component is a symlink. what names it in the error.
func OpenDir(what, path string) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case err == nil:
		return os.NewFile(uintptr(fd), path), nil
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%w: %s %s: a component of the path is a symlink; name the real path (realpath prints it)", ErrRefused, what, path)
	case errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("%w: %s %s does not exist: %w", ErrRefused, what, path, os.ErrNotExist)
	case errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%w: %s %s is not a folder, or a component of its path isn't", ErrRefused, what, path)
	default:
		return nil, fmt.Errorf("opening %s %s: openat2: %w", what, path, err)
	}
}

// StatDir opens a folder without following symlinks and tells who owns it.
func StatDir(what, path string) (Owner, error) {
	f, err := OpenDir(what, path)
	if err != nil {
		return Owner{}, err
	}
	defer f.Close()
	return OwnerOf(f)
}

func OwnerOf(f *os.File) (Owner, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Owner{}, fmt.Errorf("looking at %s: fstat: %w", f.Name(), err)
	}
	return Owner{UID: st.Uid, GID: st.Gid}, nil
}

// MakeFor makes an empty folder that belongs to owner: by descriptor of its parent, so that no link can send it
// elsewhere. It reports whether the folder was made (false: it was there, or it could not be made).
func MakeFor(path string, owner Owner) (bool, error) {
	parent, err := OpenDir("the folder above "+path, filepath.Dir(path))
	if err != nil {
		return false, err
	}
	defer parent.Close()
	name := filepath.Base(path)
	if err := unix.Mkdirat(int(parent.Fd()), name, 0o755); err != nil {
		return false, fmt.Errorf("making the folder %s: mkdirat: %w", path, err)
	}
	if err := chownNew(parent, name, owner); err != nil {
		return true, errors.Join(err, RemoveMade(path))
	}
	return true, nil
}

// chownNew gives a folder that was just made by root away. Whoever can rename in the parent could have put another
// one in its place: what is given away must be an empty folder of root's.
func chownNew(parent *os.File, name string, owner Owner) error {
	fd, err := unix.Openat2(int(parent.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH,
	})
	if err != nil {
		return fmt.Errorf("opening the new folder %s in %s: openat2: %w", name, parent.Name(), err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if names, err := f.Readdirnames(1); len(names) != 0 {
		return fmt.Errorf("%w: the new folder %s in %s was replaced while it was made (%v): try again", ErrRefused, name, parent.Name(), err)
	}
	if err := f.Chown(int(owner.UID), int(owner.GID)); err != nil {
		return fmt.Errorf("giving %s in %s to uid %d: %w", name, parent.Name(), owner.UID, err)
	}
	return nil
}

// RemoveMade takes an empty folder of ours away again.
func RemoveMade(path string) error {
	parent, err := OpenDir("the folder above "+path, filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	err = unix.Unlinkat(int(parent.Fd()), filepath.Base(path), unix.AT_REMOVEDIR)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("removing the new folder %s: unlinkat: %w", path, err)
	}
	return nil
}

// AsOwner runs f on a thread whose file-system uid and gid are the owner's (setfsuid(2)): permissions, quotas and
// root-squashing file systems then treat it as the owner, and root's file capabilities are off.
func AsOwner(o Owner, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: should the ids not come back, the thread dies with the goroutine.
		runtime.LockOSThread()
		done <- withFSIDs(o, f)
	}()
	return <-done
}

func withFSIDs(o Owner, f func() error) error {
	if err := setFSID(unix.SetfsgidRetGid, o.GID); err != nil {
		return fmt.Errorf("acting as gid %d: setfsgid: %w", o.GID, err)
	}
	if err := setFSID(unix.SetfsuidRetUid, o.UID); err != nil {
		return fmt.Errorf("acting as uid %d: setfsuid: %w", o.UID, err)
	}
	return f()
}

// setFSID sets and reads back: setfsuid(2) has no way to say that it failed, but a second call tells what is set.
func setFSID(set func(int) (int, error), id uint32) error {
	if _, err := set(int(id)); err != nil {
		return err
	}
	if now, err := set(-1); err != nil || uint32(now) != id {
		return fmt.Errorf("the kernel kept %d: %w", now, unix.EPERM)
	}
	return nil
}

// Beneath opens a name in dir: no link is followed, no mount is crossed, nothing above dir is reached (openat2(2)).
func Beneath(dir *os.File, name string, flags int, mode uint64) (int, error) {
	return unix.Openat2(int(dir.Fd()), name, &unix.OpenHow{
		Flags:   uint64(flags) | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Mode:    mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
}
