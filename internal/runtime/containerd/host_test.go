package containerd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/ttrpc"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// host is a containerd of the test's own and a runtime on it.
type host struct {
	t      testing.TB
	d      *containerd.Daemon
	r      *Runtime
	opts   Options
	state  string
	parent string
}

// way is a runtime and how receiptd is reached under it.
type way struct {
	runtime   string
	transport Transport
}

func (w way) String() string { return w.runtime + " by " + string(w.transport) }

// ways are all that there are without hardware virtualisation.
var ways = []way{{Runc, Socket}, {Runc, Attach}, {GVisor, Attach}}

// newHost starts a containerd with runc, and a runtime with the given transport.
func newHost(t testing.TB, transport Transport) *host {
	t.Helper()
	return newHostOf(t, Runc, transport)
}

func newHostOf(t testing.TB, name string, transport Transport) *host {
	t.Helper()
	return newHostOn(t, "", name, transport)
}

// newHostOn has containerd keep what it keeps in the folder root, unless that is empty.
func newHostOn(t testing.TB, root, name string, transport Transport) *host {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git, testkit.MountAPI)
	testkit.Leaks(t)
	h := &host{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}
	h.d = containerd.StartOn(t, root, "runc", name)
	h.opts = Options{
		Name: name, Address: h.d.Address, StateDir: h.state, CgroupParent: h.parent, Transport: transport,
		CallTime: testkit.Patience() / 3, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	h.r = h.runtime()
	t.Cleanup(h.end)
	return h
}

// end removes what a test has left that failed, and asserts that nothing is left then.
func (h *host) end() {
	h.t.Helper()
	ids, err := h.r.List(context.Background())
	require.NoError(h.t, err)
	for _, id := range ids {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		_, err := h.r.Remove(ctx, runtime.Identity{SandboxID: id})
		cancel()
		require.NoError(h.t, err)
	}
	h.nothingLeft()
}

// nothingLeft asserts that containerd has nothing of any sandbox, and waits for shims that are ending.
func (h *host) nothingLeft() {
	h.t.Helper()
	containers, leases := h.d.Left()
	require.Zero(h.t, containers, "containers are left")
	require.Zero(h.t, leases, "leases are left")
	containerd.Until(h.t, "the shims end", func() bool { return len(h.d.Shims()) == 0 })
}

// serve starts containerd again, and waits until the runtime's connection is there again too.
func (h *host) serve() {
	h.t.Helper()
	h.d.Serve()
	containerd.Until(h.t, "the runtime reaches containerd", func() bool { return h.r.Reachable(bound(h.t)) == nil })
}

// runtime makes a runtime on the same state, as a restarted agent does.
func (h *host) runtime() *Runtime {
	h.t.Helper()
	r, err := New(h.opts)
	require.NoError(h.t, err)
	h.t.Cleanup(func() { r.client.Close() })
	return r
}

// use has the host make its sandboxes with a runtime of other options, until the test ends.
func (h *host) use(change func(o *Options)) {
	h.t.Helper()
	usual := h.r
	change(&h.opts)
	h.r = h.runtime()
	h.t.Cleanup(func() { h.r = usual })
}

// through has every call of containerd that gives one answer go through f, until the test ends.
func (h *host) through(f grpc.UnaryClientInterceptor) {
	h.t.Helper()
	h.use(func(*Options) {})
	h.r.client.Close()
	var err error
	h.r.client, err = client.New(h.opts.Address, client.WithDefaultNamespace("sandbox-agent"), client.WithTimeout(time.Second),
		client.WithExtraDialOpts([]grpc.DialOption{grpc.WithChainUnaryInterceptor(f)}))
	require.NoError(h.t, err)
}

// nowhereOnDisk asserts that no file of the agent's state, or of containerd's, holds a secret.
func (h *host) nowhereOnDisk(secret string) {
	h.t.Helper()
	for _, top := range []string{h.state, filepath.Dir(h.opts.Address)} {
		require.NoError(h.t, filepath.WalkDir(top, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil
			}
			b, err := os.ReadFile(path)
			if err == nil {
				require.NotContains(h.t, string(b), secret, path)
			}
			return nil
		}))
	}
}

func newID(t testing.TB) string {
	b := make([]byte, 8)
	_, err := rand.Read(b)
	require.NoError(t, err)
	return "sb-" + hex.EncodeToString(b)
}

// spec describes a sandbox on a new worktree that belongs to uid 1234 on disk; slot chooses its range of host ids.
func (h *host) spec(slot uint32) runtime.Spec {
	h.t.Helper()
	return h.specIn(mounts.Isolated, slot)
}

