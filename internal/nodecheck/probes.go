package nodecheck

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// probes are the looks at a node for these needs.
func probes(node Node, n Needs) []probe {
	root := node.UID == 0
	all := []probe{
		{ids: []ID{Openat2, Pidfd}, need: NeedAgent, look: one(lookAtCalls)},
		{ids: []ID{MountAPI}, need: NeedShared, look: asRoot(root, MountAPI, tryMountAPI, "")},
		{ids: []ID{UserNS, IDMaps, PidNS, MountNS, NetNS, IpcNS, UtsNS, CgroupNS}, need: NeedShared, look: one(func() map[ID][]Fact { return tryNamespaces(root) })},
		{ids: []ID{Proc, NestedNS, NestedProc, Seccomp}, need: NeedShared, look: func(ctx context.Context) map[ID][]Fact { return trySandbox(ctx, root) }},
		{ids: []ID{SockDestroy}, need: NeedShared, look: asRoot(root, SockDestroy, tryDestroySockets, "")},
		{ids: []ID{Nftables}, need: NeedNetwork, look: asRoot(root, Nftables, tryNftables, "")},
		{ids: []ID{IngressAnswer}, need: NeedNetwork, look: asRoot(root, IngressAnswer, tryIngressAnswer, "")},
		{ids: []ID{Conntrack}, need: NeedNetwork, look: asRoot(root, Conntrack, tryConntrack, "")},
		{ids: []ID{Egress}, need: NeedNetwork, look: asRoot(root, Egress, tryEgress, "")},
		{ids: []ID{Overlay}, need: NeedImage, look: asRoot(root, Overlay, tryOverlay, "")},
		{ids: []ID{Landlock, CloneInto, IoUring, Vsock}, need: NeedNobody, look: one(func() map[ID][]Fact { return lookAtExtras(node) })},
		{ids: []ID{StateSpace, Fsync}, need: NeedAgent, look: one(func() map[ID][]Fact { return lookAtDisk(n.StateDir, root) })},
		{ids: []ID{Git}, need: NeedAgent, look: single(Git, lookAtGit)},
		{ids: []ID{Runc}, need: NeedRunc, look: single(Runc, func(ctx context.Context) Fact {
			return lookAtShimmed(ctx, runcShimmed, n.Containerd.Runtimes.Runc, n.Containerd.Address)
		})},
		{ids: []ID{GVisor}, need: NeedGVisor, look: single(GVisor, func(ctx context.Context) Fact {
			return lookAtShimmed(ctx, gvisorShimmed, n.Containerd.Runtimes.Gvisor, n.Containerd.Address)
		})},
		{ids: []ID{Kata, KVM}, need: NeedKata, look: func(ctx context.Context) map[ID][]Fact { return lookAtKata(ctx, n.Containerd) }},
		{ids: []ID{ContainerdAPI}, need: NeedContainerd, look: single(ContainerdAPI, func(ctx context.Context) Fact { return askContainerd(ctx, n.Containerd) })},
		{ids: []ID{CNI}, need: NeedCNI, look: single(CNI, func(context.Context) Fact { return lookAtCNI(n.CNI) })},
	}
	for _, path := range slices.Compact(append([]string{n.StateDir}, n.WorkspaceRoots...)) {
		all = append(all, probe{ids: []ID{Idmap}, subject: path, need: NeedShared, look: asRoot(root, Idmap, func() Fact { return tryIdmap(path) }, path)})
	}
	return all
}

func one(look func() map[ID][]Fact) func(context.Context) map[ID][]Fact {
	return func(context.Context) map[ID][]Fact { return look() }
}

func single(id ID, look func(context.Context) Fact) func(context.Context) map[ID][]Fact {
	return func(ctx context.Context) map[ID][]Fact { return map[ID][]Fact{id: {look(ctx)}} }
}

// asRoot answers for what root alone can try.
func asRoot(root bool, id ID, look func() Fact, subject string) func(context.Context) map[ID][]Fact {
	return single(id, func(context.Context) Fact {
		if !root {
			return unsure("only root can try it").of(subject)
		}
		return look()
	})
}

func lookAtCalls() map[ID][]Fact {
	return map[ID][]Fact{Openat2: {tryOpenat2()}, Pidfd: {tryPidfd()}}
}

func tryOpenat2() Fact {
	f, err := mounts.OpenSource("/")
	if err != nil {
		return no(err)
	}
	f.Close()
	return yes("it works")
}

// tryPidfd also waits by pidfd, the youngest of the three calls (5.4): ECHILD, because one is no child of oneself.
func tryPidfd() Fact {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return no(os.NewSyscallError("pidfd_open", err))
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
		return no(os.NewSyscallError("pidfd_send_signal", err))
	}
	if err := unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED|unix.WNOHANG, nil); err != unix.ECHILD {
		return no(fmt.Errorf("waitid(P_PIDFD): %w", err))
	}
	return yes("opening, signalling and waiting work")
}

func tryMountAPI() Fact {
	tree, err := cloneOf("/", nil)
	if err != nil {
		return no(err)
	}
	tree.Close()
	return yes("a detached read-only copy of / was made")
}

