package attack

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/attack/inside"
)

// patience bounds what only something that hangs takes.
const patience = time.Minute

// Options say what is attacked.
type Options struct {
	// Client is one of the running agent.
	Client *client.Client
	// Socket and StateDir are the agent's, which commands look for.
	Socket, StateDir string
	// Root is a workspace root, in which the throw-away repository is made; UID and GID own it.
	Root     string
	UID, GID int
	// Runtime is the one whose sandbox is attacked; empty: the node's default.
	Runtime string
	// Program is one that imports package inside, and runs where the sandbox's root file system is: best a static one.
	Program string
}

// Runner is a session that is attacked, and the view from outside.
type Runner struct {
	place   Place
	g       *grounds
	w       *witness
	words   map[string]string
	concede []*sandboxv1.Concession
	needs   map[string]bool
	// patience bounds a trusted Git command.
	patience time.Duration
	// shared: commands run on the node's own kernel.
	shared bool
	end    func(context.Context) error
}

// Start makes the repository, the session and the canaries. Close ends all of them.
func Start(ctx context.Context, o Options) (r *Runner, err error) {
	g, err := newGrounds(ctx, o.Root, o.UID, o.GID)
	if err != nil {
		return nil, err
	}
	created, err := o.Client.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: g.repo, Worktree: g.worktree}, Runtime: o.Runtime,
		Resources: &sandboxv1.Resources{MemoryBytes: MemoryMiB << 20, Pids: Pids},
	})
	if err != nil {
		return nil, errors.Join(err, forget(ctx, o.Client, g), g.remove())
	}
	s := &session{client: o.Client, id: created.GetSessionId(), sandbox: created.GetSandbox().GetId(), generation: created.GetGeneration()}
	// With what the agent keeps for the worktree: nobody needs it any more.
	end := func(ctx context.Context) error {
		_, err := o.Client.DeleteWorkspace(ctx, &sandboxv1.DeleteWorkspaceRequest{SessionId: s.id, Force: true})
		return err
	}
	status, err := statusOf(ctx, o.Client, created.GetSandbox().GetRuntime())
	if err == nil {
		r, err = newRunner(ctx, s, g, o.Program)
	}
	if err != nil {
		return nil, errors.Join(err, end(context.WithoutCancel(ctx)), g.remove())
	}
	r.end, r.concede, r.shared = end, status.GetConcessions(), status.GetIsolation() == sandboxv1.Isolation_NAMESPACES
	r.words["state"], r.words["socket"] = o.StateDir, o.Socket
	if created.GetSandbox().GetProvenance().GetRootfsKind() != "host" {
		r.words["node"] = "" // another root file system has such folders of its own
	}
	if !r.shared {
		r.words["making"] = "" // a kernel of the sandbox's own may have them, and they are none of the node's then
	}
	return r, nil
}

// forget has the agent give up what it may keep for the worktree of a session that could not be made.
func forget(ctx context.Context, c *client.Client, g *grounds) error {
	_, err := c.DeleteWorkspace(context.WithoutCancel(ctx), &sandboxv1.DeleteWorkspaceRequest{Worktree: g.worktree, Force: true})
	if errors.Is(err, client.ErrNotFound) {
		return nil
	}
	return err
}

// statusOf is what the agent says of a runtime: what it does not keep, and whose kernel commands run on.
func statusOf(ctx context.Context, c *client.Client, runtime string) (*sandboxv1.RuntimeStatus, error) {
	info, err := c.API().Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("asking what the runtime %s concedes: %w", runtime, err)
	}
	for _, r := range info.GetRuntimes() {
		if r.GetName() == runtime {
			return r, nil
		}
	}
	return nil, fmt.Errorf("the agent says nothing of the runtime %s", runtime)
}

// newRunner puts the attacker into the worktree, and starts the canaries.
func newRunner(ctx context.Context, p Place, g *grounds, program string) (*Runner, error) {
	helper := filepath.Join(g.worktree, helperName)
	if err := copyProgram(g, program, helper); err != nil {
		return nil, fmt.Errorf("putting the attacker into the worktree: %w", err)
	}
	w, err := newWitness(ctx, g, program)
	if err != nil {
		return nil, err
	}
	r := &Runner{place: p, g: g, w: w, needs: map[string]bool{}, patience: patience, end: func(context.Context) error { return nil }}
	r.words = w.addresses()
	for k, v := range map[string]string{
		"helper": helper + " " + inside.Word, "worktree": g.worktree, "repo": g.repo, "secret": g.secret, "beside": g.beside,
		"node":   "/etc/shadow /etc/gshadow /root /boot /var/log /var/lib",
		"making": "/dev/fuse /dev/net/tun", "pids": strconv.Itoa(Pids), "memory": strconv.Itoa(MemoryMiB), "disk": strconv.Itoa(MemoryMiB/2 + 1), "files": "200000", "zeros": zerosSHA256(), "state": "/nonexistent", "socket": "/nonexistent",
	} {
		r.words[k] = v
	}
	return r, nil
}

const helperName = ".attacker"

func copyProgram(g *grounds, from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Chown(g.uid, g.gid), out.Chmod(0o755), out.Close())
}

func zerosSHA256() string {
	h := sha256.New()
	io.WriteString(h, inside.Tried+"1\n") //nolint:errcheck // a hash's Write never fails (hash.Hash)
	block := make([]byte, 1<<20)
	for range zerosMiB {
		h.Write(block)
	}
	h.Write([]byte("tail"))
	return hex.EncodeToString(h.Sum(nil))
}

