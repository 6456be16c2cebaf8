package embedded

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// host is what the tests of real sandboxes share.
type host struct {
	t      testing.TB
	r      *Runtime
	state  string
	parent string
}

func newHost(t testing.TB) *host {
	t.Helper()
	testkit.Need(t, testkit.MountAPI)
	return newHostOfAnyKernel(t)
}

func newHostOfAnyKernel(t testing.TB) *host {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git)
	warmUp(t)
	testkit.Leaks(t)
	h := &host{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}
	h.r = h.runtime()
	t.Cleanup(func() {
		ids, err := h.r.List(context.Background())
		require.NoError(t, err)
		for _, id := range ids {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			_, err := h.r.Remove(ctx, runtime.Identity{SandboxID: id})
			cancel()
			require.NoError(t, err)
		}
	})
	return h
}

var warm sync.Once

// warmUp has libcontainer open what it keeps open for good (the root folder, /sys/fs/cgroup) before Leaks looks.
func warmUp(t testing.TB) {
	warm.Do(func() {
		h := &host{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}
		h.r = h.runtime()
		s, err := h.r.Create(bound(t), h.spec(1234, 0))
		if err != nil {
			return // the tests themselves say so
		}
		_, err = s.Stop(bound(t))
		require.NoError(t, err)
	})
}

