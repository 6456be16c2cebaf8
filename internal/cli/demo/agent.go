package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
)

// place is the demo's temporary folder, with everything that the demo's agent keeps.
type place struct {
	dir, state, socket, work, config, log, control string
}

// The demo's own settings: a clone that root owns is fine here, and a person shouldn't wait long for a command that
// ignores SIGTERM.
const demoConfig = "workspace: {allow_root_owned: true}\nlimits: {grace: 300ms}\n"

// newPlace makes the folder. The worktree will be made in it by Git as the clone's owner, who therefore owns work.
func newPlace(owner *repository) (p *place, err error) {
	dir, err := os.MkdirTemp("/var/tmp", "sandbox-demo-")
	if err != nil {
		return nil, fmt.Errorf("making the demo's folder: %w", err)
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	in := func(name string) string { return filepath.Join(dir, name) }
	p = &place{
		dir: dir, state: in("state"), socket: in("run/exec.sock"), work: in("worktrees"),
		config: in("config.yaml"), log: in("agent.log"), control: in("control"),
	}
	for _, d := range []string{in("run"), p.work, p.control} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return nil, fmt.Errorf("making the demo's folder: %w", err)
		}
	}
	if err := own(dir, 0o711, 0, 0); err != nil {
		return nil, err
	}
	if err := own(p.work, 0o755, int(owner.uid), int(owner.gid)); err != nil {
		return nil, err
	}
	if err := os.WriteFile(p.config, []byte(demoConfig), 0o600); err != nil {
		return nil, fmt.Errorf("writing the demo's configuration: %w", err)
	}
	return p, nil
}

func own(dir string, mode os.FileMode, uid, gid int) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("making the demo's folder: %w", err)
	}
	defer f.Close()
	if err := errors.Join(f.Chown(uid, gid), f.Chmod(mode)); err != nil {
		return fmt.Errorf("making the demo's folder: %w", err)
	}
	return nil
}

// agentProcess is the demo's own agent: this very program, run with "serve".
type agentProcess struct {
	cmd    *exec.Cmd
	client *client.Client
	ended  chan struct{}
	err    error // why it ended; valid once ended is closed
	// leash is the agent's standard input: it ends with the demo, however the demo dies, and the agent with it.
	leash io.Closer
}

// startAgent starts the agent and waits until it answers.
func startAgent(ctx context.Context, o Options, p *place, repo *repository) (*agentProcess, error) {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("starting the agent: %w", err)
	}
	defer log.Close()
	args := []string{
		"serve", "--until-stdin-ends", "--config", p.config, "--state-dir", p.state, "--socket", p.socket,
		"--workspace-root", p.work, "--workspace-root", filepath.Dir(repo.path),
	}
	if o.LibexecDir != "" {
		args = append(args, "--libexec-dir", o.LibexecDir)
	}
	// Not CommandContext: the agent must outlive an interrupted step, to stop the sandbox with evidence.
	a := &agentProcess{cmd: exec.Command(o.Program, args...), client: client.New(p.socket), ended: make(chan struct{})} //nolint:forbidigo // stop ends it
	a.cmd.Stdout, a.cmd.Stderr = log, log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the demo, not for the agent
	if a.leash, err = a.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("starting the agent: %w", err)
	}
	if err := a.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the agent %s: %w", o.Program, err)
	}
	go func() {
		a.err = a.cmd.Wait()
		close(a.ended)
	}()
	if err := a.awaitReady(ctx); err != nil {
		a.stop()
		return nil, fmt.Errorf("starting the agent: %w; its log ends with:\n%s", err, tail(p.log))
	}
	return a, nil
}

// readyWait bounds how long the agent may take until it answers.
const readyWait = 20 * time.Second

func (a *agentProcess) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	for {
		_, err := a.client.Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
		if err == nil {
			return nil
		}
		select {
		case <-a.ended:
			return fmt.Errorf("it ended at once: %w", a.err)
		case <-ctx.Done():
			return fmt.Errorf("it did not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (a *agentProcess) alive() bool {
	select {
	case <-a.ended:
		return false
	default:
		return true
	}
}

// stopWait is how long the agent may take to go after SIGTERM.
const stopWait = 15 * time.Second

// stop ends the agent as an init system would: SIGTERM, and SIGKILL when that is not heard.
func (a *agentProcess) stop() {
	if !a.alive() {
		return
	}
	a.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.ended:
	case <-time.After(stopWait):
		a.cmd.Process.Kill()
		<-a.ended
	}
}

// tail is the end of a log, for an error message.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}
