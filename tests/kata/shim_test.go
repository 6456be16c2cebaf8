package kata

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	testcontainerd "github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	testkata "github.com/sandbox-agent/sandbox-agent/internal/testkit/kata"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

// node is a containerd with the tests' shim, and a container in it.
type node struct {
	*testkata.Install
	t      *testing.T
	dir    string // the shim's: its programs, its management sockets, what it is asked for
	id     string // of a run alone: runc keeps containers by it, whichever containerd they are of
	config kata.Config
	client *client.Client
	ctx    context.Context
	spec   *specs.Spec
	out    *bufio.Reader
	task   client.Task
}

func newNode(t *testing.T, misbehave ...string) *node {
	t.Helper()
	i := testkata.New(t, misbehave...)
	n := &node{
		t: t, Install: i, dir: i.Dir, id: "sb-" + filepath.Base(i.Dir), ctx: namespaces.WithNamespace(t.Context(), namespace),
		config: kata.Config{Hypervisor: "qemu", SharedFS: "virtio-fs", VMM: i.VMM(), VirtioFSDaemon: i.VirtioFSDaemon()},
	}
	n.client = testcontainerd.Start(t, "runc").Client() // or the test is skipped: then nothing has been built
	i.Build()
	t.Cleanup(func() { n.client.Close() })
	n.spec = n.minimal()
	return n
}

// minimal is a container that sees the host's programs, and has all namespaces of its own.
func (n *node) minimal() *specs.Spec {
	root := filepath.Join(n.dir, "root")
	s := &specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: root},
		Process: &specs.Process{Cwd: "/", Env: []string{"PATH=/usr/bin:/bin"}, NoNewPrivileges: true},
		Mounts:  []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}},
		Linux:   &specs.Linux{CgroupsPath: "/" + n.id},
	}
	require.NoError(n.t, os.MkdirAll(filepath.Join(root, "proc"), 0o755))
	for _, ns := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.MountNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.NetworkNamespace} {
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: ns})
	}
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if target, err := os.Readlink(dir); err == nil {
			require.NoError(n.t, os.Symlink(target, root+dir))
			continue
		}
		n.bind(s, kata.Mount{Source: dir, Destination: dir, ReadOnly: true})
	}
	return s
}

func (n *node) bind(s *specs.Spec, m kata.Mount) {
	st, err := os.Stat(m.Source)
	require.NoError(n.t, err)
	if st.IsDir() {
		require.NoError(n.t, os.MkdirAll(filepath.Join(s.Root.Path, m.Destination), 0o755))
	}
	options := []string{"rbind"}
	if m.ReadOnly {
		options = append(options, "ro")
	}
	s.Mounts = append(s.Mounts, specs.Mount{Destination: m.Destination, Type: "bind", Source: m.Source, Options: options})
}

// run starts the container with a shell, and answers with its VM once the shell has said a line.
func (n *node) run(script string) (kata.VM, <-chan client.ExitStatus) {
	n.t.Helper()
	n.spec.Process.Args = []string{"/bin/sh", "-c", script}
	c, err := n.client.NewContainer(n.ctx, n.id, client.WithRuntime(kata.RuntimeType, nil), client.WithSpec(n.spec))
	require.NoError(n.t, err)
	n.t.Cleanup(func() {
		require.NoError(n.t, c.Delete(namespaces.WithNamespace(context.Background(), namespace)))
	})
	r, w := io.Pipe()
	n.out = bufio.NewReader(r)
	n.task, err = c.NewTask(n.ctx, cio.NewCreator(cio.WithFIFODir(filepath.Join(n.dir, "fifo")), cio.WithStreams(nil, w, io.Discard)))
	require.NoError(n.t, err)
	n.t.Cleanup(n.end)
	exits, err := n.task.Wait(namespaces.WithNamespace(context.Background(), namespace))
	require.NoError(n.t, err)
	require.NoError(n.t, n.task.Start(n.ctx))
	require.Equal(n.t, "started", n.line())

	s, err := kata.NewShim(n.id, n.RunDir())
	require.NoError(n.t, err)
	pid, err := s.Pid(n.ctx)
	require.NoError(n.t, err)
	vm, err := kata.FindVM(kata.Lookup{SandboxID: n.id, ShimPid: pid, Config: n.config})
	require.NoError(n.t, err)
	n.t.Cleanup(func() { require.NoError(n.t, vm.Kill()) })
	return vm, exits
}

