package gitview

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// A child of the test binary opens a view, refreshes or harvests it, and is killed at one point: see diesAt.
const (
	childVar = "GITVIEW_TEST_CHILD"
	pointVar = "GITVIEW_TEST_POINT"
)

func TestMain(m *testing.M) {
	if what := os.Getenv(childVar); what != "" {
		if err := child(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func child(what string) error {
	var o Options
	if err := json.Unmarshal([]byte(what), &o); err != nil {
		return err
	}
	ctx := context.Background()
	var err error
	if o.Config, err = gitguard.ReadConfig(ctx, filepath.Join(o.Workspace.CommonDir, "config")); err != nil {
		return err
	}
	point := os.Getenv(pointVar)
	step = func(now string) {
		if now == point {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	v, err := Open(ctx, o)
	if err != nil {
		return err
	}
	if h := v.Harvest(ctx); h.Status == Failed {
		return fmt.Errorf("%+v", h)
	}
	return v.Refresh(ctx)
}

// diesAt runs an agent that opens the view, harvests and refreshes, and is killed at a point. It says whether it came there.
func (w *world) diesAt(point string) bool {
	w.Helper()
	b, err := json.Marshal(w.o)
	require.NoError(w, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVar+"="+string(b), pointVar+"="+point)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return false
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	require.True(w, ok && status.Signaled() && status.Signal() == syscall.SIGKILL, "%s: %v\n%s", point, err, out)
	return true
}

func TestAHarvestThatIsKilledAnywhereIsCompletedByTheNext(t *testing.T) {
	for _, point := range []string{
		"locks removed", "objects checked", "objects stored", "refs decided", "refs moved", "before HEAD", "after HEAD", "before the index", "index locked",
		"after the index", "after the log", "before the state", "after the state",
	} {
		t.Run(point, func(t *testing.T) {
			w := newWorld(t)
			w.harvested("git branch old && git branch moved")
			require.NoError(t, w.v.Refresh(t.Context()))
			var want string
			w.inside(func(in *testkit.Inside) {
				want = in.Must(w.wt, `echo 1 > README && git stash -q && git switch -q -c new && echo new > new && git add new && git commit -q -m New
git branch -q -d old 2>/dev/null && git branch -f moved && git tag mine && git commit -q --allow-empty -m Later && git branch -f topic && echo staged > staged && git add staged && touch `+w.meta+`/HEAD.lock
git for-each-ref --format='%(refname) %(objectname)' refs/heads`)
			})
			require.True(t, w.diesAt(point), "it never came there")
			w.reopen()
			h := w.v.Harvest(t.Context())
			require.NotContains(t, []string{Failed, Conflicts}, h.Status, "%+v", h)
			require.Equal(t, want, w.host("for-each-ref", "--format=%(refname) %(objectname)", "refs/heads"))
			require.Equal(t, "ref: refs/heads/new\n", read(t, w.meta+"/HEAD"))
			require.Equal(t, "A  staged", w.hostInWorktree("status", "--porcelain"))
			require.Equal(t, "1", w.host("show", "refs/sandboxes/s1/stash/0:README"))
			require.NotEmpty(t, w.host("rev-parse", "refs/sandboxes/s1/tags/mine"))
			for _, left := range []string{"index.lock", "HEAD.lock", ownIndex} {
				require.NoFileExists(t, filepath.Join(w.meta, left))
			}
			w.sound()
			// The branches that the killed harvest made are the session's still.
			w.harvested("git switch -q topic && git branch -D new moved && git stash drop -q")
			require.Equal(t, "main\ntopic", w.branches())
			_, h = w.command("true")
			require.Equal(t, Harvest{Status: Unchanged}, h)
		})
	}
}

func TestARefreshThatIsKilledAnywhereIsCompletedByTheNext(t *testing.T) {
	for _, point := range []string{"refs brought in", "HEAD brought in", "index brought in"} {
		t.Run(point, func(t *testing.T) {
			w := newWorld(t)
			w.harvested("git commit -q --allow-empty -m Mine")
			write(t, w.wt+"/README", "host\n")
			w.hostInWorktree("checkout", "-q", "-b", "host")
			w.hostInWorktree("commit", "-q", "-a", "-m", "Host")
			require.True(t, w.diesAt(point))
			w.reopen()
			require.NotEqual(t, Failed, w.v.Harvest(t.Context()).Status)
			out, h := w.command("git log -1 --format=%s && git rev-parse --abbrev-ref HEAD && git status --porcelain")
			require.Equal(t, "Host\nhost", out)
			require.Empty(t, h.Conflicts)
			w.harvested("git commit -q --allow-empty -m Next && git switch -q topic")
			w.sound()
		})
	}
}

func TestAnOpenThatIsKilledAnywhereIsCompletedByTheNext(t *testing.T) {
	for _, point := range []string{"folder made", "base copied", "state made", "folder named"} {
		w := newWorld(t)
		require.NoError(t, os.RemoveAll(w.o.Dir))
		require.True(t, w.diesAt(point), point)
		w.reopen()
		require.NotEqual(t, Failed, w.v.Harvest(t.Context()).Status, point)
		w.harvested("git commit -q --allow-empty -m Mine")
		require.Equal(t, "Mine", w.host("log", "-1", "--format=%s", "topic"), point)
	}
}
