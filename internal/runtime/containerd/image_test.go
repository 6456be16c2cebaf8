package containerd

import (
	"context"
	"encoding/hex"
	"path"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

func TestAnImageServesAsRootFileSystemByItsDigest(t *testing.T) {
	h := newHost(t, Socket)
	digest := h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat", "ls", "id"))
	spec := h.spec(0)
	spec.Rootfs = "localhost/tools@" + digest
	s := h.create(spec)
	require.Equal(t, runtime.Provenance{
		Rootfs: spec.Rootfs, RootfsKind: runtime.RootfsImage, RootfsDigest: digest,
		ReceiptdSHA256: s.Identity().Provenance.ReceiptdSHA256, Pid1SHA256: s.Identity().Provenance.Pid1SHA256,
	}, s.Identity().Provenance)
	a := h.attach(s, spec, 1)
	out, p := a.run("cat /etc/of-the-image; id -un; cat README; ls /usr; echo x > /etc/of-the-image")
	require.NotZero(t, p.ExitCode)
	require.Contains(t, out, "image\nsandbox\nhello\n")
	c := h.d.Client()
	defer c.Close()
	ls, err := c.LeasesService().List(bound(t))
	require.NoError(t, err)
	require.Len(t, ls, 1, "a lease of the sandbox's own keeps its snapshot from the garbage collection")
	require.Equal(t, spec.SandboxID, ls[0].ID)
	h.stop(s)
	_, err = c.SnapshotService("").Stat(context.Background(), spec.SandboxID)
	require.Error(t, err, "its snapshot is gone")
}

func TestP14AnImageThatCantServeIsAClearError(t *testing.T) {
	testkit.Need(t, testkit.Root)
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.Rootfs = "localhost/none@sha256:" + hex.EncodeToString(make([]byte, 32))
	_, err := h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "ctr -n sandbox-agent images pull "+spec.Rootfs)

	digest := h.d.Import(t, "localhost/empty:1", containerd.Archive(t, nil))
	spec = h.spec(1)
	spec.Rootfs = "localhost/empty@" + digest
	_, err = h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "empty")
	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Empty(t, ids, "nothing of either is left, the lease and the snapshot included")
}

func TestP5AContainerdWithoutTheSnapshotterEndsSandboxesWithEvidence(t *testing.T) {
	h := newHost(t, Socket)
	digest := h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash"))
	h.use(func(o *Options) { o.Snapshotter = "absent" })
	err := h.r.client.SnapshotService("absent").Remove(bound(t), newID(t))
	require.True(t, errdefs.IsInvalidArgument(err), "containerd does not say that there is no such snapshot: %v", err)

	h.stop(h.create(h.spec(0)))

	spec := h.spec(1)
	spec.Rootfs = "localhost/tools@" + digest
	_, err = h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "containerd.snapshotter")
	require.NotErrorIs(t, err, runtime.ErrNoEvidence)
	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Empty(t, ids)
}

func TestUnpackingAnImageIsBoundByTheCreationAlone(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.Rootfs = "localhost/tools@" + h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat", "ls", "id"))
	ends := map[string]time.Time{}
	var mu sync.Mutex
	h.through(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		mu.Lock()
		if end, bounded := ctx.Deadline(); bounded {
			ends[path.Base(path.Dir(method))+"/"+path.Base(method)] = end
		}
		mu.Unlock()
		return invoke(ctx, method, req, reply, cc, opts...)
	})
	ctx := bound(t)
	s, err := h.r.Create(ctx, spec)
	require.NoError(t, err)
	creation, _ := ctx.Deadline()
	for _, call := range []string{"containerd.services.diff.v1.Diff/Apply", "containerd.services.snapshots.v1.Snapshots/Commit"} {
		require.Equal(t, creation, ends[call], call)
	}
	for _, call := range []string{"containerd.services.images.v1.Images/List", "containerd.services.leases.v1.Leases/Create", "containerd.services.snapshots.v1.Snapshots/View"} {
		require.Contains(t, ends, call)
		require.True(t, ends[call].Before(creation), "%s has a bound of its own", call)
	}
	h.stop(s)
}
