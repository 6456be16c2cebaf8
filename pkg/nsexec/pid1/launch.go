package pid1

import (
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// launch becomes the command. The order matters: the cgroup and the OOM score while it is still root of its namespace;
// the bounding set before the change of uid, which takes the right to; seccomp last, because it refuses much of the
// above. What it does to itself it does to its one locked thread, which is the one that executes bash.
func launch() {
	setup := readSetup()
	for i := range setup.JoinFDs {
		join(launcherJoin + int(i))
	}
	// Of a sandbox the kernel ends the command first, not receiptd or pid1, when the node is out of memory. Children inherit
	// it: there is no moment at which one of them has the default. It is a preference, no bound: a command may lower its
	// own score again, to what it was before this line (proc_pid_oom_score_adj(5)). The memory limit is the bound.
	writeSelf("oom_score_adj", "1000")
	if _, err := unix.Setsid(); err != nil {
		fail("making a session for the command", err)
	}
	setLimits(setup)
	become(setup.CommandUID, setup.CommandGID)
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		fail("setting no_new_privs", err)
	}
	if err := seccomp.Install(seccomp.Command(setup.NestedUserns)); err != nil {
		fail("installing the seccomp filter", err)
	}
	seals, err := statSeals(setup.Seals)
	if err != nil {
		fail("reading the seals", err)
	}
	user, system := cpu()
	ready := wire.Ready{UserUS: user, SystemUS: system, Seals: seals}
	if err := wire.FD(FDControl).WriteAll(wire.Frame(wire.KindReady, ready.Encode())); err != nil {
		unix.Exit(1)
	}
	execute(readCommand(), seals)
}

func readCommand() wire.Command {
	kind, body, err := wire.Read(wire.FD(FDControl))
	if err == wire.ErrClosed {
		unix.Exit(0) // never needed
	}
	if err != nil {
		fail("reading the command", err)
	}
	if kind != wire.KindCommand {
		fail("receiptd sent "+strconv.Quote(string(kind))+" instead of a command", nil)
	}
	command, err := wire.DecodeCommand(body)
	if err != nil {
		fail("decoding the command", err)
	}
	return command
}

func execute(c wire.Command, seals []wire.SealState) {
	if broken := brokenSeals(seals); len(broken) > 0 {
		fail("a seal was broken while the sandbox was idle, so nothing was started: "+broken[0], nil)
	}
	if err := unix.Chdir(c.Dir); err != nil {
		fail("entering the worktree "+c.Dir, err)
	}
	// A working directory outside the root would be a way out (CVE-2024-21626): it must be what was asked for.
	if cwd, err := unix.Getwd(); err != nil || cwd != c.Dir {
		fail("the working directory is "+cwd+" instead of "+c.Dir, err)
	}
	tryAll(c.Tries)
	closeOnExec()
	err := syscall.Exec(c.Path, c.Argv, c.Env)
	fail("executing "+c.Path, err)
}

// join moves this process into the cgroup whose cgroup.procs file fd is. The agent opened it as root, and the kernel
// checks with the opener's credentials (cgroup: Use open-time credentials for process migration perm checks, 5.16,
// CVE-2021-4197, also in the stable series from 5.4 on).
func join(fd int) {
	if err := wire.FD(fd).WriteAll([]byte("0")); err != nil {
		fail("joining the command's cgroup", err)
	}
	_ = unix.Close(fd)
}

// What a command may have of things that live in the kernel's own memory, and that older kernels count for no cgroup.
const (
	// maxPendingSignals counts queued signals and POSIX timers. The kernel's default is one for each 256 KiB of the node.
	maxPendingSignals = 1024
	// maxMessageQueueBytes is the kernel's default (MQ_BYTES_MAX): room for nine queues of the default size.
	maxMessageQueueBytes = 819200
)

