package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// Sandbox is a running container.
type Sandbox struct {
	r    *Runtime
	rec  hostkernel.Record
	view *receiptdv1.View
	init *hostkernel.Init
	// stopping lets one Stop run at a time.
	stopping chan struct{}
	// attaching lets one Dial run at a time; attached are the ends of the attach processes that are still awaited.
	attaching sync.Mutex
	attached  sync.WaitGroup
	// closing ends when the sandbox is let go of, and its attach processes with it.
	closing context.Context
	letGo   context.CancelFunc
}

var _ runtime.Sandbox = (*Sandbox)(nil)

// watch watches the recorded init; see hostkernel.WatchInit. It is the shim's child, which reaps it.
func (r *Runtime) watch(rec hostkernel.Record, view *receiptdv1.View) (*Sandbox, error) {
	init, err := hostkernel.WatchInit(rec.Identity, func() {})
	if err != nil {
		return nil, err
	}
	s := &Sandbox{r: r, rec: rec, view: view, init: init, stopping: make(chan struct{}, 1)}
	s.closing, s.letGo = context.WithCancel(context.Background())
	return s, nil
}

// Identity names the container.
func (s *Sandbox) Identity() runtime.Identity { return s.rec.Identity }

// View is a copy of what receiptd is told.
func (s *Sandbox) View() *receiptdv1.View { return proto.Clone(s.view).(*receiptdv1.View) }

// Exited is closed when the init has been seen to end, and stays open after Close.
func (s *Sandbox) Exited() <-chan struct{} { return s.init.Exited() }

// Dial connects to receiptd, over its socket or over an attach process. An attach of an earlier Dial is ended first: receiptd
// gives its connection up as soon as the new one is initialised, and a container runtime tells nobody that the other end of
// a stream is gone.
func (s *Sandbox) Dial(ctx context.Context) (net.Conn, error) {
	var conn net.Conn
	var err error
	if s.r.opts.Transport == Attach {
		conn, err = s.attach(ctx)
	} else {
		conn, err = s.dialSocket(ctx, runtime.SocketName)
	}
	if err != nil {
		return nil, fmt.Errorf("dialling the receiptd of sandbox %s: %w", s.rec.Identity.SandboxID, err)
	}
	return conn, nil
}

// Close lets go of the sandbox without stopping it.
func (s *Sandbox) Close() error {
	s.letGo()
	err := s.init.Close()
	s.attached.Wait()
	return err
}

// Stop kills everything of the sandbox and answers once it is gone; see runtime.Sandbox.
func (s *Sandbox) Stop(ctx context.Context) (runtime.Evidence, error) {
	if err := s.lock(ctx); err != nil {
		return runtime.Evidence{}, err
	}
	defer func() { <-s.stopping }()
	ev := hostkernel.NewEvidence(s.rec.Identity)
	if err := s.end(ctx, ev); err != nil {
		return ev.Evidence, err
	}
	if err := s.r.sweep(ctx, s.rec, ev); err != nil {
		return ev.Evidence, err
	}
	return ev.Completed(), s.Close()
}

// lock waits for another Stop to return. Without one it never fails: also a context that has ended gets its try.
func (s *Sandbox) lock(ctx context.Context) error {
	select {
	case s.stopping <- struct{}{}:
		return nil
	default:
	}
	select {
	case s.stopping <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stopping sandbox %s: %w: it is being stopped already: %w", s.rec.Identity.SandboxID, runtime.ErrNoEvidence, ctx.Err())
	}
}

// end kills the init, without asking containerd, and waits for its pidfd.
func (s *Sandbox) end(ctx context.Context, ev *hostkernel.Evidence) error {
	id := s.rec.Identity
	select {
	case <-s.init.Exited():
	default:
		if err := s.init.Kill(); err != nil {
			return fmt.Errorf("stopping sandbox %s: killing process %d: %w: %w", id.SandboxID, id.Pid, runtime.ErrNoEvidence, err)
		}
	}
	select {
	case <-s.init.Exited():
	case <-ctx.Done():
		return fmt.Errorf("stopping sandbox %s: %w: process %d has been killed and has not ended (%s): %w",
			id.SandboxID, runtime.ErrNoEvidence, id.Pid, hostkernel.States(hostkernel.Tree{Dirs: id.Cgroups}.Pids()), ctx.Err())
	}
	crashpoint.At("containerd.ended")
	ev.Add("pidfd", "process %d, start time %d, has ended, and its PID namespace with it", id.Pid, id.StartTime)
	return nil
}

