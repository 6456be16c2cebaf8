package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestASessionSaysWhatItsSandboxProved(t *testing.T) {
	n := newNode(t)
	s := n.session("proof")
	require.NotEmpty(t, s.GetSandbox().GetProof())
	promises := map[string]bool{}
	for _, p := range s.GetSandbox().GetProof() {
		require.True(t, p.GetHolds(), "%v", p)
		promises[p.GetPromise()] = true
	}
	for _, p := range []string{"P3", "P9", "P10", "P11"} {
		require.True(t, promises[p], p)
	}
	require.NotEmpty(t, s.GetSandbox().GetSeals())
	require.Len(t, s.GetSandbox().GetPublicKey(), 32)
	require.NotEmpty(t, s.GetNotes())
}

func TestTheSameCreateSessionGivesTheSameSession(t *testing.T) {
	n := newNode(t)
	repo := testkit.Repo(t, owner)
	req := func() *sandboxv1.CreateSessionRequest {
		return &sandboxv1.CreateSessionRequest{SessionId: "same", Workspace: &sandboxv1.Workspace{
			Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "b"}}
	}
	first, err := n.agent.CreateSession(n.ctx(), req())
	require.NoError(t, err)
	again, err := n.agent.CreateSession(n.ctx(), req())
	require.NoError(t, err)
	require.Equal(t, first.GetSandbox().GetId(), again.GetSandbox().GetId())
	other := req()
	other.Env = map[string]string{"A": "1"}
	_, err = n.agent.CreateSession(n.ctx(), other)
	require.ErrorIs(t, err, ErrExists)
}

func TestAWorktreeBelongsToOneSessionOnly(t *testing.T) {
	n := newNode(t)
	s := n.session("first")
	w := s.GetWorkspace()
	for name, path := range map[string]string{"the same": w.GetWorktree(), "inside it": w.GetWorktree() + "/sub"} {
		_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{
			SessionId: "second", Workspace: &sandboxv1.Workspace{Repository: w.GetRepository(), Worktree: path, Branch: "x"}})
		require.ErrorIs(t, err, ErrPrecondition, name)
		require.ErrorContains(t, err, "session first", name)
	}
	require.NoError(t, n.agent.Close())
	n.start()
	_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{
		SessionId: "second", Workspace: &sandboxv1.Workspace{Repository: w.GetRepository(), Worktree: w.GetWorktree()}})
	require.ErrorIs(t, err, ErrPrecondition, "also after a restart")
}

func TestADeletedSessionLeavesItsWorktreeAndItsIdIsNeverUsedAgain(t *testing.T) {
	n := newNode(t)
	s := n.session("gone")
	n.exec("gone", "e1", "echo work > file")
	evidence, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "gone"})
	require.NoError(t, err)
	require.True(t, evidence.GetComplete())
	w := s.GetWorkspace()
	require.FileExists(t, filepath.Join(w.GetWorktree(), "file"))
	for range 2 {
		_, err = n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "gone"})
		require.ErrorIs(t, err, ErrNotFound)
		_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "gone", ExecId: "e1", Command: "echo work > file"})
		require.ErrorIs(t, err, ErrNotFound)
		_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "gone", Workspace: w})
		require.ErrorIs(t, err, ErrExists)
		require.ErrorContains(t, err, "never reused")
		require.NoError(t, n.agent.Close())
		n.start()
	}
	again, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "next",
		Workspace: &sandboxv1.Workspace{Repository: w.GetRepository(), Worktree: w.GetWorktree()}})
	require.NoError(t, err, "its worktree is free")
	require.Equal(t, "work", again.GetWorkspace().GetBranch())
}

