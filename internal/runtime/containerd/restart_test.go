package containerd

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// gated is a command that says that it runs, waits for the file "gate" and says so.
const gated = "echo running; touch started; until [ -e gate ]; do sleep 0.02; done; rm -f gate started; echo ended"

// opens lets a gated command go on.
func opens(t testing.TB, spec runtime.Spec) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(spec.Workspace.Worktree, "gate"), nil, 0o666))
	require.NoError(t, os.Chown(filepath.Join(spec.Workspace.Worktree, "gate"), 1234, 1234))
}

func awaitStarted(t testing.TB, spec runtime.Spec) {
	t.Helper()
	containerd.Until(t, "the command runs", func() bool {
		_, err := os.Stat(filepath.Join(spec.Workspace.Worktree, "started"))
		return err == nil
	})
}

// agent starts an agent of its own process that makes a sandbox.
func (h *host) agent(spec runtime.Spec) (*exec.Cmd, runtime.Identity) {
	h.t.Helper()
	opts := h.opts
	opts.Log = nil
	o, err := json.Marshal(opts)
	require.NoError(h.t, err)
	s, err := json.Marshal(spec)
	require.NoError(h.t, err)
	cmd := exec.Command(os.Args[0], "agent", string(o), string(s))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(h.t, err)
	require.NoError(h.t, cmd.Start())
	var id runtime.Identity
	line, err := bufio.NewReader(out).ReadBytes('\n')
	require.NoError(h.t, err)
	require.NoError(h.t, json.Unmarshal(line, &id))
	return cmd, id
}

func TestACommandGoesOnWhenAgentsComeAndGo(t *testing.T) {
	for _, way := range ways {
		t.Run(way.String(), func(t *testing.T) {
			h := newHostOf(t, way.runtime, way.transport)
			spec := h.spec(0)
			cmd, id := h.agent(spec)
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()

			first, err := h.r.Load(bound(t), id)
			require.NoError(t, err)
			a := h.attach(first, spec, 1)
			a.begin("long", gated)
			awaitStarted(t, spec)

			// As after another crash: the first connection is still there, and loses.
			second, err := h.runtime().Load(bound(t), id)
			require.NoError(t, err)
			b := h.attach(second, spec, 2)
			_, err = a.receiptd.Info(bound(t), nil)
			require.Error(t, err, "the older connection is closed")
			opens(t, spec)
			p := b.await("long")
			require.EqualValues(t, 0, p.ExitCode)
			require.EqualValues(t, len("running\nended\n"), p.Stdout.Bytes)
			out, _ := b.run("echo again")
			require.Equal(t, "again", out)
			require.LessOrEqual(t, len(h.attaches(id)), 1, "the older attach process is gone")
			require.NoError(t, first.Close())
			h.stop(second)
		})
	}
}