func (n *node) line() string {
	n.t.Helper()
	line, err := n.out.ReadString('\n')
	require.NoError(n.t, err)
	return strings.TrimSpace(line)
}

// end deletes the task, whatever state a test left it in.
func (n *node) end() {
	n.Misbehave()
	ctx := namespaces.WithNamespace(context.Background(), namespace)
	_, _ = n.task.Delete(ctx, client.WithProcessKill)
}

func pidOf(t *testing.T, vm kata.VM, role kata.Role) int {
	t.Helper()
	for _, p := range vm.Processes {
		if p.Role == role {
			return p.Pid
		}
	}
	require.Fail(t, "no process", role)
	return 0
}

// lose ends the VMM as a fault of its own would.
func lose(t *testing.T, vm kata.VM) {
	t.Helper()
	fd, err := unix.PidfdOpen(pidOf(t, vm, kata.RoleVMM), 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0))
}

// now is a context that has ended: what has not happened by now is missing.
func now() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func bound(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestTheShimUnderKatasNameIsTakenForKatas(t *testing.T) {
	n := newNode(t)
	found, err := kata.Find(t.Context(), kata.Places{ContainerdPATH: n.dir})
	require.NoError(t, err)
	require.Equal(t, kata.FlavourRust, found.Flavour)
	require.Empty(t, kata.JudgeVersion(found.Flavour, found.Version, "qemu"))

	vm, exits := n.run("echo started; exit 7")
	require.Equal(t, uint32(7), (<-exits).ExitCode())
	_, err = vm.Wait(now())
	require.ErrorIs(t, err, kata.ErrNoEvidence, "the command has ended, and the VM has not")
	_, err = n.task.Delete(n.ctx)
	require.NoError(t, err)
	ev, err := vm.Wait(bound(t))
	require.NoError(t, err)
	require.True(t, ev.Complete)
}

// containerd tells of an ordinary end, or of one that any command could have; the VM's processes tell the truth.
func TestP5ALostVMIsNoEvidenceWhateverItsStatus(t *testing.T) {
	for word, status := range map[string]uint32{"lost-with-0": 0, "lost-with-255": 255} {
		t.Run(word, func(t *testing.T) {
			n := newNode(t, word)
			vm, exits := n.run("echo started; exec sleep 100000")
			lose(t, vm)
			exit := <-exits
			require.NoError(t, exit.Error())
			require.Equal(t, status, exit.ExitCode(), "the lie is told")
			ev, err := vm.Wait(now())
			require.ErrorIs(t, err, kata.ErrNoEvidence)
			require.ErrorContains(t, err, "virtiofsd, process")
			require.False(t, ev.Complete)
			_, err = n.task.Delete(n.ctx)
			require.NoError(t, err)
			ev, err = vm.Wait(bound(t))
			require.NoError(t, err)
			require.True(t, ev.Complete)
		})
	}
}

func TestP5AnAnsweredDeletionIsNoEvidence(t *testing.T) {
	n := newNode(t, "vm-survives-delete")
	vm, exits := n.run("echo started")
	<-exits
	_, err := n.task.Delete(n.ctx)
	require.NoError(t, err, "containerd says that it is gone")
	_, err = vm.Wait(now())
	require.ErrorIs(t, err, kata.ErrNoEvidence)
	require.ErrorContains(t, err, fmt.Sprintf("vmm, process %d, has not ended", pidOf(t, vm, kata.RoleVMM)))
	require.NoError(t, vm.Kill())
	ev, err := vm.Wait(bound(t))
	require.NoError(t, err)
	require.True(t, ev.Complete)
}

func TestP5AStuckDeletionIsEndedByTheVMsOwnProcesses(t *testing.T) {
	n := newNode(t, "delete-stuck")
	deleting := filepath.Join(n.dir, "deleting")
	require.NoError(t, unix.Mkfifo(deleting, 0o600))
	vm, exits := n.run("echo started")
	<-exits
	ctx, cancel := context.WithCancel(n.ctx)
	go func() {
		_, _ = os.ReadFile(deleting) // returns once the shim has been asked
		cancel()
	}()
	_, err := n.task.Delete(ctx)
	require.ErrorContains(t, err, "context canceled")
	require.NoError(t, vm.Kill())
	ev, err := vm.Wait(bound(t))
	require.NoError(t, err)
	require.True(t, ev.Complete)
}

// The pid of an exit event, and of a task, may be the shim's: waiting for it would be waiting for something else.
func TestP5ThePidOfAnExitIsNotTheVMs(t *testing.T) {
	n := newNode(t, "exit-with-shim-pid")
	messages, errs := n.client.Subscribe(n.ctx, `topic=="/tasks/exit"`)
	vm, _ := n.run("echo started")
	shimPid := pidOf(t, vm, kata.RoleShim)
	select {
	case m := <-messages:
		event, err := typeurl.UnmarshalAny(m.Event)
		require.NoError(t, err)
		require.Equal(t, uint32(shimPid), event.(*events.TaskExit).Pid, "the lie is told")
	case err := <-errs:
		require.NoError(t, err)
	}
	require.NotEqual(t, shimPid, pidOf(t, vm, kata.RoleVMM))
	_, err := vm.Wait(now())
	require.ErrorIs(t, err, kata.ErrNoEvidence)
}

func TestAnExitMayComeBeforeTheEndOfTheOutput(t *testing.T) {
	n := newNode(t, "exit-before-eof")
	_, exits := n.run("echo started")
	require.Equal(t, uint32(0), (<-exits).ExitCode())
	n.Misbehave()
	_, err := n.task.Status(n.ctx)
	require.NoError(t, err)
	require.Equal(t, "late", n.line(), "what came after the exit is output all the same")
	_, err = n.task.Delete(n.ctx)
	require.NoError(t, err)
}

// Kata brings a source into the guest by a bind mount that is not recursive.
func TestP11ASealSurvivesTheWayIntoTheGuestByAMountOfItsOwn(t *testing.T) {
	for name, c := range map[string]struct {
		planned   bool
		misbehave []string
		want      string
	}{
		"control: a recursive mount has it": {false, []string{"binds-recursive"}, "sealed"},
		"not recursive, it has vanished":    {false, nil, "writable"},
		"with a mount of its own":           {true, nil, "sealed"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, c.misbehave...)
			ws, seal := filepath.Join(n.dir, "ws"), filepath.Join(n.dir, "seal")
			require.NoError(t, os.MkdirAll(filepath.Join(ws, ".git"), 0o755))
			require.NoError(t, os.MkdirAll(seal, 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(ws, ".git", "config"), []byte("writable\n"), 0o644))
			require.NoError(t, os.WriteFile(filepath.Join(seal, "config"), []byte("sealed\n"), 0o644))
			require.NoError(t, unix.Mount(seal, filepath.Join(ws, ".git"), "", unix.MS_BIND, ""))
			t.Cleanup(func() { require.NoError(t, unix.Unmount(filepath.Join(ws, ".git"), unix.MNT_DETACH)) })
			mounts := []kata.Mount{{Source: ws, Destination: "/ws"}}
			points, err := kata.MountPoints(0)
			require.NoError(t, err)
			require.ErrorIs(t, kata.CheckMounts(mounts, points), kata.ErrMount)
			if c.planned {
				mounts, err = kata.PlanMounts(mounts, points)
				require.NoError(t, err)
				require.NoError(t, kata.CheckMounts(mounts, points))
			}
			for _, m := range mounts {
				n.bind(n.spec, m)
			}
			_, exits := n.run("echo started; cat /ws/.git/config")
			require.Equal(t, c.want, n.line())
			<-exits
		})
	}
}

// A signal for all of a container's processes may reach one: it is the end of the VM that ends them all.
func TestASignalForAllMayReachOne(t *testing.T) {
	const script = `trap 'echo init' TERM; sh -c 'trap "echo child" TERM; echo started; while :; do sleep 1; done' & while :; do wait; done`
	for word, want := range map[string]int{"": 2, "signal-one-pid": 1} {
		t.Run("asked for: "+word, func(t *testing.T) {
			n := newNode(t, word)
			_, _ = n.run(script)
			require.NoError(t, n.task.Kill(n.ctx, unix.SIGTERM, client.WithKillAll))
			heard := map[string]bool{n.line(): true}
			if want == 2 {
				heard[n.line()] = true
			}
			require.Len(t, heard, want)
			require.Equal(t, want == 2, heard["child"])
		})
	}
}
