package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Exists says whether there is something at path. Whatever can't be said for certain counts as there, a symlink in any
// component included: opening it as a source then fails, where a seal would otherwise be left out in silence.
func Exists(path string) bool {
	f, err := openPath(unix.AT_FDCWD, path, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	f.Close()
	return true
}

// OpenSource opens an absolute path as a mount's source (O_PATH), without following a symlink in any component
// (openat2(2), RESOLVE_NO_SYMLINKS, Linux 5.6).
func OpenSource(path string) (*os.File, error) {
	return openPath(unix.AT_FDCWD, path, unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS)
}

// OpenBeneath opens a path below root (O_PATH), "." for root itself. Symlinks are not followed and root is not left;
// mount points are crossed.
func OpenBeneath(root *os.File, path string) (*os.File, error) {
	rel := strings.TrimPrefix(path, "/")
	if rel == "" {
		rel = "."
	}
	return openPath(int(root.Fd()), rel, unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_BENEATH)
}

// openPath leaves O_NOFOLLOW out: with O_PATH it would open a last component that is a symlink, resolve flags or not
// (openat2(2), RESOLVE_NO_SYMLINKS).
func openPath(dirfd int, path string, resolve uint64) (*os.File, error) {
	for {
		fd, err := unix.Openat2(dirfd, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: resolve})
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), path), nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN): // EAGAIN: a rename or mount raced with ".." (openat2(2))
		case errors.Is(err, unix.ELOOP):
			return nil, &fs.PathError{Op: "openat2 (a component is a symlink; give the real path)", Path: path, Err: err}
		default:
			return nil, &fs.PathError{Op: "openat2", Path: path, Err: err}
		}
	}
}

// Attr is how a detached mount differs from its source. Every mount is private, nosuid and, unless Devices is set,
// nodev: no set-id bit counts inside, and nothing propagates in or out.
type Attr struct {
	ReadOnly bool
	NoExec   bool
	// Devices keeps device nodes usable: for the nodes of /dev alone.
	Devices bool
	// Recursive takes the mounts below the source along, all with the same attributes.
	Recursive bool
	// Idmap is a user namespace whose mapping the mount gets (mount_setattr(2), MOUNT_ATTR_IDMAP), or nil.
	Idmap *os.File
}

// Clone makes a detached copy of the mount at src (open_tree(2), Linux 5.2) with its attributes set (mount_setattr(2),
// Linux 5.12), so that it never exists anywhere without them. The error wraps ErrNoIdmap when that is what fails.
func Clone(src *os.File, a Attr) (*os.File, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH)
	at := uint(unix.AT_EMPTY_PATH)
	if a.Recursive {
		flags |= unix.AT_RECURSIVE
		at |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(int(src.Fd()), "", flags)
	if err != nil {
		return nil, mountError("open_tree", src, err)
	}
	tree := os.NewFile(uintptr(fd), src.Name())
	attr := &unix.MountAttr{Attr_set: a.bits(), Propagation: unix.MS_PRIVATE}
	if a.Idmap != nil {
		attr.Userns_fd = uint64(a.Idmap.Fd())
	}
	if err := unix.MountSetattr(fd, "", at, attr); err != nil {
		tree.Close()
		if a.Idmap != nil && errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("mount_setattr idmap %q: %w: %w", src.Name(), ErrNoIdmap, err)
		}
		return nil, mountError("mount_setattr", src, err)
	}
	return tree, nil
}

// mountError names the call and the path, and the remedy where the kernel is too old for the call.
func mountError(call string, at *os.File, err error) error {
	if errors.Is(err, unix.ENOSYS) {
		call += " (Linux 5.12 or newer is needed)"
	}
	return &fs.PathError{Op: call, Path: at.Name(), Err: err}
}

func (a Attr) bits() uint64 {
	bits := uint64(unix.MOUNT_ATTR_NOSUID)
	if !a.Devices {
		bits |= unix.MOUNT_ATTR_NODEV
	}
	if a.ReadOnly {
		bits |= unix.MOUNT_ATTR_RDONLY
	}
	if a.NoExec {
		bits |= unix.MOUNT_ATTR_NOEXEC
	}
	if a.Idmap != nil {
		bits |= unix.MOUNT_ATTR_IDMAP
	}
	return bits
}