// Close ends the session, with evidence, and removes all that was made. Its error says what is left.
func (r *Runner) Close(ctx context.Context) error {
	r.w.stop()
	if err := r.end(ctx); err != nil {
		return fmt.Errorf("ending the session that was attacked, %s is left: %w", r.g.dir, err)
	}
	if err := r.g.remove(); err != nil {
		return fmt.Errorf("removing the repository that was attacked: %w", err)
	}
	return nil
}

// Shared says whether commands run on the node's own kernel.
func (r *Runner) Shared() bool { return r.shared }

// Run makes one attack.
func (r *Runner) Run(ctx context.Context, a Attack) Result {
	word := "attacker-" + randomHex()
	a, named := r.replaced(a, word)
	verdict, why := Judge(a, r.see(ctx, a, word, named))
	verdict, why = concede(a, verdict, why, r.concede)
	return Result{Promise: a.Promise, Attack: a.Name, Verdict: verdict, Why: why}
}

// replaced puts this node's words into an attack. named: it gives the word to what it starts.
func (r *Runner) replaced(a Attack, word string) (out Attack, named bool) {
	words := map[string]string{"word": word}
	maps.Copy(words, r.words)
	out = a.words(words)
	return out, strings.Contains(out.Command, word)
}

// see runs an attack's commands, and looks.
func (r *Runner) see(ctx context.Context, a Attack, word string, named bool) (s Seen) {
	unable := func(format string, args ...any) Seen { s.Unable = fmt.Sprintf(format, args...); return s }
	for _, program := range a.Needs {
		if !r.has(ctx, program) {
			return unable("%s is not in the sandbox", program)
		}
	}
	r.w.takeReached()
	if err := r.clean(); err != nil {
		return unable("cleaning the worktree: %v", err)
	}
	before, err := r.w.look()
	if err != nil {
		return unable("looking at the node: %v", err)
	}
	if s.Answers, err = r.exec(ctx, a, word); err != nil {
		s.Unable = err.Error()
	}
	if named {
		s.Alive = r.w.still(ctx, word)
	}
	r.trustedGit(ctx, a, &s)
	known, err := r.place.Known(ctx, word)
	if known {
		s.Changed = append(s.Changed, "the agent answers for an exec that never was")
	}
	if err != nil {
		return unable("asking for an exec that never was: %v", err)
	}
	after, err := r.w.look()
	if err != nil {
		return unable("looking at the node: %v", err)
	}
	s.Changed = append(s.Changed, before.changed(after)...)
	dangerous, err := r.w.dangerous()
	if err != nil {
		return unable("looking at the worktree: %v", err)
	}
	s.Changed, s.Reached = append(s.Changed, dangerous...), r.w.takeReached()
	if s.Sandbox, err = r.place.Same(ctx); err != nil {
		return unable("looking at the sandbox: %v", err)
	}
	return s
}

// has asks once whether a program is there inside.
func (r *Runner) has(ctx context.Context, program string) bool {
	if there, asked := r.needs[program]; asked {
		return there
	}
	answer, err := r.place.Exec(ctx, "command -v "+program, 0)
	r.needs[program] = err == nil && answer.Stdout != ""
	return r.needs[program]
}

// clean removes what another attack has left in the worktree, and lets a command that stays wait.
func (r *Runner) clean() error {
	entries, err := os.ReadDir(r.g.worktree)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name := e.Name(); name != ".git" && name != helperName && name != "README" && !strings.HasPrefix(name, ".sandbox") {
			if err := os.RemoveAll(filepath.Join(r.g.worktree, name)); err != nil {
				return err
			}
		}
	}
	return r.g.own(r.gate(), 0o644, "")
}

func (r *Runner) gate() string { return filepath.Join(r.g.worktree, "gate") }

// exec runs an attack's own commands and gives the answers.
func (r *Runner) exec(ctx context.Context, a Attack, word string) (all []Answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range max(1, a.AtOnce) {
		wg.Go(func() {
			answer, failed := r.place.Exec(ctx, a.Command, timeoutOf(a))
			mu.Lock()
			defer mu.Unlock()
			if failed != nil {
				err = failed
				return
			}
			all = append(all, answer)
		})
	}
	go func() { wg.Wait(); close(done) }()
	var missed error
	if a.Stays {
		missed = r.await(ctx, word, done)
		if err := os.Remove(r.gate()); err != nil {
			return nil, err
		}
	}
	<-done
	if err == nil && a.Then != "" {
		var answer Answer
		if answer, err = r.place.Exec(ctx, a.Then, patience); err == nil {
			all = append(all, answer)
		}
	}
	return all, errors.Join(err, missed)
}

func timeoutOf(a Attack) time.Duration {
	if a.Timeout > 0 {
		return a.Timeout
	}
	return patience
}

// await waits until a process that is to stay behind is seen, which is what makes it worth looking for later.
func (r *Runner) await(ctx context.Context, word string, done <-chan struct{}) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if len(processes(word)) > 0 || r.w.beats() > 0 {
			return nil
		}
		select {
		case <-done:
			return errors.New("no process that stays behind was seen while the command ran")
		case <-ctx.Done():
			return errors.New("no process that stays behind was seen in time")
		case <-tick.C:
		}
	}
}

// trustedGit has the agent run Git after an attack.
func (r *Runner) trustedGit(ctx context.Context, a Attack, s *Seen) {
	for _, args := range a.Git {
		bounded, cancel := context.WithTimeout(ctx, r.patience)
		err := r.place.Git(bounded, args)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			s.Hung = append(s.Hung, "git "+strings.Join(args, " "))
		}
	}
}

func randomHex() string {
	b := make([]byte, 8)
	rand.Read(b)
	return hex.EncodeToString(b)
}
