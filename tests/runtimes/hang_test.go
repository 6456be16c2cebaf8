package runtimes

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// owner owns the repository and the worktree on disk.
const owner = 4321

// Nothing tells then that a task is gone: the agent has killed its init, and has no evidence.
func TestP5WhileContainerdOrAShimHangsACommandIsUncertainAndTheWorkspaceIsReserved(t *testing.T) {
	containerd.Need(t, "runc")
	for what, pids := range map[string]func(d *containerd.Daemon) []int{
		"containerd": func(d *containerd.Daemon) []int { return []int{d.Pid()} },
		"the shim":   (*containerd.Daemon).Shims,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			d := containerd.Start(t, "runc")
			a := node.Start(t, node.Options{Config: fmt.Sprintf("runtime: {default: runc, allowed: [runc], start_timeout: 60s}\ncontainerd: {address: %s}\n", d.Address)})
			ctx := t.Context()
			repo := testkit.Repo(t, owner)
			worktree := testkit.Worktree(t, owner, repo, "topic")
			made, err := a.Client.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: worktree}})
			require.NoError(t, err, a.LogText())
			id := made.GetSession().GetSessionId()
			session := func() *sandboxv1.Session {
				res, err := a.Client.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: id})
				require.NoError(t, err)
				return res.GetSession()
			}
			exec := func(id, exec, command string) (*sandboxv1.ExecResult, error) {
				res, err := a.Client.Execs.Exec(context.Background(), &sandboxv1.ExecRequest{SessionId: id, ExecId: exec, Command: command, Text: true})
				return res.GetResult(), err
			}
			const command = "touch running; exec sleep 100000"
			answer := make(chan *sandboxv1.ExecResult, 1)
			go func() {
				defer close(answer)
				if r, err := exec(id, "cut", command); err == nil {
					answer <- r
				}
			}()
			a.Until("the command runs", func() bool {
				_, err := os.Stat(filepath.Join(worktree, "running"))
				return err == nil
			})

			patience := func(from, to string) {
				a.Kill()
				text, err := os.ReadFile(a.Config)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(a.Config, []byte(strings.Replace(string(text), from, to, 1)), 0o600))
				a.Serve()
			}
			// What hangs is given up after a third of it.
			patience("start_timeout: 60s", "start_timeout: 10s")
			<-answer
			stopped := pids(d)
			require.NotEmpty(t, stopped)
			all := func(sig unix.Signal) {
				for _, pid := range stopped {
					_ = unix.Kill(pid, sig) // a shim may have ended
				}
			}
			t.Cleanup(func() { all(unix.SIGCONT) })
			all(unix.SIGSTOP)
			_, err = a.Client.Sessions.RetireSandbox(ctx, &sandboxv1.RetireSandboxRequest{SessionId: id})
			require.ErrorContains(t, err, "no evidence")
			a.Until("it is uncertain between two looks", func() bool {
				s := session()
				return s.GetState() == sandboxv1.Session_UNCERTAIN && strings.Contains(s.GetReason(), "does containerd run")
			})
			cut, err := exec(id, "cut", command)
			require.NoError(t, err)
			require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, cut.GetStatus())
			require.NotEmpty(t, cut.GetReason())
			require.False(t, cut.GetEvidence().GetComplete())
			_, err = exec(id, "early", "true")
			require.Error(t, err, "nothing new starts on the workspace")

			all(unix.SIGCONT)
			a.Until("it is reconciled", func() bool { return session().GetState() == sandboxv1.Session_IDLE })
			require.True(t, session().GetSandbox().GetEvidence().GetComplete())
			patience("start_timeout: 10s", "start_timeout: 60s")
			cut, err = exec(id, "cut", command)
			require.NoError(t, err)
			require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, cut.GetStatus(), "what was answered stays")
			next, err := exec(id, "next", "echo next")
			require.NoError(t, err, a.LogText())
			require.Equal(t, "next\n", next.GetStdoutText())
		})
	}
}
