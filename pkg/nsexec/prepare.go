package nsexec

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/pid1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// prepareTimeout bounds what pid1 and its launcher take to get ready: a few milliseconds on an idle machine.
const prepareTimeout = 30 * time.Second

// Prepared is a pid1 with its launcher, both waiting. It serves one command.
type Prepared struct {
	view   *View
	slot   *Slot
	pid    int
	pidfd  int
	ns     uint64
	ctl    *os.File // to pid1
	launch *os.File // to the launcher
	stdout *os.File
	stderr *os.File
	seals  []wire.SealState
	// mountNS keeps the command's mount namespace until release. Its end takes an RCU grace period (namespace_unlock in
	// fs/namespace.c), which the wait for pid1, and so the answer, would otherwise include.
	mountNS *os.File
	// launcherBaseline is the CPU time that the launcher used before it became the command.
	launcherBaseline wire.Ready
}

// Seals are the view's seals as the pid1 found them.
func (p *Prepared) Seals() []wire.SealState { return p.seals }

// Prepare starts a pid1 and waits until it and its launcher are ready. It waits for a free slot, if there are slots.
func (v *View) Prepare() (*Prepared, error) {
	p := &Prepared{view: v, pidfd: -1}
	if len(v.cfg.Slots) > 0 {
		p.slot = <-v.slots
	}
	var err error
	v.do(func() { err = p.fork() })
	if err != nil {
		p.release()
		return nil, err
	}
	if err := p.ready(); err != nil {
		p.Discard()
		return nil, err
	}
	return p, nil
}

// ends are the descriptors that the child inherits, closed here after the fork.
type ends []*os.File

func (e ends) close() {
	for _, f := range e {
		f.Close()
	}
}

// fork starts pid1. It runs on the view's thread.
func (p *Prepared) fork() error {
	var child ends
	defer func() { child.close() }()
	add := func(ours **os.File, pair func() (parent, child *os.File, err error)) error {
		a, b, err := pair()
		if err != nil {
			return err
		}
		*ours = a
		child = append(child, b)
		return nil
	}
	if err := errors.Join(add(&p.ctl, socketPair), add(&p.stdout, pipe), add(&p.stderr, pipe), add(&p.launch, socketPair)); err != nil {
		return fmt.Errorf("preparing a pid1: %w", err)
	}
	cfg := p.view.cfg
	null := p.view.null.Fd()
	files := make([]uintptr, pid1.FDJoin)
	files[0], files[1], files[2] = null, null, 2
	files[pid1.FDControl], files[pid1.FDStdout], files[pid1.FDStderr] = child[0].Fd(), child[1].Fd(), child[2].Fd()
	files[pid1.FDExe], files[pid1.FDLauncher] = cfg.Pid1.Fd(), child[3].Fd()
	if p.slot != nil {
		for _, f := range p.slot.Join {
			files = append(files, f.Fd())
		}
	}
	uids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(cfg.Pid1UID), Size: 1}, {ContainerID: int(cfg.CommandUID), HostID: int(cfg.CommandUID), Size: 1}}
	gids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(cfg.Pid1UID), Size: 1}, {ContainerID: int(cfg.CommandGID), HostID: int(cfg.CommandGID), Size: 1}}
	// The path is the one that holds in the child, after its descriptors have been put in place.
	pid, err := known.start("/proc/self/fd/"+strconv.Itoa(pid1.FDExe), []string{"pid1"}, &syscall.ProcAttr{
		Dir: "/", Env: pid1.Environ, Files: files,
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
			UidMappings: uids, GidMappings: gids, GidMappingsEnableSetgroups: true,
			Credential: &syscall.Credential{Uid: 0, Gid: 0},
			PidFD:      &p.pidfd,
		}})
	if err != nil {
		return fmt.Errorf("starting a pid1 in fresh namespaces: %w%s", err, namespaceRemedy(err))
	}
	p.pid = pid
	return nil
}

// namespaceRemedy says what usually stands behind a failed clone with namespace flags.
func namespaceRemedy(err error) string {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return " (raise user.max_user_namespaces, user.max_pid_namespaces and user.max_mnt_namespaces: sysctl user)"
	case errors.Is(err, unix.EPERM):
		return " (user namespaces are refused: see kernel.unprivileged_userns_clone, an LSM's restriction, or the container's seccomp profile)"
	}
	return ""
}

