package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/provenance"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// guest is what is particular to the kernel that a sandbox has for itself, where it is not the node's.
type guest struct {
	// annotations are the container's: what its shim needs and no more.
	annotations map[string]string
	// capabilities are receiptd's beyond hostkernel.Capabilities, each for a reason.
	capabilities []string
	// before, unless nil, is done before anything is made; an error wraps runtime.ErrUnavailable.
	before func(ctx context.Context, r *Runtime) error
	// change, unless nil, completes the spec.
	change func(r *Runtime, oci *specs.Spec, in input) error
	// found, unless nil, is which process of the node ends with the guest, where a task's pid doesn't tell; it completes the
	// record.
	found func(ctx context.Context, r *Runtime, st *hostkernel.Start) (pid int, startTime uint64, err error)
}

// runGuest starts a sandbox with a kernel of its own. Nothing can be attached to it from the node: every mount is in its
// spec, and receiptd is reached by processes that containerd starts in the container.
func (r *Runtime) runGuest(ctx context.Context, st *hostkernel.Start) (*Sandbox, error) {
	if before := r.kind().guest.before; before != nil {
		if err := before(ctx, r); err != nil {
			return nil, err
		}
	}
	oci, err := r.prepareGuest(ctx, st)
	if err != nil {
		return nil, err
	}
	crashpoint.At("containerd.prepared")
	ready, err := newPipes(filepath.Join(st.Spec.Dir, "ready"))
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	view := hostkernel.ViewOf(st.Spec, &hostkernel.Slots{})
	sb, err := r.createHeld(ctx, st, oci, view, ready)
	if err != nil {
		return nil, err
	}
	if err := r.launchGuest(ctx, sb, st, ready); err != nil {
		_ = sb.Init.Kill()
		sb.Close()
		return nil, fmt.Errorf("%w; receiptd said %q, and its log ends: %s", err, ready.said(), hostkernel.Tail(receiptdLog(st.Spec.Dir)))
	}
	return sb, nil
}

// launchGuest starts the container's init and waits until it says that it listens.
func (r *Runtime) launchGuest(ctx context.Context, sb *Sandbox, st *hostkernel.Start, ready *pipes) error {
	if err := r.startTask(ctx, st.Spec.SandboxID); err != nil {
		return err
	}
	crashpoint.At("containerd.started")
	if err := sb.awaitReadyLine(ctx, ready.out); err != nil {
		return err
	}
	if len(st.Spec.Grants) == 0 {
		return nil
	}
	return sb.giveGrants(ctx, st.Spec)
}

// prepareGuest makes what the spec names on the node.
func (r *Runtime) prepareGuest(ctx context.Context, st *hostkernel.Start) (*specs.Spec, error) {
	spec := &st.Spec
	if err := hostkernel.MakeDirs(*spec); err != nil {
		return nil, err
	}
	skeleton, source, digest, err := r.planGuestRoot(ctx, *spec)
	if err != nil {
		return nil, err
	}
	// No id mapping of a mount reaches into another kernel: there the command is the worktree's owner on disk.
	if spec.Workspace.OwnerUID == 0 || spec.Workspace.OwnerGID == 0 {
		return nil, fmt.Errorf("%w: %q is root's, and under %s commands run as a worktree's owner, which can't be root: give it to an ordinary user (chown -R), or name another runtime",
			mounts.ErrWorkspace, spec.Workspace.Worktree, r.opts.Name)
	}
	owner, err := mounts.DecideOwnership(spec.Workspace, false)
	if err != nil {
		return nil, err
	}
	spec.IDs.CommandHostUID, spec.IDs.CommandHostGID = owner.CommandHostUID, owner.CommandHostGID
	if err := checkSources(spec.Workspace); err != nil {
		return nil, err
	}
	root := rootfsDir(spec.Dir)
	if err := makeGuestRoot(root, skeleton, *spec); err != nil {
		return nil, err
	}
	if err := hostkernel.CheckTraversable(root); err != nil {
		return nil, err
	}
	skeleton.Warn(r.log, spec.SandboxID)
	if err := makeReceiptdsOwn(*spec); err != nil {
		return nil, err
	}
	if err := makeEmptyFolders(*spec); err != nil {
		return nil, err
	}
	if err := connectGuest(ctx, st, root); err != nil {
		return nil, err
	}
	programs, err := hashPrograms(*spec)
	if err != nil {
		return nil, err
	}
	st.Record.Identity.Provenance = hostkernel.Provenance(*spec, programs)
	st.Record.Identity.Provenance.RootfsDigest = digest
	return r.guestSpec(r.kind().guest, input{
		spec: *spec, rootfs: root, cgroup: st.Record.Cgroup, netns: st.Network.Path, oomScoreAdj: hostkernel.OomScoreAdj(hostkernel.OwnOOMScoreAdj()),
	}, source, skeleton.BindPaths())
}

