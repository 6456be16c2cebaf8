package nsexec

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

const (
	// secondLine is how much longer than pid1 receiptd waits before it ends the namespace itself.
	secondLine = 2 * time.Second
	// drainTime bounds the wait for the end of the output after the boundary. Every writer is dead by then; only a
	// descriptor that left the namespace could hold the pipe.
	drainTime = 5 * time.Second
)

// Request is one command.
type Request struct {
	Command wire.Command
	// Timeout is above 0. After it the command's process group gets SIGTERM, and after Grace the namespace ends.
	Timeout, Grace time.Duration
	// OutputBytes bounds what is kept of each stream.
	OutputBytes    uint64
	Stdout, Stderr Sink
}

// Running is a command between its start and its boundary.
type Running struct {
	p         *Prepared
	req       Request
	started   time.Time
	oomBefore int64
	hasPeak   bool
	stdout    *Capture
	stderr    *Capture
	pumps     sync.WaitGroup
	pumpErr   [2]error
	ctlMu     sync.Mutex
	second    *time.Timer
	late      atomic.Bool
	cancelled bool // guarded by ctlMu
}

// Result is what is known of a command once its boundary is established.
type Result struct {
	// Report is pid1's; nil when it ended without one.
	Report *wire.Report
	// NotStarted, when not empty, says why the launcher could not become the command: it certainly never ran.
	NotStarted string
	// Untouched comes with NotStarted when it is no fault of the command's or the sandbox's: the launcher ended before it
	// had read the command, so another pid1 may run it.
	Untouched bool
	// Pid1 is what wait4 said of it.
	Pid1               string
	Namespace          uint64
	StartedAt, EndedAt time.Time
	// BoundaryWait is how long the namespace went on after the end of the command's own process; 0 where pid1 said nothing.
	BoundaryWait   time.Duration
	Stdout, Stderr *Capture
	// DrainError is set when the end of the output was not seen.
	DrainError         error
	UserCPU, SystemCPU time.Duration
	MaxRSS, PeakMemory int64
	OOM                bool
	Cgroup             string
	Method             string // ByWait or ByWaitAndCgroup
	SecondLine         bool   // pid1 did not keep the time; receiptd ended it
	Cancelled          bool   // pid1 was asked to end the command before its end was seen
}

// Start hands the command over. An error wraps ErrNotStarted: the Prepared is gone and the command never ran. Without one it
// may run, unless Wait's result says NotStarted.
func (p *Prepared) Start(req Request) (*Running, error) {
	if p.ended() {
		p.Discard()
		return nil, fmt.Errorf("%w: the waiting pid1 has ended", ErrNotStarted)
	}
	r := &Running{p: p, req: req, oomBefore: p.slot.oomKills(), hasPeak: p.slot.resetPeak()}
	r.stdout, r.stderr = NewCapture(req.OutputBytes), NewCapture(req.OutputBytes)
	arm := wire.Arm{TimeoutMS: uint64(req.Timeout.Milliseconds()), GraceMS: uint64(req.Grace.Milliseconds())}
	r.started = time.Now()
	// The launcher is woken first, because it is what is waited for; it executes nothing before it has the whole frame.
	if _, err := p.launch.Write(wire.Frame(wire.KindCommand, req.Command.Encode())); err != nil {
		p.Discard()
		return nil, fmt.Errorf("%w: the waiting launcher is gone: %w", ErrNotStarted, err)
	}
	// From here on the command may run. A pid1 that can't be told the time is dead or dying, and the command with it;
	// Wait finds out, and the second line is there in any case.
	_, _ = p.ctl.Write(wire.Frame(wire.KindArm, arm.Encode()))
	r.arm(req.Timeout + req.Grace + secondLine)
	r.pumps.Add(2)
	go func() { defer r.pumps.Done(); r.pumpErr[0] = pump(p.stdout, r.stdout, req.Stdout) }()
	go func() { defer r.pumps.Done(); r.pumpErr[1] = pump(p.stderr, r.stderr, req.Stderr) }()
	return r, nil
}

// Cancel ends the command as its timeout would: SIGTERM, then the grace period, then the namespace.
func (r *Running) Cancel() error {
	r.ctlMu.Lock()
	defer r.ctlMu.Unlock()
	if r.p.ctl == nil || r.cancelled {
		return nil // ended already, or about to: another cancel must not set the clocks anew
	}
	if _, err := r.p.ctl.Write(wire.Frame(wire.KindCancel, nil)); err != nil {
		return fmt.Errorf("asking pid1 to cancel: %w", err)
	}
	r.cancelled = true
	// The second line comes nearer too.
	r.second.Reset(r.req.Grace + secondLine)
	return nil
}

// Kill ends the namespace at once, without pid1's help and without a report.
func (r *Running) Kill() {
	r.ctlMu.Lock()
	defer r.ctlMu.Unlock()
	r.p.kill()
}

