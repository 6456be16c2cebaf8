package hostkernel

import (
	"fmt"
	"os"
	goruntime "runtime"
	"sync"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// OwnUserNamespace makes the user namespace of a container, as the container's own root.
//
// What the kernel counts for each user (inotify instances and watches, pending signals, message queues, namespaces) it
// counts in every user namespace up to the node's own, there for whoever created the namespace (create_user_ns and
// inc_ucount, kernel/ucount.c). Made by root, one command would use up what root's daemons have left on the whole node:
// 128 inotify instances. Made with an id that is the sandbox's alone, it uses up its own.
func OwnUserNamespace(ids runtime.IDs, pid1 string) (*os.File, error) {
	exe, err := os.OpenFile(pid1, unix.O_PATH, 0)
	if err != nil {
		return nil, fmt.Errorf("making the container's user namespace: %w", err)
	}
	defer exe.Close()
	var ns *os.File
	err = asContainersRoot(ids, func() (err error) {
		ns, err = makeUserNamespace(ids, exe)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("making the container's user namespace: %w", err)
	}
	return ns, nil
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

// makeUserNamespace starts a process that never runs: it stops, traced, at the exec of pid1, which everybody can
// execute. A user namespace has no other handle than a process in it (user_namespaces(7)).
func makeUserNamespace(ids runtime.IDs, exe *os.File) (*os.File, error) {
	p, err := os.StartProcess("/proc/self/fd/3", []string{"userns"}, &os.ProcAttr{
		Env: []string{}, Files: []*os.File{nil, nil, nil, exe},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: sysIDMap(IDMap(ids.HostBase, ids.Size, ids.CommandUID, ids.CommandHostUID)),
			GidMappings: sysIDMap(IDMap(ids.HostBase, ids.Size, ids.CommandGID, ids.CommandHostGID)),
			// The gids are root's to map, so groups may be set inside.
			GidMappingsEnableSetgroups: true,
			Ptrace:                     true,
			Pdeathsig:                  unix.SIGKILL, // should the agent be killed meanwhile
		},
	})
	if err != nil {
		return nil, fmt.Errorf("%w (sysctl user.max_user_namespaces, kernel option CONFIG_USER_NS)", err)
	}
	defer func() {
		_ = p.Kill()
		_, _ = p.Wait()
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
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
