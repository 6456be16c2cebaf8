package seccomp

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Command is the filter of a command: everything is allowed but the refusals listed in package policy. With nested,
// the operator's permission, a command may make namespaces and mounts of its own; all other refusals stay, and writing
// extended attributes is refused in addition.
//
// The slice is shared: don't write to it.
func Command(nested bool) []unix.SockFilter {
	if nested {
		return commandNested[:]
	}
	return command[:]
}

// Container is the allow list for receiptd and everything that it starts. A command is under it and under Command.
// The slice is shared: don't write to it.
func Container() []unix.SockFilter { return container[:] }

// Install loads a filter for the calling thread and for whatever it starts from then on. It can't be undone, so the
// caller holds the thread with runtime.LockOSThread, and has set no_new_privs on it (or has CAP_SYS_ADMIN in its user
// namespace), else the error is EACCES.
func Install(prog []unix.SockFilter) error { return load(prog, 0) }

// InstallAll loads a filter for every thread of the process, those of the Go runtime included. no_new_privs, when it is
// set on the calling thread, is set on all of them.
func InstallAll(prog []unix.SockFilter) error { return load(prog, unix.SECCOMP_FILTER_FLAG_TSYNC) }

func load(prog []unix.SockFilter, flags uintptr) error {
	if len(prog) == 0 {
		return errors.New("loading a seccomp filter: the program is empty: use one of this package's")
	}
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	thread, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(prog)
	if e != 0 {
		return fmt.Errorf("loading a seccomp filter: %w%s", e, remedy(e))
	}
	if thread != 0 { // seccomp(2): with TSYNC, the thread that couldn't be brought in line
		return fmt.Errorf("loading a seccomp filter: thread %d has a filter of its own: load this one before any other", thread)
	}
	return nil
}

func remedy(e unix.Errno) string {
	switch e {
	case unix.EACCES:
		return ": set no_new_privs on this thread first"
	case unix.ENOSYS, unix.EINVAL:
		return ": the kernel needs CONFIG_SECCOMP_FILTER"
	}
	return ""
}
