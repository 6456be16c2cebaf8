package git

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

const (
	// owner owns the repository and the worktree on disk, unless a test is about root's.
	owner = 4321
	// patience bounds what a test waits for when it fails; nothing passes or fails by it.
	patience = node.Patience
	// impatience is how long trusted Git may take where a test makes it hang.
	impatience = 0.5
)

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

// goesOn asserts that the agent lives and answers.
func (p *place) goesOn() {
	p.t.Helper()
	require.False(p.t, p.agent.Dead(), p.agent.LogText())
	require.True(p.t, p.agent.Answers(), p.agent.LogText())
}

// The places where an attack is tried. In the control case nothing is between the command and what it attacks.
const (
	control  = "control"
	isolated = "isolated"
	shared   = "shared"
)

// place is a repository with a linked worktree where an attack is tried, and a folder outside of both that their owner
// can write. B is the base clone, C its Git folder, W the worktree, M its metadata.
type place struct {
	t          *testing.T
	layout     string
	uid        int
	b, c, w, m string
	// out is the folder outside; home is the owner's own, with its configuration of Git.
	out, home string
	agent     *node.Agent
	session   string
	// outside and sealed describe what may not change, before the attack.
	outside, sealed []string
	count           int
	// harvest is that of the last command.
	harvest *sandboxv1.Harvest
}

// attack is one of the numbered attacks.
type attack struct {
	// config is added to the agent's, env to its environment.
	config string
	env    []string
	// home is the owner's HOME; empty: an empty folder.
	home string
	// ofRoot has repository and worktree belong to root.
	ofRoot bool
	// prepare makes what is there before the command runs.
	prepare func(*place)
	// strike has the command plant something, and trusted code walk into it.
	strike func(*place)
	// steps are several attacks of one kind, instead of strike: each has a control case of its own, and all of them are made
	// one after the other in one session.
	steps []step
	// harmed says whether the attack got what it wanted; nil: something in the folder outside has changed.
	harmed func(*place) bool
	// sharedLimit is called in the layout shared instead of asking that nothing is harmed. It asserts what does not hold
	// there, and what still does.
	sharedLimit func(*place)
	// inside asserts more where there is a sandbox.
	inside func(*place)
	// refusedWhenShared is a key for which the layout shared refuses the repository; there is nothing to attack then.
	refusedWhenShared string
}

// step is one of several attacks.
type step struct {
	name string
	// strike is as that of an attack.
	strike func(*place)
	// undo is a command that takes away what would hinder the next step; it is not run in the control case.
	undo string
}

func (a attack) run(t *testing.T) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Bash, testkit.Git)
	if a.steps == nil {
		a.steps = []step{{strike: a.strike}}
	}
	for _, s := range a.steps {
		t.Run(strings.TrimSpace(control+" "+s.name), func(t *testing.T) {
			p := a.place(t, control)
			s.strike(p)
			require.True(t, a.hasHarmed(p), "the attack does not work on a plain worktree, so the test proves nothing: look at what this version of Git does")
		})
	}
	if t.Failed() {
		return
	}
	started := node.Start(t, node.Options{Config: a.config, Env: a.env})
	for _, layout := range []string{isolated, shared} {
		t.Run(layout, func(t *testing.T) {
			p := a.place(t, layout)
			p.agent = started
			if layout == shared && a.refusedWhenShared != "" {
				_, err := p.create()
				require.ErrorContains(t, err, a.refusedWhenShared)
				return
			}
			p.open()
			for _, s := range a.steps {
				s.strike(p)
				if s.undo != "" {
					p.command(s.undo)
				}
			}
			a.holds(p)
		})
	}
}

// holds asserts that the attack came to nothing, now and with all that trusted code does afterwards.
func (a attack) holds(p *place) {
	p.t.Helper()
	limited := p.layout == shared && a.sharedLimit != nil
	if limited {
		a.sharedLimit(p)
	} else {
		require.False(p.t, a.hasHarmed(p), "the attack got through")
	}
	if a.inside != nil {
		a.inside(p)
	}
	before := describe(p.t, p.out)
	p.goOn()
	if !limited && p.session != "" {
		require.False(p.t, a.hasHarmed(p), "the attack got through later")
	}
	p.deleteWorkspace()
	require.Equal(p.t, before, describe(p.t, p.out), "something outside has changed")
}

func (a attack) hasHarmed(p *place) bool {
	p.t.Helper()
	if a.harmed != nil {
		return a.harmed(p)
	}
	return p.outsideChanged()
}

