package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// order is what a test asks of an agent process: to start a sandbox and to wait to be killed.
type order struct {
	State, Parent string
	Spec          runtime.Spec
}

// agentProcess is the other end: TestMain calls it in a re-executed test binary. It prints the identity of what it
// has started and waits for its end.
func agentProcess(args []string) {
	var o order
	if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
		panic(err)
	}
	r, err := New(Options{StateDir: o.State, CgroupParent: o.Parent})
	if err != nil {
		panic(err)
	}
	s, err := r.Create(context.Background(), o.Spec)
	if err != nil {
		panic(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(s.Identity()); err != nil {
		panic(err)
	}
	select {}
}

// agent starts an agent process on the host's state.
func (h *host) agent(spec runtime.Spec) (*exec.Cmd, *bufio.Reader) {
	h.t.Helper()
	b, err := json.Marshal(order{h.state, h.parent, spec})
	require.NoError(h.t, err)
	cmd := exec.Command("/proc/self/exe", "agent", string(b))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(h.t, err)
	require.NoError(h.t, cmd.Start())
	return cmd, bufio.NewReader(out)
}

func kill(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
}

// killedAgent starts a sandbox in another process and kills that with SIGKILL.
func (h *host) killedAgent(spec runtime.Spec) runtime.Identity {
	h.t.Helper()
	cmd, out := h.agent(spec)
	line, err := out.ReadBytes('\n')
	require.NoError(h.t, err)
	kill(h.t, cmd)
	var id runtime.Identity
	require.NoError(h.t, json.Unmarshal(line, &id))
	return id
}

func TestASandboxGoesOnWhenTheAgentIsKilledAndIsLoadedAgain(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	id := h.killedAgent(spec)

	s, err := h.runtime().Load(bound(t), id)
	require.NoError(t, err)
	require.Equal(t, id.Pid, s.Identity().Pid)
	out, p := h.attach(s, spec).run("echo still here")
	require.Equal(t, "still here", out)
	require.Equal(t, "empty", p.Boundary.Cgroup, "the descriptors of the cgroups are found again")
	ev := h.stop(s)
	require.Equal(t, []string{"cgroup_empty", "deleted", "pidfd"}, sources(ev))
}

func TestP5TheEndOfALoadedSandboxIsNoticedAndRemoveHasTheEvidence(t *testing.T) {
	h := newHost(t)
	id := h.killedAgent(h.spec(1234, 0))
	s, err := h.r.Load(bound(t), id)
	require.NoError(t, err)
	require.NoError(t, unix.Kill(id.Pid, unix.SIGKILL))
	select {
	case <-s.Exited():
	case <-bound(t).Done():
		t.Fatal("the end of a loaded sandbox was not noticed")
	}
	require.NoError(t, s.Close())
	_, err = h.r.Load(bound(t), id)
	require.ErrorIs(t, err, runtime.ErrNotFound)
	ev, err := h.r.Remove(bound(t), id)
	require.NoError(t, err)
	require.True(t, ev.Complete)
	require.Equal(t, []string{"cgroup_empty", "deleted", "pidfd"}, sources(ev))
}

func TestP5RemoveEndsASandboxThatNobodyHasLoaded(t *testing.T) {
	h := newHost(t)
	id := h.killedAgent(h.spec(1234, 0))
	ev, err := h.r.Remove(bound(t), id)
	require.NoError(t, err)
	require.True(t, ev.Complete)
	_, state, err := hostkernel.ProcStat(id.Pid)
	require.True(t, errors.Is(err, os.ErrNotExist) || state == 'Z', "not alive: gone, or waiting for the node's init to reap it")
}

func TestP5AProcessWithTheRecordedPidButAnotherStartTimeIsLeftAlone(t *testing.T) {
	h := newHost(t)
	sleep := exec.Command("sleep", "600")
	require.NoError(t, sleep.Start())
	defer kill(t, sleep)
	start, _, err := hostkernel.ProcStat(sleep.Process.Pid)
	require.NoError(t, err)
	boot, err := hostkernel.BootID()
	require.NoError(t, err)
	id := runtime.Identity{SandboxID: newID(t), Pid: sleep.Process.Pid, StartTime: start + 1, BootID: boot}
	require.NoError(t, h.r.keeper.Records.Write(hostkernel.Record{Identity: id, View: []byte("{}")}))

	_, err = h.r.Load(bound(t), id)
	require.ErrorIs(t, err, runtime.ErrNotFound)
	ev, err := h.r.Remove(bound(t), id)
	require.NoError(t, err)
	require.Equal(t, []string{"cgroup_empty", "deleted", "pidfd"}, sources(ev))
	require.NoError(t, unix.Kill(sleep.Process.Pid, 0), "the stranger lives")
}

func TestP5AfterARebootTheBootIdIsTheEvidenceAndNoPidIsTouched(t *testing.T) {
	h := newHost(t)
	sleep := exec.Command("sleep", "600")
	require.NoError(t, sleep.Start())
	defer kill(t, sleep)
	start, _, err := hostkernel.ProcStat(sleep.Process.Pid)
	require.NoError(t, err)
	id := runtime.Identity{SandboxID: newID(t), Pid: sleep.Process.Pid, StartTime: start, BootID: "00000000-0000-0000-0000-000000000000"}
	require.NoError(t, h.r.keeper.Records.Write(hostkernel.Record{Identity: id, View: []byte("{}")}))
	_, err = h.r.Load(bound(t), id)
	require.ErrorIs(t, err, runtime.ErrNotFound)
	ev, err := h.r.Remove(bound(t), id)
	require.NoError(t, err)
	require.True(t, ev.Complete)
	require.Equal(t, []string{"boot_id", "cgroup_empty", "deleted"}, sources(ev))
	require.NoError(t, unix.Kill(sleep.Process.Pid, 0))
}

// stubborn builds a receiptd that never gets ready: a start of it hangs at its last step.
func stubborn(t testing.TB, name string) string {
	t.Helper()
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	out := filepath.Join(testkit.StateDir(t), name)
	require.NoError(t, testkit.BuildStatic(filepath.Join(root, "internal/runtime/embedded/testdata", name), out))
	return out
}

// awaitProcess waits until something of a sandbox is in its cgroups.
func (h *host) awaitProcess(id string) {
	h.t.Helper()
	all, err := hostkernel.Hierarchies()
	require.NoError(h.t, err)
	require.Eventually(h.t, func() bool { return len(hostkernel.TreeOf(all, h.r.keeper.Cgroup(id)).Pids()) > 0 }, leakless, pollEvery)
}

func TestP5AStartThatWasCutShortIsSweptByItsId(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	spec.Receiptd = stubborn(t, "silent")
	cmd, _ := h.agent(spec)
	h.awaitProcess(spec.SandboxID)
	kill(t, cmd)

	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Equal(t, []string{spec.SandboxID}, ids)
	ev, err := h.r.Remove(bound(t), runtime.Identity{SandboxID: spec.SandboxID, Dir: spec.Dir})
	require.NoError(t, err)
	require.True(t, ev.Complete)
	require.NoDirExists(t, spec.Dir)
}

func TestP5RemainsWithoutAnyRecordAreSweptByIdAndFolder(t *testing.T) {
	h := newHost(t)
	id := newID(t)
	dir := filepath.Join(h.state, id)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "rootfs", "usr"), 0o755))
	require.NoError(t, os.MkdirAll(filepath.Join(h.state, "containers", id), 0o711))
	require.NoError(t, unix.Mkfifo(filepath.Join(h.state, "containers", id, "exec.fifo"), 0o622))
	all, err := hostkernel.Hierarchies()
	require.NoError(t, err)
	hs, err := hostkernel.SlotHierarchies(all, runtime.Resources{})
	require.NoError(t, err)
	slots, err := hostkernel.MakeSlots(hs, h.r.keeper.Cgroup(id), runtime.Resources{Pids: 8})
	require.NoError(t, err)
	slots.Close()
	sleep := exec.Command("sleep", "600")
	require.NoError(t, sleep.Start())
	require.NoError(t, hostkernel.WriteCgroup(filepath.Join(hs[0].Path(h.r.keeper.Cgroup(id)+"/c0"), "cgroup.procs"), itoa(sleep.Process.Pid)))

	reaped := make(chan error, 1)
	go func() { reaped <- sleep.Wait() }()
	ev, err := h.r.Remove(bound(t), runtime.Identity{SandboxID: id, Dir: dir})
	require.NoError(t, err)
	require.Equal(t, []string{"cgroup_empty", "deleted"}, sources(ev))
	require.ErrorContains(t, <-reaped, "killed")
	require.NoDirExists(t, dir)
	require.NoDirExists(t, filepath.Join(h.state, "containers", id))
}

