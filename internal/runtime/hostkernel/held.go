package hostkernel

import (
	"context"
	"fmt"
	"net"
	"os"

	"google.golang.org/protobuf/proto"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
)

// Held is a sandbox whose init is watched: all of a runtime.Sandbox but Dial.
type Held struct {
	Record Record
	// Init is the container's.
	Init *Init

	keeper *Keeper
	view   *receiptdv1.View
	// stopping lets one Stop run at a time.
	stopping chan struct{}
}

// Hold watches the recorded init; see WatchInit.
func (k *Keeper) Hold(rec Record, view *receiptdv1.View, reap func()) (*Held, error) {
	init, err := WatchInit(rec.Identity, reap)
	if err != nil {
		return nil, err
	}
	return &Held{Record: rec, Init: init, keeper: k, view: view, stopping: make(chan struct{}, 1)}, nil
}

// Identity names the container.
func (h *Held) Identity() runtime.Identity { return h.Record.Identity }

// View is a copy of what receiptd is told.
func (h *Held) View() *receiptdv1.View { return proto.Clone(h.view).(*receiptdv1.View) }

// Exited is closed when the init has been seen to end, and stays open after Close.
func (h *Held) Exited() <-chan struct{} { return h.Init.Exited() }

// DialSocket connects to a socket in the control folder through a descriptor of the folder: no symlink and no limit on the
// path's length come in between (unix(7): 107 bytes).
func (h *Held) DialSocket(ctx context.Context, name string) (*net.UnixConn, error) {
	dir, err := os.Open(ControlDir(h.Record.Identity.Dir))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// Close lets go of the sandbox without stopping it.
func (h *Held) Close() error { return h.Init.Close() }

// Stop kills everything of the sandbox and answers once it is gone; see runtime.Sandbox.
func (h *Held) Stop(ctx context.Context) (runtime.Evidence, error) {
	if err := h.lock(ctx); err != nil {
		return runtime.Evidence{}, err
	}
	defer func() { <-h.stopping }()
	ev := NewEvidence(h.Record.Identity)
	if err := h.end(ctx, ev); err != nil {
		return ev.Evidence, err
	}
	if err := h.keeper.sweep(ctx, h.Record, ev); err != nil {
		return ev.Evidence, err
	}
	return ev.Completed(), h.Close()
}

// lock waits for another Stop to return. Without one it never fails: also a context that has ended gets its try.
func (h *Held) lock(ctx context.Context) error {
	select {
	case h.stopping <- struct{}{}:
		return nil
	default:
	}
	select {
	case h.stopping <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stopping sandbox %s: %w: it is being stopped already: %w", h.Record.Identity.SandboxID, runtime.ErrNoEvidence, ctx.Err())
	}
}

// end kills the init, without asking anybody, and waits for its pidfd.
func (h *Held) end(ctx context.Context, ev *Evidence) error {
	id := h.Record.Identity
	select {
	case <-h.Exited():
	default:
		if err := h.Init.Kill(); err != nil {
			return fmt.Errorf("stopping sandbox %s: killing process %d: %w: %w", id.SandboxID, id.Pid, runtime.ErrNoEvidence, err)
		}
	}
	select {
	case <-h.Exited():
	case <-ctx.Done():
		return fmt.Errorf("stopping sandbox %s: %w: process %d has been killed and has not ended (%s): %w",
			id.SandboxID, runtime.ErrNoEvidence, id.Pid, States(Tree{Dirs: id.Cgroups}.Pids()), ctx.Err())
	}
	crashpoint.At(h.keeper.Points + ".ended")
	ev.Add("pidfd", "process %d, start time %d, has ended, and its PID namespace with it", id.Pid, id.StartTime)
	return nil
}