func (a attack) place(t *testing.T, layout string) *place {
	t.Helper()
	p := &place{t: t, layout: layout, uid: owner}
	if a.ofRoot {
		p.uid = 0
	}
	p.b = testkit.Repo(t, p.uid)
	top := filepath.Dir(p.b)
	p.out, p.home = filepath.Join(top, "out"), filepath.Join(top, "home")
	p.folder(p.out)
	p.folder(p.home)
	if a.home != "" {
		p.home = a.home
	}
	p.c = filepath.Join(p.b, ".git")
	p.w = testkit.Worktree(t, p.uid, p.b, "topic")
	p.m = filepath.Join(p.c, "worktrees", filepath.Base(p.w))
	if a.prepare != nil {
		a.prepare(p)
	}
	p.outside, p.sealed = describe(t, p.out), p.describeSealed()
	return p
}

func (p *place) folder(path string) {
	p.t.Helper()
	require.NoError(p.t, os.Mkdir(path, 0o755))
	require.NoError(p.t, os.Chown(path, p.uid, p.uid))
}

// file writes a file of the owner's, as something trusted that was there before.
func (p *place) file(path, content string) {
	p.t.Helper()
	require.NoError(p.t, os.WriteFile(path, []byte(content), 0o644))
	require.NoError(p.t, os.Chown(path, p.uid, p.uid))
}

// open makes the session.
func (p *place) open() {
	p.t.Helper()
	session, err := p.create()
	require.NoError(p.t, err, p.agent.LogText())
	require.Equal(p.t, sandboxv1.Session_READY, session.GetState(), session.GetReason())
	require.Equal(p.t, p.layout, session.GetWorkspace().GetGitLayout())
	p.session = session.GetSessionId()
}

func (p *place) create() (*sandboxv1.Session, error) {
	ctx := p.bounded()
	res, err := p.agent.Client.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: p.b, Worktree: p.w, GitLayout: p.layout},
	})
	require.NoError(p.t, ctx.Err(), "making a session hangs: %v", err)
	return res.GetSession(), err
}

// bounded is a context for what has to come to an end by itself.
func (p *place) bounded() context.Context {
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	p.t.Cleanup(cancel)
	return ctx
}

// environment is what both sides see: the places, and who they are to Git.
func (p *place) environment() []string {
	return []string{
		"B=" + p.b, "C=" + p.c, "W=" + p.w, "M=" + p.m, "OUT=" + p.out,
		"GIT_AUTHOR_NAME=Agent", "GIT_AUTHOR_EMAIL=agent@example.com", "GIT_COMMITTER_NAME=Agent", "GIT_COMMITTER_EMAIL=agent@example.com", "GIT_EDITOR=:",
	}
}

// as is a program that runs on the node as the owner, with nothing of the caller's environment.
func (p *place) as(dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(p.bounded(), name, args...)
	cmd.Dir = dir
	cmd.Env = append(p.environment(), "PATH=/usr/local/bin:/usr/bin:/bin", "HOME="+p.home, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.uid)}}
	// A helper that hangs on may hold the pipe; killing git does not end it.
	cmd.WaitDelay = time.Second
	return cmd
}

// command runs the untrusted command in the worktree, and gives what it printed. It runs to its end, and may fail there: an
// attack that is stopped does.
func (p *place) command(script string) string {
	p.t.Helper()
	if p.layout == control {
		out, err := p.as(p.w, "bash", "-c", script).CombinedOutput()
		p.t.Logf("command: %v\n%s", err, out)
		return string(out)
	}
	r := p.exec(script)
	p.t.Logf("command: %s %d %s\n%s%s\nharvest: %v", r.GetStatus(), r.GetExitCode(), r.GetReason(), r.GetStdoutText(), r.GetStderrText(), r.GetHarvest())
	require.Equal(p.t, sandboxv1.ExecResult_EXITED, r.GetStatus(), "%s: %s", script, r.GetReason())
	return r.GetStdoutText() + r.GetStderrText()
}

// exec runs a command in the sandbox and gives its whole result. It is answered, whatever it does.
func (p *place) exec(script string) *sandboxv1.ExecResult {
	p.t.Helper()
	res, err := p.agent.Client.Execs.Exec(p.bounded(), p.request(script))
	require.NoError(p.t, err, "%s\n%s", script, p.agent.LogText())
	p.harvest = res.GetResult().GetHarvest()
	return res.GetResult()
}

func (p *place) request(script string) *sandboxv1.ExecRequest {
	p.count++
	timeout := patience.Seconds()
	return &sandboxv1.ExecRequest{
		SessionId: p.session, ExecId: fmt.Sprintf("exec-%d", p.count), Text: true, TimeoutSeconds: &timeout,
		Command: "export " + quoted(p.environment()) + "\n" + script,
	}
}

