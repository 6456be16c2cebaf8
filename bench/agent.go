package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

const (
	nameExec   = "exec"
	nameVerify = "exec, verified"
	readyWait  = 20 * time.Second
	stopWait   = 20 * time.Second
)

// agent is a real "sandbox-agent serve" with a fresh state folder.
type agent struct {
	place  *place
	args   []string // its command line
	client *client.Client
	log    *os.File
	cmd    *exec.Cmd
	ended  chan struct{}
}

// startAgent starts one with the default settings.
func startAgent(ctx context.Context, p *place) (*agent, error) {
	return startAgentOn(ctx, p, "default", filepath.Join(p.bin, "sandbox-agent"))
}

// startAgentOn starts a program that is an agent, with more on its command line; name tells it from others.
func startAgentOn(ctx context.Context, p *place, name, program string, more ...string) (*agent, error) {
	log, err := os.OpenFile(p.path(name+".log"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	a := &agent{place: p, client: client.New(p.path(name + ".sock")), log: log}
	a.args = append([]string{program, "serve", "--state-dir", p.path(name + "-state"), "--socket", a.client.Socket,
		"--workspace-root", p.path("work"), "--libexec-dir", p.bin}, more...)
	if err := a.serve(ctx); err != nil {
		return nil, errors.Join(err, a.end(), log.Close())
	}
	p.onClose(a.Close)
	return a, nil
}

// serve starts the process and waits until it answers.
func (a *agent) serve(ctx context.Context) error {
	// Without a context: an interrupted run still needs its agent, to stop the sandboxes with evidence.
	a.cmd = exec.Command(a.args[0], a.args[1:]...)
	a.cmd.Stdout, a.cmd.Stderr = a.log, a.log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for this program
	if err := a.cmd.Start(); err != nil {
		return fmt.Errorf("starting the agent: %w", err)
	}
	ended := make(chan struct{})
	a.ended = ended
	go func() { _ = a.cmd.Wait(); close(ended) }()
	ctx, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	for {
		_, err := a.client.Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			return fmt.Errorf("starting the agent: it ended: %s", a.said())
		case <-ctx.Done():
			return fmt.Errorf("starting the agent: it does not answer: %w: %s", err, a.said())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// said is the end of its log.
func (a *agent) said() string {
	b, _ := os.ReadFile(a.log.Name())
	return strings.TrimSpace(string(b[max(0, len(b)-2048):]))
}

// end ends the process; its sandboxes go on.
func (a *agent) end() error {
	if a.ended == nil {
		return nil
	}
	a.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.ended:
		return nil
	case <-time.After(stopWait):
		a.cmd.Process.Kill()
		<-a.ended
		return fmt.Errorf("the agent did not end on SIGTERM: %s", a.said())
	}
}

// Close deletes the sessions, with evidence that their sandboxes are gone, and ends the agent. One that has died is
// started again for that.
func (a *agent) Close(ctx context.Context) error {
	select {
	case <-a.ended:
		if err := a.serve(ctx); err != nil {
			return errors.Join(err, a.end())
		}
	default:
	}
	list, err := a.client.Sessions.ListSessions(ctx, &sandboxv1.ListSessionsRequest{})
	errs := []error{err}
	for _, s := range list.GetSessions() {
		_, err := a.client.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: s.GetSessionId()})
		errs = append(errs, a.client.Explain("deleting session "+s.GetSessionId(), err))
	}
	return errors.Join(append(errs, a.end(), a.log.Close())...)
}

// session is a session with a worktree of its own and a sandbox that is ready.
type session struct {
	client   *client.Client
	id       string
	sandbox  *sandboxv1.Sandbox
	worktree string
	env      []string // a command's
	execs    atomic.Uint64
}

func (a *agent) newSession(ctx context.Context) (*session, error) {
	worktree, _, err := a.place.worktree(ctx)
	if err != nil {
		return nil, err
	}
	c := client.New(a.client.Socket)
	res, err := c.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		Workspace: &sandboxv1.Workspace{Repository: a.place.repo, Worktree: worktree},
	})
	if err != nil {
		return nil, c.Explain("creating a session", err)
	}
	s := &session{client: c, id: res.GetSession().GetSessionId(), sandbox: res.GetSession().GetSandbox(), worktree: worktree}
	// What bash was given, not what it made of it.
	r, err := s.exec(ctx, "cat /proc/$$/environ")
	if err != nil {
		return nil, err
	}
	s.env = strings.Split(strings.TrimSuffix(string(r.GetStdout()), "\x00"), "\x00")
	return s, nil
}

