package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Labels of a container. State tells the sandboxes of one agent from those of another one on the same containerd.
const (
	labelSandbox    = "sandbox-agent/sandbox"
	labelSession    = "sandbox-agent/session"
	labelGeneration = "sandbox-agent/generation"
	labelRuntime    = "sandbox-agent/runtime"
	labelState      = "sandbox-agent/state"
)

// call bounds one call of containerd.
func (r *Runtime) call(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.opts.CallTime)
}

// processTime is what a call may take at least, where CallTime lets it, that asks for something of a process in a container.
const processTime = 20 * time.Second

// processCall bounds such a call. It boots no guest: one that does not answer in a part of the time for that hangs.
func (r *Runtime) processCall(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, max(r.opts.CallTime/3, min(r.opts.CallTime, processTime)))
}

// failed says what was being done, and whether containerd did not answer: then the error wraps runtime.ErrUnreachable.
func (r *Runtime) failed(doing string, err error) error {
	err = native(err)
	if withoutRoom(err) {
		return fmt.Errorf("%s: %w", doing, r.full(err))
	}
	if errdefs.IsUnavailable(err) || errdefs.IsDeadlineExceeded(err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w: does containerd run, and is %s its socket (containerd.address)? %w", doing, runtime.ErrUnreachable, r.opts.Address, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// native is a call's error in containerd's own classes. Some of the client's services answer with these already, which
// another translation would take away.
func native(err error) error {
	if _, raw := status.FromError(err); raw {
		return errgrpc.ToNative(err)
	}
	return err
}

// missing says whether containerd knows nothing of what it was asked for.
func missing(err error) bool { return errdefs.IsNotFound(native(err)) }

func (r *Runtime) labels(spec runtime.Spec) map[string]string {
	return map[string]string{
		labelSandbox: spec.SandboxID, labelSession: spec.SessionID, labelGeneration: strconv.FormatUint(spec.Generation, 10),
		labelRuntime: r.opts.Name, labelState: r.opts.StateDir,
	}
}

// createContainer records a container in containerd. Nothing runs.
func (r *Runtime) createContainer(ctx context.Context, spec runtime.Spec, oci *specs.Spec) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	ociAny, err := typeurl.MarshalAnyToProto(oci)
	if err != nil {
		return fmt.Errorf("writing the container's spec: %w", err)
	}
	c := containers.Container{
		ID: spec.SandboxID, Spec: ociAny, Runtime: containers.RuntimeInfo{Name: r.opts.Handler},
		Labels: r.labels(spec),
	}
	if c.Runtime.Options, err = r.kind().options(r, oci); err != nil {
		return fmt.Errorf("writing the shim's options: %w", err)
	}
	if _, err := r.client.ContainerService().Create(ctx, c); err != nil {
		return r.failed("making the container", err)
	}
	return nil
}

// runcOptions name the program to its shim, unless it is to find it.
func runcOptions(r *Runtime, _ *specs.Spec) (typeurl.Any, error) {
	if r.opts.Binary == "" {
		return nil, nil
	}
	return typeurl.MarshalAnyToProto(&runcoptions.Options{BinaryName: r.opts.Binary})
}

// createTask has the shim create the container: when it returns, its init waits to be started. Its standard streams lead
// nowhere, so nobody has to read them, unless out is not nil.
func (r *Runtime) createTask(ctx context.Context, id string, out *pipes) (pid int, err error) {
	ctx, cancel := r.call(ctx)
	defer cancel()
	req := &tasks.CreateTaskRequest{ContainerID: id}
	if out != nil {
		// gVisor's shim takes both or none.
		req.Stdout, req.Stderr = out.path("out"), out.path("err")
	}
	res, err := r.client.TaskService().Create(ctx, req)
	if err != nil {
		return 0, r.failed("creating the container", err)
	}
	return int(res.GetPid()), nil
}

func (r *Runtime) startTask(ctx context.Context, id string) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	if _, err := r.client.TaskService().Start(ctx, &tasks.StartRequest{ContainerID: id}); err != nil {
		return r.failed("starting the container", err)
	}
	return nil
}

// endTask kills what runs, waits until containerd reports its exit, and deletes the task. It says when that exit was, and
// answers with a zero time when containerd knows of no task, or of no exit.
func (r *Runtime) endTask(ctx context.Context, id string) (exitedAt time.Time, err error) {
	ctx, cancel := r.call(ctx)
	defer cancel()
	service := r.client.TaskService()
	seen, err := service.Get(ctx, &tasks.GetRequest{ContainerID: id})
	if missing(err) {
		return time.Time{}, nil
	} else if err != nil {
		return time.Time{}, r.failed("asking for the container's state", err)
	}
	// That it has ended already is no error, but that is told by the wait.
	_, killErr := service.Kill(ctx, &tasks.KillRequest{ContainerID: id, Signal: uint32(unix.SIGKILL), All: true})
	exitedAt, err = r.awaitTask(ctx, id, seen.GetProcess().GetStatus())
	switch {
	case missing(err):
		return time.Time{}, nil
	case err != nil:
		return time.Time{}, r.failed("waiting for the exit of the container", errors.Join(err, killErr))
	}
	if _, err := service.Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: id}); err != nil && !missing(err) {
		return time.Time{}, r.failed("deleting the container's task", err)
	}
	return exitedAt, nil
}

// awaitTask waits for the exit of an init that was seen in a state, and says when it was. A zero time: its shim saw none. gVisor's
// never answers a wait for what was never started, and the deletion ends that; what has stopped may be either.
func (r *Runtime) awaitTask(ctx context.Context, id string, seen task.Status) (exitedAt time.Time, err error) {
	bounded := ctx
	if r.opts.Name != Runc && seen == task.Status_CREATED {
		return time.Time{}, nil
	}
	if r.opts.Name != Runc && seen == task.Status_STOPPED {
		// Ended from here: a deadline would go to containerd, whose answer then may be there before it is over here.
		var cancel context.CancelFunc
		bounded, cancel = context.WithCancel(ctx)
		defer cancel()
		defer time.AfterFunc(settleTime, cancel).Stop()
	}
	res, err := r.client.TaskService().Wait(bounded, &tasks.WaitRequest{ContainerID: id})
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return time.Time{}, nil
	}
	return res.GetExitedAt().AsTime(), err
}

func (r *Runtime) deleteContainer(ctx context.Context, id string) error {
	ctx, cancel := r.call(ctx)
	defer cancel()
	if err := r.client.ContainerService().Delete(ctx, id); err != nil && !missing(err) {
		return r.failed("deleting the container", err)
	}
	return nil
}

// listContainers names the sandboxes of which containerd has a container, or a lease: what is made first.
func (r *Runtime) listContainers(ctx context.Context) ([]string, error) {
	ctx, cancel := r.call(ctx)
	defer cancel()
	ours := fmt.Sprintf("labels.%q==%q,labels.%q==%q", labelState, r.opts.StateDir, labelRuntime, r.opts.Name)
	cs, err := r.client.ContainerService().List(ctx, ours)
	if err != nil {
		return nil, r.failed("listing sandboxes", err)
	}
	ls, err := r.client.LeasesService().List(ctx, ours)
	if err != nil {
		return nil, r.failed("listing sandboxes", err)
	}
	var ids []string
	for _, l := range ls {
		ids = append(ids, l.ID)
	}
	for _, c := range cs {
		ids = append(ids, c.ID)
	}
	return ids, nil
}
