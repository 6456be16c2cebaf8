package agent

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// layouts runs a test in both.
func layouts(t *testing.T, f func(t *testing.T, n *node, layout string)) {
	for _, layout := range []string{config.IsolatedLayout, config.SharedLayout} {
		t.Run(layout, func(t *testing.T) {
			f(t, newNode(t, func(c *config.Config) { c.Workspace.GitLayout = layout }), layout)
		})
	}
}

// base is Git in a session's base clone, as its owner.
func (n *node) base(s *sandboxv1.Session, args ...string) string {
	n.t.Helper()
	return testkit.GitAs(n.t, owner, s.GetWorkspace().GetRepository(), args...)
}

func (n *node) get(id string) *sandboxv1.Session {
	n.t.Helper()
	s, err := n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: id})
	require.NoError(n.t, err)
	return s
}

func (n *node) git(session string, args ...string) (*sandboxv1.GitResponse, error) {
	return n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: session, Args: args})
}

// ok is exec of a command that must exit 0.
func (n *node) ok(session, id, command string) *sandboxv1.ExecResult {
	n.t.Helper()
	r := n.exec(session, id, command)
	require.Equal(n.t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.Zero(n.t, r.GetExitCode(), "%s%s", r.GetStdoutText(), r.GetStderrText())
	return r
}

func (n *node) retire(id string) {
	n.t.Helper()
	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: id})
	require.NoError(n.t, err)
}

const commitNew = "echo x > new && git add new && git commit -qm 'From inside'"

func TestACommandsCommitIsInTheBaseCloneWhenTheCommandIsAnswered(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, layout string) {
		s := n.session("s")
		r := n.ok("s", "e1", commitNew)
		require.Equal(t, "From inside\n", n.base(s, "log", "-1", "--format=%s", "work"))
		require.Empty(t, n.base(s, "fsck", "--full", "--no-dangling"))
		again, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: commitNew, Text: true})
		require.NoError(t, err)
		require.True(t, proto.Equal(r, again), "the record has the harvest too")
		if layout == config.SharedLayout {
			require.Nil(t, r.GetHarvest())
			return
		}
		require.Equal(t, gitview.Harvested, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
		require.Contains(t, r.GetHarvest().GetRefs(), "refs/heads/work")
		require.True(t, proto.Equal(r.GetHarvest(), n.get("s").GetLastHarvest()))
		require.NoError(t, n.agent.Close())
		n.start()
		require.True(t, proto.Equal(r.GetHarvest(), n.get("s").GetLastHarvest()), "also after a restart")
	})
}

func TestACommandThatTouchesNoGitCostsNoRecordOfAHarvest(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		n.session("s")
		n.ok("s", "e1", "true") // the first one may take a fingerprint again
		before, err := n.agent.journal.Get(sessionKey("s"))
		require.NoError(t, err)
		r := n.ok("s", "e2", "echo x > untracked; git status --short; git log -1 >&2")
		require.Nil(t, r.GetHarvest())
		require.Nil(t, n.get("s").GetLastHarvest())
		after, err := n.agent.journal.Get(sessionKey("s"))
		require.NoError(t, err)
		require.Equal(t, string(before), string(after))
	})
}

func TestACommitOnTheHostBetweenTwoCommandsIsSeenByTheNextOne(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		s := n.session("s")
		n.ok("s", "e1", commitNew)
		wt := s.GetWorkspace().GetWorktree()
		require.NoError(t, os.WriteFile(filepath.Join(wt, "README"), []byte("changed outside\n"), 0o644))
		testkit.GitAs(t, owner, wt, "commit", "-q", "-a", "-m", "From outside")
		r := n.ok("s", "e2", "git log --format=%s -2; git status --porcelain; echo y > y; git add y; git commit -qm 'On top'")
		require.Equal(t, "From outside\nFrom inside\n", r.GetStdoutText(), "nothing shows as staged")
		require.Equal(t, "On top\nFrom outside\nFrom inside\n", n.base(s, "log", "--format=%s", "-3", "work"))
		require.Equal(t, "hello\n", n.base(s, "show", "work~2:README"))
		require.Equal(t, "changed outside\n", n.base(s, "show", "work:README"), "the next commit did not swallow the one outside")
		require.Empty(t, strings.TrimSpace(testkit.GitAs(t, owner, wt, "status", "--porcelain")))
	})
}

