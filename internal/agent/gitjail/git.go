package gitjail

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	// DefaultTimeout bounds a call that names no time of its own.
	DefaultTimeout = 60 * time.Second
	// DefaultOutput is how much of each stream is kept, bytes.
	DefaultOutput = 4 << 20
	stderrOutput  = 64 << 10
)

// ErrGit: Git itself failed, ran out of time or was cancelled; the message carries the end of what it printed.
var ErrGit = errors.New("git failed")

// Mount is one folder or file that trusted Git sees.
type Mount struct {
	Source   string `json:"source"` // on the node; one that does not exist is left out
	Target   string `json:"target"`
	ReadOnly bool   `json:"readOnly"`
	// Empty shows nothing of Source but the mounts that lie in it.
	Empty bool `json:"empty"`
}

// Jail is where trusted Git runs: who it is, and all that it sees besides its own programs.
type Jail struct {
	Owner hostfs.Owner
	// Dir is the working folder, as the jail sees it.
	Dir string
	// Mounts are made in this order: a parent comes before what lies in it.
	Mounts []Mount
	// Env is added to gitguard.Env.
	Env []string
	// Timeout bounds each call; 0 is DefaultTimeout.
	Timeout time.Duration
	// Output is how many bytes of each stream are kept; 0 is DefaultOutput.
	Output int
	// Finish lets a Session's run come to its end when the agent is killed: a Git that dies while it writes refs leaves
	// their locks behind, which nobody may take away. It is for short runs.
	Finish bool
}

// Same is a mount of a folder at its own path, writable.
func Same(path string) Mount { return Mount{Source: path, Target: path} }

// FromPlan is a sandbox's own mount layout as a jail sees it (git.md, conclusion 1). A jail runs as the on-disk owner,
// so there is no id mapping. What lies outside of the worktree and the repository is left out by keep.
func FromPlan(p mounts.Plan, keep func(mounts.Mount) bool) []Mount {
	var out []Mount
	for _, m := range p.Mounts {
		if keep == nil || keep(m) {
			out = append(out, Mount{Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly, Empty: m.Empty})
		}
	}
	return out
}

// Call is one run of Git.
type Call struct {
	Args []string
	// Stdin is what Git reads; nil is an empty file.
	Stdin io.Reader
	// Stdout takes the whole standard output, unbounded; nil: it is kept in Result, bounded.
	Stdout io.Writer
	// Env is added to the jail's.
	Env []string
	// Dir is another working folder than the jail's, as the jail sees it; empty is the jail's.
	Dir string
	// Timeout is for a call that needs another one than the jail's; 0 is that.
	Timeout time.Duration
	// Output is for a call of which more is kept than of the jail's others, bytes of each stream; 0 is the jail's.
	Output int
}

// Result is what a run of Git gave.
type Result struct {
	ExitCode       int
	Stdout, Stderr []byte
	// Truncated says that one of the two was longer than what is kept.
	Truncated bool
}

// boundedBuffer keeps the first max bytes and swallows the rest, so that Git never blocks on a full pipe. It does not embed
// its buffer: io.Copy would take that one's ReadFrom, which knows no bound.
type boundedBuffer struct {
	kept bytes.Buffer
	max  int
	cut  bool
}

func (b *boundedBuffer) Write(p []byte) (int, error) {
	n := len(p)
	if room := b.max - b.kept.Len(); n > room {
		p, b.cut = p[:max(room, 0)], true
	}
	b.kept.Write(p)
	return n, nil
}

func (b *boundedBuffer) Bytes() []byte { return b.kept.Bytes() }

func (b *boundedBuffer) String() string { return b.kept.String() }

// Do runs Git and gives what it answered, whatever its exit code. It fails with ErrGit when the jail could not be made,
// the time was up, or ctx ended; Git and everything that it started have ended then.
func (j Jail) Do(ctx context.Context, c Call) (Result, error) {
	timeout, keep := j.timeout(c), j.keep(c)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", c.Args...)
	cmd.Args[0] = jailName
	cmd.Env = append(append(append(gitguard.Env(), j.Env...), c.Env...), jailSpec{Owner: j.Owner, Dir: j.dir(c), Mounts: j.Mounts}.variable())
	stdout, stderr := &boundedBuffer{max: keep}, &boundedBuffer{max: min(keep, stderrOutput)}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.Stdin, stdout, stderr
	if c.Stdout != nil {
		cmd.Stdout = c.Stdout
	}
	cmd.SysProcAttr = jailAttr()
	// Git is the first process of a PID namespace: its end is that of all its helpers.
	cmd.Cancel = func() error { return cmd.Process.Kill() }
	cmd.WaitDelay = time.Second
	// PR_SET_PDEATHSIG in the jail is about the thread that forks it: that one must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	made.jails.Add(1)
	made.runs.Add(1)
	err := cmd.Run()
	said := withoutAdvice(stderr.String())
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return Result{}, fmt.Errorf("%w: git %s in %s took longer than %s or was cancelled: %w", ErrGit, c.name(), j.dir(c), timeout, ctx.Err())
	case err == nil, errors.As(err, &exit) && exit.Exited() && !strings.HasPrefix(said, jailComplaint):
		r := Result{ExitCode: cmd.ProcessState.ExitCode(), Stdout: stdout.Bytes(), Stderr: []byte(said), Truncated: stdout.cut || stderr.cut}
		return r, nil
	default:
		return Result{}, fmt.Errorf("%w: git %s in %s: %w: %s", ErrGit, c.name(), j.dir(c), err, said)
	}
}

func (j Jail) timeout(c Call) time.Duration {
	return cmp.Or(c.Timeout, j.Timeout, DefaultTimeout)
}

func (j Jail) keep(c Call) int { return cmp.Or(c.Output, j.Output, DefaultOutput) }

func (j Jail) dir(c Call) string { return cmp.Or(c.Dir, j.Dir) }

func (c Call) name() string {
	if len(c.Args) == 0 {
		return ""
	}
	return c.Args[0]
}

// Run gives Git's standard output. A non-zero exit, or more output than is kept, is an error that wraps ErrGit.
func (j Jail) Run(ctx context.Context, args ...string) (string, error) {
	return j.RunCall(ctx, Call{Args: args})
}

// RunCall is Run with everything that a call can have.
func (j Jail) RunCall(ctx context.Context, c Call) (string, error) {
	r, err := j.Do(ctx, c)
	return judge(j, c, r, err)
}

// judge makes an error of a run that did not answer with exit code 0, or not whole.
func judge(j Jail, c Call, r Result, err error) (string, error) {
	switch {
	case err != nil:
		return "", err
	case r.ExitCode != 0:
		return "", fmt.Errorf("%w: git %s in %s: exit code %d: %s", ErrGit, c.name(), j.dir(c), r.ExitCode, tail(r.Stderr))
	case r.Truncated:
		return "", fmt.Errorf("%w: git %s in %s printed more than is kept (%d bytes)", ErrGit, c.name(), j.dir(c), len(r.Stdout))
	}
	return string(r.Stdout), nil
}

func tail(b []byte) string {
	const most = 4096
	return strings.TrimSpace(string(b[max(0, len(b)-most):]))
}

// withoutAdvice is what Git printed, less its advice to switch off a check in a configuration that trusted Git does not
// read.
func withoutAdvice(stderr string) string {
	said, _, _ := strings.Cut(stderr, "To add an exception for this directory")
	return strings.TrimSpace(said)
}
