package containerd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// cleanupTime bounds how long a failed start waits for its own remains to go.
const cleanupTime = 30 * time.Second

// rootfsDir is where a sandbox's own folder has the skeleton of its root file system.
func rootfsDir(dir string) string { return filepath.Join(dir, "rootfs") }

// Create starts a sandbox; see runtime.Runtime.
func (r *Runtime) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	if err := r.keeper.Admit(spec); err != nil {
		return nil, err
	}
	// Before anything is made: without containerd it could not be taken away again either.
	if err := r.Reachable(ctx); err != nil {
		return nil, fmt.Errorf("starting sandbox %s: %w", spec.SandboxID, err)
	}
	var sb *Sandbox
	err := r.keeper.Begin(ctx, spec, func(st *hostkernel.Start) (err error) {
		sb, err = r.start(ctx, st)
		return err
	})
	if err != nil {
		return nil, err
	}
	return sb, nil
}

func (r *Runtime) start(ctx context.Context, st *hostkernel.Start) (*Sandbox, error) {
	if r.kind().guest != nil {
		return r.runGuest(ctx, st)
	}
	if err := r.prepare(ctx, st); err != nil {
		return nil, err
	}
	crashpoint.At("containerd.prepared")
	defer hostkernel.KeepWarm(st.Hierarchies)()
	return r.run(ctx, st)
}

// prepare makes everything on the node's side that a container needs.
func (r *Runtime) prepare(ctx context.Context, st *hostkernel.Start) error {
	spec := st.Spec
	if err := hostkernel.MakeDirs(spec); err != nil {
		return err
	}
	if err := r.prepareRoot(ctx, st); err != nil {
		return err
	}
	st.Spec.IDs.CommandHostUID, st.Spec.IDs.CommandHostGID = st.Mounts.Ownership.CommandHostUID, st.Mounts.Ownership.CommandHostGID
	if err := st.Isolate(ctx); err != nil {
		return err
	}
	if err := hostkernel.WriteResolvConf(rootfsDir(spec.Dir), st.Network.ResolvConf); err != nil {
		return err
	}
	hs, err := hostkernel.SlotHierarchies(st.Hierarchies, spec.Resources)
	if err != nil {
		return err
	}
	st.Slots, err = hostkernel.MakeSlots(hs, st.Record.Cgroup, spec.Resources)
	return err
}

// prepareRoot makes the root file system. An image is a folder like any other once it is mounted.
func (r *Runtime) prepareRoot(ctx context.Context, st *hostkernel.Start) error {
	if runtime.KindOfRootfs(st.Spec.Rootfs) != runtime.RootfsImage {
		if err := r.makeRoot(st, st.Spec); err != nil {
			return err
		}
		st.Record.Identity.Provenance = hostkernel.Provenance(st.Spec, st.Mounts.Programs)
		return nil
	}
	img, err := r.viewImage(ctx, st.Spec)
	if err != nil {
		return err
	}
	dir := imageDir(st.Spec.Dir)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	mounted := st.Spec
	mounted.Rootfs = dir
	if err := img.inImage(dir, func() error { return r.makeRoot(st, mounted) }); err != nil {
		return fmt.Errorf("the image %s: %w", st.Spec.Rootfs, err)
	}
	st.Record.Identity.Provenance = hostkernel.Provenance(st.Spec, st.Mounts.Programs)
	st.Record.Identity.Provenance.RootfsDigest = img.digest
	return nil
}

// makeRoot makes the skeleton on disk and clones all mounts.
func (r *Runtime) makeRoot(st *hostkernel.Start, spec runtime.Spec) error {
	skeleton, source, err := hostkernel.PlanRoot(spec)
	if err != nil {
		return err
	}
	skeleton.Warn(r.log, spec.SandboxID)
	if err := makeSkeleton(rootfsDir(spec.Dir), skeleton); err != nil {
		return err
	}
	st.Mounts, err = hostkernel.PrepareMounts(spec, skeleton, source)
	return err
}

// placeholder is where the init's program is. runc looks for it when it creates the container, and executes it when it
// starts it: in between the mount that has it is attached.
const placeholder = runtime.BinPath + "/receiptd"

// makeSkeleton makes the skeleton on disk, with a placeholder.
func makeSkeleton(root string, s hostkernel.Skeleton) error {
	if err := os.Mkdir(root, 0o755); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	if err := hostkernel.MakeSkeleton(root, s); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(root, runtime.BinPath), 0o755); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	if err := os.WriteFile(filepath.Join(root, placeholder), nil, 0o755); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	return nil
}