func TestWhoLosesARaceForTheBranchIsToldAndNothingIsLost(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	wt := s.GetWorkspace().GetWorktree()
	n.ok("s", "mk", "mkfifo $TMPDIR/go")
	done := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, _ := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: "cat $TMPDIR/go; " + commitNew})
		done <- r
	}()
	w, err := os.OpenFile(filepath.Join(wt, ".sandbox-tmp", "go"), os.O_WRONLY, 0) // it runs
	require.NoError(t, err)
	before := strings.TrimSpace(n.base(s, "rev-parse", "work"))
	other := strings.TrimSpace(n.base(s, "commit-tree", "-p", "work", "-m", "Somebody else's", "work^{tree}"))
	n.base(s, "update-ref", "refs/heads/work", other)
	require.NoError(t, w.Close())
	r := <-done
	require.NotNil(t, r)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus())
	require.Zero(t, r.GetExitCode(), "a conflict changes nothing of the command's own answer")
	h := r.GetHarvest()
	require.Equal(t, gitview.Conflicts, h.GetStatus(), h.GetDetail())
	require.Len(t, h.GetConflicts(), 1)
	c := h.GetConflicts()[0]
	require.Equal(t, "refs/heads/work", c.GetRef())
	require.Equal(t, other, c.GetBaseId())
	require.Equal(t, before, c.GetBeforeId())
	require.Contains(t, h.GetConflict(), c.GetRemedy())
	require.Equal(t, other, strings.TrimSpace(n.base(s, "rev-parse", "work")), "the base clone's branch stays")
	require.Equal(t, "From inside\n", n.base(s, "log", "-1", "--format=%s", c.GetSessionId()))
	require.Contains(t, n.base(s, "for-each-ref", "--format=%(objectname)", "refs/sandboxes/s/"), c.GetSessionId())

	// It is told once, and stands in the record, whatever else arrives.
	r = n.ok("s", "e2", "git branch beside")
	require.Equal(t, gitview.Harvested, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
	require.Empty(t, r.GetHarvest().GetConflicts())
	stands := n.get("s").GetLastHarvest()
	require.Equal(t, gitview.Conflicts, stands.GetStatus())
	require.True(t, proto.Equal(c, stands.GetConflicts()[0]))
	asked, err := n.agent.Harvest(n.ctx(), &sandboxv1.HarvestRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, gitview.Conflicts, asked.GetStatus(), "who asks is told of it again")

	r = n.ok("s", "e3", "git merge -q --no-edit "+other)
	require.Equal(t, gitview.Harvested, r.GetHarvest().GetStatus(), r.GetHarvest().GetConflict()+r.GetHarvest().GetDetail())
	require.Equal(t, "From inside\nSomebody else's\n", n.base(s, "log", "--format=%s", "--no-merges", "-2", "--author-date-order", "work"))
}

func TestAConflictThatIsResolvedInTheBaseCloneIsOverWithTheNextHarvest(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "e0", "git branch theirs && git switch -q theirs && git commit -q --allow-empty -m One")
	mine := strings.TrimSpace(n.base(s, "rev-parse", "theirs"))
	n.base(s, "worktree", "add", "-q", "--detach", filepath.Join(filepath.Dir(s.GetWorkspace().GetRepository()), "elsewhere"))
	elsewhere := filepath.Join(filepath.Dir(s.GetWorkspace().GetRepository()), "elsewhere")
	testkit.GitAs(t, owner, elsewhere, "switch", "-q", "--ignore-other-worktrees", "theirs")
	r := n.ok("s", "e1", "git commit -q --allow-empty -m Two")
	require.Equal(t, gitview.Conflicts, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
	require.Equal(t, mine, strings.TrimSpace(n.base(s, "rev-parse", "theirs")))
	// An agent that is killed between the harvest and its record leaves the telling to the next.
	require.NoError(t, n.agent.sessions["s"].save(true, func(r *sessionRecord) { r.LastHarvest = nil }))
	require.NoError(t, n.agent.Close())
	n.start()
	require.Eventually(t, func() bool { return n.get("s").GetLastHarvest().GetStatus() == gitview.Conflicts }, bound, pollEvery)

	testkit.GitAs(t, owner, elsewhere, "merge", "-q", "--ff-only", r.GetHarvest().GetConflicts()[0].GetSessionId())
	h, err := n.agent.Harvest(n.ctx(), &sandboxv1.HarvestRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, gitview.Harvested, h.GetStatus(), h.GetConflict()+h.GetDetail())
	require.Empty(t, n.get("s").GetLastHarvest().GetConflict())
}

