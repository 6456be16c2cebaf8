package policy

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// The tables come from containerd and x/sys through the Go module proxy.
func TestTheTablesAreCurrent(t *testing.T) {
	testkit.Need(t, testkit.Program("go"))
	tool := filepath.Join("..", "..", "..", "..", "tools", "seccomp")
	download := exec.Command("go", "mod", "download", "github.com/containerd/containerd/v2", "golang.org/x/sys")
	download.Dir = tool
	if out, err := download.CombinedOutput(); err != nil {
		if os.Getenv(testkit.MustRun) == "1" {
			t.Fatalf("the Go module proxy is not reachable: %v\n%s", err, out)
		}
		t.Skipf("the Go module proxy is not reachable: %v", err)
	}
	dir := t.TempDir()
	run := exec.Command("go", "run", ".", "-root", dir, "tables")
	run.Dir = tool
	out, err := run.CombinedOutput()
	require.NoError(t, err, string(out))
	want, err := os.ReadFile(filepath.Join(dir, "pkg", "nsexec", "seccomp", "policy", "ztables.go"))
	require.NoError(t, err)
	got, err := os.ReadFile("ztables.go")
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "run make generate")
}
