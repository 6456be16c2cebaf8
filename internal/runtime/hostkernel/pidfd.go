package hostkernel

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"golang.org/x/sys/unix"
)

// OpenInit opens a pidfd first and compares start times after: if they agree, the pidfd is of the recorded process
// (a pid is not given again while its pidfd's process lives).
func OpenInit(id runtime.Identity) (*os.File, error) {
	fd, err := unix.PidfdOpen(id.Pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("sandbox %s: %w: there is no process %d", id.SandboxID, runtime.ErrNotFound, id.Pid)
	}
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: opening its init: %w", id.SandboxID, os.NewSyscallError("pidfd_open", err))
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	start, state, err := ProcStat(id.Pid)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ESRCH):
		f.Close()
		return nil, fmt.Errorf("sandbox %s: %w: process %d has just ended", id.SandboxID, runtime.ErrNotFound, id.Pid)
	case err != nil:
		f.Close()
		return nil, fmt.Errorf("sandbox %s: looking at its init: %w", id.SandboxID, err)
	case start != id.StartTime:
		f.Close()
		return nil, fmt.Errorf("sandbox %s: %w: process %d began at %d, not at %d: it is another", id.SandboxID, runtime.ErrNotFound, id.Pid, start, id.StartTime)
	case state == 'Z' || state == 'X':
		f.Close()
		return nil, fmt.Errorf("sandbox %s: %w: process %d has ended", id.SandboxID, runtime.ErrNotFound, id.Pid)
	}
	return f, nil
}

// WaitReadable waits until a pidfd says that its process has ended: readable once all threads are, which for a PID
// namespace's init comes after everything in the namespace (pidfd_open(2); zap_pid_ns_processes).
func WaitReadable(pidfd *os.File) error {
	rc, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return rc.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n == 1
	})
}

// SendKill sends SIGKILL through a pidfd. A process that has ended already is fine.
func SendKill(pidfd *os.File) error {
	rc, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var killErr error
	if err := rc.Control(func(fd uintptr) { killErr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err != nil {
		return err
	}
	if errors.Is(killErr, unix.ESRCH) {
		return nil
	}
	return killErr
}

// States says what processes are doing, for an error message: D is uninterruptible sleep.
func States(pids []int) string {
	out := ""
	for _, pid := range pids {
		if _, state, err := ProcStat(pid); err == nil {
			out += fmt.Sprintf("process %d is in state %c; ", pid, state)
		}
	}
	if out == "" {
		return "nothing else of it is alive"
	}
	return out[:len(out)-2]
}

// Init is the init of a sandbox that is watched.
type Init struct {
	pidfd  *os.File
	exited chan struct{}
	done   chan struct{} // the watcher has ended
	close  sync.Once
}

// WatchInit opens a pidfd of the recorded init, checks that it is that very process, and waits for its end. reap is called
// once it has ended. ErrNotFound: it is not running.
func WatchInit(id runtime.Identity, reap func()) (*Init, error) {
	f, err := OpenInit(id)
	if err != nil {
		return nil, err
	}
	i := &Init{pidfd: f, exited: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(i.done)
		if WaitReadable(f) == nil {
			reap()
			close(i.exited)
		}
	}()
	return i, nil
}

// Exited is closed when it has been seen to end, and stays open after Close.
func (i *Init) Exited() <-chan struct{} { return i.exited }

// Kill sends SIGKILL; that it has ended already is fine.
func (i *Init) Kill() error { return SendKill(i.pidfd) }

// Close stops watching.
func (i *Init) Close() error {
	var err error
	i.close.Do(func() {
		err = i.pidfd.Close()
		<-i.done
	})
	return err
}