func TestP6ACommitMadeWhileNoAgentWasThereArrivesWithTheNextOne(t *testing.T) {
	command := "cat go; " + commitNew
	c := newCrash(t, []string{"mkfifo go && echo go > .git-ignored"}, command)
	w := c.openFifo()
	c.kill()
	require.NoError(t, w.Close())
	c.restart()
	r, err := c.agent.Exec(c.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "during", Command: command})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.Zero(t, r.GetExitCode(), string(r.GetStderr()))
	require.Nil(t, r.GetHarvest(), "an answer that the first agent may have given: the session has it")
	last := c.get("s").GetLastHarvest()
	require.Equal(t, gitview.Harvested, last.GetStatus(), last.GetDetail())
	require.Equal(t, "From inside\n", c.base(c.get("s"), "log", "-1", "--format=%s", "b"))
}

func TestP6AnAgentThatIsKilledAfterACommitHasItHarvestedByTheNextOne(t *testing.T) {
	c := newCrash(t, nil, commitNew)
	receipts, err := filepath.Glob(filepath.Join(c.state, "receipts", "sb-*"))
	require.NoError(t, err)
	require.Len(t, receipts, 1)
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(receipts[0], "during.json"))
		return err == nil
	}, bound, pollEvery)
	c.kill() // in the middle of the harvest, or a little before or after it
	c.restart()
	r, err := c.agent.Exec(c.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "during", Command: commitNew})
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	s := c.get("s")
	require.Equal(t, "From inside\n", c.base(s, "log", "-1", "--format=%s", "b"))
	require.Empty(t, c.base(s, "fsck", "--full", "--no-dangling"))
	require.Equal(t, "nothing left\n", c.exec("s", "after", "git status --porcelain -uno; echo nothing left").GetStdoutText())
}

func TestAWorkspaceGoesOnAsItWasInTheNextSandboxAndTheNextSession(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		s := n.session("s")
		n.ok("s", "e1", `set -e
			echo one > f; git add f; git commit -qm One
			git checkout -qb other; echo other > f; git commit -qam Other
			git checkout -q work; echo two > f; git commit -qam Two
			echo stashed > README; git stash -q
			git cherry-pick other >/dev/null 2>&1 || true
			echo staged > s; git add s; echo dirty > untracked`)
		look := "git status --porcelain; git stash list; cat $(git rev-parse --git-path CHERRY_PICK_HEAD) > $TMPDIR/p; git diff --cached --name-only"
		before := n.ok("s", "e2", look).GetStdoutText()
		require.Contains(t, before, "UU f")
		require.Contains(t, before, "stash@{0}")
		n.retire("s")
		require.Equal(t, before, n.ok("s", "e3", look).GetStdoutText())
		_, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "s"})
		require.NoError(t, err)
		w := s.GetWorkspace()
		_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "t",
			Workspace: &sandboxv1.Workspace{Repository: w.GetRepository(), Worktree: w.GetWorktree(), GitLayout: w.GetGitLayout()}})
		require.NoError(t, err)
		require.Equal(t, before, n.ok("t", "e1", look).GetStdoutText())
		n.ok("t", "e2", "git checkout -q --ours f 2>/dev/null; git add f s && git commit -qm Picked && git stash drop -q && git log -1 --format=%s")
		require.Equal(t, "Picked\n", n.base(s, "log", "-1", "--format=%s", "work"))
	})
}

