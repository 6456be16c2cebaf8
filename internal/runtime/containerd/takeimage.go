package containerd

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// takeImage records, under the name ref, an image that Options.ImagesFrom has: in Kubernetes the kubelet pulls, with the
// node's credentials, and it has a namespace of its own, in which it removes what it takes for unused. The content is shared by
// both namespaces, and stays as long as one of them needs it. That the other one doesn't have it either is no error.
func (r *Runtime) takeImage(ctx context.Context, ref string, filters []string) error {
	theirs := namespaces.WithNamespace(ctx, r.opts.ImagesFrom)
	found, err := r.client.ImageService().List(theirs, filters...)
	if err != nil || len(found) == 0 {
		return err
	}
	// Until the image's record names it, only a lease keeps the content.
	leased, done, err := r.client.WithLease(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = done(context.WithoutCancel(leased)) }() // it ends by itself after a day
	if err := r.takeContent(leased, theirs, found[0].Target); err != nil {
		return err
	}
	_, err = r.client.ImageService().Create(leased, images.Image{Name: ref, Target: found[0].Target})
	if err != nil && !errdefs.IsAlreadyExists(native(err)) {
		return err
	}
	return nil
}

// takeContent goes from an image's target down to its layers, of this platform alone: the kubelet pulls no other.
func (r *Runtime) takeContent(ctx, theirs context.Context, target ocispec.Descriptor) error {
	store := r.client.ContentStore()
	take := images.HandlerFunc(func(_ context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		from, err := store.ReaderAt(theirs, d)
		if err != nil {
			return nil, fmt.Errorf("%s: %w: pull the image into the agent's own namespace (a containerd with discard_unpacked_layers keeps no layers)", d.Digest, err)
		}
		defer from.Close()
		return nil, content.WriteBlob(ctx, store, "take-"+d.Digest.String(), content.NewReader(from), d)
	})
	children := images.LimitManifests(images.FilterPlatforms(images.ChildrenHandler(store), platforms.Default()), platforms.Default(), 1)
	// The labels are what keeps the children of what is kept.
	return images.Walk(ctx, images.Handlers(take, images.SetChildrenLabels(store, children)), target)
}