// attaches are the attach processes of a sandbox.
func (h *host) attaches(id runtime.Identity) (pids []int) {
	for _, pid := range (hostkernel.Tree{Dirs: id.Cgroups}).Pids() {
		line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline"))
		if strings.HasSuffix(string(line), "\x00attach\x00") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func TestP5ContainerdIsKilledInTheMiddleOfACommand(t *testing.T) {
	for _, way := range ways {
		t.Run(way.String(), func(t *testing.T) {
			h := newHostOf(t, way.runtime, way.transport)
			spec := h.spec(0)
			s := h.create(spec)
			a := h.attach(s, spec, 1)
			a.begin("long", gated)
			awaitStarted(t, spec)
			h.d.Kill()

			opens(t, spec)
			require.EqualValues(t, 0, a.await("long").ExitCode, "the streams are the shim's, the socket receiptd's")
			out, _ := a.run("echo without containerd")
			require.Equal(t, "without containerd", out)
			_, err := h.r.List(bound(t))
			require.ErrorIs(t, err, runtime.ErrUnreachable)
			_, err = h.r.Create(bound(t), h.spec(1))
			require.ErrorIs(t, err, runtime.ErrUnreachable)
			require.ErrorIs(t, h.r.Check(bound(t)), runtime.ErrUnreachable)

			loaded, err := h.runtime().Load(bound(t), s.Identity())
			require.NoError(t, err, "absence in containerd says nothing")
			require.NoError(t, loaded.Close())
			ev, err := s.Stop(bound(t))
			require.ErrorIs(t, err, runtime.ErrNoEvidence)
			require.ErrorIs(t, err, runtime.ErrUnreachable)
			require.False(t, ev.Complete)
			<-s.Exited()

			h.serve()
			ev = h.stop(s)
			require.Equal(t, []string{"cgroup_empty", "deleted", "no_task", "pidfd"}, sources(ev), "containerd saw no exit")
		})
	}
}

func TestP5TheEndOfASandboxIsFoundThatContainerdMissed(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	s := h.create(spec)
	require.NoError(t, s.Close())
	h.d.Kill()
	require.NoError(t, unix.Kill(s.Identity().Pid, unix.SIGKILL))
	h.serve()
	containerd.Until(t, "it is seen to be gone", func() bool {
		loaded, err := h.r.Load(bound(t), s.Identity())
		if err == nil {
			loaded.Close()
		}
		return err != nil
	})
	_, err := h.r.Load(bound(t), s.Identity())
	require.ErrorIs(t, err, runtime.ErrNotFound)
	ev, err := h.r.Remove(bound(t), s.Identity())
	require.NoError(t, err)
	require.Equal(t, []string{"cgroup_empty", "deleted", "no_task", "pidfd"}, sources(ev), "containerd saw no exit")
}

func TestP5AHangingContainerdIsNoEvidenceAndNoHang(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	h.d.Signal(syscall.SIGSTOP)
	out, _ := a.run("echo goes on")
	require.Equal(t, "goes on", out)

	h.opts.CallTime = 1 // a nanosecond: whatever does not answer at once
	hurried := h.runtime()
	h.opts.CallTime = 0
	require.ErrorIs(t, hurried.Reachable(bound(t)), runtime.ErrUnreachable)
	other := h.spec(1)
	_, err := hurried.Create(bound(t), other)
	require.ErrorIs(t, err, runtime.ErrUnreachable)
	require.NoDirExists(t, other.Dir)
	_, err = hurried.Remove(bound(t), s.Identity())
	require.ErrorIs(t, err, runtime.ErrNoEvidence)
	require.ErrorIs(t, err, runtime.ErrUnreachable)
	<-s.Exited()
	require.DirExists(t, spec.Dir, "what is left can still be found")

	h.d.Signal(syscall.SIGCONT)
	h.stop(s)
}

func TestP5AShimThatIsStoppedOrKilled(t *testing.T) {
	for _, way := range []way{{Runc, Socket}, {GVisor, Attach}} {
		t.Run(way.runtime, func(t *testing.T) { stopAndKillShims(t, newHostOf(t, way.runtime, way.transport)) })
	}
}

func stopAndKillShims(t *testing.T, h *host) {
	t.Run("stopped: no evidence before it goes on", func(t *testing.T) {
		spec := h.spec(0)
		s := h.create(spec)
		a := h.attach(s, spec, 1)
		shim := h.d.Shims()
		require.Len(t, shim, 1)
		require.NoError(t, unix.Kill(shim[0], unix.SIGSTOP))
		if h.opts.Transport == Socket { // the streams of an attach are the shim's
			out, _ := a.run("echo goes on")
			require.Equal(t, "goes on", out)
		}
		ctx, cancel := context.WithCancel(bound(t))
		go func() {
			<-s.Exited() // by pidfd; the shim tells nobody
			cancel()
		}()
		_, err := s.Stop(ctx)
		require.ErrorIs(t, err, runtime.ErrNoEvidence)
		require.NoError(t, unix.Kill(shim[0], unix.SIGCONT))
		h.stop(s)
	})
	t.Run("killed: the sandbox ends and its end is found", func(t *testing.T) {
		spec := h.spec(1)
		s := h.create(spec)
		a := h.attach(s, spec, 1)
		a.begin("long", gated)
		awaitStarted(t, spec)
		shim := h.d.Shims()
		require.Len(t, shim, 1)
		require.NoError(t, unix.Kill(shim[0], unix.SIGKILL))
		ev := h.stop(s)
		require.Subset(t, []string{"cgroup_empty", "deleted", "exit_event", "no_task", "pidfd"}, sources(ev))
		require.Len(t, ev.Items, 4, "containerd may have forgotten the task, or not yet")
	})
}

// A shim that stands still tells nobody that a process has ended, and keeps its end of each stream open.
func TestP5ACommandsStreamEndsWithItsSandboxWhateverTheShimDoes(t *testing.T) {
	for name, host := range map[string]func(t *testing.T) *host{
		GVisor: func(t *testing.T) *host { return newHostOf(t, GVisor, Attach) },
		Kata:   func(t *testing.T) *host { return newKataHost(t).host },
	} {
		t.Run(name, func(t *testing.T) {
			h := host(t)
			spec := h.spec(0)
			s := h.create(spec)
			stream := h.attach(s, spec, 1).begin("lost", "echo begun; exec sleep 100000")
			_, err := stream.Recv()
			require.NoError(t, err)
			shims := h.d.Shims()
			require.Len(t, shims, 1)
			require.NoError(t, unix.Kill(shims[0], unix.SIGSTOP))
			require.NoError(t, unix.Kill(s.Identity().Pid, unix.SIGKILL))
			<-s.Exited()
			over := make(chan error, 1)
			go func() {
				_, err := stream.Recv()
				over <- err
			}()
			select {
			case err = <-over:
			case <-bound(t).Done():
				err = context.DeadlineExceeded
			}
			require.NoError(t, unix.Kill(shims[0], unix.SIGCONT))
			require.ErrorIs(t, err, os.ErrClosed)
			h.stop(s)
		})
	}
}

func TestP13AStalledStreamBlocksNoCommandAndIsReplaced(t *testing.T) {
	h := newHost(t, Attach)
	spec := h.spec(0)
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	pids := h.attaches(s.Identity())
	require.Len(t, pids, 1)
	require.NoError(t, unix.Kill(pids[0], unix.SIGSTOP), "from here on nobody carries anything")
	b := h.attach(s, spec, 2)
	require.NotContains(t, h.attaches(s.Identity()), pids[0], "a new attach ends the old one")
	require.Len(t, h.attaches(s.Identity()), 1)

	// Nobody reads what this one prints, and then nobody carries it.
	b.begin("flood", gated+"; head -c 30000000 /dev/zero; touch done")
	awaitStarted(t, spec)
	require.NoError(t, unix.Kill(h.attaches(s.Identity())[0], unix.SIGSTOP))
	opens(t, spec)
	containerd.Until(t, "the command ends", func() bool {
		_, err := os.Stat(filepath.Join(spec.ReceiptsDir, "flood.json"))
		return err == nil
	})
	require.EqualValues(t, 30000000+len("running\nended\n"), a.predicate("flood").Stdout.Bytes)
	// What joins the container joins the namespaces of its init's first thread.
	require.FileExists(t, fmt.Sprintf("/proc/%d/root%s/receiptd", s.Identity().Pid, runtime.BinPath), "the first thread isn't in the commands' view")
	c := h.attach(s, spec, 3)
	out, _ := c.run("ls done")
	require.Equal(t, "done", out)
	des, err := os.ReadDir(attachesDir(spec.Dir))
	require.NoError(t, err)
	require.Len(t, des, 1, "the streams of the older ones are removed")
	h.stop(s)
}

func TestAnAttachThatWasMadeAndNeverStartedIsReplaced(t *testing.T) {
	h := newHost(t, Attach)
	spec := h.spec(0)
	s := h.create(spec)
	// As an agent leaves it that is killed in between.
	const id = "attach-0011223344556677"
	p, err := newPipes(filepath.Join(attachesDir(spec.Dir), id))
	require.NoError(t, err)
	p.Close()
	process, err := typeurl.MarshalAnyToProto(&specs.Process{Args: []string{runtime.BinPath + "/receiptd", "attach"}, Cwd: "/"})
	require.NoError(t, err)
	made := tasks.ExecProcessRequest{ContainerID: spec.SandboxID, ExecID: id, Spec: process, Stdin: p.path("in"), Stdout: p.path("out"), Stderr: p.path("err")}
	service := h.r.client.TaskService()
	_, err = service.Exec(bound(t), &made)
	require.NoError(t, err)
	_, err = service.Kill(bound(t), &tasks.KillRequest{ContainerID: spec.SandboxID, ExecID: id, Signal: uint32(unix.SIGKILL)})
	require.True(t, errdefs.IsFailedPrecondition(native(err)), "it can't be killed, and has no exit: %v", err)

	out, _ := h.attach(s, spec, 1).run("echo reached")
	require.Equal(t, "reached", out)
	require.NoDirExists(t, p.dir)
	_, err = service.DeleteProcess(bound(t), &tasks.DeleteProcessRequest{ContainerID: spec.SandboxID, ExecID: id})
	require.True(t, missing(err), "the shim has it no more: %v", err)
	h.stop(s)
}

func TestP5ATaskThatContainerdHasForgottenIsNoExitThatItSaw(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	s := h.create(spec)
	_, err := h.r.endTask(bound(t), spec.SandboxID)
	require.NoError(t, err)
	require.Equal(t, []string{"cgroup_empty", "deleted", "no_task", "pidfd"}, sources(h.stop(s)))
}

// Its processes are gone then, and its exit was seen: the runtime may have something of it all the same.
func TestP5ATaskThatCantBeDeletedIsNoEvidenceUntilItIs(t *testing.T) {
	h := newHost(t, Socket)
	var stuck atomic.Bool
	h.through(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if stuck.Load() && strings.HasSuffix(method, ".Tasks/Delete") {
			return status.Error(codes.Unknown, "unable to delete container: device or resource busy")
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	})
	spec := h.spec(0)
	s := h.create(spec)
	stuck.Store(true)
	for range 2 {
		ev, err := s.Stop(bound(t))
		require.ErrorIs(t, err, runtime.ErrNoEvidence)
		require.ErrorContains(t, err, "deleting the container's task: ")
		require.ErrorContains(t, err, "device or resource busy")
		require.False(t, ev.Complete)
		require.DirExists(t, spec.Dir, "what is left can still be found")
	}
	<-s.Exited()
	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Equal(t, []string{spec.SandboxID}, ids)
	stuck.Store(false)
	require.Equal(t, []string{"cgroup_empty", "deleted", "exit_event", "pidfd"}, sources(h.stop(s)))
}

func TestP5ATaskThatComesAfterItsCreationWasGivenUpIsEnded(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	var looks atomic.Int32
	var late atomic.Bool
	h.through(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		switch {
		case strings.HasSuffix(method, ".Tasks/Create"):
			require.NoError(t, invoke(ctx, method, req, reply, cc, opts...))
			return status.Error(codes.DeadlineExceeded, "given up")
		case strings.HasSuffix(method, ".Tasks/Get") && looks.Add(1) == 1:
			// containerd lists a task when its creation has come to an end.
			return status.Error(codes.NotFound, "not yet")
		case strings.HasSuffix(method, ".Tasks/Get") && looks.Load() == 2:
			err := invoke(ctx, method, req, reply, cc, opts...)
			late.Store(err == nil)
			return err
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	})
	_, err := h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnreachable)
	require.NotErrorIs(t, err, runtime.ErrNoEvidence)
	require.True(t, late.Load(), "there was a task that the first look did not show")
	require.EqualValues(t, 3, looks.Load(), "the last look finds none")
	c := h.d.Client()
	defer c.Close()
	left, err := c.TaskService().List(bound(t), &tasks.ListTasksRequest{})
	require.NoError(t, err)
	require.Empty(t, left.GetTasks())
	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Empty(t, ids)
}

// As an agent leaves it that is killed in between: a shim may tell nobody of its end.
func TestP5AGuestThatWasMadeAndNeverStartedIsEnded(t *testing.T) {
	for name, host := range map[string]func(t *testing.T) *host{
		GVisor: func(t *testing.T) *host { return newHostOf(t, GVisor, Attach) },
		Kata:   func(t *testing.T) *host { return newKataHost(t).host },
	} {
		t.Run(name, func(t *testing.T) {
			h := host(t)
			h.through(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				if strings.HasSuffix(method, ".Tasks/Start") {
					return status.Error(codes.Aborted, "never started")
				}
				return invoke(ctx, method, req, reply, cc, opts...)
			})
			spec := h.spec(0)
			_, err := h.r.Create(bound(t), spec)
			require.ErrorContains(t, err, "never started")
			require.NotErrorIs(t, err, runtime.ErrNoEvidence)
			require.NoDirExists(t, spec.Dir)
			require.Empty(t, h.d.Keeps())
		})
	}
}