func TestTrustedGitWorksInTheSessionsJailAndItsCommitsAreHarvested(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		s := n.session("s")
		n.ok("s", "e1", commitNew+"; echo dirty >> new")
		r, err := n.git("s", "status", "--short")
		require.NoError(t, err)
		require.Equal(t, " M new\n", string(r.GetStdout()), string(r.GetStderr()))
		require.Nil(t, r.GetHarvest(), "reading harvests nothing")
		r, err = n.git("s", "commit", "-a", "-m", "From the caller")
		require.NoError(t, err)
		require.Zero(t, r.GetExitCode(), string(r.GetStderr()))
		require.NotEqual(t, gitview.Failed, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
		require.Equal(t, "From the caller\n", n.base(s, "log", "-1", "--format=%s", "work"))
		r, err = n.git("s", "rev-parse", "--verify", "nothing")
		require.NoError(t, err)
		require.EqualValues(t, 128, r.GetExitCode())
		n.retire("s")
		r, err = n.git("s", "log", "--format=%s", "-1")
		require.NoError(t, err, "without a sandbox too")
		require.Equal(t, "From the caller\n", string(r.GetStdout()))
		require.Equal(t, "From the caller\n", n.ok("s", "e2", "git log -1 --format=%s").GetStdoutText())
	})
}

func TestP12TrustedGitRunsNothingThatACommandLeft(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, _ string) {
		s := n.session("s")
		wt := s.GetWorkspace().GetWorktree()
		n.ok("s", "plant", `set -e
			git init -q nested; cd nested; git config core.fsmonitor "touch $PWD/../ran; false"
			git -c core.fsmonitor= commit -q --allow-empty -m x; id=$(git rev-parse HEAD); cd ..
			git update-index --add --cacheinfo 160000,$id,nested; rm -f ran`)
		control := testkit.StateDir(t)
		testkit.GitAs(t, owner, s.GetWorkspace().GetRepository(), "version")
		_ = control
		for _, args := range [][]string{{"status"}, {"diff"}, {"add", "-A"}} {
			_, _ = n.git("s", args...)
			require.NoFileExists(t, filepath.Join(wt, "ran"), args)
		}
		n.ok("s", "control", "git status >/dev/null; test -e ran") // the attack works where nobody is harmed
	})
}

func TestTrustedGitTakesOnlyWhatIsOnTheList(t *testing.T) {
	n := newNode(t)
	n.session("s")
	for _, args := range [][]string{
		nil, {"-c", "core.pager=sh", "log"}, {"log", "--output=/tmp/x"}, {"push"}, {"config", "x.y", "z"}, {"diff", "--no-index", "/etc/passwd", "/dev/null"},
		{"log", "--ext-diff"}, {"grep", "-Osh", "x"}, {"rebase", "--exec", "sh", "HEAD"}, {"-C", "/", "status"},
	} {
		_, err := n.git("s", args...)
		require.ErrorIs(t, err, ErrInvalid, args)
	}
	for _, seconds := range []float64{0, -1, 601} {
		_, err := n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "s", Args: []string{"status"}, TimeoutSeconds: &seconds})
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "timeout_seconds")
	}
	_, err := n.git("nobody", "status")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "s", OwnerEpoch: 7, Args: []string{"status"}})
	require.ErrorIs(t, err, ErrPrecondition)
	_, err = n.agent.Harvest(n.ctx(), &sandboxv1.HarvestRequest{SessionId: "s", OwnerEpoch: 7})
	require.ErrorIs(t, err, ErrPrecondition)
	h, err := n.agent.Harvest(n.ctx(), &sandboxv1.HarvestRequest{SessionId: "s", OwnerEpoch: 1})
	require.NoError(t, err)
	require.Equal(t, gitview.Unchanged, h.GetStatus(), h.GetDetail())
}

func TestTrustedGitNeverRunsBesideACommand(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "mk", "mkfifo $TMPDIR/go")
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		_, _ = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: "cat $TMPDIR/go; echo x > made; git add made"})
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), ".sandbox-tmp", "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	gone, cancel := context.WithCancel(n.ctx())
	cancel()
	_, err = n.agent.Git(gone, &sandboxv1.GitRequest{SessionId: "s", Args: []string{"commit", "-m", "not wanted any more"}})
	require.ErrorIs(t, err, context.Canceled)
	answered := make(chan *sandboxv1.GitResponse, 1)
	go func() {
		r, _ := n.git("s", "status", "--porcelain")
		answered <- r
	}()
	select {
	case <-answered:
		t.Error("git was answered while a command ran")
	case <-ran:
		t.Error("the command ended by itself")
	case <-context.WithoutCancel(n.ctx()).Done():
	default:
	}
	require.NoError(t, w.Close())
	require.Equal(t, "A  made\n", string((<-answered).GetStdout()))
	<-ran
	require.Equal(t, "First\n", n.base(s, "log", "-1", "--format=%s", "work"))
}

