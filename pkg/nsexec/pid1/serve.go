package pid1

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// kept is what pid1 may still do: signal a command, whose uid is not its own, and look at the seals, which lie in folders
// of that uid that may be closed to all others.
var kept = []uint{unix.CAP_KILL, unix.CAP_DAC_READ_SEARCH}

// life is one pid1 between its setup and its report.
type life struct {
	launcher  int // pid of the launcher, which becomes the command; also its process group
	seals     []wire.SealState
	timedOut  atomic.Bool
	cancelled atomic.Bool
	reported  atomic.Bool
}

// serve is pid1's life. The order matters: the signals first, because until then a signal kills; undumpable before
// anything of the command exists; /proc before the launcher, which is executed through it; privileges last.
func serve() {
	resetSignals()
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		fail("making pid1 undumpable", err)
	}
	for fd := FDControl; fd <= FDLauncher; fd++ {
		unix.CloseOnExec(fd)
	}
	setup := readSetup()
	for i := range setup.JoinFDs {
		unix.CloseOnExec(FDJoin + int(i))
	}
	if err := mountProc(); err != nil {
		fail("giving the command its own /proc", err)
	}
	seals, err := statSeals(setup.Seals)
	if err != nil {
		fail("reading the seals", err)
	}
	l := &life{launcher: startLauncher(setup), seals: seals}
	if err := keepOnly(kept...); err != nil {
		fail("giving up privileges", err)
	}
	user, system := cpu()
	ready := wire.Ready{UserUS: user, SystemUS: system, Seals: seals}
	if err := wire.FD(FDControl).WriteAll(wire.Frame(wire.KindReady, ready.Encode())); err != nil {
		unix.Exit(1)
	}
	go l.listen()
	l.reap()
}

// reap waits for every child of the namespace until the command's own process has ended.
func (l *life) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			fail("waiting for the command", err)
		}
		if pid != l.launcher {
			continue
		}
		report := wire.Report{Ended: true}
		if status.Signaled() {
			report.Signal = uint32(status.Signal())
		} else {
			report.Code = uint32(status.ExitStatus())
		}
		l.report(report)
	}
}

// listen obeys receiptd: it starts the clock, and it ends the command when the clock runs out or receiptd says so. It
// runs on a thread of its own, which keeps the same capabilities.
func (l *life) listen() {
	runtime.LockOSThread()
	if err := keepOnly(kept...); err != nil {
		fail("giving up privileges", err)
	}
	timeout := int64(-1) // milliseconds, -1: no clock yet
	grace := uint64(0)
	var deadline time.Time
	for {
		if ready := pollControl(timeout, deadline); !ready {
			l.timedOut.Store(true)
			l.end(grace)
		}
		kind, body, err := wire.Read(wire.FD(FDControl))
		if err != nil {
			// receiptd is gone: nobody is left to tell, and nothing of the command may go on.
			unix.Exit(1)
		}
		switch kind {
		case wire.KindArm:
			arm, err := wire.DecodeArm(body)
			if err != nil {
				fail("decoding the time limit", err)
			}
			timeout, grace = int64(arm.TimeoutMS), arm.GraceMS
			deadline = time.Now().Add(time.Duration(timeout) * time.Millisecond)
		case wire.KindCancel:
			l.cancelled.Store(true)
			l.end(grace)
		default:
			fail("receiptd sent a frame of an unknown kind", nil)
		}
	}
}

// pollControl waits until the control socket has something to read, or until deadline: then it answers false.
// A timeout below 0 means that there is no deadline.
func pollControl(timeout int64, deadline time.Time) bool {
	for {
		wait := -1
		if timeout >= 0 {
			// Rounded up, so that the last fraction of a millisecond is not spent in a loop; at most a minute at once,
			// because poll(2) takes an int of milliseconds.
			left := time.Until(deadline)
			wait = int(min((left+time.Millisecond-1)/time.Millisecond, 60_000))
			if left <= 0 {
				return false
			}
		}
		fds := []unix.PollFd{{Fd: FDControl, Events: unix.POLLIN}}
		n, err := unix.Poll(fds, wait)
		if err != nil && err != unix.EINTR {
			fail("waiting for receiptd", err)
		}
		if n > 0 {
			return true
		}
	}
}

// end gives the command's process group a SIGTERM and the grace period; then pid1 ends, and with it the namespace.
func (l *life) end(graceMS uint64) {
	// ESRCH: the group ended by itself; reap reports in a moment.
	if err := unix.Kill(-l.launcher, unix.SIGTERM); err != nil && err != unix.ESRCH {
		fail("sending SIGTERM to the command's group", err)
	}
	time.Sleep(time.Duration(graceMS) * time.Millisecond)
	l.report(wire.Report{})
	select {} // reap was first, and ends the process
}

// report sends the last word once, and ends pid1.
func (l *life) report(r wire.Report) {
	if !l.reported.CompareAndSwap(false, true) {
		select {}
	}
	r.AtNS = wire.MonotonicNS()
	r.TimedOut, r.Cancelled = l.timedOut.Load(), l.cancelled.Load()
	r.SealsBroken = brokenSeals(l.seals)
	r.UserUS, r.SystemUS = cpu()
	_ = wire.FD(FDControl).WriteAll(wire.Frame(wire.KindReport, r.Encode()))
	unix.Exit(0)
}
