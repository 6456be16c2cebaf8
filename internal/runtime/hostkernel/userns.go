package hostkernel

import (
	"context"
	"fmt"
	"os"
	goruntime "runtime"
	"sync"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// OwnNamespaces makes the user namespace of a container, as the container's own root, and, if asked to, a network namespace
// that it owns. Whoever has CAP_NET_ADMIN in that user namespace has it in this network namespace (network_namespaces(7)).
//
// What the kernel counts for each user (inotify instances and watches, pending signals, message queues, namespaces) it
// counts in every user namespace up to the node's own, there for whoever created the namespace (create_user_ns and
// inc_ucount, kernel/ucount.c). Made by root, one command would use up what root's daemons have left on the whole node:
// 128 inotify instances. Made with an id that is the sandbox's alone, it uses up its own.
func OwnNamespaces(ids runtime.IDs, pid1 string, withNetwork bool) (user, network *os.File, err error) {
	exe, err := os.OpenFile(pid1, unix.O_PATH, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making the container's user namespace: %w", err)
	}
	defer exe.Close()
	err = asContainersRoot(ids, func() (err error) {
		user, network, err = makeNamespaces(ids, exe, withNetwork)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("making the container's user namespace: %w", err)
	}
	return user, network, nil
}

// NewNetwork makes a network namespace that the node's user namespace owns, for sandboxes that have none of their own.
func NewNetwork() (*os.File, error) {
	type made struct {
		ns  *os.File
		err error
	}
	c := make(chan made, 1)
	go func() {
		goruntime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			c <- made{nil, fmt.Errorf("making a network namespace: %w", os.NewSyscallError("unshare", err))}
			return
		}
		ns, err := os.Open("/proc/thread-self/ns/net")
		c <- made{ns, err}
	}()
	m := <-c
	return m.ns, m.err
}

// Isolate makes a start's user namespace and, where it has a network, its network namespace, connected.
func (s *Start) Isolate(ctx context.Context) error {
	user, network, err := OwnNamespaces(s.Spec.IDs, s.Spec.Pid1, s.Spec.Connect != nil)
	if err != nil {
		return err
	}
	s.UserNS = user
	if network == nil {
		return nil
	}
	defer network.Close()
	s.Network, err = s.Spec.Connect(ctx, network)
	return err
}

// LimitInit sets the rlimits of the container's init. Another process's are its user namespace's to change, and the
// creator of that may do everything in it (prlimit(2); user_namespaces(7), Capabilities): no CAP_SYS_RESOURCE is needed.
func LimitInit(ids runtime.IDs, pid int, limits []Rlimit) error {
	return asContainersRoot(ids, func() error {
		for _, l := range limits {
			if err := unix.Prlimit(pid, l.Resource, &unix.Rlimit{Cur: l.Limit, Max: l.Limit}, nil); err != nil {
				return fmt.Errorf("setting rlimit %d of the container's init to %d: %w", l.Resource, l.Limit, os.NewSyscallError("prlimit", err))
			}
		}
		return nil
	})
}

// asContainersRoot calls f on a thread with the container root's host uid.
func asContainersRoot(ids runtime.IDs, f func() error) error {
	c := make(chan error, 1)
	go func() {
		// Never unlocked: the thread has another uid from here on, and ends with the goroutine.
		goruntime.LockOSThread()
		err := becomeOnThread(ids.HostBase)
		if err == nil {
			err = f()
		}
		c <- err
	}()
	return <-c
}

// makeNamespaces starts a process that never runs: it stops, traced, at the exec of pid1, which everybody can execute. A
// user namespace has no other handle than a process in it (user_namespaces(7)), and a multithreaded process can't enter one
// to make a network namespace there (setns(2)).
func makeNamespaces(ids runtime.IDs, exe *os.File, withNetwork bool) (user, network *os.File, err error) {
	flags := uintptr(unix.CLONE_NEWUSER)
	if withNetwork {
		flags |= unix.CLONE_NEWNET
	}
	p, err := os.StartProcess("/proc/self/fd/3", []string{"userns"}, &os.ProcAttr{
		Env: []string{}, Files: []*os.File{nil, nil, nil, exe},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  flags,
			UidMappings: sysIDMap(IDMap(ids.HostBase, ids.Size, ids.CommandUID, ids.CommandHostUID)),
			GidMappings: sysIDMap(IDMap(ids.HostBase, ids.Size, ids.CommandGID, ids.CommandHostGID)),
			// The gids are root's to map, so groups may be set inside.
			GidMappingsEnableSetgroups: true,
			Ptrace:                     true,
			Pdeathsig:                  unix.SIGKILL, // should the agent be killed meanwhile
		},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("%w (sysctl user.max_user_namespaces, kernel option CONFIG_USER_NS)", err)
	}
	defer func() {
		_ = p.Kill()
		_, _ = p.Wait()
	}()
	if user, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid)); err != nil || !withNetwork {
		return user, nil, err
	}
	if network, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", p.Pid)); err != nil {
		user.Close()
		return nil, nil, err
	}
	return user, network, nil
}

func sysIDMap(m []specs.LinuxIDMapping) (out []syscall.SysProcIDMap) {
	for _, e := range m {
		out = append(out, syscall.SysProcIDMap{ContainerID: int(e.ContainerID), HostID: int(e.HostID), Size: int(e.Size)})
	}
	return out
}

var becoming sync.Mutex

// becomeOnThread gives the calling thread, and no other, an effective uid, and leaves it its capabilities: the change of
// the effective uid alone takes only the effective ones away (capabilities(7), Effect of user ID changes).
func becomeOnThread(uid uint32) error {
	// A change of uid makes the process undumpable (prctl(2), PR_SET_DUMPABLE), and another thread must not take that for
	// how it was.
	becoming.Lock()
	defer becoming.Unlock()
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return os.NewSyscallError("prctl(PR_GET_DUMPABLE)", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	const keep = ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); e != 0 {
		return os.NewSyscallError("setresuid", e)
	}
	if err := unix.Capset(&header, &caps[0]); err != nil {
		return os.NewSyscallError("capset", err)
	}
	if dumpable == 1 {
		return os.NewSyscallError("prctl(PR_SET_DUMPABLE)", unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0))
	}
	return nil
}
