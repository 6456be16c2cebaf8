package containerd

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	testkata "github.com/sandbox-agent/sandbox-agent/internal/testkit/kata"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

// kataHost is a host of Kata's sandboxes, with the tests' shim.
type kataHost struct {
	*host
	*testkata.Install
}

func newKataHost(t *testing.T) *kataHost {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git)
	testkit.Leaks(t)
	i := testkata.New(t)
	h := &kataHost{&host{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}, i}
	h.d = containerd.Start(t, "runc")
	i.Build()
	h.opts = Options{
		Name: Kata, Address: h.d.Address, StateDir: h.state, CgroupParent: h.parent, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Kata: KataOptions{Places: kata.Places{Config: i.Config}, RunDirs: []string{i.RunDir()}},
	}
	h.r = h.runtime()
	t.Cleanup(h.end)
	return h
}

// within has the host report to a subtest.
func (h *kataHost) within(t *testing.T) {
	outer := h.t
	h.t, h.T = t, t
	t.Cleanup(func() { h.t, h.T = outer, outer })
}

// vm is what was recorded of a sandbox's virtual machine.
func (h *kataHost) vm(s runtime.Sandbox) kata.VM {
	h.t.Helper()
	rec, err := h.r.keeper.Records.Read(s.Identity().SandboxID)
	require.NoError(h.t, err)
	vm, err := recordedVM(rec)
	require.NoError(h.t, err)
	return vm
}

func (h *kataHost) pidfd(vm kata.VM, role kata.Role) int {
	h.t.Helper()
	for _, p := range vm.Processes {
		if p.Role == role {
			fd, err := unix.PidfdOpen(p.Pid, 0)
			require.NoError(h.t, err)
			h.t.Cleanup(func() { unix.Close(fd) })
			return fd
		}
	}
	require.Fail(h.t, "no process", role)
	return -1
}

func ended(t *testing.T, pidfd int) bool {
	t.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	require.NoError(t, err)
	return n == 1
}

// whole is all that shows a virtual machine's end.
var whole = []string{"cgroup_empty", "deleted", "no_process_left", "pidfd", "shim_pidfd", "virtiofsd_pidfd", "vmm_pidfd"}

func TestASandboxUnderKatasNameRunsCommandsAndIsSeenToEnd(t *testing.T) {
	h := newKataHost(t)
	spec := h.spec(0)
	spec.Grants = []runtime.Grant{{Name: "g", Files: []runtime.GrantFile{{Path: "f", Content: []byte("the secret")}}}}
	s := h.create(spec)
	require.Equal(t, runtime.VirtualMachine, h.r.Isolation())

	asked, err := os.ReadFile(filepath.Join(h.Dir, "asked-config"))
	require.NoError(t, err)
	require.Equal(t, h.Config, string(asked), "the shim is given the configuration that was judged")
	b, err := os.ReadFile(filepath.Join(h.Dir, "asked-spec.json"))
	require.NoError(t, err)
	var oci specs.Spec
	require.NoError(t, json.Unmarshal(b, &oci))
	require.Empty(t, oci.Annotations)
	binds := map[string]specs.Mount{}
	for _, m := range oci.Mounts {
		require.NotContains(t, binds, m.Destination)
		binds[m.Destination] = m
	}
	require.NotEmpty(t, spec.Workspace.Seals())
	for _, seal := range spec.Workspace.Seals() {
		require.Contains(t, binds, seal, "P11: one mount of the spec for each seal")
		require.Contains(t, binds[seal].Options, "ro")
	}

	vm := h.vm(s)
	shim, err := kata.NewShim(spec.SandboxID, h.RunDir())
	require.NoError(t, err)
	shimPid, err := shim.Pid(t.Context())
	require.NoError(t, err)
	require.NotEqual(t, shimPid, s.Identity().Pid, "what is watched is the VMM")

	a := h.attach(s, spec, 1)
	out, p := a.run("id -u; pwd; cat README /run/grants/g/f; echo; echo made > made; git add made; git -c user.name=a -c user.email=a@b commit -qm made; git log --format=%s -1")
	require.Equal(t, "1000\n"+spec.Workspace.Worktree+"\nhello\nthe secret\nmade", out)
	require.True(t, p.SealsIntact)
	for _, attack := range []string{"touch /x", "echo x >> .git", "rm .git", "mv .git y", "ls /.sandbox/receipts"} {
		out, p := a.run(attack)
		require.NotZero(t, p.ExitCode, "%s: %s", attack, out)
	}

	// A restarted agent waits for the same processes.
	h.use(func(*Options) {})
	again, err := h.r.Load(bound(t), s.Identity())
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Equal(t, vm, h.vm(again))
	ev := h.stop(again)
	require.Subset(t, sources(ev), append([]string{"exit_event"}, whole...))
	require.NoDirExists(t, spec.Dir)
}