func TestWhatTheGuardRefusesIsNamedWithItsLineAndTheRemedy(t *testing.T) {
	for _, x := range []struct {
		key, value string
		shared     bool // refused in the shared layout alone
	}{
		{"filter.x.clean", "sh", false}, {"include.path", "other", false},
		{"core.fsmonitor", "sh", true}, {"alias.x", "!sh", true}, {"core.hooksPath", ".husky", true},
	} {
		n := newNode(t)
		repo := testkit.Repo(t, owner)
		testkit.GitAs(t, owner, repo, "config", x.key, x.value)
		create := func(layout string) (*sandboxv1.Session, error) {
			return n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: layout, Workspace: &sandboxv1.Workspace{
				Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), layout), Branch: layout, GitLayout: layout}})
		}
		_, err := create(config.SharedLayout)
		require.ErrorIs(t, err, ErrInvalid, x.key)
		require.ErrorContains(t, err, strings.ToLower(x.key), x.key)
		require.ErrorContains(t, err, filepath.Join(repo, ".git", "config")+":", x.key)
		require.NoDirExists(t, filepath.Join(filepath.Dir(repo), config.SharedLayout), "nothing was made")
		s, err := create(config.IsolatedLayout)
		if !x.shared {
			require.ErrorIs(t, err, ErrInvalid, x.key)
			require.ErrorContains(t, err, strings.ToLower(x.key), x.key)
			continue
		}
		require.NoError(t, err, x.key)
		require.Len(t, s.GetLeftOut(), 1, x.key)
		require.Equal(t, strings.ToLower(x.key), strings.ToLower(s.GetLeftOut()[0].GetKey()))
		require.NotEmpty(t, s.GetLeftOut()[0].GetWhy())
	}
}

func TestAConfigurationThatTurnsDangerousStopsTheSessionUntilItIsMended(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, layout string) {
		s := n.session("s")
		n.ok("s", "e1", "true")
		n.base(s, "config", "filter.x.smudge", "sh")
		for _, f := range []func() error{
			func() error {
				_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e2", Command: "touch ran"})
				return err
			},
			func() error { _, err := n.git("s", "status"); return err },
		} {
			err := f()
			require.ErrorIs(t, err, ErrPrecondition)
			require.ErrorContains(t, err, "filter.x.smudge")
		}
		require.NoFileExists(t, filepath.Join(s.GetWorkspace().GetWorktree(), "ran"))
		n.base(s, "config", "--remove-section", "filter.x")
		n.ok("s", "e2", "touch ran")
	})
}

func TestTheNextSandboxHasTheConfigurationAsItIsThen(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, layout string) {
		s := n.session("s")
		n.ok("s", "e1", "! git config merge.conflictstyle")
		n.base(s, "config", "merge.conflictStyle", "diff3")
		if layout == config.IsolatedLayout {
			n.ok("s", "e2", "! git config merge.conflictstyle")
			require.EqualValues(t, 1, n.get("s").GetGeneration())
			n.retire("s")
		}
		require.Equal(t, "diff3\n", n.ok("s", "e3", "git config merge.conflictstyle").GetStdoutText())
		require.EqualValues(t, 2, n.get("s").GetGeneration())
		n.ok("s", "e4", "! git config user.name Mallory")
		require.NotContains(t, n.base(s, "config", "--local", "--list"), "Mallory")
	})
}

func TestTheSessionSaysWhatIsMountedAndSealed(t *testing.T) {
	layouts(t, func(t *testing.T, n *node, layout string) {
		s := n.session("s")
		repo, wt := s.GetWorkspace().GetRepository(), s.GetWorkspace().GetWorktree()
		byTarget := map[string]*sandboxv1.Mount{}
		for _, m := range s.GetMounts() {
			byTarget[m.GetTarget()] = m
		}
		require.Equal(t, wt, byTarget[wt].GetSource())
		require.False(t, byTarget[wt].GetReadOnly())
		require.True(t, byTarget[filepath.Join(wt, ".git")].GetSeal())
		require.True(t, byTarget[filepath.Join(repo, ".git", "config")].GetSeal())
		for _, m := range s.GetMounts() {
			if layout == config.IsolatedLayout && strings.HasPrefix(m.GetSource(), repo) {
				require.True(t, m.GetReadOnly(), "%s is the base clone's", m.GetTarget())
			}
		}
		sums := 0
		for _, x := range s.GetSandbox().GetSeals() {
			if x.GetPath() == filepath.Join(repo, ".git", "config") {
				require.Len(t, x.GetSha256(), 64)
				sums++
			}
		}
		require.Equal(t, 1, sums)
		require.NotEmpty(t, s.GetNotes())
	})
}

