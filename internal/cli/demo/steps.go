package demo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// check is one claim and whether it held; detail says what was seen instead.
type check struct {
	what   string
	holds  bool
	detail string
}

// step is one command and what must be true of it.
type step struct {
	id, title, why string
	command        string
	timeout        time.Duration
	// during, when set, runs while the command does; its checks come first.
	during func(ctx context.Context, done <-chan struct{}) []check
	// expect are the step's own checks; every step's are added to them.
	expect func(r outcome) []check
}

// outcome is an answer, and the receipt that was read from its file and verified.
type outcome struct {
	*sandboxv1.ExecResult
	receipt receipt.Predicate
}

func (o outcome) out() string { return string(o.Stdout) }

// all is both streams, for what may be said on either.
func (o outcome) all() string { return string(o.Stdout) + string(o.Stderr) }

func (t *tour) steps() []step {
	return []step{
		t.gitStatus(), t.commit(), t.pipeline(), t.exit3(), t.detached(), t.timeout(), t.signal(), t.flood(),
		t.twice(), t.forge(), t.socket(), t.pid1(),
	}
}

// lastStep: the session, the steps, Git from outside, the chain, the changed receipt.
func (t *tour) lastStep() int { return 1 + len(t.steps()) + 3 }

// walk runs one step.
func (t *tour) walk(ctx context.Context, s step) error {
	t.step++
	t.heading(t.step, s.title, s.why)
	t.command(s.command)
	req := t.request(s)

	done := make(chan struct{})
	seen := make(chan []check, 1)
	go func() {
		var c []check
		if s.during != nil {
			c = s.during(ctx, done)
		}
		seen <- c
	}()
	res, err := t.agent.client.Execs.Exec(ctx, req)
	close(done)
	first := <-seen
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return t.agent.client.Explain("running "+req.ExecId, err)
	}
	t.execs = append(t.execs, req.ExecId)
	t.show(res.Result)
	p, common := t.common(req, res.Result)
	for _, c := range slices.Concat(first, s.expect(outcome{res.Result, p}), common) {
		t.count(c)
	}
	return nil
}

func (t *tour) request(s step) *sandboxv1.ExecRequest {
	req := &sandboxv1.ExecRequest{
		SessionId: t.id, Generation: t.session.Generation, Command: s.command,
		ExecId: fmt.Sprintf("demo-%02d-%s", t.step, s.id), Labels: map[string]string{"demo": s.id},
	}
	if s.timeout > 0 {
		seconds := s.timeout.Seconds()
		req.TimeoutSeconds = &seconds
	}
	return req
}

func (t *tour) show(r *sandboxv1.ExecResult) {
	t.output(r.Stdout, r.StdoutInfo.GetBytes())
	t.output(r.Stderr, r.StderrInfo.GetBytes())
	text := r.Status.String()
	switch r.Status {
	case sandboxv1.ExecResult_EXITED:
		text += fmt.Sprintf(" %d", r.ExitCode)
	case sandboxv1.ExecResult_SIGNALED:
		text += " " + unix.SignalName(unix.Signal(r.Signal))
	}
	text += " · " + milliseconds(r.Duration)
	if r.Reason != "" {
		text += " · " + harmless([]byte(r.Reason))
	}
	t.result(text, r.Status == sandboxv1.ExecResult_EXITED && r.ExitCode == 0)
}

// common is what must be true of every answer (P2, P3).
func (t *tour) common(req *sandboxv1.ExecRequest, r *sandboxv1.ExecResult) (receipt.Predicate, []check) {
	p, err := t.verified(req)
	alive := marked(t.mark)
	what := "its receipt does not verify"
	if err == nil {
		what = fmt.Sprintf("receipt %d verifies: this sandbox's key, this exec, this request, this answer", p.Sequence)
		if string(p.Status) != r.Status.String() || p.ExitCode != int(r.ExitCode) || p.Signal != int(r.Signal) {
			err = fmt.Errorf("the receipt says %s %d %d, the answer %s %d %d", p.Status, p.ExitCode, p.Signal, r.Status, r.ExitCode, r.Signal)
		}
	}
	return p, []check{
		{what: what, holds: err == nil, detail: text(err)},
		{
			what: fmt.Sprintf("boundary: %s of PID namespace %d; cgroup %s; no process left anywhere",
				p.Boundary.Method, p.Boundary.PIDNamespace, p.Boundary.Cgroup),
			holds:  err == nil && p.Boundary.Method == "wait4" && p.Boundary.Cgroup != "populated" && p.SealsIntact && alive == 0,
			detail: fmt.Sprintf("%d processes are alive; seals broken: %v", alive, p.SealsBroken),
		},
	}
}

