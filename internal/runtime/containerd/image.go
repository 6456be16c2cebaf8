package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// image is a sandbox's view of an image: a read-only snapshot, kept by a lease of the sandbox's own.
type image struct {
	digest string
	mounts []mount.Mount
}

// viewImage finds the image in containerd, unpacks it where nobody has yet, and makes a read-only snapshot of it, whose key
// is the sandbox's id, as its lease's is. Unpacking takes as long as it takes: only ctx bounds it.
func (r *Runtime) viewImage(ctx context.Context, spec runtime.Spec) (image, error) {
	fail := func(doing string, err error) (image, error) {
		return image{}, r.failed(fmt.Sprintf("%s the image %s", doing, spec.Rootfs), err)
	}
	img, err := r.findImage(ctx, spec.Rootfs)
	if err != nil {
		return fail("looking for", err)
	}
	// Before the lease: what has one is only gone when the snapshotter has said so.
	if err := r.snapshotterLoaded(ctx, spec.SandboxID); err != nil {
		return fail("making a view of", err)
	}
	if err := r.lease(ctx, spec); err != nil {
		return fail("making the lease of", err)
	}
	crashpoint.At("containerd.image-leased")
	ctx = leases.WithLease(ctx, spec.SandboxID)
	// It does nothing where that is done; the lease keeps what it makes.
	if err := img.Unpack(ctx, r.opts.Snapshotter); err != nil {
		return fail("unpacking", err)
	}
	ctx, cancel := r.call(ctx)
	defer cancel()
	layers, err := img.RootFS(ctx)
	if err != nil {
		return fail("reading", err)
	}
	ms, err := r.client.SnapshotService(r.opts.Snapshotter).View(ctx, spec.SandboxID, identity.ChainID(layers).String())
	if err != nil {
		return fail("making a view of", err)
	}
	crashpoint.At("containerd.image-viewed")
	return image{digest: img.Target().Digest.String(), mounts: ms}, nil
}

// lease makes the sandbox's lease.
func (r *Runtime) lease(ctx context.Context, spec runtime.Spec) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	_, err := r.client.LeasesService().Create(ctx, leases.WithID(spec.SandboxID), leases.WithLabels(r.labels(spec)))
	if err != nil && !errdefs.IsAlreadyExists(native(err)) {
		return err
	}
	return nil
}