// runtime makes a runtime on the same state, as a restarted agent does.
func (h *host) runtime() *Runtime {
	h.t.Helper()
	r, err := New(Options{StateDir: h.state, CgroupParent: h.parent, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	require.NoError(h.t, err)
	return r
}

func newID(t testing.TB) string {
	b := make([]byte, 8)
	_, err := rand.Read(b)
	require.NoError(t, err)
	return "sb-" + hex.EncodeToString(b)
}

// spec describes a sandbox on a new worktree that belongs to uid on disk; slot chooses its range of host ids.
func (h *host) spec(uid int, slot uint32) runtime.Spec { return h.specIn(mounts.Isolated, uid, slot) }

func (h *host) specIn(layout string, uid int, slot uint32) runtime.Spec {
	h.t.Helper()
	repo := testkit.Repo(h.t, uid)
	plan := testkit.Plan(h.t, uid, repo, testkit.Worktree(h.t, uid, repo, "topic"), layout)
	receiptd, pid1 := testkit.Binaries(h.t)
	id := newID(h.t)
	return runtime.Spec{
		SandboxID: id, SessionID: "s", Generation: 1, Rootfs: "host", Network: "none", Workspace: plan,
		IDs:       runtime.IDs{HostBase: 0x70000000 + slot*65536, Size: 65536, Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000},
		Resources: runtime.Resources{Pids: 64, MemoryBytes: 256 << 20, CPUs: 1, TmpBytes: 16 << 20, HomeBytes: 8 << 20},
		Dir:       filepath.Join(h.state, id), ReceiptsDir: h.receipts(id), Receiptd: receiptd, Pid1: pid1,
	}
}

func (h *host) receipts(id string) string {
	dir := filepath.Join(h.state, "receipts-"+id)
	require.NoError(h.t, os.Mkdir(dir, 0o700))
	return dir
}

// bound ends a test that would otherwise wait for ever; nothing is measured by it.
func bound(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func (h *host) create(spec runtime.Spec) runtime.Sandbox {
	h.t.Helper()
	s, err := h.r.Create(bound(h.t), spec)
	require.NoError(h.t, err)
	return s
}

func (h *host) stop(s runtime.Sandbox) runtime.Evidence {
	h.t.Helper()
	ev, err := s.Stop(bound(h.t))
	require.NoError(h.t, err)
	require.True(h.t, ev.Complete)
	return ev
}

// attached is a connection to a receiptd that has had its Init.
type attached struct {
	t        testing.TB
	receiptd receiptdv1.ReceiptdClient
	receipts string
	execs    int
}

func (h *host) attach(s runtime.Sandbox, spec runtime.Spec) *attached {
	h.t.Helper()
	conn, err := s.Dial(bound(h.t))
	require.NoError(h.t, err)
	client := ttrpc.NewClient(conn)
	h.t.Cleanup(func() { client.Close() })
	a := &attached{t: h.t, receiptd: receiptdv1.NewReceiptdClient(client), receipts: spec.ReceiptsDir}
	view := s.View()
	view.Env = []*receiptdv1.EnvVar{{Name: "PATH", Value: "/usr/bin:/bin"}, {Name: "HOME", Value: runtime.HomePath}}
	_, err = a.receiptd.Init(bound(h.t), &receiptdv1.InitRequest{
		Identity:    &receiptdv1.Identity{SessionId: spec.SessionID, SandboxId: spec.SandboxID, Generation: spec.Generation},
		AttachEpoch: 1, View: view,
		Limits: &receiptdv1.Limits{OutputBytes: 1 << 16, Nofile: 1024, GraceMs: 100, MaxTimeoutMs: 60000},
	})
	require.NoError(h.t, err)
	return a
}

// run runs a command to its receipt and gives its output, both streams together, and what the receipt says.
func (a *attached) run(command string) (string, receipt.Predicate) {
	a.t.Helper()
	a.execs++
	id := fmt.Sprintf("e%d", a.execs)
	stream, err := a.receiptd.Exec(bound(a.t), &receiptdv1.ExecRequest{
		AttachEpoch: 1, ExecId: id, Nonce: make([]byte, 32), Command: command, TimeoutMs: 30000,
	})
	require.NoError(a.t, err)
	var out strings.Builder
	for {
		ev, err := stream.Recv()
		require.NoError(a.t, err)
		switch e := ev.Event.(type) {
		case *receiptdv1.ExecEvent_Output:
			out.Write(e.Output.Data)
		case *receiptdv1.ExecEvent_Done:
			return strings.TrimSpace(out.String()), a.predicate(id)
		default:
			a.t.Fatalf("exec %q: %v", command, ev)
		}
	}
}

func (a *attached) predicate(id string) receipt.Predicate {
	a.t.Helper()
	b, err := os.ReadFile(filepath.Join(a.receipts, id+".json"))
	require.NoError(a.t, err)
	var envelope struct{ Payload []byte }
	require.NoError(a.t, json.Unmarshal(b, &envelope))
	var statement struct{ Predicate receipt.Predicate }
	require.NoError(a.t, json.Unmarshal(envelope.Payload, &statement))
	return statement.Predicate
}

// sources are the kinds of evidence, sorted.
func sources(ev runtime.Evidence) []string {
	var out []string
	for _, i := range ev.Items {
		out = append(out, i.Source)
	}
	sort.Strings(out)
	return out
}

func TestP5ASandboxStopsWithCompleteEvidenceAndNothingIsLeft(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	id := s.Identity()
	ids, err := h.r.List(bound(t))
	require.NoError(t, err)
	require.Equal(t, []string{spec.SandboxID}, ids)

	ev := h.stop(s)
	require.Equal(t, []string{"cgroup_empty", "deleted", "pidfd"}, sources(ev))
	require.Equal(t, spec.SandboxID, ev.ContainerID)
	<-s.Exited()
	require.NoDirExists(t, spec.Dir)
	require.NoDirExists(t, filepath.Join(h.state, "containers", spec.SandboxID))
	require.NotEmpty(t, id.Cgroups)
	for _, dir := range id.Cgroups {
		require.NoDirExists(t, dir)
	}
	ids, err = h.r.List(bound(t))
	require.NoError(t, err)
	require.Empty(t, ids)
	require.DirExists(t, spec.ReceiptsDir, "receipts outlive their sandbox")
}

func TestStopCanBeCalledAgainAndByTwoAtOnce(t *testing.T) {
	h := newHost(t)
	s := h.create(h.spec(1234, 0))
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			ev, err := s.Stop(bound(t))
			if err != nil || !ev.Complete {
				t.Errorf("stop: %+v, %v", ev, err)
			}
		})
	}
	wg.Wait()
	h.stop(s)
}

