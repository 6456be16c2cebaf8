package faults

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// operation is one kind of call. prepare brings the session to where it can be made; do makes it, and returns also when the
// agent dies meanwhile; check is asked when an agent is there again, died or not.
type operation struct {
	name string
	// consumes: the session is gone or spoilt afterwards.
	consumes bool
	// starts: the points are those of the agent's start; do is called when it is dead, before the start.
	starts  bool
	prepare func(s *session)
	do      func(s *session)
	check   func(s *session)
}

// current is the exec that an operation is about.
func (s *session) current() *sandboxv1.ExecRequest { return s.pending[len(s.pending)-1] }

func (s *session) next(what string) *sandboxv1.ExecRequest {
	r := s.request(what)
	s.pending = append(s.pending, r)
	return r
}

// settleAll has every pending exec answered.
func (s *session) settleAll() {
	s.T.Helper()
	for _, r := range s.pending {
		s.open(r.GetExecId())
		s.settle(r)
	}
	s.pending = nil
}

// gate begins a command that goes on until its gate is opened.
func (s *session) gate() *sandboxv1.ExecRequest {
	s.T.Helper()
	s.next("")
	r := s.current()
	r.Command += "; " + gated(r.GetExecId())
	s.start(r)
	s.awaitRun(r.GetExecId())
	return r
}