// Namespace is the inode of the command's PID namespace.
func (r *Running) Namespace() uint64 { return r.p.ns }

// Wait establishes the boundary and gives the slot back. It waits for pid1 and for nothing before it: pid1 reports, and
// then exits; the report lies in the socket.
func (r *Running) Wait() Result {
	res := Result{Namespace: r.p.ns, StartedAt: r.started, Stdout: r.stdout, Stderr: r.stderr}
	status, usage := r.p.reap()
	res.EndedAt = time.Now()
	now := wire.MonotonicNS()
	res.SecondLine = !r.disarm()
	res.Report = r.report()
	if res.Report != nil && res.Report.AtNS > 0 && now > res.Report.AtNS {
		res.BoundaryWait = time.Duration(now - res.Report.AtNS)
	}
	res.Pid1 = describe(status)
	res.DrainError = r.drain()
	res.NotStarted, res.Untouched = r.launcherFailure()
	res.Cgroup, res.Method = r.p.slot.Empty(), r.p.slot.method()
	if r.hasPeak {
		res.PeakMemory = r.p.slot.peak()
	}
	after := r.p.slot.oomKills()
	res.OOM = r.oomBefore >= 0 && after > r.oomBefore
	r.account(&res, usage)
	r.ctlMu.Lock()
	defer r.ctlMu.Unlock()
	r.p.release()
	r.p.ctl = nil
	res.Cancelled = r.cancelled
	return res
}

// arm starts the second line: when d has passed, the namespace is ended without pid1's help.
func (r *Running) arm(d time.Duration) {
	r.second = time.AfterFunc(d, func() { r.late.Store(true); r.Kill() })
}

// disarm stops the second line and says whether it was in time to.
func (r *Running) disarm() bool {
	r.ctlMu.Lock()
	defer r.ctlMu.Unlock()
	r.second.Stop()
	return !r.late.Load()
}

// report reads pid1's last word, which it wrote before it exited; nil without one.
func (r *Running) report() *wire.Report {
	kind, body, err := wire.Read(r.p.ctl)
	if err != nil || kind != wire.KindReport {
		return nil
	}
	rep, err := wire.DecodeReport(body)
	if err != nil {
		return nil
	}
	return &rep
}

// drain waits for the end of both streams.
func (r *Running) drain() error {
	deadline := time.Now().Add(drainTime)
	_ = r.p.stdout.SetReadDeadline(deadline)
	_ = r.p.stderr.SetReadDeadline(deadline)
	r.pumps.Wait()
	for i, name := range []string{"stdout", "stderr"} {
		if r.pumpErr[i] != nil {
			return fmt.Errorf("reading the command's %s to its end: %w", name, r.pumpErr[i])
		}
	}
	return nil
}

// launcherFailure reads what the launcher left in its socket. execve closes that without a word.
func (r *Running) launcherFailure() (notStarted string, untouched bool) {
	_ = r.p.launch.SetReadDeadline(time.Now().Add(drainTime))
	return lastWord(wire.Read(r.p.launch))
}

// lastWord is what the end of a launcher's socket says: why the command certainly never ran, empty if it may have. untouched:
// because the launcher had not read it. The kernel says that by ECONNRESET: the other end was closed with something unread in
// it (unix_release_sock in net/unix/af_unix.c), and a launcher executes nothing before it has read all.
func lastWord(kind wire.Kind, body []byte, err error) (notStarted string, untouched bool) {
	switch {
	case errors.Is(err, unix.ECONNRESET):
		return "the waiting pid1 or its launcher was killed before it had read the command", true
	case err != nil || kind != wire.KindFailed:
		return "", false
	}
	failed, err := wire.DecodeFailed(body)
	if err != nil {
		return "the launcher failed and its reason does not decode: " + err.Error(), false
	}
	return failed.Reason, false
}

// account takes from pid1's rusage, which covers all it reaped, what was used before the command and by pid1 itself.
func (r *Running) account(res *Result, usage unix.Rusage) {
	user, system := usage.Utime.Nano()/1000, usage.Stime.Nano()/1000
	if res.Report != nil {
		user -= int64(res.Report.UserUS)
		system -= int64(res.Report.SystemUS)
		// The report's own time covers pid1's share of the baseline; the launcher's remains.
		user -= int64(r.p.launcherBaseline.UserUS)
		system -= int64(r.p.launcherBaseline.SystemUS)
	}
	res.UserCPU = max(0, time.Duration(user)*time.Microsecond)
	res.SystemCPU = max(0, time.Duration(system)*time.Microsecond)
	res.MaxRSS = usage.Maxrss * 1024
}

func describe(status unix.WaitStatus) string {
	if status.Signaled() {
		return fmt.Sprintf("killed by signal %d", int(status.Signal()))
	}
	return fmt.Sprintf("exited %d", status.ExitStatus())
}
