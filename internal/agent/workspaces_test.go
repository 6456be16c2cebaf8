package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func (n *node) deleteWorkspace(r *sandboxv1.DeleteWorkspaceRequest) (*sandboxv1.DeleteWorkspaceResponse, error) {
	return n.agent.DeleteWorkspace(n.ctx(), r)
}

// gone asserts that nothing of a session's workspace is left but its branch.
func (n *node) gone(s *sandboxv1.Session) {
	n.t.Helper()
	w := s.GetWorkspace()
	require.NoDirExists(n.t, w.GetWorktree())
	require.Equal(n.t, 1, strings.Count(n.base(s, "worktree", "list", "--porcelain"), "worktree "))
	require.Empty(n.t, n.base(s, "for-each-ref", "refs/sandboxes/"))
	require.Contains(n.t, n.base(s, "branch", "--list", "work"), "work", "the branch is the repository's")
	left, err := os.ReadDir(n.agent.workspacesDir())
	require.NoError(n.t, err)
	require.Empty(n.t, left)
}

func TestDeletingAWorkspaceRefusesToLoseWorkUnlessForced(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		s := n.session("s")
		n.ok("s", "e1", commitNew+"; echo dirty > untracked; echo more >> new")
		_, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
		require.ErrorIs(t, err, ErrPrecondition)
		require.ErrorContains(t, err, "untracked")
		require.ErrorContains(t, err, "force")
		require.FileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "untracked"))
		n.ok("s", "e2", "cat untracked") // the session goes on

		r, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s", Force: true})
		require.NoError(t, err)
		require.True(t, r.GetEvidence().GetComplete())
		require.Contains(t, r.GetRemoved(), s.GetWorkspace().GetWorktree())
		n.gone(s)
		require.Equal(t, "From inside\n", n.base(s, "log", "-1", "--format=%s", "work"))
		_, err = n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "s"})
		require.ErrorIs(t, err, ErrNotFound)
		_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "s", Workspace: s.GetWorkspace()})
		require.ErrorIs(t, err, ErrExists, "the id is never used again")
	})
}

func TestDeletingAWorkspaceRefusesToLoseATagThatWasNeverExported(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "e1", commitNew+" && git tag -a -m 'What was done' v1")
	_, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "refs/tags/v1")
	require.DirExists(t, s.GetWorkspace().GetWorktree())
	n.base(s, "tag", "v1", strings.TrimSpace(n.base(s, "rev-parse", "refs/sandboxes/s/tags/v1")))
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, "tag\n", n.base(s, "cat-file", "-t", "v1"))
}

func TestAWorkspaceWithoutUnsavedWorkIsDeletedAtOnceAndTheWorktreeCanBeMadeAgain(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "e1", commitNew)
	_, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
	require.NoError(t, err)
	n.gone(s)
	w := s.GetWorkspace()
	_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "again", Workspace: &sandboxv1.Workspace{
		Repository: w.GetRepository(), Worktree: w.GetWorktree(), Branch: "work"}})
	require.NoError(t, err)
	require.Equal(t, "From inside\n", n.ok("again", "e1", "git log -1 --format=%s").GetStdoutText())
}

func TestTheWorkspaceOfADeletedSessionIsDeletedByItsPath(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		s := n.session("s")
		n.ok("s", "e1", commitNew+"; echo dirty > untracked")
		wt := s.GetWorkspace().GetWorktree()
		_, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{Worktree: wt})
		require.ErrorIs(t, err, ErrPrecondition, "a session has it")
		require.ErrorContains(t, err, "session s")
		_, err = n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "s"})
		require.NoError(t, err)
		require.NoError(t, n.agent.Close())
		n.start()
		_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{Worktree: wt})
		require.ErrorIs(t, err, ErrPrecondition)
		require.ErrorContains(t, err, "untracked")
		require.NoError(t, os.Remove(filepath.Join(wt, "untracked")))
		r, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{Worktree: wt})
		require.NoError(t, err)
		require.Contains(t, r.GetRemoved(), wt)
		n.gone(s)
		_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{Worktree: wt})
		require.ErrorIs(t, err, ErrNotFound)
	})
}

func TestADeletionThatWasCutShortIsCompletedByTheNextCallAndNothingElseStarts(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "e1", commitNew+"; echo dirty > untracked")
	n.retire("s")
	// As a kill leaves it after the private Git folder has gone, in the middle of the removal of the files.
	rec, err := n.agent.sessions["s"].ownWorkspace()
	require.NoError(t, err)
	rec.Deleting = true
	require.NoError(t, n.agent.journal.Update(n.ctx(), true, journal.Set(workspaceKey(s.GetWorkspace().GetWorktree()), encode(rec))))
	require.NoError(t, os.RemoveAll(filepath.Join(n.agent.workspaceDir(s.GetWorkspace().GetWorktree()), "git")))
	require.NoError(t, os.Remove(filepath.Join(s.GetWorkspace().GetWorktree(), "README")))
	require.NoError(t, n.agent.Close())
	n.start()
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e2", Command: "true"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "deletion")
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
	require.NoError(t, err, "what was asked before is not asked again")
	n.gone(s)
}