func (h *host) specIn(layout string, slot uint32) runtime.Spec {
	h.t.Helper()
	const uid = 1234
	repo := testkit.Repo(h.t, uid)
	plan := testkit.Plan(h.t, uid, repo, testkit.Worktree(h.t, uid, repo, "topic"), layout)
	receiptd, pid1 := testkit.Binaries(h.t)
	id := newID(h.t)
	receipts := filepath.Join(h.state, "receipts-"+id)
	require.NoError(h.t, os.Mkdir(receipts, 0o700))
	return runtime.Spec{
		SandboxID: id, SessionID: "s", Generation: 1, Rootfs: "host", Network: "none", Workspace: plan,
		IDs:       runtime.IDs{HostBase: 0x70000000 + slot*65536, Size: 65536, Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000},
		Resources: runtime.Resources{Pids: 64, MemoryBytes: 256 << 20, CPUs: 1, TmpBytes: 16 << 20, HomeBytes: 8 << 20},
		Dir:       filepath.Join(h.state, id), ReceiptsDir: receipts, Receiptd: receiptd, Pid1: pid1,
	}
}

// bound ends a test that would otherwise wait for ever; nothing is measured by it.
func bound(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience())
	t.Cleanup(cancel)
	return ctx
}

func (h *host) create(spec runtime.Spec) runtime.Sandbox {
	h.t.Helper()
	s, err := h.r.Create(bound(h.t), spec)
	require.NoError(h.t, err, "%s", h.d.Log())
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
	client   *ttrpc.Client
	receiptd receiptdv1.ReceiptdClient
	receipts string
	epoch    uint64
	seals    []*receiptdv1.SealState
}

func (h *host) attach(s runtime.Sandbox, spec runtime.Spec, epoch uint64) *attached {
	h.t.Helper()
	conn, err := s.Dial(bound(h.t))
	require.NoError(h.t, err)
	client := ttrpc.NewClient(conn)
	h.t.Cleanup(func() { client.Close() })
	a := &attached{t: h.t, client: client, receiptd: receiptdv1.NewReceiptdClient(client), receipts: spec.ReceiptsDir, epoch: epoch}
	view := s.View()
	view.Env = []*receiptdv1.EnvVar{{Name: "PATH", Value: "/usr/bin:/bin"}, {Name: "HOME", Value: runtime.HomePath}}
	res, err := a.receiptd.Init(bound(h.t), &receiptdv1.InitRequest{
		Identity:    &receiptdv1.Identity{SessionId: spec.SessionID, SandboxId: spec.SandboxID, Generation: spec.Generation},
		AttachEpoch: epoch, View: view,
		Limits: &receiptdv1.Limits{OutputBytes: 1 << 16, Nofile: 1024, GraceMs: 100, MaxTimeoutMs: 60000},
	})
	require.NoError(h.t, err)
	a.seals = res.GetSeals()
	return a
}

// begin starts a command and gives its stream.
func (a *attached) begin(id, command string) receiptdv1.Receiptd_ExecClient {
	a.t.Helper()
	stream, err := a.receiptd.Exec(bound(a.t), &receiptdv1.ExecRequest{
		AttachEpoch: a.epoch, ExecId: id, Nonce: make([]byte, 32), Command: command, TimeoutMs: 60000,
	})
	require.NoError(a.t, err)
	return stream
}

// run runs a command to its receipt and gives its output, both streams together, and what the receipt says.
func (a *attached) run(command string) (string, receipt.Predicate) {
	a.t.Helper()
	id := "e-" + newID(a.t)
	stream := a.begin(id, command)
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

// await waits until a command has its receipt.
func (a *attached) await(id string) receipt.Predicate {
	a.t.Helper()
	containerd.Until(a.t, "the receipt of "+id, func() bool {
		info, err := a.receiptd.Info(bound(a.t), &receiptdv1.InfoRequest{AttachEpoch: a.epoch, ExecId: id, WaitMs: 10000})
		require.NoError(a.t, err)
		return info.GetExec() == receiptdv1.ExecKnowledge_RECEIPTED
	})
	return a.predicate(id)
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

// agentProcess is an agent that makes a sandbox, says so, and waits to be killed: the test binary itself, started as
// "agent OPTIONS SPEC", both in JSON.
func agentProcess(args []string) {
	var opts Options
	var spec runtime.Spec
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.Unmarshal([]byte(args[0]), &opts); err != nil {
		fail(err)
	}
	if err := json.Unmarshal([]byte(args[1]), &spec); err != nil {
		fail(err)
	}
	r, err := New(opts)
	if err != nil {
		fail(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := r.Create(ctx, spec)
	if err != nil {
		fail(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(s.Identity()); err != nil {
		fail(err)
	}
	select {}
}
