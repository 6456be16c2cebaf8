package gitview

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const uid = 1234 // owns a test's repository

// world is a repository with a linked worktree on the branch "topic", and a session's view of it.
type world struct {
	testing.TB
	repo, wt, git, meta string
	o                   Options
	v                   *View
}

// newWorld has prepare change the repository before the session is made.
func newWorld(t testing.TB, prepare ...func(w *world)) *world {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	testkit.Leaks(t)
	w := &world{TB: t, repo: testkit.Repo(t, uid)}
	w.wt, w.git = testkit.Worktree(t, uid, w.repo, "topic"), filepath.Join(w.repo, ".git")
	w.meta = filepath.Join(w.git, "worktrees", "wt-topic")
	for _, p := range prepare {
		p(w)
	}
	w.o = Options{Dir: filepath.Join(testkit.StateDir(t), Key(w.wt)), SessionID: "s1", Layout: mounts.Isolated}
	w.open()
	return w
}

// open makes the view, or takes it over for another session.
func (w *world) open() {
	w.Helper()
	var err error
	w.o.Workspace, err = workspace.Open(w.Context(), workspace.Wanted{Repository: w.repo, Worktree: w.wt})
	require.NoError(w, err)
	w.o.Workspace.Branch = "topic"
	w.reopen()
}

// reopen takes the view over as an agent that was restarted.
func (w *world) reopen() {
	w.Helper()
	var err error
	w.o.Config, err = gitguard.ReadConfig(w.Context(), filepath.Join(w.git, "config"))
	require.NoError(w, err)
	w.v, err = Open(w.Context(), w.o)
	require.NoError(w, err)
}

// inside runs f where the session's mounts are, as a sandbox has them.
func (w *world) inside(f func(in *testkit.Inside)) {
	w.Helper()
	ws := w.o.Workspace
	plan, err := mounts.New(mounts.Workspace{
		Worktree: ws.Worktree, CommonDir: ws.CommonDir, MetaDir: ws.MetaDir, OwnerUID: ws.Owner.UID, OwnerGID: ws.Owner.GID,
		Layout: w.o.Layout, Private: w.v.Private(),
	}, mounts.Exists)
	require.NoError(w, err)
	testkit.Attach(w, plan, f)
}

// command runs a script as a session's command, with what the agent does before and after.
func (w *world) command(script string) (string, Harvest) {
	w.Helper()
	require.NoError(w, w.v.Refresh(w.Context()))
	var out string
	w.inside(func(in *testkit.Inside) { out = in.Must(w.wt, script) })
	return out, w.v.Harvest(w.Context())
}

// try is command for a script that may fail.
func (w *world) try(script string) (string, Harvest) {
	w.Helper()
	return w.command("{ " + script + "\n} || true")
}

// harvested is command whose work must arrive.
func (w *world) harvested(script string) string {
	w.Helper()
	out, h := w.command(script)
	require.Equal(w, Harvested, h.Status, "%+v", h)
	require.Empty(w, h.Detail)
	w.sound()
	return out
}

// host runs plain Git in the base clone, as its owner.
func (w *world) host(args ...string) string {
	w.Helper()
	return strings.TrimSpace(testkit.GitAs(w, uid, w.repo, args...))
}

// hostInWorktree runs plain Git in the worktree, as people do who trust the session.
func (w *world) hostInWorktree(args ...string) string {
	w.Helper()
	return strings.TrimSpace(testkit.GitAs(w, uid, w.wt, args...))
}

// sound checks that the base clone has everything that it names, and that its own gc leaves it so.
func (w *world) sound() {
	w.Helper()
	w.host("gc", "-q", "--prune=now")
	require.Empty(w, w.host("fsck", "--full", "--strict", "--no-dangling"))
}

func write(t testing.TB, path, content string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	require.NoError(t, os.Lchown(path, uid, uid))
}

func TestACommitReachesTheBaseClone(t *testing.T) {
	w := newWorld(t)
	id := w.harvested("echo more >> README && git add README && echo new > new && git commit -q -m More README && git add new && git rev-parse HEAD")
	require.Equal(t, id, w.host("rev-parse", "topic"))
	require.Equal(t, "More", w.host("log", "-1", "--format=%s", "topic"))
	require.Equal(t, "ref: refs/heads/topic\n", read(t, w.meta+"/HEAD"))
	require.Equal(t, "A  new", w.hostInWorktree("status", "--porcelain"))
	require.Contains(t, w.hostInWorktree("reflog"), "commit: More")

	_, h := w.command("git log --oneline && ls")
	require.Equal(t, Harvest{Status: Unchanged}, h)
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// run runs a program as the repository's owner, and gives what it printed.
func run(dir string, words ...string) (string, error) {
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestWhatIsKeptAndCantBeUsedIsToldWithAndWithoutItsRemedy(t *testing.T) {
	for name, spoil := range map[string]func(w *world){
		"a state that is lost": func(w *world) { require.NoError(t, os.WriteFile(w.v.path(stateName), []byte("{"), 0o600)) },
		"another layout":       func(w *world) { w.o.Layout = mounts.Shared },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			spoil(w)
			_, err := Open(t.Context(), w.o)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, "sandbox-agent workspace delete "+w.wt)
			kept, ok := errors.AsType[*KeptError](err)
			require.True(t, ok)
			require.NotContains(t, kept.Why, "workspace delete")
		})
	}
}
