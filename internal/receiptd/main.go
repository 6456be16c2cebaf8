package receiptd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp"
)

// memoryLimit is the Go heap's soft limit, bytes: a flood of output is garbage quickly collected.
const memoryLimit = 24 << 20

// Main runs receiptd until its container is stopped. What it answers is why it can't go on.
//
// The order matters: undumpable before anything else can run in the container; the socket before "ready"; standard
// output away after it, because a write to a dead agent's pipe would kill (facts.md, hole 4).
func Main(opts Options) error {
	if os.Getpid() != 1 {
		// Not only out of tidiness: it destroys every internet socket of its network namespace, again and again.
		return errors.New("it is started by sandbox-agent, as the first process of a container with a network namespace of its own")
	}
	debug.SetMemoryLimit(memoryLimit)
	debug.SetGCPercent(50)
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("making receiptd undumpable: %w", err)
	}
	if opts.Log != "" {
		if err := openLog(opts.Log); err != nil {
			return err
		}
	}
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	if err := seccomp.InstallAll(seccomp.Container()); err != nil {
		return fmt.Errorf("restricting the container to its allow list: %w", err)
	}
	s, err := New(opts)
	if err != nil {
		return err
	}
	if opts.Handover != "" {
		files, err := receiveSlots(opts.Handover, opts.Handed)
		if err != nil {
			return err
		}
		s.descriptor = handed(files)
	}
	if opts.OwnCgroups != "" {
		if s.own, err = ownSlots(opts.OwnCgroups, opts.OwnPids, opts.OwnOOM); err != nil {
			return err
		}
	}
	l, err := listen(opts.Socket)
	if err != nil {
		return err
	}
	go reapStrangers()
	if err := sayReady(); err != nil {
		return err
	}
	return s.Serve(context.Background(), l)
}

// listen makes the control socket, which only the sandbox's root (and the node's) can connect to.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("removing an old control socket: %w", err)
	}
	old := unix.Umask(0o177)
	defer unix.Umask(old)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening on the control socket %s: %w", filepath.Base(path), err)
	}
	return l, nil
}

// sayReady tells the runtime that the socket is there, and lets go of its pipe.
func sayReady() error {
	if _, err := os.Stdout.WriteString("ready\n"); err != nil {
		return fmt.Errorf("telling the runtime that receiptd is ready: %w", err)
	}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening /dev/null: %w", err)
	}
	defer unix.Close(null)
	for _, fd := range []int{0, 1} {
		if err := unix.Dup3(null, fd, 0); err != nil {
			return fmt.Errorf("letting go of descriptor %d: %w", fd, err)
		}
	}
	return nil
}

// reapStrangers reaps what nobody here started: receiptd is the container's init, and orphans that a runtime put into
// the container become its children.
func reapStrangers() {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGCHLD)
	for range ch {
		nsexec.ReapStrangers()
	}
}
