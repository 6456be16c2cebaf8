// Package kata installs the tests' own shim (tests/kata/shim) under Kata's name, with a configuration as Kata's and programs in the place
// of a VMM and a file server: what is run with it has Kata's contracts, which it breaks on request, and no virtual machine.
package kata

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/kata"
)

// Install is one installation.
type Install struct {
	T testing.TB
	// Dir holds all of it; it is short, because sockets are in it.
	Dir string
	// Config is the configuration's path, Shim the shim's.
	Config, Shim string
}

// New makes an installation, and has what the test starts find it: PATH and the shim's own variable are set until the test ends.
// The shim misbehaves as the words say (see its constants).
func New(t *testing.T, misbehave ...string) *Install {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir, err := os.MkdirTemp("", "kata")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	i := &Install{T: t, Dir: dir, Config: filepath.Join(dir, "configuration.toml"), Shim: filepath.Join(dir, kata.ShimName)}
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	for _, p := range []string{i.VMM(), i.VirtioFSDaemon()} {
		copyProgram(t, sleep, p)
	}
	i.Misbehave(misbehave...)
	for _, f := range []string{"kernel", "image"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, f), []byte(f), 0o644))
	}
	i.Configure("")
	// containerd finds its shims in its PATH, and they have its environment.
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("KATA_TEST_DIR", dir)
	return i
}

// Configure writes the configuration, with more lines of the hypervisor's table.
func (i *Install) Configure(more string) {
	i.T.Helper()
	text := fmt.Sprintf(`[hypervisor.qemu]
path = %q
kernel = %q
image = %q
shared_fs = "virtio-fs"
virtio_fs_daemon = %q
virtio_fs_cache = "never"
%s
[runtime]
hypervisor_name = "qemu"
sandbox_cgroup_only = true
`, i.VMM(), filepath.Join(i.Dir, "kernel"), filepath.Join(i.Dir, "image"), i.VirtioFSDaemon(), more)
	require.NoError(i.T, os.WriteFile(i.Config, []byte(text), 0o644))
}

// VMM and VirtioFSDaemon are the programs in their places.
func (i *Install) VMM() string { return filepath.Join(i.Dir, "qemu") }

// VirtioFSDaemon: see VMM.
func (i *Install) VirtioFSDaemon() string { return filepath.Join(i.Dir, "virtiofsd") }

// RunDir has a folder for each sandbox, with its management socket.
func (i *Install) RunDir() string { return filepath.Join(i.Dir, "run") }

// Misbehave asks for what the words say, and takes back what was asked for.
func (i *Install) Misbehave(words ...string) {
	i.T.Helper()
	require.NoError(i.T, os.WriteFile(filepath.Join(i.Dir, "misbehave"), []byte(strings.Join(words, " ")), 0o644))
}

// Build puts the shim in its place. It is built once per test process; the caller has seen to it that containerd is there,
// whose packages are compiled then.
func (i *Install) Build() {
	i.T.Helper()
	built.Do(func() { built.path, built.err = build() })
	require.NoError(i.T, built.err)
	copyProgram(i.T, built.path, i.Shim)
}

var built struct {
	sync.Once
	path string
	err  error
}

// Clean removes what Build built. Call it at the end of TestMain.
func Clean() {
	if built.path != "" {
		_ = os.RemoveAll(filepath.Dir(built.path))
	}
}

// build has the flags of scripts/containerd.sh: the packages are compiled already.
func build() (string, error) {
	root, err := testkit.ModuleRoot()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("/var/tmp", "sandbox-agent-kata-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, kata.ShimName)
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, ".")
	cmd.Dir = filepath.Join(root, "tests", "kata", "shim") // a module of its own
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		return path, fmt.Errorf("building the tests' shim: %w: %s", err, out)
	}
	return path, nil
}

func copyProgram(t testing.TB, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, b, 0o755))
}