func TestTheInitIsTheOneThatTheIdentityNames(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	id := s.Identity()
	start, _, err := hostkernel.ProcStat(id.Pid)
	require.NoError(t, err)
	require.Equal(t, start, id.StartTime)
	boot, err := hostkernel.BootID()
	require.NoError(t, err)
	require.Equal(t, boot, id.BootID)
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", id.Pid))
	require.NoError(t, err)
	require.Equal(t, "receiptd\n", string(comm))
	h.stop(s)
}

func TestExitedIsClosedWhenReceiptdDies(t *testing.T) {
	h := newHost(t)
	s := h.create(h.spec(1234, 0))
	require.NoError(t, unix.Kill(s.Identity().Pid, unix.SIGKILL))
	select {
	case <-s.Exited():
	case <-bound(t).Done():
		t.Fatal("the end of receiptd was not noticed")
	}
	h.stop(s)
}

func TestFilesBelongToTheCommandInsideAndToTheirOwnerOnDisk(t *testing.T) {
	for name, uid := range map[string]int{"an ordinary owner": 1234, "root as owner": 0, "the command's own number": 1000} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			spec := h.spec(uid, 3)
			s := h.create(spec)
			out, p := h.attach(s, spec).run("stat -c %u:%g README . && echo new > made && stat -c %u:%g made && git status --porcelain")
			require.Equal(t, receipt.Exited, p.Status)
			require.Equal(t, "1000:1000\n1000:1000\n1000:1000\n?? made", out)
			h.stop(s)
			var st unix.Stat_t
			require.NoError(t, unix.Stat(filepath.Join(spec.Workspace.Worktree, "made"), &st))
			require.Equal(t, []uint32{uint32(uid), uint32(uid)}, []uint32{st.Uid, st.Gid})
		})
	}
}

func TestGitCommitsInTheSandboxAndTheHostSeesIt(t *testing.T) {
	h := newHost(t)
	spec := h.specIn(mounts.Shared, 1234, 0)
	s := h.create(spec)
	out, p := h.attach(s, spec).run("echo x > f && git add f && git -c user.name=a -c user.email=a@b commit -q -m inside && pwd && git rev-parse HEAD")
	require.Equal(t, 0, p.ExitCode, out)
	dir, head, _ := strings.Cut(out, "\n")
	require.Equal(t, spec.Workspace.Worktree, dir)
	h.stop(s)
	require.Equal(t, head, strings.TrimSpace(testkit.GitAs(t, 1234, spec.Workspace.Worktree, "rev-parse", "HEAD")))
}

func TestP11GitPointersConfigurationAndHooksAreReadOnlyInside(t *testing.T) {
	for _, layout := range []string{mounts.Isolated, mounts.Shared} {
		t.Run(layout, func(t *testing.T) {
			h := newHost(t)
			spec := h.specIn(layout, 1234, 0)
			s := h.create(spec)
			a := h.attach(s, spec)
			seals := spec.Workspace.Seals()
			require.GreaterOrEqual(t, len(seals), 10)
			for _, seal := range seals {
				out, p := a.run(fmt.Sprintf("chmod 600 %[1]q; mv %[1]q %[1]q.x; rm -rf %[1]q; test -e %[1]q", seal))
				require.Equal(t, 0, p.ExitCode, out)
				require.Contains(t, out, "Read-only file system", seal)
				require.Regexp(t, "Device or resource busy|cannot move .*: (Read-only file system|Operation not permitted)", out, seal)
			}
			h.stop(s)
		})
	}
}

func TestP9CommandCannotSeeReceiptsControlOrBinaries(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	a := h.attach(s, spec)
	out, _ := a.run("ls -A /.sandbox; find / -xdev \\( -name 'receiptd*' -o -name '*.sock' \\) 2>/dev/null; grep -c sandbox/ /proc/self/mountinfo")
	require.Equal(t, "0", out, "an empty folder, and no such mount")
	out, _ = a.run(`perl -MIO::Socket::UNIX -e 'print IO::Socket::UNIX->new(Peer => "/.sandbox/control/receiptd.sock") ? "connected" : $!'`)
	require.Equal(t, "No such file or directory", out)
	h.stop(s)
}