func TestP14AFailedStartIsAnErrorAndNothingOfItIsLeft(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(t *testing.T, h *host, s *runtime.Spec)
		says   string
	}{
		{"receiptd dies", func(t *testing.T, h *host, s *runtime.Spec) { s.Receiptd = stubborn(t, "dying") }, "cannot go on"},
		{"receiptd is missing", func(t *testing.T, h *host, s *runtime.Spec) { s.Receiptd = "/nonexistent/receiptd" }, "/nonexistent/receiptd"},
		{"the root file system is missing", func(t *testing.T, h *host, s *runtime.Spec) { s.Rootfs = "/nonexistent" }, "/nonexistent"},
		{"the root file system is empty", func(t *testing.T, h *host, s *runtime.Spec) { s.Rootfs = testkit.StateDir(t) }, "unpack an image"},
		{"the worktree has gone", func(t *testing.T, h *host, s *runtime.Spec) {
			require.NoError(t, os.Rename(s.Workspace.Worktree, s.Workspace.Worktree+".x"))
		}, "wt-topic"},
		{"the state folder is closed to others", func(t *testing.T, h *host, s *runtime.Spec) { require.NoError(t, os.Chmod(h.state, 0o700)) }, "chmod o+x"},
		{"a network mode that is not there", func(t *testing.T, h *host, s *runtime.Spec) { s.Network = "bridge" }, "bridge"},
		{"a worktree in the sandbox's own HOME", func(t *testing.T, h *host, s *runtime.Spec) {
			s.Workspace.Mounts = []mounts.Mount{{Source: "/home/sandbox/wt", Target: "/home/sandbox/wt"}}
		}, "git worktree move"},
		{"ids that begin at root", func(t *testing.T, h *host, s *runtime.Spec) { s.IDs.HostBase = 0 }, "root"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			spec := h.spec(1234, 0)
			c.change(t, h, &spec)
			_, err := h.r.Create(bound(t), spec)
			require.ErrorContains(t, err, c.says)
			ids, err := h.r.List(bound(t))
			require.NoError(t, err)
			require.Empty(t, ids)
			require.NoDirExists(t, spec.Dir)
		})
	}
}