// verified reads a receipt's file, as an auditor would, and holds it against the request.
func (t *tour) verified(req *sandboxv1.ExecRequest) (receipt.Predicate, error) {
	p, err := verify.File(filepath.Join(t.receipts(), receipt.FileName(req.ExecId)), t.key)
	if err != nil {
		return p, err
	}
	digest := receipt.Request{
		SessionID: req.SessionId, Command: req.Command, TimeoutMS: uint64(req.GetTimeoutSeconds() * 1000), Labels: req.Labels,
	}.Digest()
	// The nonce is between the agent and its sandbox: it is the one thing that an outsider can't ask for.
	return p, verify.Expect{
		SessionID: t.id, SandboxID: t.session.GetSandbox().GetId(), ExecID: req.ExecId, Nonce: p.Nonce,
		RequestDigest: digest, Generation: t.session.Generation,
	}.Match(p)
}

func (t *tour) receipts() string {
	return filepath.Join(t.place.state, "receipts", t.session.GetSandbox().GetId())
}

func (t *tour) gitStatus() step {
	return step{
		id: "git-status", title: "Ordinary Git work", why: "The worktree has the same path inside and outside, and Git works in it.",
		command: "pwd && git status --short --branch",
		expect: func(r outcome) []check {
			return []check{
				{what: "it ran in the worktree, at the worktree's own path", holds: strings.HasPrefix(r.out(), t.worktree+"\n"), detail: r.out()},
				{what: "Git sees the session's branch, and a clean worktree", holds: strings.Contains(r.out(), "## "+t.branch+"\n") && strings.Count(r.out(), "\n") == 2, detail: r.all()},
			}
		},
	}
}

func (t *tour) commit() step {
	const file, message = "SANDBOX-DEMO.txt", "Try the sandbox"
	return step{
		id: "commit", title: "An edit and a commit", why: "What a command writes is in the worktree, and what it commits is in the repository.",
		command: fmt.Sprintf("echo 'Written in a sandbox.' > %s\ngit add -f %s && git commit -q -m '%s' && git show --stat --format='%%h %%an: %%s'", file, file, message),
		expect: func(r outcome) []check {
			subject, err := t.repo.git(context.Background(), "log", "-1", "--format=%s", t.branch)
			st, owner := os.Lstat(filepath.Join(t.worktree, file))
			uid := uint32(1<<32 - 1)
			if owner == nil {
				uid = uidOf(st)
			}
			return []check{
				{what: "after the command, the agent brought the commit to the base clone, which the command could not write", holds: r.GetHarvest().GetStatus() == "HARVESTED", detail: r.GetHarvest().GetStatus() + " " + r.GetHarvest().GetDetail()},
				{what: fmt.Sprintf("outside, branch %s ends in that commit", t.branch), holds: err == nil && subject == message, detail: subject + text(err)},
				{what: fmt.Sprintf("outside, the file belongs to the repository's owner (uid %d)", t.repo.uid), holds: owner == nil && uid == t.repo.uid, detail: fmt.Sprintf("uid %d %s", uid, text(owner))},
			}
		},
	}
}

func (t *tour) pipeline() step {
	return step{
		id: "pipeline", title: "A pipeline", why: "A command is a line for bash.",
		command: "git ls-files | sed -n 's/.*\\.//p' | sort | uniq -c | sort -rn | head -5",
		expect: func(r outcome) []check {
			return []check{{what: "it exited 0 and says which kinds of file there are", holds: exited(r, 0) && len(r.Stdout) > 0, detail: r.all()}}
		},
	}
}

func (t *tour) exit3() step {
	return step{
		id: "exit-3", title: "A failure is an answer too", why: "The exit code is the command's own.",
		command: "exit 3",
		expect: func(r outcome) []check {
			return []check{{what: "EXITED with 3", holds: exited(r, 3), detail: r.Status.String()}}
		},
	}
}

