package demo

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/interrupt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// Options say where the demo works and how it looks.
type Options struct {
	// Repo is a path in a clone: the demo makes a worktree and a branch of it, and removes both.
	Repo string
	// Program is this executable, which the demo starts as its agent.
	Program string
	// LibexecDir, when not empty, is where the agent finds receiptd and pid1.
	LibexecDir string
	Out        io.Writer
	Colour     bool
}

// ErrNotHeld: something that the demo claims did not hold. The screen has said what.
var ErrNotHeld = errors.New("not everything held")

// tour is one run of the demo.
type tour struct {
	screen
	opts  Options
	repo  *repository
	place *place
	agent *agentProcess

	id       string // of the session; its branch, worktree and mark are named after it
	branch   string
	worktree string
	mark     string // the variable in the environment of everything that the session runs
	session  *sandboxv1.Session
	key      ed25519.PublicKey

	step           int
	held, notHeld  int
	execs          []string
	mayHaveSandbox bool
}

// Run walks through the demo. It needs root. What it made is gone when it returns, whatever the error.
func Run(ctx context.Context, o Options) (err error) {
	t := &tour{screen: screen{w: o.Out, colour: o.Colour}, opts: o, id: "demo-" + randomHex(4)}
	t.branch = "sandbox-demo/" + t.id
	t.mark = "SANDBOX_DEMO=" + t.id
	if t.repo, err = openRepository(ctx, o.Repo); err != nil {
		return err
	}
	if t.place, err = newPlace(t.repo); err != nil {
		return err
	}
	t.worktree = filepath.Join(t.place.work, t.id)
	interrupt.Describe(ctx, interrupt.CleanUp{Left: t.left()})
	// The clean-up goes on after Ctrl-C.
	defer func() { err = errors.Join(err, t.cleanUp(context.WithoutCancel(ctx))) }()

	if err := t.open(ctx); err != nil {
		return err
	}
	for _, s := range t.steps() {
		if err := t.walk(ctx, s); err != nil {
			return err
		}
	}
	if err := t.fromOutside(ctx); err != nil {
		return err
	}
	if err := t.wholeChain(); err != nil {
		return err
	}
	if err := t.tamper(); err != nil {
		return err
	}
	return nil
}

// open starts the agent and makes the session.
func (t *tour) open(ctx context.Context) (err error) {
	t.line("%s", t.paint(bold, "sandbox-agent demo"))
	t.line("Runs commands in a sandbox on a real repository, and checks each claim against the receipt and the machine.")
	t.line("")
	t.line("   repository  %s (owner uid %d)", t.repo.path, t.repo.uid)
	t.line("   worktree    %s, branch %s: both are removed at the end", t.worktree, t.branch)
	t.line("   agent       a process of its own, state in %s", t.place.state)

	if t.agent, err = startAgent(ctx, t.opts, t.place, t.repo); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	began := time.Now()
	t.mayHaveSandbox = true
	name, value, _ := cut(t.mark)
	// A Ctrl-C waits for this answer (a second or so): cut short, it would leave half a worktree.
	create, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	res, err := t.agent.client.Sessions.CreateSession(create, &sandboxv1.CreateSessionRequest{
		SessionId: t.id,
		Workspace: &sandboxv1.Workspace{Repository: t.repo.path, Worktree: t.worktree, Branch: t.branch},
		Env:       map[string]string{name: value},
	})
	if err != nil {
		return fmt.Errorf("%w; the agent's log ends with:\n%s", t.agent.client.Explain("creating the session", err), tail(t.place.log))
	}
	t.session = res.Session
	t.step++
	t.heading(t.step, "A session", "The agent makes the worktree, starts a sandbox, and lets it prove itself before any command runs in it.")
	t.command(fmt.Sprintf("sandbox-agent session create --repo %s --branch %s", t.repo.path, t.branch))
	t.result(fmt.Sprintf("%s, sandbox %s, generation %d · %s", res.Session.State, res.Session.GetSandbox().GetId(), res.Session.Generation,
		time.Since(began).Round(time.Millisecond)), true)
	t.proof(res.Session.GetSandbox().GetProof())
	t.key, err = verify.LoadKey(filepath.Join(t.place.state, "keys", res.Session.GetSandbox().GetId()+".pub"))
	return err
}

// proof shows what the sandbox proved, a paragraph for each promise, and what it could not prove by itself.
func (t *tour) proof(items []*sandboxv1.ProofItem) {
	var promises []string
	held := map[string][]string{}
	for _, p := range items {
		if !p.Holds {
			t.count(check{what: p.Promise + ": " + p.What, detail: p.Detail})
			continue
		}
		t.held++
		if held[p.Promise] == nil {
			promises = append(promises, p.Promise)
		}
		held[p.Promise] = append(held[p.Promise], p.What)
	}
	for _, name := range promises {
		t.check(check{what: name + ": " + strings.Join(held[name], "; "), holds: true})
	}
}