// dropPlaceholder leaves an empty folder: it is what commands see where receiptd has taken the mount away.
func dropPlaceholder(root string) error {
	if err := os.RemoveAll(filepath.Join(root, runtime.BinPath)); err != nil {
		return fmt.Errorf("removing the placeholder of receiptd: %w", err)
	}
	return nil
}

// run has containerd create the container, completes it while its init waits, and starts it.
func (r *Runtime) run(ctx context.Context, st *hostkernel.Start) (*Sandbox, error) {
	spec, root := st.Spec, rootfsDir(st.Spec.Dir)
	if err := hostkernel.CheckTraversable(root); err != nil {
		return nil, err
	}
	oci := ociSpec(input{
		spec: spec, rootfs: root, cgroup: st.Record.Cgroup, handed: len(st.Slots.Files),
		userns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), st.UserNS.Fd()),
		netns:  st.Network.Path,
		// Never none: the container would inherit the shim's, one above containerd's own. That is -999 on many nodes, and a command
		// may take back what it inherits.
		oomScoreAdj: new(int),
	})
	sb, err := r.createHeld(ctx, st, oci, hostkernel.ViewOf(spec, st.Slots), nil)
	if err != nil {
		return nil, err
	}
	if err := r.launch(ctx, sb, st, root); err != nil {
		_ = sb.Init.Kill()
		sb.Close()
		return nil, fmt.Errorf("%w; receiptd's log ends: %s", err, hostkernel.Tail(receiptdLog(spec.Dir)))
	}
	return sb, nil
}

// createHeld has containerd create the container, and records and watches its init, which waits. out is where its
// output goes, or nil.
func (r *Runtime) createHeld(ctx context.Context, st *hostkernel.Start, oci *specs.Spec, view *receiptdv1.View, out *pipes) (*Sandbox, error) {
	if err := r.createContainer(ctx, st.Spec, oci); err != nil {
		return nil, err
	}
	crashpoint.At("containerd.container-made")
	st.Record.TaskAsked = true
	if err := r.keeper.Records.Write(st.Record); err != nil {
		return nil, err
	}
	pid, err := r.createTask(ctx, st.Spec.SandboxID, out)
	if err != nil {
		return nil, err
	}
	crashpoint.At("containerd.init-waits")
	if err := r.record(ctx, st, pid, view); err != nil {
		return nil, err
	}
	held, err := r.keeper.Hold(st.Record, view, func() {})
	if err != nil {
		return nil, err
	}
	return r.sandbox(held), nil
}

// record keeps the identity of the container's init, which waits.
func (r *Runtime) record(ctx context.Context, st *hostkernel.Start, pid int, view *receiptdv1.View) error {
	if g := r.kind().guest; g != nil && g.found != nil {
		pid, start, err := g.found(ctx, r, st)
		if err != nil {
			return err
		}
		return r.keeper.Found(st, pid, start, view)
	}
	if !slices.Contains(hostkernel.Tree{Dirs: st.Record.Identity.Cgroups}.Pids(), pid) {
		return fmt.Errorf("%w: containerd says that the container's init is process %d, which is not in its cgroup as this agent sees it: "+
			"run the agent in the node's PID namespace and with its cgroup file systems (hostPID)", runtime.ErrUnavailable, pid)
	}
	return r.keeper.Found(st, pid, 0, view)
}

// launch completes the container and starts its init, which then is receiptd.
func (r *Runtime) launch(ctx context.Context, sb *Sandbox, st *hostkernel.Start, root string) error {
	pid := st.Record.Identity.Pid
	limits := hostkernel.Rlimits(hostkernel.HardLimit(unix.RLIMIT_NOFILE, hostkernel.NoFile), hostkernel.HardLimit(unix.RLIMIT_CORE, 0))
	if err := hostkernel.LimitInit(st.Spec.IDs, pid, limits); err != nil {
		return err
	}
	if err := dropPlaceholder(root); err != nil {
		return err
	}
	// The init has changed its root already: it is that of its mount namespace.
	if err := st.Mounts.Attach(pid, "/"); err != nil {
		return err
	}
	crashpoint.At("containerd.mounts-attached")
	if err := r.startTask(ctx, st.Spec.SandboxID); err != nil {
		return err
	}
	crashpoint.At("containerd.started")
	if err := sb.handOver(ctx, st.Slots.Files); err != nil {
		return err
	}
	return sb.awaitReady(ctx)
}