// findImage looks for an image by its name and, as the same content may have another name, by its digest. It fetches none:
// which registries a node trusts, and with what credentials, is its administrator's to set up.
func (r *Runtime) findImage(ctx context.Context, ref string) (client.Image, error) {
	ctx, cancel := r.call(ctx)
	defer cancel()
	name, digest, pinned := strings.Cut(ref, "@")
	var filters []string
	if pinned {
		filters = append(filters, fmt.Sprintf("target.digest==%q", digest))
	} else {
		filters = append(filters, fmt.Sprintf("name==%q", name))
	}
	found, err := r.client.ListImages(ctx, filters...)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 && r.opts.ImagesFrom != "" {
		if err := r.takeImage(ctx, ref, filters); err != nil {
			return nil, fmt.Errorf("taking it from the namespace %s: %w", r.opts.ImagesFrom, err)
		}
		found, err = r.client.ListImages(ctx, filters...)
		if err != nil {
			return nil, err
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%w: containerd does not have it in the namespace %s: ctr -n %s images pull %s", runtime.ErrUnavailable, r.opts.Namespace, r.opts.Namespace, ref)
	}
	return found[0], nil
}

// overlayOptions is how long the options of a mount may be. The kernel takes a page of them.
const overlayOptions = 3500

// inImage calls f with the image mounted at dir, which nobody else sees: the mount is one of the calling thread's own mount
// namespace, and what f clones of it stays when that is gone.
func (i image) inImage(dir string, f func() error) error {
	return hostkernel.InOwnMounts(func() error {
		for _, m := range i.mounts {
			if n := len(strings.Join(m.Options, ",")); n > overlayOptions {
				return fmt.Errorf("%w: the image has too many layers for one mount (%d bytes of options, %d at most): make one of fewer layers, or have containerd's root at a shorter path",
					runtime.ErrUnavailable, n, overlayOptions)
			}
			if err := m.Mount(dir); err != nil {
				return fmt.Errorf("mounting the image: %w", err)
			}
		}
		return f()
	})
}

// imageDir is where a sandbox's own folder has its image while it is mounted.
func imageDir(dir string) string { return filepath.Join(dir, "image") }

// mountForGuest mounts a sandbox's image on the node, for as long as the sandbox is there: what a guest has of the node it is
// given by path, and processes of its shim's open it.
func (r *Runtime) mountForGuest(ctx context.Context, img image, dir string) error {
	if err := img.mountOnNode(dir); err != nil {
		return err
	}
	crashpoint.At("containerd.guest-image-mounted")
	pid, err := r.containerdPid(ctx)
	if err != nil {
		return err
	}
	return sameFolder(dir, fmt.Sprintf("/proc/%d/root", pid))
}

// mountOnNode mounts the image where everybody on the node comes to it. Its set-id programs and its devices never count there,
// not for a moment either: the mount is made where nobody sees it, and gets its place when it is read-only, nosuid and nodev.
func (i image) mountOnNode(dir string) error {
	var tree *os.File
	err := i.inImage(dir, func() error {
		f, err := mounts.OpenSource(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		tree, err = mounts.Clone(f, mounts.Attr{ReadOnly: true, Recursive: true})
		return err
	})
	if err != nil {
		return err
	}
	defer tree.Close()
	place, err := mounts.OpenSource(dir)
	if err != nil {
		return err
	}
	defer place.Close()
	return mounts.Attach(tree, place)
}

// sameFolder refuses a mount at dir that is not there below root, which is how a process of another mount namespace sees the node.
func sameFolder(dir, root string) error {
	ours, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("looking at the image: %w", err)
	}
	theirs, err := os.Stat(filepath.Join(root, dir))
	if err != nil || !os.SameFile(ours, theirs) {
		return errors.Join(fmt.Errorf("%w: containerd does not see what the agent mounts at %s: run the agent in containerd's mount namespace, or let mounts in its state folder "+
			"reach it (in a pod: mountPropagation: Bidirectional)", runtime.ErrUnavailable, dir), err)
	}
	return nil
}

// unmountImage takes a guest's image off the node. That there is none is fine, and that somebody of the node has a file of it
// open: it is gone from the node's folders then, and none of the sandbox's processes is left.
func unmountImage(dir string) error {
	if dir == "" {
		return nil
	}
	if err := mount.UnmountAll(imageDir(dir), unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil {
		return fmt.Errorf("taking the image off %s: %w", imageDir(dir), err)
	}
	return nil
}

// snapshotterLoaded asks the snapshotter for a snapshot that need not be there.
func (r *Runtime) snapshotterLoaded(ctx context.Context, id string) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	_, err := r.client.SnapshotService(r.opts.Snapshotter).Stat(ctx, id)
	if errdefs.IsInvalidArgument(native(err)) {
		return fmt.Errorf("%w: containerd has not loaded the snapshotter (containerd.snapshotter; ctr plugins ls shows those that there are): %w", runtime.ErrUnavailable, err)
	}
	if missing(err) {
		return nil
	}
	return err
}

// dropImage removes a sandbox's view of an image and its lease. That there is none is fine. The snapshotter is only asked
// where there is a lease, which is made before the view: sandboxes without an image need no snapshotter.
func (r *Runtime) dropImage(ctx context.Context, id string) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	ls, err := r.client.LeasesService().List(ctx, fmt.Sprintf("id==%q", id))
	if err != nil {
		return r.failed("looking for the lease", err)
	}
	if len(ls) == 0 {
		return nil
	}
	var how []leases.DeleteOpt
	if err := r.client.SnapshotService(r.opts.Snapshotter).Remove(ctx, id); missing(err) {
		// It was cut short while the image was unpacked. What there is of that may be what fills the disk, and containerd would
		// collect it some time later.
		how = append(how, leases.SynchronousDelete)
	} else if err != nil {
		return r.failed("removing the snapshot", err)
	}
	if err := r.client.LeasesService().Delete(ctx, leases.Lease{ID: id}, how...); err != nil && !missing(err) {
		return r.failed("removing the lease", err)
	}
	return nil
}