func operations() []operation {
	var epoch uint64
	grants := func(value string) []*sandboxv1.Grant {
		return []*sandboxv1.Grant{{Name: "g", Files: []*sandboxv1.GrantFile{{Path: "f", Content: []byte(value)}}}}
	}
	return []operation{{
		name: "exec", do: func(s *session) { s.exec(s.next("")) }, check: (*session).settleAll,
	}, {
		name: "exec that commits",
		do: func(s *session) {
			s.exec(s.next("git commit -q --allow-empty -m " + s.id))
		},
		check: func(s *session) {
			r := s.current()
			s.settleAll()
			if s.ran(r.GetExecId()) == 0 {
				return
			}
			s.Until("the commit is in the base clone", func() bool {
				return git(s.T, s.repo, "rev-parse", s.branch) == inWorktree(s, "rev-parse", "HEAD")
			})
		},
	}, {
		// The host works in the worktree too, before the command: each part of the view is brought in and out.
		name: "exec with all kinds of Git work", prepare: func(s *session) {
			name := fmt.Sprintf("host-%s-%d", s.id, s.count)
			require.NoError(s.T, os.WriteFile(filepath.Join(s.worktree, name), nil, 0o644))
			require.NoError(s.T, os.Chown(filepath.Join(s.worktree, name), owner, owner))
			git(s.T, s.worktree, "checkout", "-q", "-b", name)
			git(s.T, s.worktree, "add", name)
			git(s.T, s.worktree, "commit", "-q", "-m", name)
		},
		do: func(s *session) {
			name := fmt.Sprintf("new-%s-%d", s.id, s.count+1)
			s.exec(s.next("git switch -q -c " + name + " && echo new > " + name + " && git add " + name + " && git commit -q -m " + name +
				" && git tag t-" + name + " && echo staged > staged-" + name + " && git add staged-" + name + " && touch $(git rev-parse --git-dir)/HEAD.lock"))
		},
		check: func(s *session) {
			r, name := s.current(), fmt.Sprintf("new-%s-%d", s.id, s.count)
			s.settleAll()
			if s.ran(r.GetExecId()) == 0 {
				return
			}
			s.Until("the work is in the base clone", func() bool {
				return git(s.T, s.repo, "for-each-ref", "--format=%(objectname)", "refs/heads/"+name) == inWorktree(s, "rev-parse", "HEAD")
			})
			require.Equal(s.T, name, git(s.T, s.worktree, "branch", "--show-current"))
			require.Equal(s.T, name, git(s.T, s.worktree, "log", "-1", "--format=%s"))
			require.Contains(s.T, git(s.T, s.worktree, "diff", "--cached", "--name-only"), "staged-"+name)
		},
	}, {
		name: "cancel of a running exec", prepare: func(s *session) { s.gate() },
		do: func(s *session) {
			s.Client.Execs.CancelExec(context.Background(), &sandboxv1.CancelExecRequest{SessionId: s.id, ExecId: s.current().GetExecId()})
		},
		check: (*session).settleAll,
	}, {
		name: "cancel of a queued exec", prepare: func(s *session) {
			s.gate()
			r := s.next("")
			s.start(r)
			s.Until("it waits", func() bool { return slices.Contains(s.get().GetQueuedExecIds(), r.GetExecId()) })
		},
		do: func(s *session) {
			res, err := s.Client.Execs.CancelExec(context.Background(), &sandboxv1.CancelExecRequest{SessionId: s.id, ExecId: s.current().GetExecId()})
			if err == nil {
				require.Equal(s.T, sandboxv1.ExecResult_NOT_STARTED, res.GetResult().GetStatus())
				require.NoError(s.T, s.judge(s.current(), res.GetResult()))
			}
		},
		check: (*session).settleAll,
	}, {
		name: "retire beside a running exec", prepare: func(s *session) { s.gate() },
		do: func(s *session) {
			s.Client.Sessions.RetireSandbox(context.Background(), &sandboxv1.RetireSandboxRequest{SessionId: s.id})
		},
		check: (*session).settleAll,
	}, {
		name: "claim",
		do: func(s *session) {
			epoch = s.get().GetOwnerEpoch()
			res, err := s.Client.Sessions.ClaimSession(context.Background(), &sandboxv1.ClaimSessionRequest{SessionId: s.id})
			if err == nil {
				require.Equal(s.T, epoch+1, res.GetSession().GetOwnerEpoch())
				epoch++
			}
		},
		check: func(s *session) {
			now := s.get().GetOwnerEpoch()
			require.GreaterOrEqual(s.T, now, epoch, "P8: an epoch that was told is never taken back")
			require.LessOrEqual(s.T, now, epoch+1)
			old := s.request("")
			if old.OwnerEpoch = now - 1; old.OwnerEpoch == 0 {
				return
			}
			_, err := s.exec(old)
			require.Equal(s.T, connect.CodeFailedPrecondition, codeOf(err), "P8: %v", err)
			require.Zero(s.T, s.ran(old.GetExecId()), "P8")
		},
	}, {
		name: "exec that needs a new sandbox", prepare: func(s *session) {
			_, err := s.Client.Sessions.RetireSandbox(context.Background(), &sandboxv1.RetireSandboxRequest{SessionId: s.id})
			require.NoError(s.T, err)
		},
		do: func(s *session) { s.exec(s.next("")) }, check: (*session).settleAll,
	}, {
		name: "trusted Git", do: func(s *session) {
			s.Client.Git.Git(context.Background(), &sandboxv1.GitRequest{SessionId: s.id, Args: []string{"commit", "-q", "--allow-empty", "-m", "trusted"}})
		},
		check: func(s *session) {
			branch := inWorktree(s, "branch", "--show-current")
			s.Until("the commit is in the base clone", func() bool {
				return git(s.T, s.repo, "rev-parse", branch) == inWorktree(s, "rev-parse", "HEAD")
			})
		},
	}, {
		name: "start beside a running exec", starts: true, prepare: func(s *session) { s.gate() },
		do: func(*session) {}, check: (*session).settleAll,
	}, {
		name: "start after the sandbox died", starts: true, prepare: func(s *session) { s.gate() },
		do: func(s *session) {
			for _, pid := range processesOf(s.lastSandbox()) {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		},
		check: (*session).settleAll,
	}, {
		name: "create", consumes: true,
		prepare: func(s *session) { s.destroyed(); *s = *s.unborn(s.repo) },
		do:      func(s *session) { s.Client.Sessions.CreateSession(context.Background(), s.create) },
		check: func(s *session) {
			s.born() // the same request finds it, or makes it
			require.Equal(s.T, s.branch, inWorktree(s, "branch", "--show-current"))
			s.works()
		},
	}, {
		name: "grants", consumes: true, prepare: func(s *session) { s.gate() },
		do: func(s *session) {
			s.Client.Sessions.UpdateGrants(context.Background(), &sandboxv1.UpdateGrantsRequest{SessionId: s.id, Grants: grants("secret")})
		},
		check: func(s *session) {
			s.open(s.current().GetExecId())
			// The contents died with the agent, unless it lives: then, or if they were never recorded, commands may run.
			r := s.request("cat /run/grants/g/f")
			result, err := s.exec(r)
			if err != nil {
				require.Equal(s.T, connect.CodeFailedPrecondition, codeOf(err), "P15: %v", err)
				require.Equal(s.T, sandboxv1.Session_GRANTS_REQUIRED, s.get().GetState(), "P15")
				require.Zero(s.T, s.ran(r.GetExecId()), "P15")
			} else {
				require.NoError(s.T, s.judge(r, result))
			}
			_, err = s.Client.Sessions.UpdateGrants(context.Background(), &sandboxv1.UpdateGrantsRequest{SessionId: s.id, Grants: grants("again")})
			require.NoError(s.T, err, s.LogText())
			r = s.request("cat /run/grants/g/f")
			require.Equal(s.T, r.GetExecId()+"\nagain", string(s.settle(r).GetStdout()))
			s.settleAll()
		},
	}, {
		name: "delete beside a running exec", consumes: true, prepare: func(s *session) { s.gate() },
		do: func(s *session) {
			s.Client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.id})
		},
		check: func(s *session) {
			exec, sandbox := s.current().GetExecId(), s.lastSandbox()
			s.open(exec)
			s.deleteAgain(func() error {
				_, err := s.Client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: s.id})
				return err
			})
			require.Empty(s.T, processesOf(sandbox), "P5")
			require.LessOrEqual(s.T, s.ran(exec), 1)
			_, err := s.Client.Sessions.CreateSession(context.Background(), s.create)
			require.Equal(s.T, connect.CodeAlreadyExists, codeOf(err), "P7: ids are never used again: %v", err)
		},
	}, {
		name: "delete of a workspace", consumes: true, do: func(s *session) {
			s.Client.Sessions.DeleteWorkspace(context.Background(), &sandboxv1.DeleteWorkspaceRequest{SessionId: s.id, Force: true})
		},
		check: func(s *session) {
			sandbox := s.lastSandbox()
			s.deleteAgain(func() error {
				_, err := s.Client.Sessions.DeleteWorkspace(context.Background(), &sandboxv1.DeleteWorkspaceRequest{SessionId: s.id, Force: true})
				return err
			})
			require.Empty(s.T, processesOf(sandbox), "P5")
			require.NoDirExists(s.T, s.worktree)
			require.NotContains(s.T, git(s.T, s.repo, "worktree", "list"), s.worktree)
			require.NotContains(s.T, git(s.T, s.repo, "for-each-ref"), "refs/sandboxes/"+s.id+"/")
		},
	}}
}

