package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// Name is how configuration and records call this runtime.
const Name = "embedded"

// Options configure the runtime.
type Options struct {
	// StateDir is an existing folder for the runtime's own records; it and its parents must be traversable by everyone
	// (0711). It must lie neither below the folder of the agent's own program nor above it: libcontainer then copies
	// that program into memory at every start (some 15 ms) instead of sealing it in place.
	StateDir string
	// CgroupParent is the cgroup below which sandboxes live in every hierarchy; "/sandbox-agent" by default. It is not
	// the agent's own cgroup, so that sandboxes outlive the agent's unit.
	CgroupParent string
	// Name is how it is called; Name (the constant) by default. Two of them on one node need two StateDirs as well.
	Name string
	Log  *slog.Logger
}

// Runtime hosts sandboxes with libcontainer.
type Runtime struct {
	opts   Options
	log    *slog.Logger
	keeper *hostkernel.Keeper
}

var _ runtime.Runtime = (*Runtime)(nil)

// New makes the runtime. It starts nothing and looks at nothing that is already there.
func New(opts Options) (*Runtime, error) {
	if !filepath.IsAbs(opts.StateDir) {
		return nil, fmt.Errorf("embedded runtime: the state folder %q is not an absolute path", opts.StateDir)
	}
	if opts.CgroupParent == "" {
		opts.CgroupParent = "/sandbox-agent"
	}
	if !filepath.IsAbs(opts.CgroupParent) || filepath.Clean(opts.CgroupParent) != opts.CgroupParent || opts.CgroupParent == "/" {
		return nil, fmt.Errorf("embedded runtime: the cgroup parent %q is not a clean absolute path below the root", opts.CgroupParent)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Name == "" {
		opts.Name = Name
	}
	r := &Runtime{opts: opts, log: opts.Log}
	r.keeper = &hostkernel.Keeper{
		Name: opts.Name, Records: hostkernel.Records(filepath.Join(opts.StateDir, "records")), CgroupParent: opts.CgroupParent,
		Points: "runtime", UndoTime: cleanupTime, Log: opts.Log,
		Parts: func(id string) []string { return []string{filepath.Join(r.containersDir(), id)} },
	}
	for _, dir := range []string{string(r.keeper.Records), r.containersDir(), r.rootMount()} {
		if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("embedded runtime: making its state folder: %w", err)
		}
	}
	forwardLogs(opts.Log)
	openCgroupRoot()
	return r, nil
}

// openCgroupRoot has libcontainer's cgroup package open its folder of hierarchies, which it does once and for good,
// here: on a thread that starts a container it would be that thread's mount namespace's, and useless after it.
func openCgroupRoot() {
	hs, err := hostkernel.Hierarchies()
	if err != nil {
		return
	}
	for _, h := range hs {
		if f, err := cgroups.OpenFile(h.Mount, "cgroup.procs", os.O_RDONLY); err == nil {
			f.Close()
			return
		}
	}
}

// Name answers "embedded", or what Options say.
func (r *Runtime) Name() string { return r.opts.Name }

// Isolation answers runtime.Namespaces: commands run on the node's kernel.
func (r *Runtime) Isolation() runtime.Isolation { return runtime.Namespaces }

// Concessions answers none.
func (r *Runtime) Concessions() []runtime.Concession { return nil }

// TakesRootfs refuses images; see runtime.Runtime.
func (r *Runtime) TakesRootfs(kind runtime.RootfsKind) error { return hostkernel.TakesRootfs(kind) }

// Reachable answers nil: the work is done in this process.
func (r *Runtime) Reachable(context.Context) error { return nil }

func (r *Runtime) containersDir() string { return filepath.Join(r.opts.StateDir, "containers") }

// rootMount is where each container's root is mounted, in the mount namespace of the thread that starts it.
func (r *Runtime) rootMount() string { return filepath.Join(r.opts.StateDir, "root") }

// Check says whether this node can host sandboxes; see runtime.Runtime.
func (r *Runtime) Check(context.Context) error { return hostkernel.Check() }

// Create starts a sandbox; see runtime.Runtime.
func (r *Runtime) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	if err := r.keeper.Admit(spec); err != nil {
		return nil, err
	}
	var sb Sandbox
	err := r.keeper.Begin(ctx, spec, func(st *hostkernel.Start) (err error) {
		sb, err = r.start(ctx, &start{Start: st})
		return err
	})
	if err != nil {
		return nil, err
	}
	return sb, nil
}

// cleanupTime bounds how long a failed start waits for its own remains to go.
const cleanupTime = 10 * time.Second