func setLimits(setup wire.Setup) {
	limitCores()
	limit("RLIMIT_NOFILE", unix.RLIMIT_NOFILE, setup.NoFile)
	limitAtMost("RLIMIT_SIGPENDING", unix.RLIMIT_SIGPENDING, maxPendingSignals)
	limitAtMost("RLIMIT_MSGQUEUE", unix.RLIMIT_MSGQUEUE, maxMessageQueueBytes)
	if setup.NProc > 0 {
		limit("RLIMIT_NPROC", unix.RLIMIT_NPROC, setup.NProc)
	}
	if setup.FSize > 0 {
		limit("RLIMIT_FSIZE", unix.RLIMIT_FSIZE, setup.FSize)
	}
}

// limitCores allows no core dump. 1 and not 0: with a core_pattern that is a pipe the kernel ignores the limit and starts
// the program, as the node's root, except for exactly 1 (core(5)). A file of one byte is not written either. Where this
// process may not have 1, because the agent's own hard limit is 0, it is 0; the command can't change it (seccomp).
func limitCores() {
	if unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}) != nil {
		limit("RLIMIT_CORE", unix.RLIMIT_CORE, 0)
	}
}

func limit(name string, resource int, value uint64) {
	if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: value, Max: value}); err != nil {
		fail("setting "+name+" to "+strconv.FormatUint(value, 10), err)
	}
}

// limitAtMost lowers a limit, and leaves one that is lower already: only CAP_SYS_RESOURCE of the node could raise it.
func limitAtMost(name string, resource int, value uint64) {
	var now unix.Rlimit
	if err := unix.Getrlimit(resource, &now); err != nil {
		fail("reading "+name, err)
	}
	// Not set again where it is low enough: gVisor refuses every change of those that it does not know, which are 0 there.
	if now.Cur > value || now.Max > value {
		limit(name, resource, min(value, now.Max))
	}
}

// become takes this thread to the command's uid and drops every capability on the way. Raw system calls, because Go's
// own change all threads, by a signal; the other threads end at execve.
func become(uid, gid uint32) {
	if err := dropBounding(); err != nil {
		fail("dropping the capability bounding set", err)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); e != 0 {
		fail("dropping supplementary groups", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)); e != 0 {
		fail("becoming gid "+strconv.Itoa(int(gid)), e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
		fail("becoming uid "+strconv.Itoa(int(uid)), e)
	}
}

// closeOnExec marks every descriptor from 3 on, immediately before execve (CVE-2024-21626): the command gets 0, 1 and 2.
func closeOnExec() {
	err := unix.CloseRange(3, ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC)
	if err == nil {
		return
	}
	// CLOSE_RANGE_CLOEXEC came with Linux 5.11. The launcher's descriptors are few and low: the Go runtime's and ours.
	for fd := 3; fd < 1024; fd++ {
		if _, e := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); e == nil {
			unix.CloseOnExec(fd)
		}
	}
}

func writeSelf(name, value string) {
	fd, err := unix.Open("/proc/self/"+name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		fail("opening /proc/self/"+name, err)
	}
	if err := wire.FD(fd).WriteAll([]byte(value)); err != nil {
		fail("writing "+value+" to /proc/self/"+name, err)
	}
	_ = unix.Close(fd)
}

// resetSignals gives every signal its default action, so that the kernel's own protection of PID 1 holds: a signal with
// the default action does not reach the init of a PID namespace from inside it, whoever sends it. The Go runtime's
// handlers would be reached (a forged SIGBUS killed a pid1 that had them), and os/signal.Ignore would be inherited by
// the command and break wait4 (SIGCHLD).
func resetSignals() {
	const kernelSigset = 8       // bytes
	var defaultAction [4]uintptr // struct kernel_sigaction with SIG_DFL and nothing else
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig == uintptr(unix.SIGKILL) || sig == uintptr(unix.SIGSTOP) {
			continue
		}
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&defaultAction)), 0, kernelSigset, 0, 0); e != 0 {
			fail("resetting signal "+strconv.Itoa(int(sig)), e)
		}
	}
}
