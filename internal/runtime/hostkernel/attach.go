package hostkernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/provenance"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Starting a container takes threads that enter its mount namespace and end with their goroutine; libcontainer has
// one of these too. The process's first thread can't end: it would stay in there for ever, and /proc/self, which is the
// first thread's, would show the container's mounts. So the main goroutine keeps that thread to itself: LockOSThread in
// an init function makes main run on it (runtime documentation).
func init() { goruntime.LockOSThread() }

// attachment is a detached mount and where it goes.
type attachment struct {
	target string
	tree   *os.File
}

// Programs are SHA-256 of the programs that go into a sandbox, lower-case hex.
type Programs struct{ Receiptd, Pid1 string }

// BindMounts are all bind mounts of a sandbox, cloned and ready before its container exists.
type BindMounts struct {
	root      []attachment // root file system, then receiptd's own folders, then the grants
	workspace *mounts.Detached
	// Programs are the digests of receiptd and pid1 as they are mounted.
	Programs Programs
	// Ownership tells how files of the worktree get their owner inside.
	Ownership mounts.Ownership
	inTmp     []string // mount points that have to be made in /tmp
	inHome    []string // and in HOME
	ids       runtime.IDs
}

func (b *BindMounts) Close() {
	for _, a := range b.root {
		a.tree.Close()
	}
	b.root = nil
	if b.workspace != nil {
		b.workspace.Close()
	}
}

// PrepareMounts clones every bind mount. Whatever can fail for a reason of the host fails here.
func PrepareMounts(spec runtime.Spec, s Skeleton, source string) (_ *BindMounts, err error) {
	b := &BindMounts{ids: spec.IDs}
	defer func() {
		if err != nil {
			b.Close()
		}
	}()
	if err := b.cloneRoot(s, source); err != nil {
		return nil, err
	}
	if err := b.makeInternal(spec.IDs); err != nil {
		return nil, err
	}
	if err := b.cloneInternal(spec); err != nil {
		return nil, err
	}
	if err := b.cloneWorkspace(spec); err != nil {
		return nil, err
	}
	if err := b.makeGrants(spec.Grants); err != nil {
		return nil, err
	}
	for _, p := range spec.Workspace.Roots() {
		switch {
		case underTmp(p):
			b.inTmp = append(b.inTmp, p)
		case underHome(p):
			b.inHome = append(b.inHome, p)
		}
	}
	return b, nil
}

// cloneRoot clones the binds of the root file system: read-only, with what is mounted below them.
func (b *BindMounts) cloneRoot(s Skeleton, source string) error {
	for _, bd := range s.binds {
		if err := b.clone(filepath.Join(source, bd.path), bd.path, mounts.Attr{ReadOnly: true, Recursive: true}); err != nil {
			return err
		}
	}
	return nil
}

// clone opens a host path and clones its mount.
func (b *BindMounts) clone(source, target string, a mounts.Attr) error {
	f, err := mounts.OpenSource(source)
	if err != nil {
		return fmt.Errorf("opening %s for a sandbox: %w", source, err)
	}
	defer f.Close()
	return b.cloneOpened(f, target, a)
}

func (b *BindMounts) cloneOpened(f *os.File, target string, a mounts.Attr) error {
	tree, err := mounts.Clone(f, a)
	if err != nil {
		return fmt.Errorf("cloning the mount of %s for a sandbox: %w", f.Name(), err)
	}
	b.root = append(b.root, attachment{target, tree})
	return nil
}

// makeInternal makes the folder that holds what only receiptd sees: a file system of its own, so that receiptd can take
// it away from the commands' view with everything that is mounted in it, and an empty folder is left.
func (b *BindMounts) makeInternal(ids runtime.IDs) error {
	tmpfs, err := mounts.NewTmpfs(map[string]string{"mode": "0700", "size": "64k", "nr_inodes": "16"})
	if err != nil {
		return err
	}
	b.root = append(b.root, attachment{runtime.InternalDir, tmpfs})
	fd := int(tmpfs.Fd())
	fail := func(err error) error { return fmt.Errorf("making receiptd's own folder: %w", err) }
	for _, d := range []string{"receipts", "control", "bin"} {
		if err := unix.Mkdirat(fd, d, 0o700); err != nil {
			return fail(os.NewSyscallError("mkdirat", err))
		}
	}
	for _, f := range []string{"bin/receiptd", "bin/pid1"} {
		if err := unix.Mknodat(fd, f, unix.S_IFREG|0o600, 0); err != nil {
			return fail(os.NewSyscallError("mknodat", err))
		}
	}
	for _, d := range []string{".", "receipts", "control", "bin"} {
		if err := unix.Fchownat(fd, d, int(ids.HostBase), int(ids.HostBase), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fail(os.NewSyscallError("fchownat", err))
		}
	}
	return mounts.SetAttr(tmpfs, mounts.Attr{ReadOnly: true, NoExec: true})
}