// detached: the child of a child of a session leader, which nobody waits for.
func (t *tour) detached() step {
	const escape = "setsid --fork bash -c '(touch \"$TMPDIR/alive\"; sleep 1; echo \"I got away\" > escaped.txt) &'\n" +
		"until [ -e \"$TMPDIR/alive\" ]; do :; done; echo 'left something running'"
	return step{
		id: "detached", title: "A child that tries to stay", why: "Detached, double-forked, in a session of its own, it would write into the worktree a second later. " +
			"A sandbox that only waits for bash would let it. The same line also runs outside, without a sandbox, to see that it works.",
		command: escape,
		expect: func(r outcome) []check {
			control, err := t.outside(escape)
			_, inside := os.Lstat(filepath.Join(t.worktree, "escaped.txt"))
			return []check{
				{what: "without the sandbox, it wrote its file", holds: err == nil && control, detail: text(err)},
				{what: "in the sandbox it was alive, and died with its command: the file never came", holds: exited(r, 0) && os.IsNotExist(inside), detail: r.all() + text(inside)},
			}
		},
	}
}

// outside runs a line without a sandbox and waits for what its child writes.
func (t *tour) outside(line string) (wrote bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", line)
	cmd.Dir = t.place.control
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.place.control}
	if out, err := cmd.Output(); err != nil {
		return false, fmt.Errorf("running it outside: %w: %s", err, out)
	}
	for {
		if _, err := os.Lstat(filepath.Join(t.place.control, "escaped.txt")); err == nil {
			return true, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (t *tour) timeout() step {
	most := 0
	return step{
		id: "timeout", title: "Three generations and a timeout", why: "A child, a grandchild and a great-grandchild, all deaf to SIGTERM. At the timeout the whole PID namespace ends.",
		command: "generation() { trap '' TERM; [ \"$1\" = 3 ] && exec sleep 600; generation $(($1 + 1)) & wait; }\ngeneration 0",
		timeout: time.Second,
		during: func(_ context.Context, done <-chan struct{}) []check {
			for running := true; running; {
				select {
				case <-done:
					running = false
				case <-time.After(20 * time.Millisecond):
					most = max(most, marked(t.mark))
				}
			}
			return []check{{what: fmt.Sprintf("while it ran, %d of its processes were seen from outside", most), holds: most >= 4, detail: "want 4"}}
		},
		expect: func(r outcome) []check {
			return []check{{what: "TIMED_OUT, and all of them are gone", holds: r.Status == sandboxv1.ExecResult_TIMED_OUT && marked(t.mark) == 0, detail: r.Status.String()}}
		},
	}
}

func (t *tour) signal() step {
	return step{
		id: "signal", title: "A death by signal", why: "A signal is told apart from an exit code: 139 would be ambiguous.",
		command: "kill -SEGV $$",
		expect: func(r outcome) []check {
			return []check{{what: "SIGNALED by SIGSEGV", holds: r.Status == sandboxv1.ExecResult_SIGNALED && r.Signal == int32(unix.SIGSEGV), detail: r.Status.String()}}
		},
	}
}

func (t *tour) flood() step {
	const last = 5_000_000
	return step{
		id: "flood", title: "A flood of output", why: "Head and tail are kept; everything is counted and hashed.",
		command: fmt.Sprintf("seq %d", last),
		expect: func(r outcome) []check {
			bytes, sum := sequence(last)
			i := r.StdoutInfo
			return []check{
				{what: fmt.Sprintf("all %s were counted, and their SHA-256 is the one computed here", size(bytes)), holds: i.GetBytes() == bytes && i.GetSha256() == sum, detail: fmt.Sprintf("%d bytes, %s", i.GetBytes(), i.GetSha256())},
				{
					what:  fmt.Sprintf("the answer holds %s: the beginning and the end, and says that %s between them are left out", size(uint64(len(r.Stdout))), size(i.GetOmittedBytes())),
					holds: i.GetTruncated() && uint64(len(r.Stdout)) == bytes-i.GetOmittedBytes() && strings.HasPrefix(r.out(), "1\n2\n") && strings.HasSuffix(r.out(), fmt.Sprintf("\n%d\n", last)),
				},
			}
		},
	}
}

// sequence is what seq prints: its length and its hash.
func sequence(last int) (n uint64, sum string) {
	h := sha256.New()
	var b []byte
	for i := 1; i <= last; i++ {
		b = append(strconv.AppendInt(b, int64(i), 10), '\n')
		if len(b) > 1<<16 || i == last {
			n += uint64(len(b))
			h.Write(b)
			b = b[:0]
		}
	}
	return n, hex.EncodeToString(h.Sum(nil))
}

func (t *tour) twice() step {
	return step{
		id: "twice", title: "A lost answer", why: "A caller that lost the connection asks again with the same exec id: it gets the recorded answer, and nothing runs twice.",
		command: "echo ran >> \"$TMPDIR/count\"; wc -l < \"$TMPDIR/count\"",
		expect: func(r outcome) []check {
			req := &sandboxv1.ExecRequest{SessionId: t.id, ExecId: r.ExecId, Labels: r.Labels, Generation: t.session.Generation,
				Command: "echo ran >> \"$TMPDIR/count\"; wc -l < \"$TMPDIR/count\""}
			again, err := t.agent.client.Execs.Exec(context.Background(), req)
			req.Command = "true"
			_, other := t.agent.client.Execs.Exec(context.Background(), req)
			return []check{
				{what: "asked again, the answer is the same, receipt included, and still says 1", holds: err == nil && bytes.Equal(again.GetResult().GetReceipt(), r.Receipt) && string(again.GetResult().GetStdout()) == "1\n" && r.out() == "1\n", detail: text(err)},
				{what: "the same id for another command is refused", holds: connect.CodeOf(other) == connect.CodeAlreadyExists, detail: text(other)},
			}
		},
	}
}

func (t *tour) forge() step {
	return step{
		id: "forge", title: "An attempt on the receipts", why: "It tries to write a receipt where receipts lie, and looks for those of the steps before.",
		command: "mkdir -p /.sandbox/receipts && echo '{\"forged\":true}' > /.sandbox/receipts/demo-99.json || echo 'could not write one'\n" +
			"find / -path /proc -prune -o -path \"$PWD\" -prune -o -name 'demo-0*.json' -print 2>/dev/null; echo 'looked everywhere'",
		expect: func(r outcome) []check {
			ids, err := receipt.List(t.receipts())
			return []check{
				{what: "it could not write one, and found none", holds: strings.HasPrefix(r.out(), "could not write one\nlooked everywhere\n"), detail: r.all()},
				{what: fmt.Sprintf("the folder holds the receipts of this session's %d commands and nothing else", len(t.execs)), holds: err == nil && slices.Equal(ids, slices.Sorted(slices.Values(t.execs))), detail: strings.Join(ids, " ") + text(err)},
			}
		},
	}
}

func (t *tour) socket() step {
	sockets := []string{"/.sandbox/control/receiptd.sock", "/proc/1/root/.sandbox/control/receiptd.sock", t.place.socket}
	return step{
		id: "socket", title: "An attempt on the control socket", why: "It looks for sockets and dials receiptd's and the agent's, also through PID 1's root.",
		command: "find / -path /proc -prune -o -path \"$PWD\" -prune -o -type s -print 2>/dev/null\n" +
			"perl -MIO::Socket::UNIX -e 'for (@ARGV) { print \"$_: \", IO::Socket::UNIX->new($_) ? \"CONNECTED\" : $!, \"\\n\" }' \\\n  " + strings.Join(sockets, " \\\n  "),
		expect: func(r outcome) []check {
			lines := strings.Split(strings.TrimSpace(r.out()), "\n")
			return []check{{what: "there is no socket to be found, and none answers", holds: exited(r, 0) && len(lines) == len(sockets) && !strings.Contains(r.out(), "CONNECTED"), detail: r.all()}}
		},
	}
}

func (t *tour) pid1() step {
	// ptrace(PTRACE_ATTACH = 16, pid 1): a bare system call, so that no debugger need be installed.
	number := map[string]int{"amd64": 101, "arm64": 117}[runtime.GOARCH]
	return step{
		id: "pid1", title: "An attempt on PID 1", why: "PID 1 of the namespace is the one who reports how the command ended. It tries to trace it, to read its memory and to kill it.",
		command: fmt.Sprintf("perl -e 'print \"ptrace: \", syscall(%d, 16, 1, 0, 0) == -1 ? $! : \"ATTACHED\", \"\\n\"'\n", number) +
			"head -c 1 /proc/1/mem >/dev/null || echo 'memory: refused'\n" +
			"for s in TERM INT HUP SEGV BUS QUIT STOP KILL; do kill -$s 1; done\n" +
			"echo 'still here'",
		expect: func(r outcome) []check {
			return []check{
				{what: "neither traced nor read", holds: strings.Contains(r.out(), "ptrace: Operation not permitted\nmemory: refused\n"), detail: r.all()},
				{what: "PID 1 lived on to report this command's own exit", holds: exited(r, 0) && strings.HasSuffix(r.out(), "still here\n"), detail: r.all()},
			}
		},
	}
}

// fromOutside looks at the work as a person would: at the commit in the base clone, and at the worktree through the agent.
func (t *tour) fromOutside(ctx context.Context) error {
	t.step++
	t.heading(t.step, "Git from outside", "In the base clone plain Git is safe. In the worktree it is not: commands have written there. The agent runs Git there in a jail.")
	t.command("git -C " + t.repo.path + " log --oneline -2 " + t.branch)
	log, err := t.repo.git(ctx, "log", "--oneline", "-2", t.branch)
	if err != nil {
		return err
	}
	t.output([]byte(log), uint64(len(log)))
	t.command("sandbox-agent git " + t.id + " -- status --short --branch")
	res, err := t.agent.client.Git.Git(ctx, &sandboxv1.GitRequest{SessionId: t.id, Args: []string{"status", "--short", "--branch"}})
	if err != nil {
		return t.agent.client.Explain("running git in session "+t.id, err)
	}
	t.output(res.Stdout, uint64(len(res.Stdout)))
	t.output(res.Stderr, uint64(len(res.Stderr)))
	_, err = t.agent.client.Git.Git(ctx, &sandboxv1.GitRequest{SessionId: t.id, Args: []string{"-c", "core.fsmonitor=/bin/true", "status"}})
	t.count(check{what: "the base clone has the commit", holds: strings.Contains(log, "Try the sandbox"), detail: log})
	t.count(check{what: "the worktree is on the session's branch", holds: res.ExitCode == 0 && strings.HasPrefix(string(res.Stdout), "## "+t.branch), detail: string(res.Stdout) + string(res.Stderr)})
	t.count(check{what: "an option that would have Git run a program is refused", holds: connect.CodeOf(err) == connect.CodeInvalidArgument, detail: text(err)})
	return nil
}

// wholeChain checks all receipts of the sandbox together.
func (t *tour) wholeChain() error {
	t.step++
	t.heading(t.step, "The whole chain", "Each receipt names the one before it: a missing one would show. No agent is needed for this.")
	t.command("sandbox-agent receipt verify --all " + t.receipts())
	report, err := verify.Chain(t.receipts(), t.key)
	if err != nil {
		return err
	}
	t.count(check{what: fmt.Sprintf("%d receipts, one for each command, in one unbroken chain", len(report.Receipts)),
		holds: report.OK() && len(report.Receipts) == len(t.execs), detail: strings.Join(report.Problems, "; ")})
	return nil
}

// tamper changes one receipt (a copy of it) and sees that it is refused.
func (t *tour) tamper() error {
	t.step++
	t.heading(t.step, "A receipt that was changed", "In a copy of the receipt of \"exit 3\", the payload is changed to say that it exited with 0.")
	name := receipt.FileName(t.execs[3])
	b, err := os.ReadFile(filepath.Join(t.receipts(), name))
	if err != nil {
		return fmt.Errorf("reading the receipt to change: %w", err)
	}
	changed, err := exitCodeZero(b)
	if err != nil {
		return err
	}
	_, refused := verify.Envelope(changed, t.key)
	_, control := verify.Envelope(b, t.key)
	t.count(check{what: "unchanged, it verifies", holds: control == nil, detail: text(control)})
	t.count(check{what: "changed, it is refused", holds: refused != nil, detail: "it was accepted"})
	return nil
}

func exited(r outcome, code int32) bool {
	return r.Status == sandboxv1.ExecResult_EXITED && r.ExitCode == code
}