// Remove ends whatever is left of a sandbox; see runtime.Runtime.
func (r *Runtime) Remove(ctx context.Context, id runtime.Identity) (runtime.Evidence, error) {
	if err := hostkernel.CheckSandboxID(id.SandboxID); err != nil {
		return runtime.Evidence{}, err
	}
	rec, err := r.remains(id)
	if err != nil {
		return runtime.Evidence{}, err
	}
	if dir := rec.Identity.Dir; dir != "" && (!filepath.IsAbs(dir) || filepath.Base(dir) != id.SandboxID) {
		return runtime.Evidence{}, fmt.Errorf("removing sandbox %s: %w: the folder %q is not that of this sandbox", id.SandboxID, runtime.ErrNoEvidence, dir)
	}
	ev := hostkernel.NewEvidence(rec.Identity)
	boot, err := hostkernel.BootID()
	if err != nil {
		return ev.Evidence, err
	}
	if rec.Identity.BootID != "" && rec.Identity.BootID != boot {
		ev.Add("boot_id", "the node has been rebooted since: %s, now %s", rec.Identity.BootID, boot)
		rec.TaskAsked = false // nothing of it comes late any more
	} else if rec.Identity.Pid != 0 {
		if err := r.endLoaded(ctx, rec, ev); err != nil {
			return ev.Evidence, err
		}
	}
	if err := r.sweep(ctx, rec, ev); err != nil {
		return ev.Evidence, err
	}
	return ev.Completed(), nil
}

// remains puts together what is known of a sandbox: the caller's record of it, and the runtime's own where the start
// was cut short before the caller learnt the rest.
func (r *Runtime) remains(id runtime.Identity) (hostkernel.Record, error) {
	rec, err := r.records().Read(id.SandboxID)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		r.log.Warn("the record of a sandbox can't be read; sweeping by its id", "sandbox", id.SandboxID, "error", err)
	}
	if err != nil {
		rec = hostkernel.Record{Identity: id, TaskAsked: !errors.Is(err, os.ErrNotExist)}
	}
	return rec, rec.Complete(id, r.opts.Name, r.cgroup(id.SandboxID))
}

// endLoaded ends the init of a sandbox that nobody watches.
func (r *Runtime) endLoaded(ctx context.Context, rec hostkernel.Record, ev *hostkernel.Evidence) error {
	s, err := r.watch(rec, nil)
	if errors.Is(err, runtime.ErrNotFound) {
		ev.Add("pidfd", "%s", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", runtime.ErrNoEvidence, err)
	}
	defer s.Close()
	return s.end(ctx, ev)
}

// sweep has containerd end and forget the container, empties and removes the sandbox's cgroups, then everything that is kept
// of it on disk, the runtime's record last: as long as there is anything, List names it.
func (r *Runtime) sweep(ctx context.Context, rec hostkernel.Record, ev *hostkernel.Evidence) error {
	id := rec.Identity
	none := func(err error) error {
		return fmt.Errorf("removing sandbox %s: %w: %w", id.SandboxID, runtime.ErrNoEvidence, err)
	}
	t := hostkernel.Tree{Dirs: id.Cgroups}
	had, err := r.endSeen(ctx, id.SandboxID, ev)
	if err != nil {
		return none(err)
	}
	// While there is the container: containerd shows no task without one.
	if !had && rec.TaskAsked && id.Pid == 0 {
		if err := r.endLate(ctx, id.SandboxID, t, ev); err != nil {
			return none(err)
		}
	}
	crashpoint.At("containerd.task-deleted")
	if err := r.deleteContainer(ctx, id.SandboxID); err != nil {
		return none(err)
	}
	if err := r.dropImage(ctx, id.SandboxID); err != nil {
		return none(err)
	}
	crashpoint.At("containerd.container-deleted")
	if err := t.Remove(ctx); err != nil {
		return none(fmt.Errorf("%s: %w", hostkernel.States(t.Pids()), err))
	}
	ev.Add("cgroup_empty", "no cgroup of it is left in %d hierarchies", len(id.Cgroups))
	for _, path := range slices.Concat([]string{id.Dir}, r.records().Files(id.SandboxID)) {
		if path == "" {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return none(err)
		}
		crashpoint.At("containerd.part-removed")
	}
	ev.Add("deleted", "its container, its folder and its record are removed")
	return nil
}

// endSeen ends the container's task and adds what containerd says of it: its exit, or that there is none, which is all that
// it says then. It answers whether there was one.
func (r *Runtime) endSeen(ctx context.Context, id string, ev *hostkernel.Evidence) (bool, error) {
	exitedAt, err := r.endTask(ctx, id)
	if err != nil {
		return false, err
	}
	if exitedAt.IsZero() {
		ev.Add("no_task", "containerd has no task of it")
		return false, nil
	}
	ev.Add("exit_event", "containerd saw its init exit at %s, and deleted the task", exitedAt.UTC().Format(time.RFC3339Nano))
	return true, nil
}

// settleTime is how long a creation that was given up is given to come to an end: containerd then ends what its shim and runc
// have begun, and until then shows no task of it.
const settleTime = 2 * time.Second

// endLate ends what comes of a creation whose answer nobody waited for. It answers after a look that finds neither a task
// nor a cgroup, settleTime after everything that had been found was removed.
func (r *Runtime) endLate(ctx context.Context, id string, t hostkernel.Tree, ev *hostkernel.Evidence) error {
	for {
		if err := t.Remove(ctx); err != nil {
			return fmt.Errorf("%s: %w", hostkernel.States(t.Pids()), err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for what may come of a creation that was cut short: %w", ctx.Err())
		case <-time.After(settleTime):
		}
		had, err := r.endSeen(ctx, id, ev)
		if err != nil {
			return err
		}
		if !had && !slices.ContainsFunc(t.Dirs, exists) {
			return nil
		}
	}
}

// exists is also true of what can't be looked at.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}