// planGuestRoot is hostkernel.PlanRoot, which takes an image for the folder that it is mounted at; digest is the image's, or empty.
func (r *Runtime) planGuestRoot(ctx context.Context, spec runtime.Spec) (s hostkernel.Skeleton, source, digest string, err error) {
	if runtime.KindOfRootfs(spec.Rootfs) != runtime.RootfsImage {
		s, source, err = hostkernel.PlanRoot(spec)
		return s, source, "", err
	}
	img, err := r.viewImage(ctx, spec)
	if err != nil {
		return s, "", "", err
	}
	dir := imageDir(spec.Dir)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return s, "", "", fmt.Errorf("making the root file system: %w", err)
	}
	mounted := spec
	mounted.Rootfs = dir
	if err = r.mountForGuest(ctx, img, dir); err == nil {
		s, source, err = hostkernel.PlanRoot(mounted)
	}
	if err != nil {
		return s, "", "", fmt.Errorf("the image %s: %w", spec.Rootfs, err)
	}
	return s, source, img.digest, nil
}

// connectGuest makes the network namespace that the guest's network is taken from, unless it has none.
func connectGuest(ctx context.Context, st *hostkernel.Start, root string) error {
	if st.Spec.Connect == nil {
		return nil
	}
	ns, err := hostkernel.NewNetwork()
	if err != nil {
		return err
	}
	defer ns.Close()
	if st.Network, err = st.Spec.Connect(ctx, ns); err != nil {
		return err
	}
	return hostkernel.WriteResolvConf(root, st.Network.ResolvConf)
}

// checkSources refuses a workspace of which a mount's source is not what the plan says: a symbolic link, or of another kind.
// Nothing of the workspace runs now, so that it is the same when the shim looks.
func checkSources(p mounts.Plan) error {
	opened, err := mounts.Open(p)
	if err != nil {
		return err
	}
	return opened.Close()
}

// makeGuestRoot makes the skeleton on disk, with a mount point for each of the spec's mounts: the shim makes none in it.
func makeGuestRoot(root string, s hostkernel.Skeleton, spec runtime.Spec) error {
	if err := os.Mkdir(root, 0o755); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	if err := hostkernel.MakeSkeleton(root, s); err != nil {
		return err
	}
	for _, dir := range []string{runtime.ReceiptsPath, runtime.ControlPath, runtime.BinPath} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			return fmt.Errorf("making the root file system: %w", err)
		}
	}
	for _, file := range []string{runtime.ControlPath + "/" + logName, runtime.ControlPath + "/" + oomName, runtime.BinPath + "/receiptd", runtime.BinPath + "/pid1"} {
		if err := os.WriteFile(filepath.Join(root, file), nil, 0o644); err != nil {
			return fmt.Errorf("making the root file system: %w", err)
		}
	}
	return closeToCommands(filepath.Join(root, runtime.InternalDir), spec.IDs)
}

// closeToCommands gives the folder of those mount points to receiptd alone: it is what commands see where receiptd has taken
// the mounts away.
func closeToCommands(dir string, ids runtime.IDs) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	defer f.Close()
	if err := errors.Join(f.Chown(int(ids.HostBase), int(ids.HostBase)), f.Chmod(0o700)); err != nil {
		return fmt.Errorf("making the root file system: %w", err)
	}
	return nil
}

// emptyFolder is where a sandbox's own folder has what stands for mount i of the workspace, which is empty.
func emptyFolder(dir string, i int) string { return filepath.Join(dir, fmt.Sprintf("empty-%d", i)) }

// makeEmptyFolders makes them, on disk and with the mount points for the workspace's mounts in them: a shim mounts from the
// node's side too, and would make the mount points there.
func makeEmptyFolders(spec runtime.Spec) error {
	for i, m := range spec.Workspace.Mounts {
		if !m.Empty {
			continue
		}
		for _, in := range spec.Workspace.Mounts {
			name := ""
			if filepath.Dir(in.Target) == m.Target {
				name = filepath.Base(in.Target)
			}
			if err := os.MkdirAll(filepath.Join(emptyFolder(spec.Dir, i), name), 0o755); err != nil {
				return fmt.Errorf("making an empty folder for %q: %w", m.Target, err)
			}
		}
	}
	return nil
}