// start is one start, and what is planned for it.
type start struct {
	*hostkernel.Start
	skeleton hostkernel.Skeleton
}

func (r *Runtime) start(ctx context.Context, st *start) (Sandbox, error) {
	defer hostkernel.KeepWarm(st.Hierarchies)()
	if err := st.prepare(ctx); err != nil {
		return Sandbox{}, err
	}
	crashpoint.At("runtime.prepared")
	st.skeleton.Warn(r.log, st.Spec.SandboxID)
	return r.run(ctx, st)
}

// prepare makes everything that a container needs, in parallel: the bind mounts and the user namespace on one side, the
// cgroups on the other, and the first cgroup migration of a while, which waits for an RCU grace period (about 16 ms).
func (s *start) prepare(ctx context.Context) error {
	var wg sync.WaitGroup
	var mountErr, cgroupErr error
	wg.Go(func() {
		if mountErr = s.prepareRoot(); mountErr == nil {
			crashpoint.At("runtime.mounts-made")
			mountErr = s.Isolate(ctx) // the mounts decide which host id a command gets
			s.skeleton.Resolve(s.Network.ResolvConf)
		}
	})
	wg.Go(func() {
		var hs []hostkernel.Hierarchy
		if hs, cgroupErr = hostkernel.SlotHierarchies(s.Hierarchies, s.Spec.Resources); cgroupErr == nil {
			s.Slots, cgroupErr = hostkernel.MakeSlots(hs, s.Record.Cgroup, s.Spec.Resources)
			crashpoint.At("runtime.cgroups-made")
		}
	})
	wg.Wait()
	return errors.Join(mountErr, cgroupErr)
}

func (s *start) prepareRoot() error {
	spec := s.Spec
	sk, source, err := hostkernel.PlanRoot(spec)
	if err != nil {
		return err
	}
	if err := hostkernel.MakeDirs(spec); err != nil {
		return err
	}
	s.skeleton = sk
	if s.Mounts, err = hostkernel.PrepareMounts(spec, sk, source); err != nil {
		return err
	}
	s.Spec.IDs.CommandHostUID, s.Spec.IDs.CommandHostGID = s.Mounts.Ownership.CommandHostUID, s.Mounts.Ownership.CommandHostGID
	return nil
}

// run starts the container and waits until receiptd listens.
func (r *Runtime) run(ctx context.Context, st *start) (_ Sandbox, err error) {
	spec, rootfs := st.Spec, r.rootMount()
	if err := hostkernel.CheckTraversable(rootfs); err != nil {
		return Sandbox{}, err
	}
	cfg := containerConfig(spec, rootfs, st.Record.Cgroup, func(s *specs.State) error {
		limits := hostkernel.Rlimits(hostkernel.HardLimit(unix.RLIMIT_NOFILE, hostkernel.NoFile), hostkernel.HardLimit(unix.RLIMIT_CORE, 0))
		crashpoint.At("runtime.init-waits")
		err := errors.Join(hostkernel.LimitInit(spec.IDs, s.Pid, limits), st.Mounts.Attach(s.Pid, rootfs))
		crashpoint.At("runtime.mounts-attached")
		return err
	})
	cfg.OomScoreAdj = hostkernel.OomScoreAdj(hostkernel.OwnOOMScoreAdj())
	joinNetwork(cfg, st.Network.Path)
	cfg.Namespaces.Add(configs.NEWUSER, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), st.UserNS.Fd()))
	tree := hostkernel.Tree{Dirs: st.Record.Identity.Cgroups}
	abort := abortOn(ctx, tree)
	var process *libcontainer.Process
	var ready *os.File
	err = hostkernel.InOwnMounts(func() error {
		if err := hostkernel.MountSkeleton(rootfs, st.skeleton); err != nil {
			return err
		}
		container, err := libcontainer.Create(r.containersDir(), spec.SandboxID, cfg)
		if err != nil {
			return fmt.Errorf("making the container: %w", err)
		}
		crashpoint.At("runtime.container-made")
		if process, ready, err = startReceiptd(ctx, container, st); err != nil {
			reapStages(tree)
		}
		return err
	})
	abort.end()
	if err != nil {
		return Sandbox{}, err
	}
	defer ready.Close()
	crashpoint.At("runtime.started")
	st.Record.Identity.Provenance = hostkernel.Provenance(spec, st.Mounts.Programs)
	sb, err := r.adopt(process, st.Start, hostkernel.ViewOf(spec, st.Slots))
	if err != nil {
		// Without a watcher nobody else reaps it. It may have ended by itself already.
		_ = process.Signal(unix.SIGKILL)
		_, _ = process.Wait()
		return Sandbox{}, fmt.Errorf("%w; receiptd's log ends: %s", err, hostkernel.Tail(hostkernel.LogPath(spec.Dir)))
	}
	crashpoint.At("runtime.adopted")
	if err := hostkernel.AwaitReady(ctx, ready); err != nil {
		_ = sb.Init.Kill()
		<-sb.Init.Exited()
		sb.Close()
		return Sandbox{}, fmt.Errorf("%w; its log ends: %s", err, hostkernel.Tail(hostkernel.LogPath(spec.Dir)))
	}
	return sb, nil
}