// NewTmpfs makes a detached tmpfs (fsopen(2), fsmount(2), Linux 5.2) with the given options (tmpfs(5); one without a value
// is a flag): private, nosuid, nodev, noexec. It can be filled through its descriptor before it is attached.
func NewTmpfs(options map[string]string) (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making a tmpfs: %w", os.NewSyscallError("fsopen", err))
	}
	defer unix.Close(fs)
	for k, v := range options {
		set := func() error { return unix.FsconfigSetString(fs, k, v) }
		if v == "" {
			set = func() error { return unix.FsconfigSetFlag(fs, k) }
		}
		if err := set(); err != nil {
			return nil, fmt.Errorf("making a tmpfs with %s=%s: %w", k, v, os.NewSyscallError("fsconfig", err))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("making a tmpfs: %w", os.NewSyscallError("fsconfig", err))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making a tmpfs: %w", os.NewSyscallError("fsmount", err))
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}

// SetAttr changes the attributes of a mount, attached or not: target is its root. It does not idmap.
func SetAttr(target *os.File, a Attr) error {
	a.Idmap = nil
	at := uint(unix.AT_EMPTY_PATH)
	if a.Recursive {
		at |= unix.AT_RECURSIVE
	}
	err := unix.MountSetattr(int(target.Fd()), "", at, &unix.MountAttr{Attr_set: a.bits(), Propagation: unix.MS_PRIVATE})
	if err != nil {
		return mountError("mount_setattr", target, err)
	}
	return nil
}

// Attach puts a detached mount onto target, which the caller has opened inside the mount namespace of the calling
// thread (move_mount(2), Linux 5.2). Both are descriptors: no path is looked up again.
func Attach(tree, target *os.File) error {
	err := unix.MoveMount(int(tree.Fd()), "", int(target.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	if err != nil {
		return &fs.PathError{Op: "move_mount onto", Path: target.Name(), Err: err}
	}
	return nil
}

// Mapping says which on-disk ids of an idmapped mount appear as which host ids; all others appear as the overflow id
// and can't be made.
type Mapping struct {
	DiskUID, HostUID uint32
	DiskGID, HostGID uint32
	// KeepUID, when not 0, appears as itself. The kernel refuses every write to a file, or into a folder, whose owner
	// has no mapping in its mount (inode_permission, HAS_UNMAPPED_ID).
	KeepUID uint32
}

func (m Mapping) uids() []syscall.SysProcIDMap {
	out := []syscall.SysProcIDMap{{ContainerID: int(m.DiskUID), HostID: int(m.HostUID), Size: 1}}
	if m.KeepUID != 0 {
		out = append(out, syscall.SysProcIDMap{ContainerID: int(m.KeepUID), HostID: int(m.KeepUID), Size: 1})
	}
	return out
}

// UserNamespace makes a user namespace with that mapping, for Attr.Idmap. The caller closes it.
//
// A namespace needs a process for as long as it takes to open its file. The child is stopped by ptrace at its own
// execve, so nothing of it ever runs.
func UserNamespace(m Mapping) (*os.File, error) {
	// A tracee's tracer is a thread: it must not go away in between.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	proc, err := os.StartProcess("/proc/self/exe", []string{"userns"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: m.uids(),
			GidMappings: []syscall.SysProcIDMap{{ContainerID: int(m.DiskGID), HostID: int(m.HostGID), Size: 1}},
			Ptrace:      true,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("making a user namespace for an idmapped mount: %w (sysctl user.max_user_namespaces, kernel option CONFIG_USER_NS)", err)
	}
	defer func() {
		proc.Kill()
		_, _ = proc.Wait()
	}()
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", proc.Pid))
	if err != nil {
		return nil, fmt.Errorf("opening the user namespace of an idmapped mount: %w", err)
	}
	return ns, nil
}

// State is what is mounted at a path, as the kernel says it.
type State struct {
	Path string
	// MountID is that of statx(2), STATX_MNT_ID (Linux 5.8): the mount that the path lies on.
	MountID       uint64
	Device, Inode uint64
	// MountPoint: the path is the root of its mount.
	MountPoint              bool
	ReadOnly, NoSuid, NoDev bool
}

// ReadBack says what is mounted at a path below root, in the mount namespace that root belongs to.
func ReadBack(root *os.File, path string) (State, error) {
	f, err := OpenBeneath(root, path)
	if err != nil {
		return State{}, fmt.Errorf("reading back %q: %w", path, err)
	}
	defer f.Close()
	return stateOf(f, path)
}

func stateOf(f *os.File, path string) (State, error) {
	var x unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &x); err != nil {
		return State{}, fmt.Errorf("reading back %q: %w", path, os.NewSyscallError("statx", err))
	}
	var v unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &v); err != nil {
		return State{}, fmt.Errorf("reading back %q: %w", path, os.NewSyscallError("fstatfs", err))
	}
	return State{
		Path: path, MountID: x.Mnt_id, Inode: x.Ino,
		Device:     unix.Mkdev(x.Dev_major, x.Dev_minor),
		MountPoint: x.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
		ReadOnly:   v.Flags&unix.ST_RDONLY != 0,
		NoSuid:     v.Flags&unix.ST_NOSUID != 0,
		NoDev:      v.Flags&unix.ST_NODEV != 0,
	}, nil
}
