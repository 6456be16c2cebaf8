package mounts_test

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

const (
	disk = 1234
	host = 0x70000000 + 1000
)

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

type applied struct {
	plan mounts.Plan
	root string // the container's root folder, mounted only in the thread's namespace
	wt   string
	git  string
}

// withPlan applies the plan of a real linked worktree below an empty root and calls f in that mount namespace.
func withPlan(t *testing.T, f func(a applied) error) {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.UserNamespaces, testkit.MountAPI)
	testkit.Leaks(t)
	repo := testkit.Repo(t, disk)
	a := applied{wt: testkit.Worktree(t, disk, repo, "topic"), git: filepath.Join(repo, ".git"), root: testkit.StateDir(t)}
	var err error
	a.plan, err = mounts.New(mounts.Workspace{
		Worktree: a.wt, CommonDir: a.git, MetaDir: filepath.Join(a.git, "worktrees", "wt-topic"), OwnerUID: disk, OwnerGID: disk,
	}, mounts.Exists)
	require.NoError(t, err)

	opened, err := mounts.Open(a.plan)
	require.NoError(t, err)
	defer opened.Close()
	ns, err := mounts.UserNamespace(mounts.Mapping{DiskUID: disk, HostUID: host, DiskGID: disk, HostGID: host})
	require.NoError(t, err)
	defer ns.Close()
	detached, err := opened.Clone(ns)
	require.NoError(t, err)
	defer detached.Close()
	for _, target := range a.plan.Roots() {
		require.NoError(t, os.MkdirAll(filepath.Join(a.root, target), 0o755))
	}
	inMountNamespace(t, func() error {
		root, err := mounts.OpenSource(a.root)
		if err != nil {
			return err
		}
		defer root.Close()
		states, err := detached.Attach(root)
		if err != nil {
			return err
		}
		require.Len(t, states, len(a.plan.Mounts))
		return f(a)
	})
}

func TestTheWorktreeAppearsAsTheCommandsAndStaysItsOwnersOnDisk(t *testing.T) {
	withPlan(t, func(a applied) error {
		var st unix.Stat_t
		require.NoError(t, unix.Stat(filepath.Join(a.root, a.wt, "README"), &st))
		require.Equal(t, uint32(host), st.Uid)
		require.NoError(t, unix.Stat(filepath.Join(a.wt, "README"), &st))
		require.Equal(t, uint32(disk), st.Uid)
		return nil
	})
}

func TestP11SealsAreReadOnlyAndTheRestIsWritable(t *testing.T) {
	withPlan(t, func(a applied) error {
		for _, seal := range a.plan.Seals() {
			var v unix.Statfs_t
			require.NoError(t, unix.Statfs(filepath.Join(a.root, seal), &v))
			require.NotZero(t, v.Flags&unix.ST_RDONLY, seal)
			require.ErrorIs(t, unix.Chmod(filepath.Join(a.root, seal), 0o600), unix.EROFS)
		}
		for _, open := range []string{a.wt, filepath.Join(a.git, "refs"), filepath.Join(a.git, "objects")} {
			require.NoError(t, unix.Access(filepath.Join(a.root, open), unix.W_OK))
		}
		return nil
	})
}

func TestP11ASealOrAFolderAboveItCantBeRenamed(t *testing.T) {
	withPlan(t, func(a applied) error {
		for _, p := range append(a.plan.Seals(), filepath.Join(a.git, "worktrees"), filepath.Join(a.git, "worktrees", "wt-topic")) {
			p = filepath.Join(a.root, p)
			// As the command: another uid has no mapping in these mounts and fails earlier.
			require.NoError(t, unix.Setfsgid(host))
			require.NoError(t, unix.Setfsuid(host))
			err := unix.Rename(p, p+".moved")
			require.True(t, err == unix.EBUSY || err == unix.EROFS, "%s: %v", p, err) // EROFS: it lies in an empty folder of the plan
		}
		return nil
	})
}

func TestEveryMountIsNosuidNodevAndPrivate(t *testing.T) {
	withPlan(t, func(a applied) error {
		root, err := mounts.OpenSource(a.root)
		require.NoError(t, err)
		defer root.Close()
		for _, m := range a.plan.Mounts {
			s, err := mounts.ReadBack(root, m.Target)
			require.NoError(t, err)
			require.True(t, s.MountPoint && s.NoSuid && s.NoDev, "%+v", s)
			require.Equal(t, m.ReadOnly, s.ReadOnly, m.Target)
		}
		return nil
	})
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