// makeReceiptdsOwn makes what receiptd alone has on the node, and gives it to receiptd's host uid.
func makeReceiptdsOwn(spec runtime.Spec) error {
	log, err := os.OpenFile(receiptdLog(spec.Dir), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("making receiptd's log: %w", err)
	}
	defer log.Close()
	receipts, err := os.Open(spec.ReceiptsDir)
	if err != nil {
		return fmt.Errorf("opening the receipts folder: %w", err)
	}
	defer receipts.Close()
	for _, f := range []*os.File{receipts, log} {
		if err := f.Chown(int(spec.IDs.HostBase), int(spec.IDs.HostBase)); err != nil {
			return fmt.Errorf("giving a file to receiptd: %w", err)
		}
	}
	return nil
}

func hashPrograms(spec runtime.Spec) (p hostkernel.Programs, err error) {
	if p.Receiptd, err = provenance.ProgramAt("receiptd", spec.Receiptd, spec.ReceiptdSHA256); err != nil {
		return p, err
	}
	p.Pid1, err = provenance.ProgramAt("pid1", spec.Pid1, spec.Pid1SHA256)
	return p, err
}

// guestSpec is ociSpec with everything in it that hostkernel attaches for runc. source is where the root file system's binds
// come from.
func (r *Runtime) guestSpec(g *guest, in input, source string, binds []string) (*specs.Spec, error) {
	s := ociSpec(in)
	ids := in.spec.IDs
	s.Linux.UIDMappings = hostkernel.IDMap(ids.HostBase, ids.Size, ids.CommandUID, ids.CommandHostUID)
	s.Linux.GIDMappings = hostkernel.IDMap(ids.HostBase, ids.Size, ids.CommandGID, ids.CommandHostGID)
	s.Annotations = g.annotations
	all := slices.Concat(hostkernel.Capabilities, g.capabilities)
	s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
	s.Mounts = append(guestFileSystems(in.spec), guestBinds(in.spec, source, binds)...)
	if g.change != nil {
		if err := g.change(r, s, in); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func tmpfsMount(target, data string, more ...string) specs.Mount {
	return specs.Mount{
		Source: "tmpfs", Destination: target, Type: "tmpfs", Options: append(append([]string{"nosuid", "nodev"}, more...), strings.Split(data, ",")...),
	}
}

// guestFileSystems are those in memory. receiptd's own folder holds only mount points; its socket is in the guest alone.
func guestFileSystems(spec runtime.Spec) []specs.Mount {
	shm, tmp, home := hostkernel.SmallFileSystems(spec.Resources)
	out := []specs.Mount{
		{Source: "proc", Destination: "/proc", Type: "proc", Options: []string{"nosuid", "nodev", "noexec"}},
		tmpfsMount("/dev/shm", shm, "noexec"),
		tmpfsMount("/tmp", tmp),
		tmpfsMount(runtime.HomePath, fmt.Sprintf("%s,uid=%d,gid=%d", home, spec.IDs.CommandUID, spec.IDs.CommandGID)),
		tmpfsMount(runtime.InternalDir, "mode=0700,size=64k,nr_inodes=16", "noexec"),
		tmpfsMount(runtime.ControlPath, "mode=0700,size=64k,nr_inodes=16", "noexec"),
	}
	if len(spec.Grants) > 0 {
		out = append(out, grantsMount(spec.Grants))
	}
	return out
}

// guestBinds are one for each part of the root file system, for receiptd's own files, and for each mount and each seal of the
// workspace.
func guestBinds(spec runtime.Spec, source string, binds []string) []specs.Mount {
	var out []specs.Mount
	bind := func(from, to string, options ...string) {
		out = append(out, specs.Mount{Source: from, Destination: to, Type: "bind", Options: append([]string{"nosuid", "nodev", "rprivate"}, options...)})
	}
	for _, p := range binds {
		bind(filepath.Join(source, p), p, "rbind", "ro")
	}
	bind(spec.ReceiptsDir, runtime.ReceiptsPath, "bind", "rw", "noexec")
	bind(receiptdLog(spec.Dir), runtime.ControlPath+"/"+logName, "bind", "rw", "noexec")
	bind(spec.Receiptd, runtime.BinPath+"/receiptd", "bind", "ro")
	bind(spec.Pid1, runtime.BinPath+"/pid1", "bind", "ro")
	for i, m := range spec.Workspace.Mounts {
		switch {
		case m.Empty:
			bind(emptyFolder(spec.Dir, i), m.Target, "bind", "ro", "noexec")
		case m.ReadOnly:
			bind(m.Source, m.Target, "bind", "ro")
		default:
			bind(m.Source, m.Target, "bind", "rw")
		}
	}
	return out
}
