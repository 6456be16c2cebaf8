package workspace

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

var storageOwner = Owner{UID: uid, GID: uid}

// fileSystem mounts a file system of that type on a new folder.
func fileSystem(t *testing.T, fstype, source, data string, flags uintptr) string {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir := filepath.Join(testkit.StateDir(t), "fs")
	require.NoError(t, os.Mkdir(dir, 0o755))
	if err := unix.Mount(source, dir, fstype, flags, data); err == unix.ENODEV {
		t.Skipf("this kernel has no %s", fstype)
	} else {
		require.NoError(t, err, fstype)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// ext2 is a file system of the oldest kind: whole seconds and little room, in an image.
func ext2(t *testing.T) string {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("mke2fs"), testkit.Program("mount"))
	dir := testkit.StateDir(t)
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "fs")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, 1<<20))
	require.NoError(t, os.Mkdir(at, 0o755))
	for _, c := range [][]string{{"mke2fs", "-q", "-t", "ext2", "-I", "128", image}, {"mount", "-o", "loop", image, at}} {
		out, err := exec.Command(c[0], c[1:]...).CombinedOutput()
		require.NoError(t, err, "%v: %s", c, out)
	}
	t.Cleanup(func() { require.NoError(t, exec.Command("umount", at).Run()) })
	return at
}

func overlay(t *testing.T) string {
	t.Helper()
	dir := testkit.StateDir(t)
	for _, d := range []string{"lower", "upper", "work"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	return fileSystem(t, "overlay", "overlay", fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", dir), 0)
}

func TestStorageThatDoesWhatGitNeedsPassesAndHoldsNothingAfterwards(t *testing.T) {
	for name, make := range map[string]func(t *testing.T) string{
		"the test's own": func(t *testing.T) string { testkit.Need(t, testkit.Root); return testkit.StateDir(t) },
		"tmpfs":          func(t *testing.T) string { return fileSystem(t, "tmpfs", "tmpfs", "mode=755", 0) },
		"ramfs":          func(t *testing.T) string { return fileSystem(t, "ramfs", "ramfs", "mode=755", 0) },
		"ext2":           ext2,
		"overlay":        overlay,
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Leaks(t)
			dir := make(t)
			require.NoError(t, os.RemoveAll(filepath.Join(dir, "lost+found")))
			require.NoError(t, os.Chown(dir, uid, uid))
			require.NoError(t, CheckStorage(t.Context(), dir, storageOwner))
			require.Empty(t, names(t, dir))
		})
	}
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	out := []string{}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestStorageThatGitCantWorkOnIsRefusedByTheOperationThatFailed(t *testing.T) {
	for name, x := range map[string]struct {
		make func(t *testing.T) string
		// says are the operation, the error and the remedy.
		says []string
	}{
		"read-only": {func(t *testing.T) string {
			dir := fileSystem(t, "", testkit.StateDir(t), "", unix.MS_BIND)
			require.NoError(t, os.Chown(dir, uid, uid))
			require.NoError(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			return dir
		}, []string{"making a folder", "read-only file system", "mount it read-write"}},
		"someone else's": {func(t *testing.T) string {
			testkit.Need(t, testkit.Root)
			dir := testkit.StateDir(t)
			require.NoError(t, os.Chmod(dir, 0o755))
			return dir
		}, []string{"making a folder", "permission denied", "let its owner, uid 1234, gid 1234, write there"}},
		"without an inode that is free": {func(t *testing.T) string {
			return fileSystem(t, "tmpfs", "tmpfs", "mode=777,nr_inodes=2", 0)
		}, []string{"making a file", "no space left", "df -i"}},
		"full": {func(t *testing.T) string {
			dir := fileSystem(t, "tmpfs", "tmpfs", "mode=777,size=4k", 0)
			require.NoError(t, os.WriteFile(filepath.Join(dir, "fills-it"), []byte("x"), 0o644))
			return dir
		}, []string{"making a file", "no space left", "make room"}},
		"one whose files can't be written to": {func(t *testing.T) string {
			return fileSystem(t, "hugetlbfs", "hugetlbfs", "mode=777", 0)
		}, []string{"making a file", "invalid argument", "findmnt"}},
		"one without folders": {func(t *testing.T) string {
			dir := fileSystem(t, "mqueue", "mqueue", "", 0)
			require.NoError(t, os.Chmod(dir, 0o777))
			return dir
		}, []string{"making a folder", "operation not permitted", "findmnt"}},
		"one on which the owner has no id": {func(t *testing.T) string {
			ns, err := mounts.UserNamespace(mounts.Mapping{DiskUID: 0, HostUID: uid + 1, DiskGID: 0, HostGID: uid + 1})
			require.NoError(t, err)
			defer ns.Close()
			source := fileSystem(t, "tmpfs", "tmpfs", "mode=777", 0)
			return idmapped(t, source, ns)
		}, []string{"making a folder", "value too large", "findmnt"}},
		"not a folder": {func(t *testing.T) string {
			testkit.Need(t, testkit.Root)
			f := filepath.Join(testkit.StateDir(t), "f")
			require.NoError(t, os.WriteFile(f, nil, 0o644))
			return f
		}, []string{"not a folder"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := x.make(t)
			before, _ := os.ReadDir(dir)
			err := CheckStorage(t.Context(), dir, storageOwner)
			require.ErrorIs(t, err, ErrRefused)
			for _, want := range append(x.says, dir) {
				require.ErrorContains(t, err, want)
			}
			require.NotContains(t, err.Error(), "left is")
			after, _ := os.ReadDir(dir)
			require.Len(t, after, len(before), "what it made is taken away after a failure too")
		})
	}
}

// idmapped mounts source once more, with another view of its owners.
func idmapped(t *testing.T, source string, ns *os.File) string {
	t.Helper()
	at := filepath.Join(testkit.StateDir(t), "idmapped")
	require.NoError(t, os.Mkdir(at, 0o755))
	src, err := mounts.OpenSource(source)
	require.NoError(t, err)
	defer src.Close()
	tree, err := mounts.Clone(src, mounts.Attr{Idmap: ns})
	if err != nil {
		t.Skipf("this kernel can't idmap tmpfs: %v", err)
	}
	defer tree.Close()
	target, err := mounts.OpenSource(at)
	require.NoError(t, err)
	defer target.Close()
	require.NoError(t, mounts.Attach(tree, target))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(at, unix.MNT_DETACH)) })
	return at
}

func TestStorageThatDoesNotAnswerIsGivenUp(t *testing.T) {
	testkit.Need(t, testkit.Root)
	testkit.Leaks(t)
	// A file system in user space whose server reads nothing.
	server, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("this kernel has no file systems in user space: %v", err)
	}
	defer server.Close()
	dir := fileSystem(t, "fuse", "silent", fmt.Sprintf("fd=%d,rootmode=40777,user_id=0,group_id=0,allow_other", server.Fd()), 0)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err = CheckStorage(ctx, dir, storageOwner)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "the storage of "+dir+" did not answer")
}

func BenchmarkCheckStorage(b *testing.B) {
	testkit.Need(b, testkit.Root)
	dir := testkit.StateDir(b)
	require.NoError(b, os.Chown(dir, uid, uid))
	for b.Loop() {
		if err := CheckStorage(b.Context(), dir, storageOwner); err != nil {
			b.Fatal(err)
		}
	}
}
