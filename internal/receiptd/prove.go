package receiptd

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

const (
	proveTimeout = 20 * time.Second
	proveOutput  = 256 << 10
	// probeEnd is the last line of the probe's output; it stops itself after it.
	probeEnd = "probe: end"
)

// probeScript uses what bash has built in and nothing else: a root file system may lack every other program. It leaves
// a detached, double-forked child in a process group of its own behind; that one, and at its end the probe itself, are
// stopped, so that they are certainly there when receiptd looks. The child stops again and again: when its parent ends
// after the child has stopped, its group is orphaned, and the kernel sends it SIGHUP and SIGCONT (_exit(2)). Of a
// hidden mount its mount point stays: a folder that is empty, or one that the command can neither read nor enter.
const probeScript = `
mapfile -t lines </proc/self/status; printf 'status: %s\n' "${lines[@]}"
mapfile -t lines </proc/self/mountinfo; printf 'mount: %s\n' "${lines[@]}"
shopt -s nullglob dotglob
for path in "$@"; do
	in=("$path"/*)
	[[ -e $path ]] || continue
	[[ -d $path && ! -r $path && ! -x $path ]] && continue
	[[ -d $path && -r $path && -x $path && ${#in[@]} == 0 ]] && continue
	printf 'sees: %s %s\n' "$path" "${in[*]}"
done
for fd in {3..40}; do [[ -e /proc/self/fd/$fd ]] && printf 'fd: %s\n' "$fd"; done
[[ /proc/self/fd/0 -ef /dev/null ]] && echo 'stdin: null'
[[ -w / || -w /usr || -w /etc ]] && echo 'root: writable'
[[ -e /proc/1 ]] && echo 'pid1: visible'
` + reachScript + `
set -m
( ( trap '' HUP; while :; do kill -STOP $BASHPID; done ) & )
echo 'probe: end'
kill -STOP $$
`

// probe is what a probe command showed.
type probe struct {
	status map[string]string
	mounts []string
	sees   []string
	fds    []string
	// reached is what it connected to, or made.
	reached []string
	flags   map[string]bool
	ended   bool
	// before and after are the processes of its PID namespace, counted from outside, before it was killed and after the
	// boundary.
	before, after int
	pid1          string
}

// Prove runs one probe command in real namespaces and says what it could do.
func (c *connection) Prove(_ context.Context, req *receiptdv1.ProveRequest) (*receiptdv1.ProveResponse, error) {
	s := c.server
	s.starting.Lock()
	defer s.starting.Unlock()
	running, err := c.current(req.GetAttachEpoch())
	if err != nil {
		return nil, err
	}
	if running != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "exec %s is running: a sandbox is proved when nothing runs", running.id)
	}
	if err := checkTargets(req.GetTargets()); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	a, p, err := s.try(req.GetTargets())
	if err != nil {
		return nil, status.Error(codes.Internal, fmt.Sprintf("proving the sandbox: %v", err))
	}
	// What waits for a neighbour would leave later, and be refused as some command's.
	if _, _, err := nsexec.DestroySockets(); err != nil {
		logf("destroying the sockets of a proof: %v", err)
	}
	s.prepared.refill()
	items := judge(p, s.init.GetView(), s.prepared.seals())
	return &receiptdv1.ProveResponse{Items: append(items, judgeReach(a, p)...)}, nil
}

// try has a probe try the targets, and leaves nothing open that was opened for it.
func (s *Server) try(targets []*receiptdv1.Target) (*attempts, *probe, error) {
	a, err := newAttempts(targets)
	if err != nil {
		return nil, nil, err
	}
	defer a.close()
	p, err := s.probe(a)
	if err == nil {
		err = a.sidecars.settle()
	}
	return a, p, err
}

func (s *Server) probe(a *attempts) (*probe, error) {
	prepared, err := s.prepared.take()
	if err != nil {
		return nil, err
	}
	view := s.init.GetView()
	end := make(chan struct{})
	var seen []byte
	run, err := prepared.Start(nsexec.Request{
		Command: wire.Command{
			Path: shell, Argv: append([]string{"bash", "-c", probeScript, "probe"}, view.GetHide()...), Dir: view.GetDir(), Env: append(environ(view.GetEnv()), targetsEnv(a.script)),
			Tries: a.tries,
		},
		Timeout: proveTimeout, OutputBytes: proveOutput,
		Stdout: func(_ uint64, data []byte) {
			if seen == nil || !bytes.Contains(seen, []byte(probeEnd)) {
				seen = append(seen, data...)
				if bytes.Contains(seen, []byte(probeEnd)) {
					close(end)
				}
			}
		},
	})
	if err != nil {
		return nil, err
	}
	ended := make(chan nsexec.Result, 1)
	go func() { ended <- run.Wait() }()
	var res nsexec.Result
	before, scanErr := -1, error(nil)
	select {
	case res = <-ended: // it could not be started, or broke off
	case <-end:
		before, scanErr = countProcesses(run.Namespace())
		run.Kill()
		res = <-ended
	case <-time.After(proveTimeout):
		run.Kill()
		res = <-ended
	}
	if res.NotStarted != "" {
		return nil, fmt.Errorf("the probe could not be started: %s", res.NotStarted)
	}
	if scanErr != nil {
		return nil, scanErr
	}
	after, err := countProcesses(run.Namespace())
	if err != nil {
		return nil, err
	}
	p := parseProbe(res.Stdout.Kept())
	p.before, p.after, p.pid1 = before, after, res.Pid1
	if !p.ended {
		return nil, fmt.Errorf("the probe did not come to its end; its standard error: %q", res.Stderr.Kept())
	}
	return p, nil
}