func TestP14WithoutASandboxThereIsNoSessionAndNothingIsRun(t *testing.T) {
	n := newNode(t)
	n.agent.opts.Pid1 = filepath.Join(n.state, "no-pid1")
	repo := testkit.Repo(t, owner)
	req := &sandboxv1.CreateSessionRequest{SessionId: "none", Workspace: &sandboxv1.Workspace{
		Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "b"}}
	_, err := n.agent.CreateSession(n.ctx(), req)
	require.ErrorIs(t, err, ErrUnavailable)
	_, err = n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "none"})
	require.ErrorIs(t, err, ErrNotFound)
	require.Empty(t, n.agent.slots.taken)
	require.NoDirExists(t, req.GetWorkspace().GetWorktree(), "what was made for it is taken back")
	require.Equal(t, "main\n", testkit.GitAs(t, owner, repo, "for-each-ref", "--format=%(refname:short)", "refs/heads"))
	other := proto.CloneOf(req)
	other.SessionId = "another"
	_, err = n.agent.CreateSession(n.ctx(), other)
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotContains(t, err.Error(), "checked out", "nothing of the first try is in the way of the next")
	_, n.agent.opts.Pid1 = testkit.Binaries(t)
	_, err = n.agent.CreateSession(n.ctx(), req)
	require.NoError(t, err, "once the cause is mended the same call works")

	_, _, err = n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "none"})
	require.NoError(t, err)
	n.agent.opts.Pid1 = filepath.Join(n.state, "no-pid1")
	exec := &sandboxv1.ExecRequest{SessionId: "none", ExecId: "e1", Command: "touch ran"}
	_, err = n.agent.Exec(n.ctx(), exec)
	require.ErrorIs(t, err, ErrUnavailable)
	require.NoFileExists(t, filepath.Join(req.GetWorkspace().GetWorktree(), "ran"))
	_, n.agent.opts.Pid1 = testkit.Binaries(t)
	r, err := n.agent.Exec(n.ctx(), exec)
	require.NoError(t, err, "the id was not used up")
	require.EqualValues(t, 0, r.GetExitCode())
}

func TestAFailedCreationTakesBackOnlyWhatItMade(t *testing.T) {
	n := newNode(t)
	n.agent.opts.Pid1 = filepath.Join(n.state, "no-pid1")
	repo := testkit.Repo(t, owner)
	adopted := testkit.Worktree(t, owner, repo, "adopted")
	testkit.GitAs(t, owner, repo, "branch", "old")
	create := func(w *sandboxv1.Workspace) {
		w.Repository = repo
		_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "s", Workspace: w})
		require.ErrorIs(t, err, ErrUnavailable)
	}
	create(&sandboxv1.Workspace{Worktree: adopted})
	require.FileExists(t, filepath.Join(adopted, "README"))
	create(&sandboxv1.Workspace{Worktree: filepath.Join(filepath.Dir(repo), "new"), Branch: "old"})
	require.NoDirExists(t, filepath.Join(filepath.Dir(repo), "new"))
	require.Equal(t, "adopted\nmain\nold\n", testkit.GitAs(t, owner, repo, "for-each-ref", "--format=%(refname:short)", "refs/heads"))
}

func TestAWorktreeInsideTheGitFolderIsRefusedBeforeItIsMade(t *testing.T) {
	n := newNode(t)
	repo := testkit.Repo(t, owner)
	_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "s", Workspace: &sandboxv1.Workspace{
		Repository: repo, Worktree: filepath.Join(repo, ".git", "wt"), Branch: "b"}})
	require.ErrorIs(t, err, ErrInvalid)
	require.NoDirExists(t, filepath.Join(repo, ".git", "wt"))
}

func TestP16TheNumberOfSessionsIsBounded(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Limits.Sessions = 1 })
	n.session("only")
	repo := testkit.Repo(t, owner)
	_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "more",
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "b"}})
	require.ErrorIs(t, err, ErrExhausted)
	require.ErrorContains(t, err, "limits.sessions")
}

func TestAnUnnamedWorktreeLiesUnderTheFirstRootWhichIsMade(t *testing.T) {
	root := filepath.Join(testkit.StateDir(t), "ws")
	n := newNode(t, func(c *config.Config) { c.Workspace.Roots = []string{root, "/var/tmp"} })
	repo := testkit.Repo(t, owner)
	s, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{Workspace: &sandboxv1.Workspace{Repository: repo, Branch: "b"}})
	require.NoError(t, err)
	require.Equal(t, filepath.Join(root, s.GetSessionId()), s.GetWorkspace().GetWorktree())
	r := n.exec(s.GetSessionId(), "e1", "git status --porcelain; ls -a")
	require.Contains(t, r.GetStdoutText(), ".sandbox-tmp")
	require.NotContains(t, r.GetStdoutText(), "??")
}

func TestAWorktreeThatWasReplacedByALinkStartsNoSandbox(t *testing.T) {
	n := newNode(t)
	s := n.session("link")
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "link"})
	require.NoError(t, err)
	wt := s.GetWorkspace().GetWorktree()
	require.NoError(t, os.Rename(wt, wt+".moved"))
	require.NoError(t, os.Symlink("/etc", wt))
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "link", ExecId: "e1", Command: "true"})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "symlink")
	require.NoError(t, os.Remove(wt))
	require.NoError(t, os.Rename(wt+".moved", wt))
	require.Zero(t, n.exec("link", "e1", "true").GetExitCode())
}