func TestHooksRunInsideWhereTheOperatorWantsThemAndNeverInTrustedGit(t *testing.T) {
	for _, hooks := range []string{"off", "inside"} {
		for _, layout := range []string{config.IsolatedLayout, config.SharedLayout} {
			n := newNode(t, func(c *config.Config) { c.Workspace.Hooks, c.Workspace.GitLayout = hooks, layout })
			repo := testkit.Repo(t, owner)
			hook := filepath.Join(repo, ".git", "hooks", "pre-commit")
			require.NoError(t, os.MkdirAll(filepath.Dir(hook), 0o755))
			require.NoError(t, os.WriteFile(hook, []byte("#!/bin/sh\necho x >> hooked\n"), 0o755))
			require.NoError(t, os.Chown(hook, owner, owner))
			wt := filepath.Join(filepath.Dir(repo), "wt")
			_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "s",
				Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: wt, Branch: "work"}})
			require.NoError(t, err)
			n.ok("s", "e1", commitNew)
			require.Equal(t, hooks == "inside", exists(filepath.Join(wt, "hooked")), "%s %s", hooks, layout)
			os.Remove(filepath.Join(wt, "hooked"))
			r, err := n.git("s", "commit", "--allow-empty", "-m", "Trusted")
			require.NoError(t, err)
			require.Zero(t, r.GetExitCode(), string(r.GetStderr()))
			require.False(t, exists(filepath.Join(wt, "hooked")), "%s %s", hooks, layout)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestP5TheWorkOfAnUncertainExecIsHarvestedOnceItsSandboxIsGone(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.ok("s", "mk", "mkfifo $TMPDIR/go")
	done := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, _ := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Command: commitNew + "; cat $TMPDIR/go"})
		done <- r
	}()
	w, err := os.OpenFile(filepath.Join(s.GetWorkspace().GetWorktree(), ".sandbox-tmp", "go"), os.O_WRONLY, 0) // it has committed
	require.NoError(t, err)
	defer w.Close()
	require.Equal(t, "First\n", n.base(s, "log", "-1", "--format=%s", "work"))
	killReceiptds(t, n.parent)
	r := <-done
	require.NotNil(t, r)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus(), r.GetReason())
	require.Equal(t, gitview.Harvested, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
	require.Equal(t, "From inside\n", n.base(s, "log", "-1", "--format=%s", "work"))
}

func TestP12WhatACommandPlantedInItsGitFolderHindersNobodyButItself(t *testing.T) {
	for name, plant := range map[string]string{
		"a FIFO for HEAD":   `rm -f $G/HEAD; mkfifo $G/HEAD`,
		"a FIFO as a ref":   `mkfifo $C/refs/heads/fifo`,
		"a link for refs":   `rm -rf $C/refs/tags; ln -s /etc $C/refs/tags`,
		"a broken index":    `echo nonsense > $G/index`,
		"a HEAD outside":    `echo 'ref: refs/heads/../../../../outside/new' > $G/HEAD`,
		"a lock of HEAD":    `touch $G/HEAD.lock $G/index.lock $C/packed-refs.lock`,
		"no HEAD at all":    `rm -f $G/HEAD`,
		"a folder for HEAD": `rm -f $G/HEAD; mkdir $G/HEAD`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			s := n.session("s")
			n.ok("s", "e1", commitNew)
			r := n.exec("s", "plant", "G=$(git rev-parse --absolute-git-dir) C=$(git rev-parse --path-format=absolute --git-common-dir); cp $G/index $TMPDIR/index; "+plant)
			require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
			require.Equal(t, "From inside\n", n.base(s, "log", "-1", "--format=%s", "work"))
			require.Empty(t, n.base(s, "fsck", "--full", "--no-dangling"))
			require.NotContains(t, n.base(s, "for-each-ref"), "fifo")
			if strings.Contains(name, "FIFO") { // refused by its kind: nothing hangs on it
				_, err := n.git("s", "status")
				require.ErrorIs(t, err, ErrPrecondition)
				require.ErrorContains(t, err, "neither a file nor a folder")
			}
			// The session can mend what it broke.
			g := filepath.Join(s.GetWorkspace().GetRepository(), ".git", "worktrees", filepath.Base(s.GetWorkspace().GetWorktree()))
			c := filepath.Join(s.GetWorkspace().GetRepository(), ".git")
			n.ok("s", "mend", "rm -rf "+g+"/HEAD "+c+"/refs/heads/fifo "+c+"/refs/tags "+g+"/*.lock "+c+"/*.lock; echo ref: refs/heads/work > "+g+"/HEAD; cp $TMPDIR/index "+g+"/index; git status --short")
			r = n.ok("s", "e3", "echo y > y && git add y && git commit -qm 'Goes on'")
			require.Equal(t, gitview.Harvested, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
			require.Equal(t, "Goes on\n", n.base(s, "log", "-1", "--format=%s", "work"))
		})
	}
}

