package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

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
	if err := hostkernel.CheckSpec(spec); err != nil {
		return nil, err
	}
	if err := r.hosts(); err != nil {
		return nil, fmt.Errorf("starting sandbox %s: %w", spec.SandboxID, err)
	}
	if spec.Network != "none" {
		return nil, fmt.Errorf("starting sandbox %s: %w: the runtime %q has the network mode \"none\" only, not %q",
			spec.SandboxID, runtime.ErrUnavailable, r.opts.Name, spec.Network)
	}
	if _, err := r.records().Read(spec.SandboxID); !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("starting sandbox %s: %w: there is one with this id", spec.SandboxID, os.ErrExist)
	}
	// Before anything is made: without containerd it could not be taken away again either.
	if err := r.Reachable(ctx); err != nil {
		return nil, fmt.Errorf("starting sandbox %s: %w", spec.SandboxID, err)
	}
	s, err := r.create(ctx, spec)
	if err == nil {
		return s, nil
	}
	err = fmt.Errorf("starting sandbox %s: %w", spec.SandboxID, err)
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if _, cleanErr := r.Remove(clean, runtime.Identity{SandboxID: spec.SandboxID, Dir: spec.Dir}); cleanErr != nil {
		err = errors.Join(err, cleanErr)
	}
	return nil, err
}

// start is everything of one start that has to be let go of, whatever comes of it.
type start struct {
	spec   runtime.Spec
	rec    hostkernel.Record
	mounts *hostkernel.BindMounts
	slots  *hostkernel.Slots
	userns *os.File
}

func (s *start) Close() {
	if s.mounts != nil {
		s.mounts.Close()
	}
	if s.slots != nil {
		s.slots.Close()
	}
	if s.userns != nil {
		s.userns.Close()
	}
}

func (r *Runtime) create(ctx context.Context, spec runtime.Spec) (*Sandbox, error) {
	all, err := hostkernel.Hierarchies()
	if err != nil {
		return nil, err
	}
	boot, err := hostkernel.BootID()
	if err != nil {
		return nil, err
	}
	st := &start{spec: spec, rec: hostkernel.Record{Cgroup: r.cgroup(spec.SandboxID), Identity: runtime.Identity{
		Runtime: r.opts.Name, SandboxID: spec.SandboxID, ContainerID: spec.SandboxID, BootID: boot, Dir: spec.Dir,
		Cgroups: hostkernel.TreeOf(all, r.cgroup(spec.SandboxID)).Dirs,
	}}}
	defer st.Close()
	if err := r.records().Write(st.rec); err != nil {
		return nil, err
	}
	crashpoint.At("containerd.announced")
	if err := r.prepare(ctx, st, all); err != nil {
		return nil, err
	}
	crashpoint.At("containerd.prepared")
	defer hostkernel.KeepWarm(all)()
	return r.run(ctx, st)
}

// prepare makes everything on the node's side that a container needs.
func (r *Runtime) prepare(ctx context.Context, st *start, all []hostkernel.Hierarchy) error {
	spec := st.spec
	if err := hostkernel.MakeDirs(spec); err != nil {
		return err
	}
	if err := r.prepareRoot(ctx, st); err != nil {
		return err
	}
	st.spec.IDs.CommandHostUID, st.spec.IDs.CommandHostGID = st.mounts.Ownership.CommandHostUID, st.mounts.Ownership.CommandHostGID
	var err error
	if st.userns, err = hostkernel.OwnUserNamespace(st.spec.IDs, spec.Pid1); err != nil {
		return err
	}
	hs, err := hostkernel.SlotHierarchies(all, spec.Resources)
	if err != nil {
		return err
	}
	st.slots, err = hostkernel.MakeSlots(hs, st.rec.Cgroup, spec.Resources)
	return err
}

// prepareRoot makes the root file system. An image is a folder like any other once it is mounted.
func (r *Runtime) prepareRoot(ctx context.Context, st *start) error {
	if runtime.KindOfRootfs(st.spec.Rootfs) != runtime.RootfsImage {
		if err := r.makeRoot(st, st.spec); err != nil {
			return err
		}
		st.rec.Identity.Provenance = hostkernel.Provenance(st.spec, st.mounts.Programs)
		return nil
	}
	img, err := r.viewImage(ctx, st.spec)
	if err != nil {
		return err
	}
	dir := filepath.Join(st.spec.Dir, "image")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	mounted := st.spec
	mounted.Rootfs = dir
	if err := img.inImage(dir, func() error { return r.makeRoot(st, mounted) }); err != nil {
		return fmt.Errorf("the image %s: %w", st.spec.Rootfs, err)
	}
	st.rec.Identity.Provenance = hostkernel.Provenance(st.spec, st.mounts.Programs)
	st.rec.Identity.Provenance.RootfsDigest = img.digest
	return nil
}