func TestP9ReceiptsAndControlBelongToRootOnDisk(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	h.attach(s, spec).run("true")
	for _, path := range []string{filepath.Join(spec.ReceiptsDir, "e1.json"), filepath.Join(spec.Dir, "control", runtime.SocketName)} {
		var st unix.Stat_t
		require.NoError(t, unix.Lstat(path, &st))
		require.Zero(t, st.Uid, path)
		require.Zero(t, st.Mode&0o077, path)
	}
	h.stop(s)
}

func TestACommandCantWriteTheRootFileSystem(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	out, _ := h.attach(s, spec).run("for d in / /usr /usr/bin /etc /dev /home; do touch $d/x 2>&1; done; :")
	require.NotEmpty(t, out)
	for _, line := range strings.Split(out, "\n") {
		require.Contains(t, line, "Read-only file system")
	}
	h.stop(s)
}

func TestP16TmpAndHomeAreBoundedInBytesAndInodes(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	a := h.attach(s, spec)
	for _, c := range []struct{ dir, command string }{
		{"/tmp", "head -c 20M /dev/zero > /tmp/f"},
		{runtime.HomePath, "head -c 10M /dev/zero > ~/f"},
		{"/dev/shm", "head -c 70M /dev/zero > /dev/shm/f"},
		{"inodes of /tmp", "rm /tmp/f; mkdir /tmp/d && cd /tmp/d && seq 5000 | xargs touch"},
		{"inodes of HOME", "rm ~/f; cd ~ && seq 3000 | xargs touch"},
	} {
		out, p := a.run(c.command)
		require.NotZero(t, p.ExitCode, c.dir)
		require.Contains(t, out, "No space left on device", c.dir)
	}
	out, _ := a.run("echo alive")
	require.Equal(t, "alive", out)
	h.stop(s)
}

func TestP16AMemoryHogIsEndedAsACommandAndReceiptdLives(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	spec.Resources.MemoryBytes = 64 << 20
	s := h.create(spec)
	a := h.attach(s, spec)
	_, p := a.run("head -c 200M /dev/zero | tail -c 150M | wc -c")
	require.True(t, p.OOM)
	out, p := a.run("echo alive")
	require.Equal(t, "alive", out)
	require.Equal(t, "empty", p.Boundary.Cgroup)
	h.stop(s)
}

func TestTheReceiptSaysWhatMemoryACommandTookUnlessTheKernelCantTell(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	s := h.create(spec)
	a := h.attach(s, spec)
	_, big := a.run("head -c 40M /dev/zero | tail -c 40M | wc -c")
	// Both slots, so one of them the big one's.
	_, small := a.run("true")
	_, small2 := a.run("true")
	h.stop(s)
	hs, err := hostkernel.Hierarchies()
	require.NoError(t, err)
	v2 := slices.ContainsFunc(hs, func(h hostkernel.Hierarchy) bool { return h.V2 && h.Has("memory") })
	if v2 && testkit.OlderKernel(6, 12) {
		require.Equal(t, []int64{0, 0, 0}, []int64{big.Usage.PeakMemory, small.Usage.PeakMemory, small2.Usage.PeakMemory}, "memory.peak can't be reset")
		return
	}
	require.GreaterOrEqual(t, big.Usage.PeakMemory, int64(40<<20))
	require.Less(t, max(small.Usage.PeakMemory, small2.Usage.PeakMemory), int64(20<<20))
	require.NotZero(t, min(small.Usage.PeakMemory, small2.Usage.PeakMemory))
}

func TestP16TheProcessLimitHoldsForACommandAndNotForReceiptd(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	spec.Resources.Pids = 20
	s := h.create(spec)
	a := h.attach(s, spec)
	out, _ := a.run("for i in $(seq 100); do sleep 60 & done 2>&1 | grep -c -m1 'Resource temporarily unavailable'")
	require.Equal(t, "1", out)
	out, _ = a.run("echo alive")
	require.Equal(t, "alive", out)
	h.stop(s)
}

