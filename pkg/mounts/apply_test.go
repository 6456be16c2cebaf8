package mounts_test

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const disk = 1234 // the uid and gid that own a test's worktree

// inMountNamespace runs f on a thread with a private mount namespace, which ends with it.
func inMountNamespace(t *testing.T, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		defer close(done)      // also when a require in f ends the goroutine: the test has failed then
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
				return os.NewSyscallError("unshare", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return os.NewSyscallError("mount private", err)
			}
			return f()
		}()
	}()
	require.NoError(t, <-done)
}

// applied is a plan of a real linked worktree, attached.
type applied struct {
	*testkit.Inside
	plan            mounts.Plan
	repo, wt        string
	git, meta, priv string // the common Git folder, the worktree's, and what the agent keeps for the workspace
}

// withPlan applies the plan of each layout and calls f in its mount namespace.
func withPlan(t *testing.T, f func(t *testing.T, a applied)) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	for _, layout := range []string{mounts.Isolated, mounts.Shared} {
		t.Run(layout, func(t *testing.T) {
			testkit.Leaks(t)
			a := planned(t, layout)
			testkit.Attach(t, a.plan, func(in *testkit.Inside) {
				a.Inside = in
				require.Len(t, in.States, len(a.plan.Mounts))
				f(t, a)
			})
		})
	}
}

// planned makes a repository with a linked worktree and what the agent keeps for it, and plans its mounts.
func planned(t *testing.T, layout string) applied {
	t.Helper()
	a := applied{repo: testkit.Repo(t, disk)}
	a.wt, a.git = testkit.Worktree(t, disk, a.repo, "topic"), filepath.Join(a.repo, ".git")
	a.meta = filepath.Join(a.git, "worktrees", "wt-topic")
	w := testkit.Workspace(t, disk, a.repo, a.wt, layout)
	a.priv = w.Private
	var err error
	a.plan, err = mounts.New(w, mounts.Exists)
	require.NoError(t, err)
	return a
}

func TestTheWorktreeAppearsAsTheCommandsAndStaysItsOwnersOnDisk(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		require.Equal(t, "1000", a.Must(a.wt, "stat -c %u README && touch made"))
		a.Outside(func() {
			var st unix.Stat_t
			require.NoError(t, unix.Stat(filepath.Join(a.wt, "made"), &st))
			require.Equal(t, uint32(disk), st.Uid)
		})
	})
}

func TestP11SealsAreReadOnlyAndTheRestIsWritable(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		for _, seal := range a.plan.Seals() {
			var v unix.Statfs_t
			require.NoError(t, unix.Statfs(seal, &v))
			require.NotZero(t, v.Flags&unix.ST_RDONLY, seal)
			require.ErrorIs(t, unix.Chmod(seal, 0o600), unix.EROFS)
		}
		for _, open := range []string{a.wt, a.git, a.meta, filepath.Join(a.git, "refs"), filepath.Join(a.git, "objects")} {
			a.Must(open, "touch made")
		}
	})
}

func TestEveryMountIsNosuidNodevAndPrivate(t *testing.T) {
	withPlan(t, func(t *testing.T, a applied) {
		for i, m := range a.plan.Mounts {
			s := a.States[i]
			require.True(t, s.MountPoint && s.NoSuid && s.NoDev, "%+v", s)
			require.Equal(t, m.ReadOnly, s.ReadOnly, m.Target)
		}
		require.NotContains(t, propagation(t, a), "shared:")
	})
}

// propagation gives the mounts of a plan as /proc has them.
func propagation(t *testing.T, a applied) string {
	t.Helper()
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	require.NoError(t, err)
	var out []string
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 4 && slices.ContainsFunc(a.plan.Mounts, func(m mounts.Mount) bool { return m.Target == f[4] }) {
			out = append(out, line)
		}
	}
	require.Len(t, out, len(a.plan.Mounts))
	return strings.Join(out, "\n")
}

func TestASourceWithASymlinkInItsPathIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "real", "wt"), 0o755))
	require.NoError(t, os.Symlink("real", filepath.Join(dir, "link")))
	path := filepath.Join(dir, "link", "wt")
	_, err := mounts.Open(mounts.Plan{Worktree: path, Mounts: []mounts.Mount{{Source: path, Target: path}}})
	require.ErrorIs(t, err, mounts.ErrWorkspace)
	require.ErrorContains(t, err, "symlink")
	require.True(t, mounts.Exists(path))
}

func TestASourceWithAnotherOwnerIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	_, err := mounts.Open(mounts.Plan{OwnerUID: 7, OwnerGID: 7, Mounts: []mounts.Mount{{Source: dir, Target: dir}}})
	require.ErrorIs(t, err, mounts.ErrWorkspace)
	require.ErrorContains(t, err, "chown")
}

func TestP11ATargetThatIsASymlinkIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.MountAPI)
	testkit.Leaks(t)
	root, src := testkit.StateDir(t), testkit.StateDir(t)
	require.NoError(t, os.Symlink("/etc", filepath.Join(root, "wt")))
	opened, err := mounts.Open(mounts.Plan{Mounts: []mounts.Mount{{Source: src, Target: "/wt"}}})
	require.NoError(t, err)
	defer opened.Close()
	detached, err := opened.Clone(nil)
	require.NoError(t, err)
	defer detached.Close()
	inMountNamespace(t, func() error {
		r, err := mounts.OpenSource(root)
		require.NoError(t, err)
		defer r.Close()
		_, err = detached.Attach(r)
		require.ErrorIs(t, err, unix.ELOOP)
		return nil
	})
}

func TestP11ASealIsNeverPutOnADecoy(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.MountAPI)
	testkit.Leaks(t)
	root, wt := testkit.StateDir(t), testkit.StateDir(t)
	seal := filepath.Join(wt, ".git")
	require.NoError(t, os.WriteFile(seal, []byte("gitdir: /x\n"), 0o644))
	require.NoError(t, os.MkdirAll(filepath.Join(root, wt), 0o755))
	opened, err := mounts.Open(mounts.Plan{Mounts: []mounts.Mount{
		{Source: wt, Target: wt}, {Source: seal, Target: seal, ReadOnly: true, Seal: true},
	}})
	require.NoError(t, err)
	defer opened.Close()
	require.NoError(t, os.Rename(seal, seal+".moved"))
	require.NoError(t, os.WriteFile(seal, []byte("gitdir: /decoy\n"), 0o644))
	detached, err := opened.Clone(nil)
	require.NoError(t, err)
	defer detached.Close()
	inMountNamespace(t, func() error {
		r, err := mounts.OpenSource(root)
		require.NoError(t, err)
		defer r.Close()
		_, err = detached.Attach(r)
		require.ErrorIs(t, err, mounts.ErrChanged)
		return nil
	})
}
