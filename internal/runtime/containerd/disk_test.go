package containerd

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// smallDisk is a disk of the test's own.
type smallDisk struct {
	t   *testing.T
	dir string
}

func newSmallDisk(t *testing.T, size string) smallDisk {
	t.Helper()
	testkit.Need(t, testkit.Root)
	d := smallDisk{t, testkit.StateDir(t)}
	require.NoError(t, unix.Mount("tmpfs", d.dir, "tmpfs", 0, "mode=0711,size="+size))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(d.dir, unix.MNT_DETACH)) })
	return d
}

// fill leaves so many bytes free; room takes that back.
func (d smallDisk) fill(but int64) {
	d.t.Helper()
	f, err := os.Create(d.filler())
	require.NoError(d.t, err)
	defer f.Close()
	require.NoError(d.t, unix.Fallocate(int(f.Fd()), 0, 0, d.free()-but))
}

func (d smallDisk) free() int64 {
	d.t.Helper()
	var st unix.Statfs_t
	require.NoError(d.t, unix.Statfs(d.dir, &st))
	return int64(st.Bavail) * st.Bsize
}

func (d smallDisk) room() {
	d.t.Helper()
	require.NoError(d.t, os.Remove(d.filler()))
}

func (d smallDisk) filler() string { return filepath.Join(d.dir, "filler") }

func TestP14AFullDiskOfTheSnapshotterIsAClearErrorAndLeavesNothing(t *testing.T) {
	disk := newSmallDisk(t, "64m")
	root := filepath.Join(disk.dir, "root")
	h := newHostOn(t, root, Runc, Socket)
	running := h.spec(0)
	s := h.create(running)
	a := h.attach(s, running, 1)
	spec := h.spec(1)
	spec.Rootfs = "localhost/tools@" + h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat"))
	disk.fill(1 << 20)

	_, err := h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "no space left on device")
	require.ErrorContains(t, err, "the disk of containerd's snapshotter is full ("+root)
	require.ErrorContains(t, err, "enlarge it")
	out, _ := a.run("echo goes on")
	require.Equal(t, "goes on", out)

	disk.room()
	// Where containerd had no room even to forget it, it is named, and goes now.
	ids, listErr := h.r.List(bound(t))
	require.NoError(t, listErr)
	require.Equal(t, errors.Is(err, runtime.ErrNoEvidence), slices.Contains(ids, spec.SandboxID))
	_, err = h.r.Remove(bound(t), runtime.Identity{SandboxID: spec.SandboxID})
	require.NoError(t, err)
	require.NoDirExists(t, spec.Dir)
	keeps := h.d.Keeps()
	delete(keeps, running.SandboxID)
	require.Empty(t, keeps, "nothing of it is left, nor of what was unpacked")

	h.stop(h.create(spec))
	h.stop(s)
	require.Empty(t, h.d.Keeps())
}
