package nodecheck

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRuntimesAreFoundInTheFileSystemOfAContainerdWithOtherMounts(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "opt", "bin"), 0o755))
	root, err := os.Open(dir)
	require.NoError(t, err)
	defer root.Close()
	const path = "relative:/usr/bin:/bin"

	f := runcShimmed.lookIn(root, "", path)
	require.Equal(t, No, f.Answer, "this machine's own /usr/bin is another one: %v", f)
	require.Contains(t, f.Detail, "runc is not in containerd's PATH")

	// An absolute link means containerd's own root, not this process's.
	require.NoError(t, os.Symlink("/opt/bin", filepath.Join(dir, "bin")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "opt", "bin", "runc"), nil, 0o755))
	f = runcShimmed.lookIn(root, "", path)
	require.Contains(t, f.Detail, "containerd-shim-runc-v2 is not in containerd's PATH")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "opt", "bin", "containerd-shim-runc-v2"), nil, 0o755))
	f = runcShimmed.lookIn(root, "", path)
	require.Equal(t, Yes, f.Answer, f)
	require.Contains(t, f.Detail, "/bin/runc; /bin/containerd-shim-runc-v2")
	require.Equal(t, Yes, runcShimmed.lookIn(root, "/opt/bin/runc", path).Answer)
	require.Equal(t, No, runcShimmed.lookIn(root, "/opt/runc", path).Answer, "the configured one is not there")
}