func quoted(env []string) string {
	out := make([]string, 0, len(env))
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		out = append(out, fmt.Sprintf("%s='%s'", name, value))
	}
	return strings.Join(out, " ")
}

// works is a command that has to succeed, in the control case as well; it gives its output.
func (p *place) works(script string) string {
	p.t.Helper()
	if p.layout == control {
		out, err := p.as(p.w, "bash", "-c", "set -e\n"+script).CombinedOutput()
		require.NoError(p.t, err, "%s\n%s", script, out)
		return string(out)
	}
	r := p.exec("set -e\n" + script)
	require.Equal(p.t, sandboxv1.ExecResult_EXITED, r.GetStatus(), "%s: %s", script, r.GetReason())
	require.Zero(p.t, r.GetExitCode(), "%s\n%s%s", script, r.GetStdoutText(), r.GetStderrText())
	return r.GetStdoutText()
}

// answer is what trusted Git gave.
type answer struct {
	out  string
	code int
	err  error
}

// trusted is a Git call of trusted code in the worktree: plain Git in the control case, which is what one must not do;
// else the agent's. It may be refused.
func (p *place) trusted(args ...string) answer {
	p.t.Helper()
	return p.trustedFor(patience.Seconds(), args...)
}

func (p *place) trustedFor(seconds float64, args ...string) answer {
	p.t.Helper()
	if p.layout == control {
		cmd := p.as(p.w, "git", args...)
		out, err := cmd.CombinedOutput()
		p.t.Logf("git %v: %v\n%s", args, err, out)
		return answer{string(out), cmd.ProcessState.ExitCode(), err}
	}
	ctx := p.bounded()
	res, err := p.agent.Client.Git.Git(ctx, &sandboxv1.GitRequest{SessionId: p.session, Args: args, TimeoutSeconds: &seconds})
	require.NoError(p.t, ctx.Err(), "git %v hangs: %v", args, err)
	p.t.Logf("sandbox-agent git %v: %v %d\n%s%s\nharvest: %v", args, err, res.GetExitCode(), res.GetStdout(), res.GetStderr(), res.GetHarvest())
	return answer{string(res.GetStdout()) + string(res.GetStderr()), int(res.GetExitCode()), err}
}

// host is plain Git in the base clone, as its owner.
func (p *place) host(args ...string) (string, error) {
	p.t.Helper()
	out, err := p.as(p.b, "git", args...).CombinedOutput()
	p.t.Logf("git -C base %v: %v\n%s", args, err, out)
	return string(out), err
}

// hostWorks is a call in the base clone that has to succeed; it gives its output without the line's end.
func (p *place) hostWorks(args ...string) string {
	p.t.Helper()
	out, err := p.host(args...)
	require.NoError(p.t, err, "git -C base %v\n%s", args, out)
	return strings.TrimSuffix(out, "\n")
}

// goOn has trusted code do what it does in a session's life after the attack, and then has another session take the
// worktree over. That one may be refused; p.session is empty then.
func (p *place) goOn() {
	p.t.Helper()
	require.Equal(p.t, p.sealed, p.describeSealed(), "the base clone's configuration, hooks and info are as they were")
	_, err := os.Lstat(filepath.Join(p.c, "commondir"))
	require.ErrorIs(p.t, err, fs.ErrNotExist)
	ctx := p.bounded()
	_, err = p.agent.Client.Execs.Exec(ctx, p.request("echo next"))
	require.NoError(p.t, ctx.Err(), "a later command hangs: %v", err)
	p.trustedFor(impatience, "status", "--porcelain")
	if p.layout == isolated {
		p.baseIsWhole()
	}
	_, err = p.agent.Client.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: p.session})
	require.NoError(p.t, err)
	session, err := p.create()
	p.t.Logf("another session: %v", err)
	p.session = session.GetSessionId()
	p.goesOn()
}

// deleteWorkspace throws everything away.
func (p *place) deleteWorkspace() {
	p.t.Helper()
	req := &sandboxv1.DeleteWorkspaceRequest{SessionId: p.session, Force: true}
	if p.session == "" {
		req.Worktree = p.w
	}
	res, err := p.agent.Client.Sessions.DeleteWorkspace(p.bounded(), req)
	require.NoError(p.t, err, p.agent.LogText())
	p.t.Logf("removed: %v", res.GetRemoved())
	p.goesOn()
	require.NoFileExists(p.t, p.w)
	if p.layout == isolated {
		p.hostWorks("fsck")
	}
}