func TestTwoSandboxesHaveIdsOfTheirOwn(t *testing.T) {
	h := newHost(t)
	specs := []runtime.Spec{h.spec(1234, 0), h.spec(1234, 1)}
	var uids []string
	for _, spec := range specs {
		s := h.create(spec)
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", s.Identity().Pid))
		require.NoError(t, err)
		uids = append(uids, strings.Join(strings.Fields(string(b)), " "))
	}
	require.Equal(t, []string{"0 1879048192 65536", "0 1879113728 65536"}, uids)
}

func TestManySandboxesStartAtOnce(t *testing.T) {
	h := newHost(t)
	var specs []runtime.Spec
	for i := range 6 {
		specs = append(specs, h.spec(1234, uint32(i)))
	}
	var wg sync.WaitGroup
	for _, spec := range specs {
		wg.Go(func() {
			s, err := h.r.Create(bound(t), spec)
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			if _, err := s.Stop(bound(t)); err != nil {
				t.Errorf("stop: %v", err)
			}
		})
	}
	wg.Wait()
}

func TestALongStateFolderDoesNotMatterToTheSocket(t *testing.T) {
	h := newHost(t)
	h.state = filepath.Join(h.state, strings.Repeat("long-", 25))
	require.NoError(t, os.Mkdir(h.state, 0o711))
	h.r = h.runtime()
	s := h.create(h.spec(1234, 0))
	conn, err := s.Dial(bound(t))
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	h.stop(s)
}

func TestAWorktreeBelowTmpOrUsrIsMountedWithoutTouchingTheHost(t *testing.T) {
	for _, top := range []string{"/tmp", "/usr/src"} {
		t.Run(top, func(t *testing.T) {
			h := newHost(t)
			dir, err := os.MkdirTemp(top, "sa-wt-")
			require.NoError(t, err)
			defer os.RemoveAll(dir)
			require.NoError(t, os.Chown(dir, 1234, 1234))
			spec := h.spec(1234, 0)
			wt := filepath.Join(dir, "wt")
			testkit.GitAs(t, 1234, spec.Workspace.Worktree, "worktree", "add", "-q", "-b", "other", wt)
			repo := filepath.Join(filepath.Dir(spec.Workspace.Worktree), "repo")
			spec.Workspace = testkit.Plan(t, 1234, repo, wt, mounts.Isolated)
			s := h.create(spec)
			out, p := h.attach(s, spec).run("pwd; git status --porcelain; ls " + top)
			require.Equal(t, 0, p.ExitCode, out)
			require.Contains(t, out, wt)
			h.stop(s)
		})
	}
}

func TestAFileSystemWithoutIdmappedMountsIsUsedAsItsOwner(t *testing.T) {
	h := newHost(t)
	fs := filepath.Join(h.state, "ramfs")
	require.NoError(t, os.Mkdir(fs, 0o711))
	require.NoError(t, unix.Mount("ramfs", fs, "ramfs", 0, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(fs, unix.MNT_DETACH)) })
	require.NoError(t, os.Chown(fs, 1234, 1234))
	repo, wt := filepath.Join(fs, "repo"), filepath.Join(fs, "wt")
	testkit.GitAs(t, 1234, fs, "init", "-q", repo)
	testkit.GitAs(t, 1234, repo, "commit", "-q", "--allow-empty", "-m", "x")
	testkit.GitAs(t, 1234, repo, "worktree", "add", "-q", "-b", "topic", wt)
	for _, layout := range []string{mounts.Isolated, mounts.Shared} {
		t.Run(layout, func(t *testing.T) {
			spec := h.spec(1234, 0)
			spec.Workspace = testkit.Plan(t, 1234, repo, wt, layout)
			spec.Grants = someGrants("granted")
			s := h.create(spec)
			out, p := h.attach(s, spec).run("echo > made && stat -c %u made && git status --porcelain && git branch x && git update-ref -d refs/heads/x && cat /run/grants/cluster/kubeconfig")
			require.Equal(t, 0, p.ExitCode, out)
			require.Equal(t, "1000\n?? made\ngranted", out)
			h.stop(s)
			var st unix.Stat_t
			require.NoError(t, unix.Stat(filepath.Join(wt, "made"), &st))
			require.Equal(t, uint32(1234), st.Uid)
		})
	}
}