// cloneInternal clones the folders that only receiptd sees. On disk all of it belongs to root, so that nothing of an
// ended sandbox ever belongs to the next user of its ids; inside, to receiptd. Where the state folder's file
// system can't map ids, it is given to receiptd's host uid.
func (b *BindMounts) cloneInternal(spec runtime.Spec) error {
	ns, err := mounts.UserNamespace(mounts.Mapping{HostUID: spec.IDs.HostBase, HostGID: spec.IDs.HostBase})
	if err != nil {
		return err
	}
	defer ns.Close()
	before := len(b.root)
	err = b.internalMounts(spec, ns)
	if !errors.Is(err, mounts.ErrNoIdmap) {
		return err
	}
	for _, a := range b.root[before:] {
		a.tree.Close()
	}
	b.root = b.root[:before]
	for _, dir := range []string{ControlDir(spec.Dir), spec.ReceiptsDir} {
		if err := os.Lchown(dir, int(spec.IDs.HostBase), int(spec.IDs.HostBase)); err != nil {
			return fmt.Errorf("giving a folder to receiptd: %w", err)
		}
	}
	return b.internalMounts(spec, nil)
}

func (b *BindMounts) internalMounts(spec runtime.Spec, idmap *os.File) (err error) {
	for _, m := range []struct {
		source, target string
		attr           mounts.Attr
	}{
		{spec.ReceiptsDir, runtime.ReceiptsPath, mounts.Attr{NoExec: true, Idmap: idmap}},
		{ControlDir(spec.Dir), runtime.ControlPath, mounts.Attr{NoExec: true, Idmap: idmap}},
	} {
		if err := b.clone(m.source, m.target, m.attr); err != nil {
			return err
		}
	}
	if b.Programs.Receiptd, err = b.cloneProgram("receiptd", spec.Receiptd, spec.ReceiptdSHA256); err != nil {
		return err
	}
	b.Programs.Pid1, err = b.cloneProgram("pid1", spec.Pid1, spec.Pid1SHA256)
	return err
}

// cloneProgram clones the mount of a program and hashes it by the very descriptor that was cloned.
func (b *BindMounts) cloneProgram(name, source, want string) (string, error) {
	f, err := mounts.OpenSource(source)
	if err != nil {
		return "", fmt.Errorf("opening %s for a sandbox: %w", source, err)
	}
	defer f.Close()
	sum, err := provenance.Program(name, f, want)
	if err != nil {
		return "", err
	}
	return sum, b.cloneOpened(f, runtime.BinPath+"/"+name, mounts.Attr{ReadOnly: true})
}

// cloneWorkspace clones the workspace's mounts, idmapped if all its file systems can do that.
func (b *BindMounts) cloneWorkspace(spec runtime.Spec) error {
	opened, err := mounts.Open(spec.Workspace)
	if err != nil {
		return err
	}
	defer opened.Close()
	if spec.IDs.CommandHostUID == 0 {
		err := b.cloneIdmapped(opened, spec)
		if !errors.Is(err, mounts.ErrNoIdmap) {
			b.Ownership.Idmap = true
			return err
		}
	}
	if b.Ownership, err = mounts.DecideOwnership(spec.Workspace, false); err != nil {
		return err
	}
	b.workspace, err = opened.Clone(nil)
	return err
}

func (b *BindMounts) cloneIdmapped(opened *mounts.Opened, spec runtime.Spec) error {
	ns, err := mounts.UserNamespace(spec.Workspace.Mapping(spec.IDs.HostBase+spec.IDs.CommandUID, spec.IDs.HostBase+spec.IDs.CommandGID))
	if err != nil {
		return err
	}
	defer ns.Close()
	b.workspace, err = opened.Clone(ns)
	return err
}