// deleteAgain completes a deletion that may be complete.
func (s *session) deleteAgain(call func() error) {
	s.T.Helper()
	if err := call(); err != nil {
		require.Equal(s.T, connect.CodeNotFound, codeOf(err), "%v\n%s", err, s.LogText())
	}
	_, err := s.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: s.id})
	require.Equal(s.T, connect.CodeNotFound, codeOf(err), "%v", err)
	s.pending, s.answers = nil, map[string]*answered{}
}

// inWorktree asks Git in the private Git folder that the session has mounted: the base clone's own has what was harvested.
func inWorktree(s *session, args ...string) string {
	s.T.Helper()
	res, err := s.Client.Git.Git(context.Background(), &sandboxv1.GitRequest{SessionId: s.id, Args: args})
	require.NoError(s.T, err, s.LogText())
	return string(trim(res.GetStdout()))
}

func trim(b []byte) []byte {
	for len(b) > 0 && b[len(b)-1] == '\n' {
		b = b[:len(b)-1]
	}
	return b
}

// crashCase is a session on which operations are made one after the other.
type crashCase struct {
	*agent
	repo string
	s    *session
}

func (c *crashCase) fresh() *session {
	c.T.Helper()
	if c.s == nil {
		c.s = c.session(c.repo)
	}
	return c.s
}

// run makes an operation; with at, the agent is to die at that point. It says whether it did, and without at where the
// agent came by until the operation was answered.
func (c *crashCase) run(op operation, at string, count int) (died bool, passed []string) {
	c.T.Helper()
	s := c.fresh()
	if op.prepare != nil {
		op.prepare(s)
	}
	s.noteSandbox()
	c.passed()
	if op.starts {
		c.Kill()
		op.do(s)
	}
	if at != "" {
		c.arm(at, count)
	}
	if op.starts {
		c.start(at)
	} else {
		op.do(s)
	}
	if at == "" {
		passed = c.passed()
	} else {
		died = c.dies()
		c.disarm()
	}
	if died {
		c.Serve()
	}
	op.check(s)
	s.pending = nil
	s.same()
	if op.consumes {
		c.end()
	} else {
		s.works()
	}
	return died, passed
}

