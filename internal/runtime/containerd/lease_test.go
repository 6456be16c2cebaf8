package containerd

import (
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

func TestTheGarbageCollectionTakesNothingThatASandboxUsesAndLabelsSayWhoseItIs(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.SessionID, spec.Generation = "of-this-session", 7
	spec.Rootfs = "localhost/tools@" + h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat"))
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	c := h.d.Client()
	defer c.Close()

	want := map[string]string{
		labelSandbox: spec.SandboxID, labelSession: "of-this-session", labelGeneration: "7", labelRuntime: Runc, labelState: h.state,
	}
	container, err := c.ContainerService().Get(bound(t), spec.SandboxID)
	require.NoError(t, err)
	require.Equal(t, want, container.Labels)
	ls, err := c.LeasesService().List(bound(t))
	require.NoError(t, err)
	require.Len(t, ls, 1)
	require.Equal(t, want, ls[0].Labels)

	// What a sandbox has is all that keeps the image, once its name is gone.
	snapshots := c.SnapshotService("")
	_, err = snapshots.Prepare(bound(t), "of-nobody", "")
	require.NoError(t, err)
	require.NoError(t, c.ImageService().Delete(bound(t), "localhost/tools:1", images.SynchronousDelete()))
	_, err = snapshots.Stat(bound(t), "of-nobody")
	require.True(t, errdefs.IsNotFound(err), "control: what has no lease is collected: %v", err)
	_, err = snapshots.Stat(bound(t), spec.SandboxID)
	require.NoError(t, err, "its own is kept")
	out, _ := a.run("cat /etc/of-the-image README")
	require.Equal(t, "image\nhello", out)

	h.stop(s)
	require.Empty(t, h.d.Keeps())
}