// aborter ends a start that hangs: from the end of its context on it kills whatever is in the sandbox's cgroups.
type aborter struct {
	tree hostkernel.Tree
	stop func() bool
	quit chan struct{}
	done chan struct{}
}

func abortOn(ctx context.Context, t hostkernel.Tree) *aborter {
	a := &aborter{tree: t, quit: make(chan struct{}), done: make(chan struct{})}
	a.stop = context.AfterFunc(ctx, a.kill)
	return a
}

func (a *aborter) kill() {
	defer close(a.done)
	for {
		a.tree.Kill()
		select {
		case <-a.quit:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// end is called once libcontainer has returned and waits for nothing of its own any more.
func (a *aborter) end() {
	close(a.quit)
	if !a.stop() {
		<-a.done
	}
}

// reapStages ends and reaps what a failed start has left of the stages of runc's init, which are all children of the
// calling thread (CLONE_PARENT). libcontainer does not know the later ones before they tell it, and then nobody waits
// for them. It gives up after cleanupTime: a process in uninterruptible sleep can't be waited for.
func reapStages(t hostkernel.Tree) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	for ctx.Err() == nil {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG|unix.WNOTHREAD|unix.WALL, nil)
		switch {
		case errors.Is(err, unix.ECHILD):
			return
		case err == nil && pid == 0:
			t.Kill()
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
		}
	}
}

// startReceiptd starts the container's init; ready is the read end of its standard output.
func startReceiptd(ctx context.Context, container *libcontainer.Container, st *start) (_ *libcontainer.Process, ready *os.File, err error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("opening receiptd's standard input: %w", err)
	}
	defer null.Close()
	log, err := os.OpenFile(hostkernel.LogPath(st.Spec.Dir), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("opening receiptd's log: %w", err)
	}
	defer log.Close()
	ready, out, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("opening receiptd's standard output: %w", err)
	}
	defer out.Close()
	process := &libcontainer.Process{
		Args: []string{runtime.BinPath + "/receiptd"}, Cwd: "/", Init: true,
		// libcontainer adds a HOME of its own when there is none.
		Env:   []string{"HOME=/"},
		Stdin: null, Stdout: out, Stderr: log, ExtraFiles: st.Slots.Files,
	}
	if err := container.Run(process); err != nil {
		ready.Close()
		return nil, nil, fmt.Errorf("starting receiptd: %w", errors.Join(err, ctx.Err()))
	}
	return process, ready, nil
}

// adopt records the identity of the started container and watches its init.
func (r *Runtime) adopt(process *libcontainer.Process, st *hostkernel.Start, view *receiptdv1.View) (Sandbox, error) {
	// It is this process's child and not reaped yet: its pid can't have been taken by another.
	pid, err := process.Pid()
	if err != nil {
		return Sandbox{}, fmt.Errorf("finding receiptd: %w", err)
	}
	if err := r.keeper.Found(st, pid, 0, view); err != nil {
		return Sandbox{}, err
	}
	held, err := r.keeper.Hold(st.Record, view, func() { _, _ = process.Wait() })
	return Sandbox{held}, err
}

var forwardOnce sync.Once

// forwardLogs sends libcontainer's own messages to the agent's log.
func forwardLogs(log *slog.Logger) {
	forwardOnce.Do(func() {
		logrus.SetOutput(io.Discard)
		logrus.AddHook(logHook{log})
	})
}

type logHook struct{ log *slog.Logger }

func (logHook) Levels() []logrus.Level { return []logrus.Level{logrus.ErrorLevel, logrus.WarnLevel} }

func (h logHook) Fire(e *logrus.Entry) error {
	if strings.HasPrefix(e.Message, "cannot serialize hook") {
		return nil // ours is a function, and only needed at the start
	}
	h.log.Warn("libcontainer: " + e.Message)
	return nil
}