// start starts the agent, and waits until it has come to a point, or has begun to look after the last of what it found.
func (c *crashCase) start(at string) {
	c.T.Helper()
	if at == "" {
		at = "recover.intent"
	}
	c.Launch()
	c.Until("it answers or dies", func() bool {
		return c.Dead() || c.Answers() && bytes.Contains(read(c.points), []byte(at+"\n"))
	})
}

// dies waits for a death that is under way: the connection is lost before the process is.
func (c *crashCase) dies() bool {
	for range 3 {
		if !c.Answers() {
			<-c.Ended
			return true
		}
	}
	return false
}

// end deletes the session, if there still is one.
func (c *crashCase) end() {
	c.T.Helper()
	if _, err := c.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: c.s.id}); err == nil {
		c.s.destroyed()
	}
	c.s = nil
}

// pointsOf gives, in their order, the points that the agent came by, each once, with how often.
func pointsOf(passed []string) (order []string, times map[string]int) {
	times = map[string]int{}
	for _, name := range passed {
		if times[name]++; times[name] == 1 {
			order = append(order, name)
		}
	}
	return order, times
}

// special are points that other tests die at.
var special = []string{"undo.undone", "recover.removed", "expire.recorded", "expire.removed"}

// TestP6AnAgentThatIsKilledBetweenAnyTwoStepsNeverLiesAfterwards makes each kind of call, has the agent killed (kill -9) at
// each of the named points that the call comes by, starts it again and compares all that it says with what the commands
// did. The points are found by making the call first without a death.
func TestP6AnAgentThatIsKilledBetweenAnyTwoStepsNeverLiesAfterwards(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	c := &crashCase{agent: a, repo: testkit.Repo(t, owner)}
	crashed := map[string]int{}
	deaths, tried := 0, 0
	for _, op := range operations() {
		t.Run(op.name, func(t *testing.T) {
			c.T = t
			_, passed := c.run(op, "", 0)
			order, times := pointsOf(passed)
			require.NotEmpty(t, order, op.name)
			for _, point := range order {
				for _, count := range countsOf(times[point]) {
					if !long() && (crashed[point] > 0 || count > 1) {
						continue
					}
					tried++
					t.Logf("killed at %s, the %d. time", point, count)
					if died, _ := c.run(op, point, count); died {
						deaths++
						crashed[point]++
					}
				}
			}
		})
		c.T = t
		if t.Failed() {
			return
		}
	}
	t.Run("every point", func(t *testing.T) {
		t.Logf("%d calls that were to be cut short, %d crashes injected at %d points, 0 violations", tried, deaths, len(crashed))
		requireAll(t, crashed, func(point string) bool { return !overContainerd(point) })
	})
}

// requireAll requires that the agent was killed at each of the named points that are wanted.
func requireAll(t *testing.T, crashed map[string]int, wanted func(point string) bool) {
	t.Helper()
	missed := slices.DeleteFunc(namedPoints(t), func(point string) bool {
		return crashed[point] > 0 || slices.Contains(special, point) || !wanted(point)
	})
	require.Empty(t, missed, "points at which no call was killed")
}

// countsOf are the first and the last time.
func countsOf(times int) []int {
	if times > 1 {
		return []int{1, times}
	}
	return []int{1}
}

// namedPoints are the points in the source: of the agent, of what it keeps of Git, of the runtimes.
func namedPoints(t *testing.T) []string {
	t.Helper()
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	found := map[string]bool{}
	for _, in := range []struct {
		files, call string
		prefixes    []string
	}{
		{"internal/agent/*.go", `point\(`, []string{""}},
		{"internal/agent/gitview/*.go", `step\(`, []string{"gitview."}},
		{"internal/runtime/embedded/*.go", `crashpoint\.At\(`, []string{""}},
		{"internal/runtime/containerd/*.go", `crashpoint\.At\(`, []string{""}},
		// What the runtimes have in common has the name of each.
		{"internal/runtime/hostkernel/*.go", `crashpoint\.At\([a-z.]+\.Points \+ `, []string{"runtime", "containerd"}},
	} {
		before := len(found)
		files, err := filepath.Glob(filepath.Join(root, in.files))
		require.NoError(t, err)
		for _, path := range files {
			for _, m := range regexp.MustCompile(`\t`+in.call+`"([a-zA-Z. -]+)"\)`).FindAllSubmatch(read(path), -1) {
				for _, prefix := range in.prefixes {
					found[prefix+strings.ReplaceAll(string(m[1]), " ", "-")] = true
				}
			}
		}
		require.Greater(t, len(found), before, in.files)
	}
	return slices.Sorted(maps.Keys(found))
}

