package inside

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process tries every call on the process whose id is given that reads, changes or stops it.
func process(a *attacker, args []string) error {
	pid, err := number(args, 0)
	if err != nil {
		return err
	}
	for _, f := range []string{"mem", "environ", "maps", "auxv", "stack", "syscall", "io", "pagemap"} {
		a.attempt(readByte(fmt.Sprintf("/proc/%d/%s", pid, f)), "a byte of /proc/%d/%s", pid, f)
	}
	for _, f := range []string{"root", "cwd", "exe"} {
		_, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, f))
		a.attempt(err, "the link /proc/%d/%s", pid, f)
	}
	for _, kind := range []string{"mnt", "pid", "user", "net"} {
		a.attempt(enter(fmt.Sprintf("/proc/%d/ns/%s", pid, kind)), "into the %s namespace of %d", kind, pid)
	}
	byMemory(a, pid)
	byNumber(a, pid)
	byDescriptor(a, pid)
	return nil
}

func readByte(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Read(make([]byte, 1))
	return err
}

// enter goes into a namespace, or back into its own, which nobody may without rights either. A thread with a root and a working
// directory of its own could be moved to other mounts (setns(2)).
func enter(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return inThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		return unix.Setns(int(f.Fd()), 0)
	})
}

func byMemory(a *attacker, pid int) {
	here := make([]byte, 8)
	local := []unix.Iovec{{Base: &here[0]}}
	local[0].SetLen(len(here))
	remote := []unix.RemoteIovec{{Base: 0x400000, Len: len(here)}}
	_, err := unix.ProcessVMReadv(pid, local, remote, 0)
	a.attempt(err, "process_vm_readv on %d", pid)
	_, err = unix.ProcessVMWritev(pid, local, remote, 0)
	a.attempt(err, "process_vm_writev on %d", pid)
	// A trace belongs to a thread, and ends with this process.
	runtime.LockOSThread()
	a.attempt(unix.PtraceSeize(pid), "ptrace on %d", pid)
}

func byNumber(a *attacker, pid int) {
	var limit unix.Rlimit
	a.attempt(unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit), "prlimit on %d", pid)
	a.attempt(unix.Setpriority(unix.PRIO_PROCESS, pid, 5), "setpriority on %d", pid)
	var cpus unix.CPUSet
	if unix.SchedGetaffinity(0, &cpus) == nil {
		a.attempt(unix.SchedSetaffinity(pid, &cpus), "sched_setaffinity on %d", pid)
	}
	_, _, e := unix.Syscall6(unix.SYS_KCMP, uintptr(pid), uintptr(os.Getpid()), 1, 0, 0, 0)
	a.attempt(asError(e), "kcmp on %d", pid)
	for _, sig := range []unix.Signal{0, unix.SIGTERM, unix.SIGSTOP, unix.SIGKILL} {
		_, _, e := unix.Syscall(unix.SYS_KILL, uintptr(pid), uintptr(sig), 0)
		a.attempt(asError(e), "to send signal %d to %d", int(sig), pid)
	}
}

func byDescriptor(a *attacker, pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		a.tried++ // that a process is there is no secret
		return
	}
	defer unix.Close(fd)
	stolen, err := unix.PidfdGetfd(fd, 3, 0)
	a.attempt(err, "descriptor %d of %d", stolen, pid)
	a.attempt(unix.PidfdSendSignal(fd, 0, nil, 0), "pidfd_send_signal on %d", pid)
	a.attempt(unix.Setns(fd, unix.CLONE_NEWNS), "the mounts of %d", pid)
	iov := unix.Iovec{Base: (*byte)(unsafe.Pointer(&fd)), Len: 8}
	_, _, e := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, unix.MADV_COLD, 0, 0)
	a.attempt(asError(e), "process_madvise on %d", pid)
}

func asError(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

// namespaces tries to make, and to enter again, each kind of namespace.
func namespaces(a *attacker, _ []string) error {
	kinds := []struct {
		name string
		flag int
	}{
		{"user", unix.CLONE_NEWUSER}, {"mnt", unix.CLONE_NEWNS}, {"pid", unix.CLONE_NEWPID}, {"net", unix.CLONE_NEWNET}, {"ipc", unix.CLONE_NEWIPC},
		{"uts", unix.CLONE_NEWUTS}, {"cgroup", unix.CLONE_NEWCGROUP}, {"time", unix.CLONE_NEWTIME},
	}
	for _, k := range kinds {
		a.attempt(inThread(func() error { return unix.Unshare(k.flag) }), "a %s namespace by unshare", k.name)
		a.attempt(inThread(func() error { return unix.Unshare(k.flag | unix.CLONE_NEWUSER) }), "a %s namespace in a user namespace", k.name)
		a.attempt(cloned(uintptr(k.flag)), "a %s namespace by clone", k.name)
		a.attempt(cloned(uintptr(k.flag|unix.CLONE_NEWUSER)), "a %s namespace in a user namespace by clone", k.name)
		if f, err := os.Open("/proc/self/ns/" + k.name); err == nil {
			a.attempt(inThread(func() error { return unix.Setns(int(f.Fd()), 0) }), "into a %s namespace by setns", k.name)
			f.Close()
		}
	}
	return nil
}

// inThread runs something on a thread that ends with it. A thread can't make a user namespace beside others (unshare(2)): that
// is EINVAL, which a clone finds out about.
func inThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		done <- f()
	}()
	return <-done
}

// cloned makes a child in new namespaces, which ends at once.
func cloned(flags uintptr) error {
	pid, err := fork1(flags, 0)
	if err != nil {
		return err
	}
	_, err = unix.Wait4(pid, nil, 0, nil)
	return err
}

// descriptors names open files besides the first three, and a first one that is not /dev/null.
func descriptors(a *attacker, _ []string) error {
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		return err
	}
	for _, l := range links {
		a.tried++
		target, err := os.Readlink(l)
		switch {
		case err != nil: // the folder's own, closed since
		case l == "/proc/self/fd/0" && target != os.DevNull:
			a.got("a standard input: %s", target)
		// The Go runtime's own, in this process.
		case len(l) == len("/proc/self/fd/0") && l <= "/proc/self/fd/2", within(target, []string{"/sys/fs/cgroup", "/proc"}), target == "anon_inode:[eventpoll]", target == "anon_inode:[eventfd]":
		default:
			a.got("an open descriptor: %s", target)
		}
	}
	return nil
}