// Attach puts the mounts into the mount namespace of the container's init, which waits in libcontainer's hook with
// its own file systems mounted and the host's root still its own.
func (b *BindMounts) Attach(initPid int, rootfs string) error {
	result := make(chan error, 1)
	go func() {
		// Never unlocked: this thread's mount namespace is the container's, and it ends with the goroutine.
		goruntime.LockOSThread()
		result <- b.attachHere(initPid, rootfs)
	}()
	return <-result
}

func (b *BindMounts) attachHere(initPid int, rootfs string) error {
	if err := enterMountNamespace(initPid); err != nil {
		return err
	}
	root, err := mounts.OpenSource(rootfs)
	if err != nil {
		return fmt.Errorf("opening the container's root: %w", err)
	}
	defer root.Close()
	for _, a := range b.root {
		if err := attachOne(root, a); err != nil {
			return err
		}
	}
	if err := b.makeMountPoints(root); err != nil {
		return err
	}
	if b.workspace != nil {
		if _, err := b.workspace.Attach(root); err != nil {
			return err
		}
	}
	for _, d := range DeviceNodes {
		if err := setAttr(root, d.Path, mounts.Attr{NoExec: true, Devices: true}); err != nil {
			return err
		}
	}
	return mounts.SetAttr(root, mounts.Attr{ReadOnly: true})
}

func enterMountNamespace(pid int) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return fmt.Errorf("opening the container's mount namespace: %w", err)
	}
	defer ns.Close()
	// A thread that shares its root and working directory with others can't change its mount namespace (setns(2)).
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("entering the container's mount namespace: %w", os.NewSyscallError("unshare", err))
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the container's mount namespace: %w", os.NewSyscallError("setns", err))
	}
	return nil
}

func attachOne(root *os.File, a attachment) error {
	target, err := mounts.OpenBeneath(root, a.target)
	if err != nil {
		return fmt.Errorf("opening the mount target %s: %w", a.target, err)
	}
	defer target.Close()
	return mounts.Attach(a.tree, target)
}

func setAttr(root *os.File, path string, a mounts.Attr) error {
	f, err := mounts.OpenBeneath(root, path)
	if err != nil {
		return fmt.Errorf("opening %s of the container: %w", path, err)
	}
	defer f.Close()
	return mounts.SetAttr(f, a)
}

// makeMountPoints makes those that lie in file systems which libcontainer has just mounted. In /tmp they are the
// container's root's: it is sticky, so a command can't rename them. HOME is the command's, who may rename what it likes
// there: only caches are mounted in it.
func (b *BindMounts) makeMountPoints(root *os.File) error {
	uid, gid := b.commandIDs()
	if err := mkdirAllAs(root, b.inTmp, b.ids.HostBase, b.ids.HostBase); err != nil {
		return err
	}
	return mkdirAllAs(root, b.inHome, uid, gid)
}

// commandIDs are the host ids of a command. They are known once the workspace is cloned.
func (b *BindMounts) commandIDs() (uid, gid uint32) {
	if !b.Ownership.Idmap {
		return b.Ownership.CommandHostUID, b.Ownership.CommandHostGID
	}
	return b.ids.HostBase + b.ids.CommandUID, b.ids.HostBase + b.ids.CommandGID
}

// mkdirAllAs makes folders with the ids that their file system knows, which the node's root is not among.
func mkdirAllAs(root *os.File, paths []string, uid, gid uint32) error {
	if len(paths) == 0 {
		return nil
	}
	// Of this thread alone, which takes its own capabilities for files away until it is 0 again (capabilities(7)).
	unix.Setfsgid(int(gid))
	unix.Setfsuid(int(uid))
	defer unix.Setfsgid(0)
	defer unix.Setfsuid(0)
	for _, p := range paths {
		if err := mkdirBeneath(root, p); err != nil {
			return err
		}
	}
	return nil
}

// mkdirBeneath makes a folder and its parents below root, in a file system of the container's own.
func mkdirBeneath(root *os.File, path string) error {
	at := ""
	for _, part := range strings.Split(strings.Trim(path, "/"), "/") {
		parent, err := mounts.OpenBeneath(root, at)
		if err != nil {
			return fmt.Errorf("making the mount point %s: %w", path, err)
		}
		err = unix.Mkdirat(int(parent.Fd()), part, 0o755)
		parent.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("making the mount point %s: %w", path, os.NewSyscallError("mkdirat", err))
		}
		at += "/" + part
	}
	return nil
}