// exec runs a command through the socket and sees that it ended well.
func (s *session) exec(ctx context.Context, command string) (*sandboxv1.ExecResult, error) {
	id := fmt.Sprintf("bench-%d", s.execs.Add(1))
	res, err := s.client.Execs.Exec(ctx, &sandboxv1.ExecRequest{SessionId: s.id, ExecId: id, Command: command})
	if err != nil {
		return nil, s.client.Explain("running a command", err)
	}
	r := res.GetResult()
	if r.GetExecId() != id || r.GetStatus() != sandboxv1.ExecResult_EXITED || r.GetExitCode() != 0 {
		return nil, fmt.Errorf("running %q: %s, exit code %d: %s %s", command, r.GetStatus(), r.GetExitCode(), r.GetReason(), r.GetStderr())
	}
	return r, nil
}

// verify is what a caller that trusts nobody does with the answer: the signature, and that it is of this request.
func (s *session) verify(r *sandboxv1.ExecResult, command string) error {
	p, err := verify.Envelope(r.GetReceipt(), s.sandbox.GetPublicKey())
	if err != nil {
		return err
	}
	return verify.Expect{
		SessionID: s.id, SandboxID: s.sandbox.GetId(), ExecID: r.GetExecId(), Generation: r.GetGeneration(),
		Nonce:         p.Nonce, // known to the agent, which has compared it
		RequestDigest: receipt.Request{SessionID: s.id, Command: command}.Digest(),
	}.Match(p)
}

// agentCases run a command through the socket. Each answer's receipt is verified; the second series has that in its time.
func agentCases(_ context.Context, o options, _ *place, s *session) ([]testCase, error) {
	if !o.wants(nameExec) && !o.wants(nameVerify) {
		return nil, nil
	}
	return []testCase{{group: groupCommand, series: []string{nameExec, nameVerify}, sample: func(ctx context.Context) ([]time.Duration, error) {
		began := time.Now()
		r, err := s.exec(ctx, "true")
		answered := time.Since(began)
		if err == nil {
			err = s.verify(r, "true")
		}
		return []time.Duration{answered, time.Since(began)}, err
	}}}, nil
}

// gitCases are a real command. Each side has a worktree of its own: Git's index notes the owner's uid, which differs
// between the two, and would otherwise be written anew at each turn.
func gitCases(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	const bareName, inside, command = "git status, bare", "git status, exec", "git status --porcelain"
	if !o.wants(bareName) && !o.wants(inside) {
		return nil, nil
	}
	worktree, _, err := p.worktree(ctx)
	if err != nil {
		return nil, err
	}
	bash, err := find("bash", "-c", command)
	if err != nil {
		return nil, err
	}
	bash.env, bash.dir, bash.uid = s.env, worktree, ownerUID
	var cases []testCase
	if o.wants(bareName) {
		cases = append(cases, testCase{group: groupGit, series: []string{bareName}, baseline: true, sample: one(func(context.Context) (time.Duration, error) {
			return bash.run(p.null)
		})})
	}
	if o.wants(inside) {
		cases = append(cases, testCase{group: groupGit, series: []string{inside}, sample: one(func(ctx context.Context) (time.Duration, error) {
			began := time.Now()
			r, err := s.exec(ctx, command)
			took := time.Since(began)
			if err == nil && len(r.GetStdout()) > 0 {
				err = fmt.Errorf("the worktree is not clean: %s", r.GetStdout())
			}
			return took, err
		})})
	}
	return cases, nil
}
