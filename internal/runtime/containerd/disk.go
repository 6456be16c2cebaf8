package containerd

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/defaults"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// withoutRoom says whether containerd had no room for what it was asked to keep. Its errors are text.
func withoutRoom(err error) bool {
	return strings.Contains(err.Error(), unix.ENOSPC.Error()) || strings.Contains(err.Error(), unix.EDQUOT.Error())
}

// full names the disk that is full, and the remedy.
func (r *Runtime) full(err error) error {
	return fmt.Errorf("%w: the disk of containerd's snapshotter is full (%s): remove images that nobody needs (ctr -n %s images ls, images rm), or enlarge it: %w",
		runtime.ErrUnavailable, r.snapshotterRoot(), r.opts.Namespace, err)
}

// snapshotterRoot is the folder that the snapshotter keeps file systems in, as containerd says.
func (r *Runtime) snapshotterRoot() string {
	ctx, cancel := r.call(context.Background())
	defer cancel()
	name := r.opts.Snapshotter
	if name == "" {
		name = defaults.DefaultSnapshotter
	}
	res, err := r.client.IntrospectionService().Plugins(ctx, fmt.Sprintf("type==io.containerd.snapshotter.v1,id==%q", name))
	if err == nil {
		for _, p := range res.GetPlugins() {
			if root := p.GetExports()["root"]; root != "" {
				return root
			}
		}
	}
	return "its folder is the \"root\" of containerd's configuration"
}
