package inside

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The longest that a process of an attack lives when nothing ends it.
const life = 20

// fork1 makes a child of one thread, by nothing but system calls, since the Go runtime is not whole in it. The child waits so
// many seconds and ends; with 0 it ends at once.
//
//go:norace
func fork1(flags uintptr, seconds int64) (int, error) {
	wait := unix.Timespec{Sec: seconds}
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && pid == 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&wait)), 0, 0)
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	return int(pid), asError(e)
}

// fork makes children until it gets no more, at most a few more than the limit, which is what the sandbox has.
func fork(a *attacker, args []string) error {
	limit, err := number(args, 0)
	if err != nil {
		return err
	}
	for n := 1; n <= limit+50; n++ {
		a.tried++
		if _, err := fork1(0, life); err != nil {
			return nil //nolint:nilerr // that there are no more is what must be; they end with the command, or by themselves
		}
	}
	a.got("%d processes; the limit is %d", limit+50, limit)
	return nil
}

// comet has processes that fork their successor and end, so that there is never the same one twice to be killed. It returns, and
// they go on for a few seconds and write to Beat, since none is there for long enough to be seen in /proc.
func comet(a *attacker, _ []string) error {
	signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGTERM)
	f, err := os.OpenFile(Beat, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	for range 8 {
		a.tried++
		if err := startComet(f.Fd()); err != nil {
			return fmt.Errorf("forking: %w", err)
		}
	}
	return nil
}

//go:norace
func startComet(beat uintptr) error {
	var now, end unix.Timespec
	one := byte('.')
	_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&end)), 0)
	end.Sec += 5
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e != 0 || pid != 0 {
		return asError(e)
	}
	_, _, _ = unix.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	for {
		_, _, _ = unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&now)), 0)
		if now.Sec >= end.Sec {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		_, _, _ = unix.RawSyscall(unix.SYS_WRITE, beat, uintptr(unsafe.Pointer(&one)), 1)
		pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if e == 0 && pid != 0 {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
}

// Beat is the file in the working directory that a process which stays behind writes to as long as it runs.
const Beat = "beat"

// stay writes to Beat until its time is up. The first argument says what it is beside that.
func stay(_ *attacker, args []string) error {
	how := ""
	if len(args) > 0 {
		how = args[0]
	}
	switch how {
	case "deaf":
		signal.Ignore(unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM, unix.SIGPIPE)
	case "under a reaper":
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return os.NewSyscallError("prctl", err)
		}
		if err := again(true, "deaf"); err != nil {
			return err
		}
	case "traced":
		return stayTraced()
	case "without its leader":
		return stayWithoutLeader()
	}
	return beat()
}

// beat writes a byte every few milliseconds.
func beat() error {
	f, err := os.OpenFile(Beat, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	end, tick := time.After(life*time.Second), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-end:
			return nil
		case <-tick.C:
			if _, err := f.WriteString("."); err != nil {
				return err
			}
		}
	}
}

// again starts this program once more, to stay in its own way, with the same name.
func again(newSession bool, how string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self) //nolint:forbidigo // it is to outlive its caller: that is the attack
	cmd.Args = []string{os.Args[0], Word, "stay", how}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: newSession}
	return cmd.Start()
}

// stayTraced has a tracer keep its child from ending: PTRACE_O_EXITKILL is not set, and the tracer never waits.
func stayTraced() error {
	runtime.LockOSThread()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self) //nolint:forbidigo // it is to outlive its caller: that is the attack
	cmd.Args = []string{os.Args[0], Word, "stay", "deaf"}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := unix.PtraceSeize(cmd.Process.Pid); err != nil {
		return os.NewSyscallError("ptrace", err)
	}
	return beat()
}

// stayWithoutLeader ends the process's first thread; /proc shows it as a zombie then, and the others go on.
func stayWithoutLeader() error {
	failed := make(chan error)
	go func() { failed <- beat() }()
	for {
		if unix.Gettid() == os.Getpid() {
			// Through the scheduler, which gives the thread's work to another one.
			_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
		}
		select {
		case err := <-failed:
			return err
		default:
			runtime.Gosched()
		}
	}
}

// leave leaves behind whatever the kernel keeps for a process without needing one: shared memory, queues, sockets, a child.
func leave(a *attacker, _ []string) error {
	const key = 0x5e1f
	for _, make := range []struct {
		nr   uintptr
		size uintptr
		flag uintptr
	}{{unix.SYS_SHMGET, 4096, unix.IPC_CREAT | 0o666}, {unix.SYS_SEMGET, 1, unix.IPC_CREAT | 0o666}, {unix.SYS_MSGGET, unix.IPC_CREAT | 0o666, 0}} {
		a.tried++
		if _, _, e := unix.Syscall(make.nr, key, make.size, make.flag); e != 0 {
			return fmt.Errorf("system call %d: %w", make.nr, e)
		}
	}
	if _, err := fork1(0, life); err != nil {
		return err
	}
	_, err := listenUnder("@left-behind")
	return err
}

// left names what another command has left behind, as leave does.
func left(a *attacker, _ []string) error {
	for _, f := range []string{"/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"} {
		if n, err := lines(f); err == nil {
			a.tried++
			if n > 1 { // the first is the heading
				a.got("what %s lists: %d", f, n-1)
			}
		}
	}
	const key = 0x5e1f
	_, _, e := unix.Syscall(unix.SYS_SHMGET, key, 0, 0)
	a.attempt(asError(e), "another command's shared memory")
	_, _, e = unix.Syscall(unix.SYS_MSGGET, key, 0, 0)
	a.attempt(asError(e), "another command's message queue")
	_, err := listenUnder("@left-behind")
	if errors.Is(err, unix.EADDRINUSE) {
		a.got("the name of another command's socket, still in use")
	}
	a.tried++
	return nil
}

func lines(path string) (n int, err error) {
	b, err := os.ReadFile(path)
	for _, c := range b {
		if c == '\n' {
			n++
		}
	}
	return n, err
}

// files is what a folder has at most: it makes empty ones until it gets no more.
func files(a *attacker, args []string) error {
	limit, err := number(args, 1)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(args[0], "many-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for n := 1; n <= limit; n++ {
		a.tried++
		f, err := os.Create(filepath.Join(dir, fmt.Sprint(n)))
		if err != nil {
			return nil
		}
		f.Close()
	}
	a.got("%d files in %s", limit, args[0])
	return nil
}