func TestAStartThatHangsIsEndedWithItsContext(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	spec.Receiptd = stubborn(t, "silent")
	ctx, cancel := context.WithCancel(bound(t))
	go func() {
		h.awaitProcess(spec.SandboxID)
		cancel()
	}()
	_, err := h.r.Create(ctx, spec)
	require.ErrorIs(t, err, context.Canceled)
	require.NoDirExists(t, spec.Dir)
}

func TestP5AProcessThatWasPutIntoTheSandboxFromOutsideIsEndedBeforeTheEvidence(t *testing.T) {
	h := newHost(t)
	s := h.create(h.spec(1234, 0))
	sleep := exec.Command("sleep", "600")
	require.NoError(t, sleep.Start())
	reaped := make(chan error, 1)
	go func() { reaped <- sleep.Wait() }()
	require.NoError(t, hostkernel.WriteCgroup(filepath.Join(s.Identity().Cgroups[0], "init", "cgroup.procs"), itoa(sleep.Process.Pid)))
	h.stop(s)
	require.ErrorContains(t, <-reaped, "killed")
}

func TestP5WithoutTheEndOfTheInitThereIsNoEvidence(t *testing.T) {
	testkit.Need(t, testkit.CgroupV1)
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	// A task in the v1 freezer does not even die of SIGKILL: it stands for one in uninterruptible sleep.
	all, err := hostkernel.Hierarchies()
	require.NoError(t, err)
	i := slices.IndexFunc(all, func(h hostkernel.Hierarchy) bool { return h.Has("freezer") })
	require.GreaterOrEqual(t, i, 0, "cgroup v1 has a freezer")
	freezer := filepath.Join(all[i].Path(h.r.keeper.Cgroup(spec.SandboxID)), "init", "freezer.state")
	t.Cleanup(func() { hostkernel.WriteCgroup(freezer, "THAWED") })
	require.NoError(t, hostkernel.WriteCgroup(freezer, "FROZEN"))
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(freezer)
		return err == nil && string(b) == "FROZEN\n"
	}, leakless, pollEvery)

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	ev, err := s.Stop(ctx)
	require.ErrorIs(t, err, runtime.ErrNoEvidence)
	require.ErrorContains(t, err, itoa(s.Identity().Pid), "what is still there is named")
	require.False(t, ev.Complete)
	require.DirExists(t, spec.Dir, "nothing is removed under a living sandbox")

	require.NoError(t, hostkernel.WriteCgroup(freezer, "THAWED"))
	h.stop(s)
}

func TestP5OnCgroupV2EverythingInASandboxIsKilledAndItsCgroupsAreRemoved(t *testing.T) {
	testkit.Need(t, testkit.Root)
	testkit.Leaks(t)
	all, err := hostkernel.Hierarchies()
	require.NoError(t, err)
	i := slices.IndexFunc(all, func(h hostkernel.Hierarchy) bool { return h.V2 })
	if i < 0 {
		testkit.Need(t, testkit.CgroupV2)
	}
	cgroup := testkit.CgroupParent(t) + "/" + newID(t)
	slots, err := hostkernel.MakeSlots(all[i:i+1], cgroup, runtime.Resources{})
	require.NoError(t, err)
	defer slots.Close()
	sleep := exec.Command("sleep", "600")
	require.NoError(t, sleep.Start())
	reaped := make(chan error, 1)
	go func() { reaped <- sleep.Wait() }()
	require.NoError(t, hostkernel.WriteCgroup(filepath.Join(all[i].Path(cgroup), "c1", "cgroup.procs"), itoa(sleep.Process.Pid)))
	require.NoError(t, hostkernel.TreeOf(all, cgroup).Remove(bound(t)))
	require.ErrorContains(t, <-reaped, "killed")
	require.NoDirExists(t, all[i].Path(cgroup))
}

func TestRemoveNeverDeletesAFolderThatIsNotTheSandboxes(t *testing.T) {
	h := newHost(t)
	other := testkit.StateDir(t)
	_, err := h.r.Remove(bound(t), runtime.Identity{SandboxID: newID(t), Dir: other})
	require.ErrorIs(t, err, runtime.ErrNoEvidence)
	require.DirExists(t, other)
}