// cloneOf makes a detached copy of the mount at path, which ends with its descriptor.
func cloneOf(path string, idmap *os.File) (*os.File, error) {
	f, err := mounts.OpenSource(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return mounts.Clone(f, mounts.Attr{ReadOnly: true, Idmap: idmap})
}

// probeID is a host id of nobody's: the first of the range that sandboxes get theirs from (systemd's UIDS-GIDS, "unused").
const probeID = 0x70000000

// tryIdmap makes a detached idmapped copy of the mount that path lies on.
func tryIdmap(path string) Fact {
	at, err := existing(path)
	if err != nil {
		return unsure("%v", err).of(path)
	}
	ns, err := mounts.UserNamespace(mounts.Mapping{DiskUID: 1000, HostUID: probeID, DiskGID: 1000, HostGID: probeID})
	if err != nil {
		return unsure("%v", err).of(path)
	}
	defer ns.Close()
	tree, err := cloneOf(at, ns)
	if err != nil {
		if !errors.Is(err, mounts.ErrNoIdmap) {
			return unsure("%v", err).of(path)
		}
		return nof("%s can't%s", fileSystem(at), elsewhere(path, at)).of(path)
	}
	tree.Close()
	return yes("%s can%s", fileSystem(at), elsewhere(path, at)).of(path)
}

// existing is path with its links resolved, or the nearest folder above it that is there.
func existing(path string) (string, error) {
	for {
		at, err := filepath.EvalSymlinks(path)
		if !errors.Is(err, os.ErrNotExist) {
			return at, err
		}
		path = filepath.Dir(path)
	}
}

func elsewhere(path, at string) string {
	if path == at {
		return ""
	}
	return " (looked at " + at + ")"
}

// kinds are the namespaces of a sandbox, each with the flag of clone(2).
var kinds = []struct {
	id   ID
	flag uintptr
}{
	{PidNS, unix.CLONE_NEWPID}, {MountNS, unix.CLONE_NEWNS}, {NetNS, unix.CLONE_NEWNET}, {IpcNS, unix.CLONE_NEWIPC},
	{UtsNS, unix.CLONE_NEWUTS}, {CgroupNS, unix.CLONE_NEWCGROUP},
}

// tryNamespaces makes a user namespace with each other kind. As another user than root it maps that user alone, and what is
// refused then says nothing about root.
func tryNamespaces(root bool) map[ID][]Fact {
	maps := idRange(probeID, 1<<16)
	if !root {
		maps = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	}
	seen := map[ID][]Fact{UserNS: {made(makeNamespaces(unix.CLONE_NEWUSER, nil), root)}}
	if !root {
		seen[IDMaps] = []Fact{unsure("only root can try it")}
	} else {
		seen[IDMaps] = []Fact{made(makeNamespaces(unix.CLONE_NEWUSER, maps), root)}
	}
	for _, k := range kinds {
		seen[k.id] = []Fact{made(makeNamespaces(unix.CLONE_NEWUSER|k.flag, maps), root)}
	}
	return seen
}

func made(err error, root bool) Fact {
	switch {
	case err == nil:
		return yes("one was made")
	case !root:
		return unsure("uid %d can't make one: %v", os.Geteuid(), err)
	}
	return no(err)
}

func idRange(base, size int) []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: size}}
}

// nothing is a program that is not there: what begins with its start is undone by its end.
const nothing = "/proc/self/fd/sandbox-agent-starts-nothing"

// makeNamespaces starts a child in new namespaces, which executes a program that is not there. ENOENT so means that all was
// made, and with the child, which never ran, all is gone.
func makeNamespaces(flags uintptr, maps []syscall.SysProcIDMap) error {
	attr := &syscall.SysProcAttr{Cloneflags: flags, UidMappings: maps, GidMappings: maps, GidMappingsEnableSetgroups: len(maps) > 0 && maps[0].Size > 1}
	_, err := syscall.ForkExec(nothing, []string{"nothing"}, &syscall.ProcAttr{Env: []string{}, Sys: attr})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		err = errors.New("a program that is not there was started")
	}
	return err
}

// tryOverlay makes an overlay that is never mounted, of two folders that every node has.
func tryOverlay() Fact {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return no(os.NewSyscallError("fsopen", err))
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "lowerdir", "/usr:/etc"); err != nil {
		return no(os.NewSyscallError("fsconfig", err))
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return no(os.NewSyscallError("fsconfig", err))
	}
	return yes("one was made of two folders")
}

func lookAtExtras(node Node) map[ID][]Fact {
	return map[ID][]Fact{Landlock: {landlock()}, CloneInto: {cloneInto()}, IoUring: {ioUring(node)}, Vsock: {vsock()}}
}

// landlock asks for the ABI (landlock_create_ruleset(2), LANDLOCK_CREATE_RULESET_VERSION).
func landlock() Fact {
	abi, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if e != 0 {
		return no(os.NewSyscallError("landlock_create_ruleset", e))
	}
	return yes("ABI %d", abi)
}

// cloneInto clones into a cgroup that no descriptor stands for, which the kernel says only where it knows the flag.
func cloneInto() Fact {
	const badFD = 1<<31 - 1
	args := struct { // struct clone_args of clone3(2), up to its version 2
		flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
	}{flags: unix.CLONE_INTO_CGROUP, exitSignal: uint64(unix.SIGCHLD), cgroup: badFD}
	pid, _, e := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
	runtime.KeepAlive(&args)
	switch {
	case e == 0 && pid == 0:
		unix.Exit(0) // in a child that could not be made
	case e == unix.EBADF:
		return yes("clone3 knows it")
	}
	return no(os.NewSyscallError("clone3", e))
}

// ioUring asks for an instance without memory for its parameters: EFAULT where it could be had.
func ioUring(n Node) Fact {
	_, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, 0, 0)
	state := ""
	if v, known := n.Sysctls["kernel.io_uring_disabled"]; known {
		state = ", kernel.io_uring_disabled is " + v
	}
	if e == unix.EFAULT || e == unix.EINVAL {
		return yes("the node has it%s", state)
	}
	return yes("the node has it not%s", state)
}

func vsock() Fact {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return no(os.NewSyscallError("socket(AF_VSOCK)", err))
	}
	unix.Close(fd)
	return yes("a socket was made")
}