// baseIsWhole asserts that the base clone is as clean as if no command had ever run, and works.
func (p *place) baseIsWhole() {
	p.t.Helper()
	require.NoError(p.t, filepath.WalkDir(p.c, func(path string, d fs.DirEntry, err error) error {
		require.NoError(p.t, err)
		info, err := d.Info()
		require.NoError(p.t, err)
		require.True(p.t, info.IsDir() || info.Mode().IsRegular(), "%s is %s", path, info.Mode())
		require.Zero(p.t, info.Mode()&(fs.ModeSetuid|fs.ModeSetgid), path)
		require.Equal(p.t, uint32(p.uid), info.Sys().(*syscall.Stat_t).Uid, path)
		return nil
	}))
	for _, args := range [][]string{{"status"}, {"branch", "-a"}, {"worktree", "list"}, {"fsck", "--strict"}} {
		p.hostWorks(args...)
	}
}

func (p *place) outsideChanged() bool {
	p.t.Helper()
	now := describe(p.t, p.out)
	changed := strings.Join(now, "\n") != strings.Join(p.outside, "\n")
	if changed {
		p.t.Logf("outside:\n%s", strings.Join(now, "\n"))
	}
	return changed
}

// describeSealed is what neither a command nor anything that it plants may change in the base clone. info/refs is written by
// the host's own repack.
func (p *place) describeSealed() (all []string) {
	p.t.Helper()
	for _, name := range []string{"config", "hooks", "info"} {
		all = append(all, describe(p.t, filepath.Join(p.c, name))...)
	}
	return slices.DeleteFunc(all, func(s string) bool { return strings.HasPrefix(s, filepath.Join(p.c, "info", "refs")+" ") })
}

// describe lists what is at a path and below it: kinds, modes, owners, contents.
func describe(t *testing.T, path string) (all []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(path, func(p string, _ fs.DirEntry, err error) error {
		require.NoError(t, err)
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(p, &st))
		content := ""
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			b, err := os.ReadFile(p)
			require.NoError(t, err)
			content = fmt.Sprintf("%x %.200q", sha256.Sum256(b), b)
		}
		all = append(all, fmt.Sprintf("%s %o %d:%d %s", p, st.Mode, st.Uid, st.Gid, content))
		return nil
	}))
	return all
}

// held is a command that waits for its release.
type held struct {
	p    *place
	gate *os.File
	done chan *sandboxv1.ExecResult
}

// hold starts a command that does nothing before it is released. It has been refreshed for, and runs, when hold returns.
func (p *place) hold(script string) *held {
	p.t.Helper()
	h := &held{p: p, done: make(chan *sandboxv1.ExecResult, 1)}
	gate := filepath.Join(p.w, fmt.Sprintf("gate-%d", p.count))
	require.NoError(p.t, unix.Mkfifo(gate, 0o600))
	require.NoError(p.t, os.Chown(gate, p.uid, p.uid))
	script = fmt.Sprintf("read -r < %s; rm -f %[1]s\n%s", gate, script)
	if p.layout == control {
		cmd := p.as(p.w, "bash", "-c", script)
		go func() { _ = cmd.Run(); h.done <- nil }()
	} else {
		ctx, req, c := p.bounded(), p.request(script), p.agent.Client
		go func() {
			res, _ := c.Execs.Exec(ctx, req)
			h.done <- res.GetResult()
		}()
	}
	require.Eventually(p.t, func() bool {
		var err error
		h.gate, err = os.OpenFile(gate, os.O_WRONLY|unix.O_NONBLOCK, 0) // fails as long as nobody waits at the other end
		return err == nil
	}, patience, 5*time.Millisecond, "the command runs")
	return h
}

// release lets it go on and gives its result (nil in the control case).
func (h *held) release() *sandboxv1.ExecResult {
	h.p.t.Helper()
	require.NoError(h.p.t, h.gate.Close())
	r := <-h.done
	if h.p.layout != control {
		require.NotNil(h.p.t, r, "the command was answered")
	}
	return r
}

// retire stops the sandbox; the next command gets a new one on the same workspace.
func (p *place) retire() {
	p.t.Helper()
	_, err := p.agent.Client.Sessions.RetireSandbox(p.bounded(), &sandboxv1.RetireSandboxRequest{SessionId: p.session})
	require.NoError(p.t, err)
}

// outsideGit is Git in the folder outside.
func (p *place) outsideGit(args ...string) string {
	p.t.Helper()
	out, err := p.as(p.out, "git", args...).CombinedOutput()
	require.NoError(p.t, err, "git -C outside %v\n%s", args, out)
	return strings.TrimSuffix(string(out), "\n")
}

// blob is the id that a file of the folder outside has as an object.
func (p *place) blob(name string) string {
	p.t.Helper()
	return p.outsideGit("hash-object", "--no-filters", name)
}
