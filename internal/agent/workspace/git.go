package workspace

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"
)

const (
	gitTimeout = 60 * time.Second
	// checkoutTimeout is for git worktree add, which writes every file of the tree.
	checkoutTimeout = 10 * time.Minute
	gitMaxOutput    = 4 << 20
	gitPath         = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// pinned are configuration values that win over the repository's own: nothing of it may run a program, fetch, or
// start maintenance when trusted Git looks at it.
var pinned = [][2]string{
	{"core.hooksPath", "/dev/null"},
	{"core.fsmonitor", "false"},
	{"protocol.allow", "never"},
	{"credential.helper", ""},
	{"commit.gpgSign", "false"},
	{"log.showSignature", "false"},
	{"submodule.recurse", "false"},
	{"gc.auto", "0"},
	{"maintenance.auto", "false"},
	{"core.useReplaceRefs", "false"},
	{"advice.graftFileDeprecated", "false"}, // GIT_GRAFT_FILE switches grafts off, and Git advises against using them
}

// gitEnv is the whole environment of trusted Git; nothing of the agent's own comes in.
func gitEnv() []string {
	env := []string{
		"PATH=" + gitPath, "HOME=/nonexistent", "LC_ALL=C",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_ATTR_NOSYSTEM=1",
		"GIT_NO_REPLACE_OBJECTS=1", "GIT_NO_LAZY_FETCH=1", "GIT_OPTIONAL_LOCKS=0", "GIT_ALLOW_PROTOCOL=none",
		"GIT_GRAFT_FILE=/dev/null", "GIT_TERMINAL_PROMPT=0", "GIT_SSH_COMMAND=/bin/false", "GIT_ASKPASS=/bin/false",
		"GIT_EDITOR=:", "GIT_SEQUENCE_EDITOR=:", "GIT_PAGER=cat", "PAGER=cat",
		"GIT_CONFIG_COUNT=" + strconv.Itoa(len(pinned)),
	}
	for i, kv := range pinned {
		env = append(env, fmt.Sprintf("GIT_CONFIG_KEY_%d=%s", i, kv[0]), fmt.Sprintf("GIT_CONFIG_VALUE_%d=%s", i, kv[1]))
	}
	return env
}

// git is one way to call Git: in a folder, as its owner.
type git struct {
	dir   string
	owner Owner
	env   []string // added to gitEnv
	// folders are what Git sees besides its own programs: the repository's Git folder and maybe a worktree.
	folders []string
	// timeout is gitTimeout unless it is set.
	timeout time.Duration
}

// boundedBuffer keeps the first max bytes and swallows the rest, so that Git never blocks on a full pipe.
type boundedBuffer struct {
	bytes.Buffer
	max int
	cut bool
}

func (b *boundedBuffer) Write(p []byte) (int, error) {
	n := len(p)
	if room := b.max - b.Len(); n > room {
		p, b.cut = p[:max(room, 0)], true
	}
	b.Buffer.Write(p)
	return n, nil
}

// run gives Git's standard output. A non-zero exit is an error with the end of its standard error.
func (g git) run(ctx context.Context, args ...string) (string, error) {
	timeout := g.timeout
	if timeout == 0 {
		timeout = gitTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Args[0] = jailName
	cmd.Env = append(append(gitEnv(), g.env...), jailSpec{Owner: g.owner, Dir: g.dir, Folders: g.folders}.variable())
	stdout, stderr := &boundedBuffer{max: gitMaxOutput}, &boundedBuffer{max: 4096}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = jailAttr()
	// Git is the first process of a PID namespace: its end is that of all its helpers.
	cmd.Cancel = func() error { return cmd.Process.Kill() }
	cmd.WaitDelay = time.Second
	// PR_SET_PDEATHSIG in the jail is about the thread that forks it: that one must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("%w: git %s in %s took longer than %s or was cancelled: %w", ErrGit, args[0], g.dir, timeout, ctx.Err())
	case err != nil:
		return "", fmt.Errorf("%w: git %s in %s: %w: %s", ErrGit, args[0], g.dir, err, withoutAdvice(stderr.String()))
	case stdout.cut:
		return "", fmt.Errorf("%w: git %s in %s printed more than %d bytes", ErrGit, args[0], g.dir, gitMaxOutput)
	}
	return stdout.String(), nil
}

// withoutAdvice is what Git printed, less its advice to switch off a check in a configuration that trusted Git does not
// read.
func withoutAdvice(stderr string) string {
	said, _, _ := strings.Cut(stderr, "To add an exception for this directory")
	return strings.TrimSpace(said)
}
