package containerd

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// many is what comes and goes: three kinds of sandboxes, so many at once.
type many struct {
	*host
	byAttach *Runtime
	image    string
	spec     runtime.Spec
}

const atOnce = 4

func TestManyComeAndGoAndNothingIsLeft(t *testing.T) {
	n := 24
	if os.Getenv("SANDBOX_TEST_LONG") != "" {
		n = 200
	}
	m := &many{host: newHost(t, Socket)}
	m.image = "localhost/tools@" + m.d.Import(t, "localhost/tools:1", containerd.Layer(t, "bash"))
	m.spec = m.host.spec(0)
	m.opts.Transport = Attach
	m.byAttach = m.runtime()
	m.opts.Transport = Socket
	m.upAndDown(3 * atOnce) // connections and threads that stay are made
	m.nothingLeft()
	before := m.footprint()
	t.Logf("before: %v", before)

	ids := m.upAndDown(n)
	m.nothingLeft()
	containerd.Until(t, "containerd has nothing of any", func() bool { return len(m.d.Keeps()) == 0 })
	des, err := os.ReadDir(filepath.Join(m.state, "records"))
	require.NoError(t, err)
	require.Empty(t, des)
	for _, id := range ids {
		for _, path := range m.traces(id) {
			_, err := os.Lstat(path)
			require.ErrorIs(t, err, os.ErrNotExist)
		}
	}
	containerd.Until(t, "goroutines and containerd's descriptors are as many as before", func() bool {
		now := m.footprint()
		return now.goroutines <= before.goroutines && now.descriptors <= before.descriptors
	})
	t.Logf("%d came and went: %v", n, m.footprint())
}

// upAndDown makes n sandboxes and stops them.
func (m *many) upAndDown(n int) []string {
	m.t.Helper()
	ids := make([]string, n)
	for i := range ids {
		ids[i] = newID(m.t)
	}
	errs := make(chan error, n)
	for w := range atOnce {
		go func() {
			for i := w; i < n; i += atOnce {
				errs <- m.one(ids[i], i/atOnce%3, uint32(w))
			}
		}()
	}
	for range n {
		require.NoError(m.t, <-errs)
	}
	return ids
}

func (h *host) ofSandbox(spec runtime.Spec, id string) runtime.Spec {
	spec.SandboxID, spec.Dir, spec.ReceiptsDir = id, filepath.Join(h.state, id), filepath.Join(h.state, "receipts-"+id)
	return spec
}

func (m *many) one(id string, kind int, slot uint32) error {
	r, spec := m.r, m.ofSandbox(m.spec, id)
	spec.IDs.HostBase += slot * 65536
	switch kind {
	case 1:
		spec.Rootfs = m.image
	case 2:
		r = m.byAttach
	}
	s, err := r.Create(bound(m.t), spec)
	if err != nil {
		return err
	}
	conn, err := s.Dial(bound(m.t))
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, path := range m.traces(id) {
		if _, err := os.Lstat(path); err != nil {
			return fmt.Errorf("what is looked for when it is gone is not there while it runs: %w", err)
		}
	}
	_, err = s.Stop(bound(m.t))
	return err
}

// traces are what a sandbox has on disk beside records: its folder, runc's state of its container (the shim's default
// place), its shim's socket (pkg/shim, CreateSocketAddress).
func (m *many) traces(id string) []string {
	socket := sha256.Sum256([]byte(filepath.Join(m.d.Address, "sandbox-agent", id)))
	return []string{m.ofSandbox(m.spec, id).Dir, filepath.Join("/run/containerd/runc/sandbox-agent", id), fmt.Sprintf("/run/containerd/s/%x", socket)}
}

// footprint is what stays, or grows.
type footprint struct {
	goroutines, descriptors int
	// memory is what containerd, and this process, have in memory.
	memory string
}

func (f footprint) String() string {
	return fmt.Sprintf("%d goroutines, %d descriptors of containerd, %s", f.goroutines, f.descriptors, f.memory)
}

func (h *host) footprint() footprint {
	h.t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", h.d.Pid()))
	require.NoError(h.t, err)
	goruntime.GC()
	return footprint{
		goroutines: goruntime.NumGoroutine(), descriptors: len(fds),
		memory: fmt.Sprintf("containerd %s, this process %s", resident(h.t, h.d.Pid()), resident(h.t, os.Getpid())),
	}
}

// resident is a process's VmRSS.
func resident(t testing.TB, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	_, after, _ := strings.Cut(string(b), "VmRSS:")
	line, _, _ := strings.Cut(after, "\n")
	return strings.Join(strings.Fields(line), " ")
}