func TestCachesAreMountedInHomeAndBelongToTheirOwner(t *testing.T) {
	h := newHost(t)
	w := h.cached()
	own, operators := w.Extra[0].Source, w.Extra[1].Source
	spec := h.spec(1234, 0)
	var err error
	spec.Workspace, err = mounts.New(w, mounts.Exists)
	require.NoError(t, err)
	s := h.create(spec)
	a := h.attach(s, spec)
	out, p := a.run("cd ~ && stat -c %u .cache .cache/tool .cache/tool/go && echo x > .cache/tool/go/made && touch .cache/other && cat .npm/given && ! touch .npm/x")
	require.Equal(t, 0, p.ExitCode, out)
	require.True(t, strings.HasPrefix(out, "1000\n1000\n1000\noperator's\n"), out)
	require.Contains(t, out, "Read-only file system")
	out, p = a.run("mv ~/.cache ~/c && cat ~/c/tool/go/made; rm -rf ~/c ~/.npm; cd " + w.Worktree + " && git status --porcelain")
	require.Equal(t, 0, p.ExitCode, "caches are no seals: %s", out)
	h.stop(s)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(own, &st))
	require.Equal(t, uint32(1234), st.Uid)
	require.NoFileExists(t, filepath.Join(own, "made"), "the command removed it")
	require.FileExists(t, filepath.Join(operators, "given"))
}

// cached is a workspace with a cache of its own and one of the operator's.
func (h *host) cached() mounts.Workspace {
	h.t.Helper()
	repo := testkit.Repo(h.t, 1234)
	w := testkit.Workspace(h.t, 1234, repo, testkit.Worktree(h.t, 1234, repo, "topic"), mounts.Isolated)
	own, operators := filepath.Join(h.state, "cache"), filepath.Join(h.state, "operators")
	for _, dir := range []string{own, operators} {
		require.NoError(h.t, os.Mkdir(dir, 0o755))
	}
	require.NoError(h.t, os.Chown(own, 1234, 1234))
	require.NoError(h.t, os.WriteFile(filepath.Join(operators, "given"), []byte("operator's\n"), 0o644))
	w.Extra = []mounts.Mount{
		{Source: own, Target: runtime.HomePath + "/.cache/tool/go", Idmap: true},
		{Source: operators, Target: runtime.HomePath + "/.npm", ReadOnly: true},
	}
	return w
}

func TestP11OtherWorktreesOfTheRepositoryAreOutOfReach(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	common := filepath.Join(spec.Workspace.Worktree, ".git")
	for _, m := range spec.Workspace.Mounts {
		if m.Empty {
			common = filepath.Dir(m.Target)
		}
	}
	repo := filepath.Dir(common)
	other := testkit.Worktree(t, 1234, repo, "other")
	before := testkit.GitAs(t, 1234, other, "rev-parse", "--symbolic-full-name", "HEAD")
	s := h.create(spec)
	a := h.attach(s, spec)
	out, p := a.run(fmt.Sprintf("ls %[1]s/worktrees; echo 'ref: refs/heads/evil' > %[1]s/worktrees/wt-other/HEAD; mkdir %[1]s/worktrees/x; mv %[1]s/worktrees %[1]s/w2; git worktree prune -v; git gc -q --prune=now; git status --porcelain", common))
	require.Equal(t, 0, p.ExitCode, out)
	require.NotContains(t, out, "Removing")
	h.stop(s)
	require.Equal(t, before, testkit.GitAs(t, 1234, other, "rev-parse", "--symbolic-full-name", "HEAD"))
	testkit.GitAs(t, 1234, other, "status")
	testkit.GitAs(t, 1234, other, "fsck")
	require.NoDirExists(t, filepath.Join(common, "worktrees", "x"))
}