// A first sandbox that can't be had (its receipts have no place) takes the session with it, and what was made for it.
func TestP6AnAgentThatIsKilledWhileItTakesAFirstSandboxBack(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	repo := testkit.Repo(t, owner)
	s := a.unborn(repo)
	receipts := filepath.Join(a.State, "receipts")
	require.NoError(t, unix.Mount("tmpfs", receipts, "tmpfs", unix.MS_RDONLY, ""))
	t.Cleanup(func() { _ = unix.Unmount(receipts, unix.MNT_DETACH) })

	_, err := s.Client.Sessions.CreateSession(context.Background(), s.create)
	require.Equal(t, connect.CodeUnavailable, codeOf(err), "P14: %v", err)
	require.NoDirExists(t, s.worktree, "what was made for it is gone")
	s = a.unborn(repo)
	a.arm("undo.undone", 1)
	_, err = s.Client.Sessions.CreateSession(context.Background(), s.create)
	require.True(t, lost(err), "%v", err)
	<-a.Ended
	a.disarm()
	require.NoError(t, unix.Unmount(receipts, unix.MNT_DETACH))
	a.Serve()
	require.Equal(t, sandboxv1.Session_IDLE, s.get().GetState())
	s.destroyed()
	again := a.unborn(repo)
	again.create.Workspace = s.create.GetWorkspace()
	again.worktree = s.worktree
	again.born()
	again.works()
}

// A sandbox that no session owns: the journal lost the session's record, which no crash does.
func TestP6AnAgentThatIsKilledWhileItRemovesASandboxThatNobodyOwns(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	s := a.session(testkit.Repo(t, owner))
	s.works()
	sandbox := s.get().GetSandbox().GetId()
	a.Kill()
	a.edit("session/"+s.id, func([]byte) []byte { return nil })
	a.arm("recover.removed", 1)
	a.Launch()
	<-a.Ended
	a.disarm()
	a.Serve()
	require.Empty(t, processesOf(sandbox))
	require.NoDirExists(t, filepath.Join(a.State, "sandboxes", sandbox))
}

// edit changes a record of the journal of an agent that is dead; nil deletes it.
func (a *agent) edit(key string, change func([]byte) []byte) {
	a.T.Helper()
	j, err := journal.Open(filepath.Join(a.State, "journal"), quiet())
	require.NoError(a.T, err)
	value, err := j.Get(key)
	require.NoError(a.T, err)
	op := journal.Delete(key)
	if value = change(value); value != nil {
		op = journal.Set(key, value)
	}
	require.NoError(a.T, j.Update(context.Background(), true, op))
	require.NoError(a.T, j.Close())
}

// Records that expire leave a digest: the id is known as long as the session, and nothing of it runs again.
func TestP7AnAgentThatIsKilledWhileRecordsExpire(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "retention: {execs: 1}\n")
	s := a.session(testkit.Repo(t, owner))
	for _, point := range []string{"expire.recorded", "expire.removed"} {
		var requests []*sandboxv1.ExecRequest
		for range 3 {
			requests = append(requests, s.request(""))
		}
		a.arm(point, 1)
		for _, r := range requests {
			if _, err := s.exec(r); err != nil {
				require.True(t, lost(err) || codeOf(err) == connect.CodeFailedPrecondition, "%v", err)
			}
		}
		a.Until("the agent dies in the sweep, which comes by itself", a.Dead)
		a.disarm()
		a.Serve()
		for _, r := range requests {
			if s.ran(r.GetExecId()) == 0 {
				continue // the agent was dead by then
			}
			result, err := s.exec(r)
			if err != nil {
				require.Equal(t, connect.CodeFailedPrecondition, codeOf(err), "%v", err)
			} else {
				require.NoError(t, s.judge(r, result))
			}
			require.Equal(t, 1, s.ran(r.GetExecId()), fmt.Sprintf("P7: %s at %s", r.GetExecId(), point))
		}
		s.answers = map[string]*answered{}
	}
	r := s.request("")
	result, err := s.exec(r)
	require.NoError(t, err)
	require.NoError(t, s.judge(r, result))
}
