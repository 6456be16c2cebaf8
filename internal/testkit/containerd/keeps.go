package containerd

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/stretchr/testify/require"
)

// Pid is its process's.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// Keeps is what it has of each sandbox, by the sandbox's id: containers, tasks, leases, snapshots that are a sandbox's own,
// shims and their folders.
func (d *Daemon) Keeps() map[string][]string {
	d.T.Helper()
	keeps := map[string][]string{}
	add := func(what, id string) { keeps[id] = append(keeps[id], what) }
	c := d.Client()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cs, err := c.ContainerService().List(ctx)
	require.NoError(d.T, err)
	for _, x := range cs {
		add("container", x.ID)
	}
	ts, err := c.TaskService().List(ctx, &tasks.ListTasksRequest{})
	require.NoError(d.T, err)
	for _, x := range ts.GetTasks() {
		add("task", x.GetID())
	}
	ls, err := c.LeasesService().List(ctx)
	require.NoError(d.T, err)
	for _, x := range ls {
		add("lease", x.ID)
	}
	require.NoError(d.T, c.SnapshotService("").Walk(ctx, func(_ context.Context, s snapshots.Info) error {
		if s.Kind != snapshots.KindCommitted { // those are the images' layers
			add("snapshot", s.Name)
		}
		return nil
	}))
	for _, pid := range d.Shims() {
		line, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		args := strings.Split(string(line), "\x00")
		if i := slices.Index(args, "-id"); i >= 0 && i+1 < len(args) {
			add("shim", args[i+1])
		}
	}
	for _, dir := range []string{filepath.Join(d.dir, "state"), d.root} {
		bundles, _ := filepath.Glob(filepath.Join(dir, "io.containerd.runtime.v2.task", "*", "*"))
		for _, path := range bundles {
			add("folder "+path, filepath.Base(path))
		}
	}
	return keeps
}