func TestP12DeletingAWorkspaceWhoseFilesAreGoneTakesWhatTheBaseClonesGitKeepsOfItToo(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "e1", "true")
	n.retire("s")
	wt := s.GetWorkspace().GetWorktree()
	rec, err := n.agent.sessions["s"].ownWorkspace()
	require.NoError(t, err)
	// As a deletion leaves it that was ended between the files and Git's entry, and with a lock against Git.
	require.NoError(t, os.RemoveAll(wt))
	require.NoError(t, os.WriteFile(filepath.Join(rec.Workspace.MetaDir, "locked"), nil, 0o600))
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s", Force: true})
	require.NoError(t, err)
	require.NoDirExists(t, rec.Workspace.MetaDir)
	n.gone(s)
}

func TestDeletingTheWorkspaceOfAWorktreeThatIsGoneSparesAnotherOneAtItsPath(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "e1", commitNew)
	_, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	wt := s.GetWorkspace().GetWorktree()
	n.base(s, "worktree", "remove", "--force", wt)
	n.base(s, "worktree", "add", "-q", "-b", "theirs", filepath.Join(filepath.Dir(wt), "filler")) // takes the inode
	n.base(s, "worktree", "add", "-q", "-b", "others", wt)
	create := func(id string) error {
		_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: id,
			Workspace: &sandboxv1.Workspace{Repository: s.GetWorkspace().GetRepository(), Worktree: wt}})
		return err
	}
	err = create("t")
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "workspace delete")
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{Worktree: wt})
	require.ErrorIs(t, err, ErrPrecondition)
	r, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{Worktree: wt, Force: true})
	require.NoError(t, err)
	require.NotContains(t, r.GetRemoved(), wt)
	require.FileExists(t, filepath.Join(wt, "README"))
	require.NoError(t, create("u"))
}

func TestDeletingAWorkspaceNamesWhatIsWrongWithTheRequest(t *testing.T) {
	n := newNode(t)
	for _, r := range []*sandboxv1.DeleteWorkspaceRequest{{}, {SessionId: "s", Worktree: "/var/tmp/x"}, {Worktree: "x"}, {Worktree: "/etc/x"}} {
		_, err := n.deleteWorkspace(r)
		require.ErrorIs(t, err, ErrInvalid, r)
	}
	_, err := n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "nobody"})
	require.ErrorIs(t, err, ErrNotFound)
	n.session("s")
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s", OwnerEpoch: 9})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "owner_epoch 9 was never given out by session s, which is at 1")
	_, err = n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s", OwnerEpoch: 1})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "another owner has claimed it")
}

func TestACacheOutlivesTheSandboxAndASharedOneIsReadOnly(t *testing.T) {
	shared := testkit.StateDir(t)
	require.NoError(t, os.Chmod(shared, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(shared, "wheel"), []byte("from the operator\n"), 0o644))
	n := newNode(t, func(c *config.Config) {
		c.Caches = map[string]config.Cache{"pip": {Source: shared, Path: ".cache/pip"}}
	})
	repo := testkit.Repo(t, owner)
	s, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "s",
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "work"},
		Caches:    []*sandboxv1.Cache{{Name: "go", Path: "go/pkg"}, {Name: "pip", ReadOnly: true}}})
	require.NoError(t, err)
	require.Len(t, s.GetCaches(), 2)
	n.ok("s", "e1", "cat ~/.cache/pip/wheel && echo kept > ~/go/pkg/mod && ! touch ~/.cache/pip/x 2>/dev/null && echo lost > ~/other")
	n.retire("s")
	r := n.ok("s", "e2", "cat ~/go/pkg/mod ~/.cache/pip/wheel; ! test -e ~/other")
	require.Equal(t, "kept\nfrom the operator\n", r.GetStdoutText())
	require.EqualValues(t, 2, r.GetGeneration())
	require.NoFileExists(t, filepath.Join(shared, "x"))
	_, err = n.deleteWorkspace(&sandboxv1.DeleteWorkspaceRequest{SessionId: "s"})
	require.NoError(t, err)
	n.gone(s)
	require.FileExists(t, filepath.Join(shared, "wheel"), "the operator's stays")
}