// makeRoot makes the skeleton on disk and clones all mounts.
func (r *Runtime) makeRoot(st *start, spec runtime.Spec) error {
	skeleton, source, err := hostkernel.PlanRoot(spec)
	if err != nil {
		return err
	}
	if len(skeleton.Shadowed) > 0 {
		r.log.Warn("the workspace covers folders of the root file system", "sandbox", spec.SandboxID, "folders", skeleton.Shadowed)
	}
	if err := makeSkeleton(rootfsDir(spec.Dir), skeleton); err != nil {
		return err
	}
	st.mounts, err = hostkernel.PrepareMounts(spec, skeleton, source)
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
func (r *Runtime) run(ctx context.Context, st *start) (*Sandbox, error) {
	spec, root := st.spec, rootfsDir(st.spec.Dir)
	if err := hostkernel.CheckTraversable(root); err != nil {
		return nil, err
	}
	oci := ociSpec(input{
		spec: spec, rootfs: root, cgroup: st.rec.Cgroup, handed: len(st.slots.Files),
		userns:      fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), st.userns.Fd()),
		oomScoreAdj: hostkernel.OomScoreAdj(hostkernel.OwnOOMScoreAdj()),
	})
	if err := r.createContainer(ctx, spec, oci); err != nil {
		return nil, err
	}
	crashpoint.At("containerd.container-made")
	st.rec.TaskAsked = true
	if err := r.records().Write(st.rec); err != nil {
		return nil, err
	}
	pid, err := r.createTask(ctx, spec.SandboxID)
	if err != nil {
		return nil, err
	}
	crashpoint.At("containerd.init-waits")
	view := hostkernel.ViewOf(spec, st.slots)
	if err := r.record(st, pid, view); err != nil {
		return nil, err
	}
	sb, err := r.watch(st.rec, view)
	if err != nil {
		return nil, err
	}
	if err := r.launch(ctx, sb, st, root); err != nil {
		_ = sb.init.Kill()
		sb.Close()
		return nil, fmt.Errorf("%w; receiptd's log ends: %s", err, hostkernel.Tail(receiptdLog(spec.Dir)))
	}
	return sb, nil
}

// record keeps the identity of the container's init, which waits.
func (r *Runtime) record(st *start, pid int, view *receiptdv1.View) error {
	id := &st.rec.Identity
	if !slices.Contains(hostkernel.Tree{Dirs: id.Cgroups}.Pids(), pid) {
		return fmt.Errorf("%w: containerd says that the container's init is process %d, which is not in its cgroup as this agent sees it: "+
			"run the agent in the node's PID namespace and with its cgroup file systems (hostPID)", runtime.ErrUnavailable, pid)
	}
	start, _, err := hostkernel.ProcStat(pid)
	if err != nil {
		return fmt.Errorf("finding the container's init: %w", err)
	}
	id.Pid, id.StartTime, id.StartedAt = pid, start, time.Now().UTC()
	if st.rec.View, err = protojson.Marshal(view); err != nil {
		return fmt.Errorf("recording the view: %w", err)
	}
	return r.records().Write(st.rec)
}

// launch completes the container and starts its init, which then is receiptd.
func (r *Runtime) launch(ctx context.Context, sb *Sandbox, st *start, root string) error {
	pid := st.rec.Identity.Pid
	limits := hostkernel.Rlimits(hostkernel.HardLimit(unix.RLIMIT_NOFILE, hostkernel.NoFile), hostkernel.HardLimit(unix.RLIMIT_CORE, 0))
	if err := hostkernel.LimitInit(st.spec.IDs, pid, limits); err != nil {
		return err
	}
	if err := dropPlaceholder(root); err != nil {
		return err
	}
	// The init has changed its root already: it is that of its mount namespace.
	if err := st.mounts.Attach(pid, "/"); err != nil {
		return err
	}
	crashpoint.At("containerd.mounts-attached")
	if err := r.startTask(ctx, st.spec.SandboxID); err != nil {
		return err
	}
	crashpoint.At("containerd.started")
	if err := sb.handOver(ctx, st.slots.Files); err != nil {
		return err
	}
	return sb.awaitReady(ctx)
}