// Whatever the shim tells containerd, the processes tell the truth.
func TestP5OnlyTheProcessesOfAVirtualMachineShowItsEnd(t *testing.T) {
	h := newKataHost(t)
	h.use(func(o *Options) { o.CallTime = 3 * time.Second })
	for name, c := range map[string]struct {
		misbehave string
		// lose ends the VMM in the middle of a command, as a fault of its own would.
		lose bool
	}{
		"a lost VM with status 0":                         {"lost-with-0", true},
		"a lost VM with status 255":                       {"lost-with-255", true},
		"an exit with the shim's pid":                     {"exit-with-shim-pid", true},
		"an exit before the output's end":                 {"exit-before-eof", true},
		"a signal that reaches one process":               {"signal-one-pid", false},
		"a deletion that is answered, and the VM goes on": {"vm-survives-delete", false},
		"a deletion that is never answered":               {"delete-stuck", false},
	} {
		t.Run(name, func(t *testing.T) {
			h.within(t)
			h.Misbehave(c.misbehave)
			spec := h.spec(0)
			if c.misbehave == "delete-stuck" {
				require.NoError(t, os.WriteFile(filepath.Join(h.Dir, "deleting"), nil, 0o600))
			}
			s := h.create(spec)
			vm := h.vm(s)
			pids := map[kata.Role]int{}
			for _, role := range []kata.Role{kata.RoleShim, kata.RoleVMM, kata.RoleVirtiofsd} {
				pids[role] = h.pidfd(vm, role)
			}
			a := h.attach(s, spec, 1)
			stream := a.begin("e", "echo begun; exec sleep 100000")
			_, err := stream.Recv()
			require.NoError(t, err)
			if c.lose {
				require.NoError(t, unix.PidfdSendSignal(pids[kata.RoleVMM], unix.SIGKILL, nil, 0))
				<-s.Exited()
			}
			ev := h.stop(s)
			require.Subset(t, sources(ev), whole)
			for role, fd := range pids {
				require.True(t, ended(t, fd), "the %s has ended", role)
			}
		})
	}
}

// A stop has a minute, which a call may take that boots a guest.
func TestP5AShimThatHangsIsEndedWhileAStopHasTimeForItsEvidence(t *testing.T) {
	h := newKataHost(t)
	spec := h.spec(0)
	first := h.create(spec)
	shim := h.pidfd(h.vm(first), kata.RoleShim)
	require.NoError(t, first.Close())
	var given []time.Duration
	h.through(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, o ...grpc.CallOption) error {
		if !strings.HasSuffix(method, ".Tasks/Delete") {
			return invoke(ctx, method, req, reply, cc, o...)
		}
		if end, _ := ctx.Deadline(); len(given) == 0 {
			given = append(given, time.Until(end))
			return status.Error(codes.DeadlineExceeded, "it hangs")
		}
		return invoke(ctx, method, req, reply, cc, o...)
	})
	s, err := h.r.Load(bound(t), first.Identity())
	require.NoError(t, err)
	ev := h.stop(s)
	require.Len(t, given, 1)
	require.LessOrEqual(t, given[0], h.r.opts.CallTime/3)
	require.Subset(t, sources(ev), whole)
	require.True(t, ended(t, shim))
}

