package containerd

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
)

// collectTime bounds how long containerd may take to collect what the last image of a namespace has kept.
const collectTime = 30 * time.Second

// RemoveNamespace takes a namespace with its images out of the containerd at address: what is left of this project there when
// no sandbox is. That there is none is fine. An error: containerd does not answer, or there are containers in the namespace.
func RemoveNamespace(ctx context.Context, address, namespace string) error {
	fail := func(doing string, err error) error {
		return fmt.Errorf("%s of the namespace %s in the containerd at %s: %w", doing, namespace, address, native(err))
	}
	c, err := client.New(address, client.WithDefaultNamespace(namespace), client.WithTimeout(time.Second))
	if err != nil {
		return fail("asking for the containers", err)
	}
	defer c.Close()
	if have, err := c.ContainerService().List(ctx); err != nil || len(have) > 0 {
		return fail("asking for the containers", errOr(err, fmt.Errorf("%d are there: end them first (sandbox-agent drain)", len(have))))
	}
	list, err := c.ImageService().List(ctx)
	if err != nil {
		return fail("asking for the images", err)
	}
	for _, i := range list {
		if err := c.ImageService().Delete(ctx, i.Name, images.SynchronousDelete()); err != nil && !missing(err) {
			return fail("removing the image "+i.Name, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, collectTime)
	defer cancel()
	for {
		err := c.NamespaceService().Delete(ctx, namespace)
		if err == nil || missing(err) {
			return nil
		}
		if !errdefs.IsFailedPrecondition(native(err)) {
			return fail("removing what is left", err)
		}
		select { // what the images had is collected by and by
		case <-ctx.Done():
			return fail("removing what is left", err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}