func TestP14AFailedStartIsAnErrorAndNothingOfItIsLeft(t *testing.T) {
	h := newHost(t, Socket)
	for i, c := range []struct {
		name   string
		change func(s *runtime.Spec)
		says   string
	}{
		{"receiptd is missing", func(s *runtime.Spec) { s.Receiptd = "/nonexistent/receiptd" }, "/nonexistent/receiptd"},
		{"receiptd ends at once", func(s *runtime.Spec) { s.Receiptd = s.Pid1 }, "it ended"},
		{"receiptd was swapped", func(s *runtime.Spec) { s.ReceiptdSHA256 = strings.Repeat("0", 64) }, runtime.ErrSwapped.Error()},
		{"receiptd is no program", func(s *runtime.Spec) { s.Receiptd = "/etc/passwd" }, "it ended"},
		{"the root file system is missing", func(s *runtime.Spec) { s.Rootfs = "/nonexistent" }, "/nonexistent"},
		{"an image", func(s *runtime.Spec) { s.Rootfs = "example.org/image@sha256:" + strings.Repeat("0", 64) }, "images pull"},
		{"the worktree has gone", func(s *runtime.Spec) {
			require.NoError(t, os.Rename(s.Workspace.Worktree, s.Workspace.Worktree+".x"))
		}, "wt-topic"},
		{"a network mode that is not there", func(s *runtime.Spec) { s.Network = "bridge" }, "bridge"},
		{"ids that begin at root", func(s *runtime.Spec) { s.IDs.HostBase = 0 }, "root"},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := h.spec(uint32(i))
			c.change(&spec)
			_, err := h.r.Create(bound(t), spec)
			require.ErrorContains(t, err, c.says)
			ids, err := h.r.List(bound(t))
			require.NoError(t, err)
			require.Empty(t, ids)
			require.NoDirExists(t, spec.Dir)
		})
	}
}