// An agent that was killed while containerd created the sandbox knows none of its processes.
func TestP5ASandboxWhoseVirtualMachineWasNeverRecordedIsSwept(t *testing.T) {
	h := newKataHost(t)
	spec := h.spec(0)
	s := h.create(spec)
	vm := h.vm(s)
	vmm, fs := h.pidfd(vm, kata.RoleVMM), h.pidfd(vm, kata.RoleVirtiofsd)
	require.NoError(t, s.Close())
	rec, err := h.r.keeper.Records.Read(spec.SandboxID)
	require.NoError(t, err)
	rec.VM, rec.View, rec.Identity.Pid, rec.Identity.StartTime = nil, nil, 0, 0
	require.NoError(t, h.r.keeper.Records.Write(hostkernel.Record{Identity: rec.Identity, Cgroup: rec.Cgroup, TaskAsked: true}))
	h.Misbehave("vm-survives-delete")
	ev, err := h.r.Remove(bound(t), runtime.Identity{SandboxID: spec.SandboxID, Dir: spec.Dir})
	require.NoError(t, err)
	require.True(t, ev.Complete)
	require.Contains(t, sources(ev), "no_process_left")
	require.True(t, ended(t, vmm))
	require.True(t, ended(t, fs))
}

func TestP14AnInstallationThatMayNotBeUsedMakesNoSandbox(t *testing.T) {
	h := newKataHost(t)
	h.Configure("kernel_params = \"init=/bin/sh\"")
	spec := h.spec(0)
	_, err := h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "kernel_params")
	h.Configure("")
	require.NoError(t, os.Remove(h.VMM()))
	_, err = h.r.Create(bound(t), spec)
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "kata needs vmm")
	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Empty(t, ids, "nothing is left")

	// Whatever else is missing here has its remedy too.
	err = h.r.Check(bound(t))
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "kata needs vmm")
	if _, statErr := os.Stat("/dev/kvm"); statErr != nil {
		require.ErrorContains(t, err, "kata needs kvm")
	}
}

func TestP14AContainerdThatChoosesAnotherConfigurationIsRefused(t *testing.T) {
	t.Setenv("KATA_CONF_FILE", "/etc/other.toml")
	h := newKataHost(t)
	_, err := h.r.Create(bound(t), h.spec(0))
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "KATA_CONF_FILE")
}

// A guest that hangs ends no process: whoever wants to attach again hears of that long before the time is over that a boot may take.
func TestAnOldAttachThatDoesNotEndIsNotWaitedForAsLongAsForABoot(t *testing.T) {
	h := newKataHost(t)
	spec := h.spec(0)
	s := h.create(spec)
	_, err := s.Dial(bound(t))
	require.NoError(t, err)
	var given []time.Duration
	h.through(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, o ...grpc.CallOption) error {
		if w, ok := req.(*tasks.WaitRequest); ok && w.GetExecID() != "" {
			end, _ := ctx.Deadline()
			given = append(given, time.Until(end))
			return status.Error(codes.DeadlineExceeded, "it hangs")
		}
		return invoke(ctx, method, req, reply, cc, o...)
	})
	again, err := h.r.Load(bound(t), s.Identity())
	require.NoError(t, err)
	dial, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	_, err = again.Dial(dial)
	require.ErrorIs(t, err, runtime.ErrUnreachable)
	require.Len(t, given, 1)
	require.LessOrEqual(t, given[0], h.r.opts.CallTime/3)

	held := again.(*Sandbox)
	done, err := held.aloneAttaching(bound(t))
	require.NoError(t, err)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = again.Dial(over)
	require.ErrorIs(t, err, context.Canceled, "nor is one that somebody else waits for")
	done()
	require.NoError(t, again.Close())
	h.stop(s)
}