func TestListsCanBeReadInPages(t *testing.T) {
	n := newNode(t)
	n.session("a")
	n.session("b")
	page, next, err := n.agent.ListSessions(n.ctx(), &sandboxv1.ListSessionsRequest{PageSize: 1})
	require.NoError(t, err)
	require.Len(t, page, 1)
	require.Equal(t, "a", next)
	page, next, err = n.agent.ListSessions(n.ctx(), &sandboxv1.ListSessionsRequest{PageSize: 1, PageToken: next})
	require.NoError(t, err)
	require.Equal(t, "b", page[0].GetSessionId())
	require.Empty(t, next)
	for _, id := range []string{"e1", "e2", "e3"} {
		n.exec("a", id, "exit 7")
	}
	var seen []string
	token := ""
	for {
		list, next, err := n.agent.ListExecs(n.ctx(), &sandboxv1.ListExecsRequest{SessionId: "a", PageSize: 2, PageToken: token})
		require.NoError(t, err)
		for _, e := range list {
			seen = append(seen, e.GetExecId())
			require.EqualValues(t, 7, e.GetExitCode())
			require.Equal(t, sandboxv1.ExecState_EXEC_DONE, e.GetState())
		}
		if token = next; token == "" {
			break
		}
	}
	require.Equal(t, []string{"e1", "e2", "e3"}, seen)
	_, _, err = n.agent.ListExecs(n.ctx(), &sandboxv1.ListExecsRequest{SessionId: "a", PageSize: -1})
	require.ErrorIs(t, err, ErrInvalid)
}

func TestAnUnknownSessionIsNotFound(t *testing.T) {
	n := newNode(t)
	_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "nobody", Command: "true"})
	require.ErrorIs(t, err, ErrNotFound)
	require.True(t, errors.Is(err, ErrNotFound))
	require.ErrorContains(t, err, "nobody")
}

func TestTheAgentLeavesNothingBehind(t *testing.T) {
	testkit.Need(t, testkit.Root)
	testkit.Leaks(t)
	n := newNode(t)
	n.session("s")
	n.exec("s", "e1", "true")
}

func TestACallerThatGoesAwayWhileItsSessionIsMadeFindsItLater(t *testing.T) {
	n := newNode(t)
	repo := testkit.Repo(t, owner)
	req := func() *sandboxv1.CreateSessionRequest {
		return &sandboxv1.CreateSessionRequest{SessionId: "gone", Workspace: &sandboxv1.Workspace{
			Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "b"}}
	}
	gone, cancel := context.WithCancel(n.ctx())
	cancel()
	_, err := n.agent.CreateSession(gone, req())
	require.NoError(t, err)
	again, err := n.agent.CreateSession(n.ctx(), req())
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Session_READY, again.GetState())
}

// spares are the names in a sandbox's receipts folder that are neither a receipt nor kept output.
func (n *node) spares(sandbox string) []string {
	n.t.Helper()
	found, err := filepath.Glob(filepath.Join(n.state, "receipts", sandbox, "*~*"))
	require.NoError(n.t, err)
	return found
}

func TestTheSpareSpaceOfASandboxGoesWithItAndItsReceiptsStay(t *testing.T) {
	n := newNode(t)
	sandbox := n.session("s").GetSandbox().GetId()
	n.exec("s", "e1", "echo kept")
	require.NotEmpty(t, n.spares(sandbox))
	_, evidence, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "s"})
	require.NoError(t, err)
	require.True(t, evidence.GetComplete())
	require.Empty(t, n.spares(sandbox))
	require.Equal(t, "kept\n", n.exec("s", "e1", "echo kept").GetStdoutText(), "answered from its receipt")

	s, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, sandbox, s.GetSandbox().GetId())
	n.exec("s", "e2", "true")
	s, err = n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.NotEqual(t, sandbox, s.GetSandbox().GetId())
	// What an agent that was killed in between left of the first one; the second one is alive.
	require.NoError(t, os.WriteFile(filepath.Join(n.state, "receipts", sandbox, "~ballast"), make([]byte, 1<<16), 0o600))
	require.NoError(t, n.agent.Close())
	n.start()
	require.Empty(t, n.spares(sandbox))
	require.NotEmpty(t, n.spares(s.GetSandbox().GetId()), "a sandbox that lives keeps its own")
}
