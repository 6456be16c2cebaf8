package embedded

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
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
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git)
	testkit.Leaks(t)
	h := &host{t: t, state: testkit.StateDir(t), parent: testkit.CgroupParent(t)}
	h.r = h.runtime()
	t.Cleanup(func() {
		ids, err := h.r.List(context.Background())
		require.NoError(t, err)
		for _, id := range ids {
			_, err := h.r.Remove(context.Background(), runtime.Identity{SandboxID: id})
			require.NoError(t, err)
		}
	})
	return h
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
func (h *host) spec(uid int, slot uint32) runtime.Spec {
	h.t.Helper()
	repo := testkit.Repo(h.t, uid)
	wt := testkit.Worktree(h.t, uid, repo, "topic")
	plan, err := mounts.New(mounts.Workspace{
		Worktree: wt, CommonDir: filepath.Join(repo, ".git"), MetaDir: filepath.Join(repo, ".git", "worktrees", "wt-topic"),
		OwnerUID: uint32(uid), OwnerGID: uint32(uid),
	}, mounts.Exists)
	require.NoError(h.t, err)
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func (h *host) create(spec runtime.Spec) runtime.Sandbox {
	h.t.Helper()
	s, err := h.r.Create(bound(h.t), spec)
	require.NoError(h.t, err)
	return s
}

func TestASandboxStartsAndStopsWithCompleteEvidence(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	t0 := time.Now()
	s := h.create(spec)
	t.Log("create", time.Since(t0))
	conn, err := s.Dial(bound(t))
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	t0 = time.Now()
	ev, err := s.Stop(bound(t))
	t.Log("stop", time.Since(t0))
	require.NoError(t, err)
	require.True(t, ev.Complete)
	for i := range 5 {
		spec.SandboxID = newID(t)
		spec.Dir = filepath.Join(h.state, spec.SandboxID)
		t0 = time.Now()
		s := h.create(spec)
		t.Log(i, "create", time.Since(t0))
		t0 = time.Now()
		_, err = s.Stop(bound(t))
		require.NoError(t, err)
		t.Log("stop", time.Since(t0))
	}
}