// ready sends the setup and waits for both processes.
func (p *Prepared) ready() error {
	cfg := p.view.cfg
	setup := wire.Setup{
		CommandUID: cfg.CommandUID, CommandGID: cfg.CommandGID, NestedUserns: cfg.NestedUserns,
		NProc: cfg.NProc, NoFile: cfg.NoFile, FSize: cfg.FSize, Seals: cfg.Seals,
	}
	if p.slot != nil {
		setup.JoinFDs = uint32(len(p.slot.Join))
	}
	frame := wire.Frame(wire.KindSetup, setup.Encode())
	deadline := time.Now().Add(prepareTimeout)
	for _, f := range []*os.File{p.ctl, p.launch} {
		if err := f.SetDeadline(deadline); err != nil {
			return fmt.Errorf("preparing a pid1: %w", err)
		}
		if _, err := f.Write(frame); err != nil {
			return fmt.Errorf("preparing a pid1: sending its setup: %w", err)
		}
	}
	first, err := readReady(p.ctl, "pid1")
	if err != nil {
		return err
	}
	second, err := readReady(p.launch, "the launcher")
	if err != nil {
		return err
	}
	p.seals = first.Seals
	p.launcherBaseline = second
	if p.ns, err = namespaceInode(p.pid); err != nil {
		return err
	}
	if p.mountNS, err = os.Open(fmt.Sprintf("/proc/%d/ns/mnt", p.pid)); err != nil {
		return fmt.Errorf("holding the command's mount namespace: %w", err)
	}
	return errors.Join(p.ctl.SetDeadline(time.Time{}), p.launch.SetDeadline(time.Time{}))
}

func readReady(f *os.File, who string) (wire.Ready, error) {
	kind, body, err := wire.Read(f)
	if err != nil {
		return wire.Ready{}, fmt.Errorf("preparing a pid1: %s ended before it was ready: %w", who, err)
	}
	if kind == wire.KindFailed {
		failed, err := wire.DecodeFailed(body)
		return wire.Ready{}, errors.Join(fmt.Errorf("preparing a pid1: %s: %s", who, failed.Reason), err)
	}
	if kind != wire.KindReady {
		return wire.Ready{}, fmt.Errorf("preparing a pid1: %s sent %q instead of being ready", who, kind)
	}
	return wire.DecodeReady(body)
}

// namespaceInode reads the inode of a process's PID namespace: "pid:[4026532758]".
func namespaceInode(pid int) (uint64, error) {
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return 0, fmt.Errorf("reading the command's PID namespace: %w", err)
	}
	inode, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(link, "pid:["), "]"), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading the command's PID namespace from %q: %w", link, err)
	}
	return inode, nil
}

// ended says whether pid1 or the launcher is gone, or going: while they wait, neither says anything.
func (p *Prepared) ended() bool {
	return speaks(p.ctl) || speaks(p.launch)
}

// speaks says whether there is something to read from a socket, or its other end is closed.
func speaks(f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return true
	}
	n := 0
	var pollErr error
	err = raw.Control(func(fd uintptr) {
		n, pollErr = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	})
	return err != nil || pollErr != nil && pollErr != unix.EINTR || n > 0
}

// Discard ends a Prepared that is not needed.
func (p *Prepared) Discard() {
	p.kill()
	p.reap()
	p.release()
}

func (p *Prepared) kill() {
	if p.pidfd >= 0 {
		// ESRCH: it is gone already.
		_ = unix.PidfdSendSignal(p.pidfd, unix.SIGKILL, nil, 0)
	}
}

// reap waits for pid1: when it returns, every process of the namespace is gone.
func (p *Prepared) reap() (unix.WaitStatus, unix.Rusage) {
	var status unix.WaitStatus
	var usage unix.Rusage
	if p.pid == 0 {
		return status, usage
	}
	for {
		if _, err := unix.Wait4(p.pid, &status, 0, &usage); err != unix.EINTR {
			break
		}
	}
	known.remove(p.pid)
	p.pid = 0
	p.slot.awaitEmpty()
	return status, usage
}

// release closes what is open and gives the slot back.
func (p *Prepared) release() {
	for _, f := range []*os.File{p.ctl, p.launch, p.stdout, p.stderr} {
		if f != nil {
			f.Close()
		}
	}
	if p.mountNS != nil {
		go p.mountNS.Close()
		p.mountNS = nil
	}
	if p.pidfd >= 0 {
		unix.Close(p.pidfd)
		p.pidfd = -1
	}
	if p.slot != nil {
		p.view.slots <- p.slot
		p.slot = nil
	}
}

// socketPair gives a stream socket pair whose first end can have deadlines.
func socketPair() (parent, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a socket pair: %w", err)
	}
	return parentEnd(fds[0]), os.NewFile(uintptr(fds[1]), "pid1's end"), nil
}

func pipe() (parent, child *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("making a pipe: %w", err)
	}
	return parentEnd(fds[0]), os.NewFile(uintptr(fds[1]), "the command's end"), nil
}

// parentEnd makes a descriptor non-blocking, so that the runtime's poller serves it instead of a thread.
func parentEnd(fd int) *os.File {
	_ = unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), "receiptd's end")
}
