package containerd

import (
	"context"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

func TestAnImageThatAnotherNamespaceHasIsTakenAndOutlivesItThere(t *testing.T) {
	h := newHost(t, Socket)
	digest := h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat"))
	c := h.d.Client()
	defer c.Close()
	// The kubelet's namespace gets it, and the agent's own loses it.
	kubelet := namespaces.WithNamespace(bound(t), "k8s.io")
	h.use(func(o *Options) { o.Namespace, o.ImagesFrom = "k8s.io", "sandbox-agent" })
	require.NoError(t, h.r.takeImage(bound(t), "localhost/tools:1", []string{`target.digest=="` + digest + `"`}))
	require.NoError(t, c.ImageService().Delete(bound(t), "localhost/tools:1", images.SynchronousDelete()))
	own, err := c.ImageService().List(bound(t))
	require.NoError(t, err)
	require.Empty(t, own)

	spec := h.spec(0)
	spec.Rootfs = "localhost/tools@" + digest
	h.use(func(o *Options) { o.Namespace, o.ImagesFrom = "sandbox-agent", "" })
	_, err = h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable, "without images_from it is not looked for there")

	h.use(func(o *Options) { o.ImagesFrom = "k8s.io" })
	spec = h.spec(1)
	spec.Rootfs = "localhost/tools@" + digest
	s := h.create(spec)
	require.Equal(t, digest, s.Identity().Provenance.RootfsDigest)
	h.stop(s)
	// The kubelet removes what it takes for unused, with all that nobody else keeps.
	require.NoError(t, c.ImageService().Delete(kubelet, "localhost/tools:1", images.SynchronousDelete()))
	spec = h.spec(2)
	spec.Rootfs = "localhost/tools@" + digest
	s = h.create(spec)
	out, _ := h.attach(s, spec, 1).run("cat /etc/of-the-image")
	require.Equal(t, "image", out)
	h.stop(s)
}

func TestANamespaceIsRemovedWithItsImagesUnlessAContainerIsInIt(t *testing.T) {
	h := newHost(t, Socket)
	digest := h.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash", "cat"))
	c := h.d.Client()
	defer c.Close()
	spec := h.spec(0)
	spec.Rootfs = "localhost/tools@" + digest
	s := h.create(spec)
	require.ErrorContains(t, RemoveNamespace(bound(t), h.d.Address, "sandbox-agent"), "1 are there")
	h.stop(s)
	require.NoError(t, RemoveNamespace(bound(t), h.d.Address, "sandbox-agent"))
	all, err := c.NamespaceService().List(context.Background())
	require.NoError(t, err)
	require.NotContains(t, all, "sandbox-agent")
	require.NoError(t, RemoveNamespace(bound(t), h.d.Address, "sandbox-agent"), "that there is none is fine")
}