func TestARepositoryIsRefusedForTheTreeThatTheWorktreeIsMadeFrom(t *testing.T) {
	n := newNode(t)
	repo := testkit.Repo(t, owner)
	git := func(args ...string) { t.Helper(); testkit.GitAs(t, owner, repo, args...) }
	git("switch", "-q", "-c", "lfs")
	require.NoError(t, os.WriteFile(filepath.Join(repo, ".gitattributes"), []byte("*.bin filter=lfs\n"), 0o644))
	git("add", ".gitattributes")
	git("commit", "-q", "-m", "Large files")
	git("switch", "-q", "main")
	wt := filepath.Join(filepath.Dir(repo), "wt")
	create := func(w *sandboxv1.Workspace) error {
		w.Repository, w.Worktree = repo, wt
		_, err := n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{Workspace: w})
		return err
	}
	for _, w := range []*sandboxv1.Workspace{{Branch: "new", BaseRef: "lfs"}, {Branch: "lfs"}} {
		err := create(w)
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "lfs:.gitattributes: it has filter=")
		require.NoDirExists(t, wt)
	}
	git("worktree", "add", "-q", wt, "lfs")
	require.ErrorContains(t, create(&sandboxv1.Workspace{}), "worktrees/wt/HEAD:.gitattributes")
	git("-C", wt, "checkout", "-q", "--detach", "main")
	require.NoError(t, create(&sandboxv1.Workspace{}), "the control case")
}

// A message holds UTF-8 alone, and Git's names any bytes.
func TestNamesThatAreNotUTF8AreRefusedOrQuotedAndNeverEndAnAnswer(t *testing.T) {
	n := newNode(t)
	s := n.session("s")
	n.base(s, "branch", "host\xff", "main")
	r := n.ok("s", "e1", `git commit -q --allow-empty -m One && git branch $'mine\xff' && git tag $'tag\xff' && touch "$(git rev-parse --git-common-dir)"/refs/heads/$'x\xff.lock'`)
	_, err := proto.Marshal(r)
	require.NoError(t, err)
	require.Equal(t, gitview.Harvested, r.GetHarvest().GetStatus(), r.GetHarvest().GetDetail())
	require.Contains(t, r.GetHarvest().GetRefs(), "refs/heads/work")
	require.Regexp(t, `^".*/refs/heads/x\\xff\.lock"$`, r.GetHarvest().GetStaleLocks()[0])
	require.NoError(t, n.agent.Close())
	n.start()
	again, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "s", ExecId: "e1", Text: true,
		Command: `git commit -q --allow-empty -m One && git branch $'mine\xff' && git tag $'tag\xff' && touch "$(git rev-parse --git-common-dir)"/refs/heads/$'x\xff.lock'`})
	require.NoError(t, err)
	require.True(t, proto.Equal(r, again))

	wt := filepath.Join(filepath.Dir(s.GetWorkspace().GetRepository()), "theirs")
	n.base(s, "worktree", "add", "-q", wt, "host\xff")
	_, err = n.agent.CreateSession(n.ctx(), &sandboxv1.CreateSessionRequest{SessionId: "t",
		Workspace: &sandboxv1.Workspace{Repository: s.GetWorkspace().GetRepository(), Worktree: wt}})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, `"host\xff" is not valid UTF-8: rename it`)
}