// cleanUp removes what the demo made, and says what it could not remove.
func (t *tour) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	t.line("")
	t.line("%s", t.paint(bold, "Cleaning up"))
	var errs []error
	fail := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	sandboxGone := true
	if t.mayHaveSandbox {
		if err := t.endSession(ctx); err != nil {
			sandboxGone = false
			fail("stopping the sandbox", err)
		}
	}
	if t.agent != nil {
		t.agent.stop()
	}
	if sandboxGone { // removing what a live sandbox still uses would hide the problem, not solve it
		fail("removing the worktree and its branch", t.repo.forget(ctx, t.worktree, t.branch))
		fail("removing what was kept of the session's work", t.repo.forgetKept(ctx, t.id))
	}
	if len(errs) == 0 {
		fail("removing the demo's folder", os.RemoveAll(t.place.dir))
	}
	if len(errs) > 0 {
		fail("left for you to look at", fmt.Errorf("%s, and branch %s of %s", t.place.dir, t.branch, t.repo.path))
		return errors.Join(errs...)
	}
	t.line("   worktree, branch %s and %s are gone", t.branch, t.place.dir)
	return t.verdict()
}

// endSession stops the sandbox with evidence. An agent that is gone is started again for it: its sandbox is not.
func (t *tour) endSession(ctx context.Context) error {
	if !t.agent.alive() {
		agent, err := startAgent(ctx, t.opts, t.place, t.repo)
		if err != nil {
			return err
		}
		t.agent = agent
	}
	res, err := t.agent.client.Sessions.DeleteWorkspace(ctx, &sandboxv1.DeleteWorkspaceRequest{SessionId: t.id, Force: true})
	if err != nil {
		if t.session == nil && isNotFound(err) {
			return nil // it was never made
		}
		return t.agent.client.Explain("deleting the workspace of session "+t.id, err)
	}
	if e := res.GetEvidence(); e != nil {
		t.line("   the sandbox is gone, on evidence:")
		for _, i := range e.Items {
			t.line("     %s %s: %s", t.paint(green, "✓"), i.Source, i.Detail)
		}
	}
	if n := marked(t.mark); n > 0 {
		return fmt.Errorf("%d processes of the session are still alive", n)
	}
	return nil
}

// left says what somebody leaves behind who doesn't wait for the clean-up, and how to remove it. It is called while
// the demo runs, so it looks at nothing that changes.
func (t *tour) left() func() []string {
	dir, worktree, branch, kept := t.place.dir, t.worktree, t.branch, keptRefs(t.id)
	git := "git -C " + t.repo.path
	if t.repo.uid != 0 { // Git refuses root in somebody else's clone
		git = fmt.Sprintf("setpriv --reuid %d --regid %d --clear-groups %s", t.repo.uid, t.repo.gid, git)
	}
	return func() []string {
		return []string{
			"left behind, if the clean-up had not come to it; each line removes one thing:",
			"  " + git + " worktree remove --force --force " + worktree,
			"  " + git + " branch -D " + branch,
			"  " + git + " for-each-ref --format='delete %(refname)' " + kept + " | " + git + " update-ref --stdin",
			"  rm -rf " + dir,
			"The demo's agent stops the sandbox and ends by itself; its log is " + filepath.Join(dir, "agent.log") + ".",
		}
	}
}

// verdict is the last word.
func (t *tour) verdict() error {
	t.line("")
	if t.step < t.lastStep() {
		return nil // cut short: no verdict
	}
	if t.notHeld > 0 {
		t.line("%s", t.paint(red, fmt.Sprintf("%d of %d checks did not hold.", t.notHeld, t.held+t.notHeld)))
		return ErrNotHeld
	}
	t.line("%s", t.paint(green, fmt.Sprintf("All %d checks hold.", t.held)))
	t.line("")
	t.line("%s", t.paint(bold, "What next"))
	for _, l := range t.next() {
		t.line("%s", l)
	}
	return nil
}

func (t *tour) next() []string {
	p := t.opts.Program
	config := ""
	lines := []string{"   Start an agent of your own, as root:"}
	if t.repo.uid == 0 {
		config = " --config agent.yaml"
		lines = append(lines, "     "+t.paint(cyan, "echo 'workspace: {allow_root_owned: true}' > agent.yaml")+"   # root owns this clone")
	}
	return append(lines,
		"     "+t.paint(cyan, p+" serve"+config+" --workspace-root /var/lib/sandbox-workspaces --workspace-root "+filepath.Dir(t.repo.path)),
		"   Then, from another terminal:",
		"     "+t.paint(cyan, p+" session create --repo "+t.repo.path+" --branch try-it"),
		"     "+t.paint(cyan, p+" exec SESSION -- 'git status'"),
		"     "+t.paint(cyan, p+" git SESSION -- status")+"   # not plain git: commands have written there",
		"     "+t.paint(cyan, p+" receipt verify --all /var/lib/sandbox-agent/receipts"),
		"   How it works is in docs/architecture.md, what it does not protect against in docs/threat-model.md.",
	)
}

// count shows a check and keeps the score.
func (t *tour) count(c check) {
	if c.holds {
		t.held++
	} else {
		t.notHeld++
	}
	t.check(c)
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	rand.Read(b)
	return hex.EncodeToString(b)
}

func milliseconds(d *durationpb.Duration) string {
	v := d.AsDuration()
	if v < 10*time.Millisecond {
		return fmt.Sprintf("%.1f ms", float64(v)/1e6)
	}
	return fmt.Sprintf("%.0f ms", float64(v)/1e6)
}
