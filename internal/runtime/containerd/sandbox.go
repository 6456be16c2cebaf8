package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// Sandbox is a running container.
type Sandbox struct {
	*hostkernel.Held
	r *Runtime
	// attaching has room for the one Dial, or the one end of an attach process, that runs at a time; attached are the ends of the
	// attach processes that are still awaited.
	attaching chan struct{}
	attached  sync.WaitGroup
	// closing ends when the sandbox is let go of, and its attach processes with it.
	closing context.Context
	letGo   context.CancelFunc
}

var _ runtime.Sandbox = (*Sandbox)(nil)

// sandbox takes a watched init over. It is the shim's child, which reaps it.
func (r *Runtime) sandbox(held *hostkernel.Held) *Sandbox {
	s := &Sandbox{Held: held, r: r, attaching: make(chan struct{}, 1)}
	s.closing, s.letGo = context.WithCancel(context.Background())
	return s
}

// Dial connects to receiptd, over its socket or over an attach process. An attach of an earlier Dial is ended first: receiptd
// gives its connection up as soon as the new one is initialised, and a container runtime tells nobody that the other end of
// a stream is gone.
func (s *Sandbox) Dial(ctx context.Context) (net.Conn, error) {
	var conn net.Conn
	var err error
	if s.r.opts.Transport == Attach {
		conn, err = s.attach(ctx)
	} else {
		conn, err = s.DialSocket(ctx, runtime.SocketName)
	}
	if err != nil {
		return nil, fmt.Errorf("dialling the receiptd of sandbox %s: %w", s.Record.Identity.SandboxID, err)
	}
	return conn, nil
}

// Close lets go of the sandbox without stopping it.
func (s *Sandbox) Close() error {
	s.letGo()
	err := s.Held.Close()
	s.attached.Wait()
	return err
}

// Stop kills everything of the sandbox and answers once it is gone; see runtime.Sandbox.
func (s *Sandbox) Stop(ctx context.Context) (runtime.Evidence, error) {
	ev, err := s.Held.Stop(ctx)
	if err != nil {
		return ev, err
	}
	return ev, s.Close()
}

// endContainer has containerd end and forget the container.
func (r *Runtime) endContainer(ctx context.Context, rec hostkernel.Record, ev *hostkernel.Evidence) error {
	id := rec.Identity
	had, err := r.endSeen(ctx, id.SandboxID, ev)
	if err != nil {
		return err
	}
	// While there is the container: containerd shows no task without one.
	if !had && rec.TaskAsked && id.Pid == 0 {
		if err := r.endLate(ctx, id.SandboxID, hostkernel.Tree{Dirs: id.Cgroups}, ev); err != nil {
			return err
		}
	}
	crashpoint.At("containerd.task-deleted")
	if err := r.deleteContainer(ctx, id.SandboxID); err != nil {
		return err
	}
	// As long as there is the lease, List names the sandbox.
	if err := unmountImage(id.Dir); err != nil {
		return err
	}
	if err := r.dropImage(ctx, id.SandboxID); err != nil {
		return err
	}
	crashpoint.At("containerd.container-deleted")
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