// countProcesses counts the processes whose PID namespace has the given inode, as this process's /proc shows them.
func countProcesses(namespace uint64) (int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, fmt.Errorf("listing processes: %w", err)
	}
	want := "pid:[" + strconv.FormatUint(namespace, 10) + "]"
	n := 0
	for _, e := range entries {
		if e.Name()[0] < '0' || e.Name()[0] > '9' {
			continue
		}
		// A process that ended meanwhile has no link; one that can't be read is not ours.
		if link, err := os.Readlink("/proc/" + e.Name() + "/ns/pid"); err == nil && link == want {
			n++
		}
	}
	return n, nil
}

func parseProbe(out []byte) *probe {
	p := &probe{status: map[string]string{}, flags: map[string]bool{}}
	for line := range strings.Lines(string(out)) {
		kind, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch kind {
		case "status":
			name, value, _ := strings.Cut(rest, ":")
			p.status[name] = strings.TrimSpace(value)
		case "mount":
			p.mounts = append(p.mounts, rest)
		case "sees":
			p.sees = append(p.sees, rest)
		case "reached":
			p.reached = append(p.reached, rest)
		case "fd":
			p.fds = append(p.fds, rest)
		case "probe":
			p.ended = rest == "end"
		default:
			p.flags[kind] = true
		}
	}
	return p
}

// judge turns what the probe showed into the promises that hold or don't. It is pure.
func judge(p *probe, view *receiptdv1.View, seals []*receiptdv1.SealState) []*receiptdv1.ProofItem {
	var items []*receiptdv1.ProofItem
	add := func(promise, what string, holds bool, detail string) {
		items = append(items, &receiptdv1.ProofItem{Promise: promise, What: what, Holds: holds, Detail: detail})
	}
	// pid1, the probe and its detached child: at least three must have been there, or the check proves nothing.
	add("P3", "a detached, double-forked child is gone with its namespace", p.before >= 3 && p.after == 0,
		fmt.Sprintf("%d processes before, %d after the boundary (pid1 %s)", p.before, p.after, p.pid1))
	uid := strconv.Itoa(int(view.GetCommandUid()))
	add("P3", "the command has its own uid, not pid1's", sameFields(p.status["Uid"], uid) && view.GetCommandUid() != view.GetPid1Uid(), "Uid "+p.status["Uid"])
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		add("P9", "no capability in "+set, strings.Trim(p.status[set], "0") == "" && p.status[set] != "", p.status[set])
	}
	add("P9", "no_new_privs is set", p.status["NoNewPrivs"] == "1", p.status["NoNewPrivs"])
	add("P10", "a seccomp filter is on", p.status["Seccomp"] == "2", "Seccomp "+p.status["Seccomp"])
	add("P9", "receipts, control socket and binaries are not visible", len(p.sees) == 0, strings.Join(p.sees, ", "))
	add("P9", "none of them is mounted in the command's view", !mentions(p.mounts, view.GetHide()), "")
	add("P9", "pid1 is not visible", !p.flags["pid1"], "")
	add("P9", "the command has descriptors 0, 1 and 2 only", len(p.fds) == 0, strings.Join(p.fds, ", "))
	add("P9", "standard input is /dev/null", p.flags["stdin"], "")
	add("P11", "the root file system is read-only", !p.flags["root"], "")
	for _, s := range seals {
		detail := fmt.Sprintf("mount %d device %#x inode %d", s.GetMountId(), s.GetDevice(), s.GetInode())
		if s.GetSha256() != "" {
			detail += " sha256 " + s.GetSha256()
		}
		add("P11", "sealed: "+s.GetPath(), s.GetReadOnly(), detail)
	}
	return items
}

// sameFields says whether a line of /proc/PID/status has the same value in every column.
func sameFields(line, want string) bool {
	fields := strings.Fields(line)
	for _, f := range fields {
		if f != want {
			return false
		}
	}
	return len(fields) > 0
}

// mentions says whether a mount point (field 5 of mountinfo) is one of paths or lies below one.
func mentions(mountinfo, paths []string) bool {
	for _, line := range mountinfo {
		fields := strings.Fields(line)
		if len(fields) < 5 {
			return true
		}
		for _, p := range paths {
			if fields[4] == p || strings.HasPrefix(fields[4], p+"/") {
				return true
			}
		}
	}
	return false
}
