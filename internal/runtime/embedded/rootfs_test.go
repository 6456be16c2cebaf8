package embedded

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

var testIDs = runtime.IDs{HostBase: 0x70000000, Size: 65536, Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000}

// image makes a root file system out of some of the node's programs and the libraries that they name.
func image(t *testing.T, programs ...string) string {
	t.Helper()
	dir := testkit.StateDir(t)
	copyIn := func(p string) {
		real, err := filepath.EvalSymlinks(p)
		require.NoError(t, err)
		b, err := os.ReadFile(real)
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(p)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, p), b, 0o755))
	}
	for _, name := range programs {
		p, err := exec.LookPath(name)
		require.NoError(t, err)
		copyIn(p)
		out, err := exec.Command("ldd", p).Output()
		require.NoError(t, err)
		for _, lib := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
			copyIn(lib)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "bin")); os.IsNotExist(err) {
		require.NoError(t, os.Symlink("usr/bin", filepath.Join(dir, "bin")))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "etc"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "etc", "of-the-image"), []byte("image\n"), 0o644))
	return dir
}

func TestAFolderServesAsRootFileSystem(t *testing.T) {
	h := newHost(t)
	spec := h.spec(1234, 0)
	spec.Rootfs = image(t, "bash", "cat", "ls", "id", "touch")
	s := h.create(spec)
	a := h.attach(s, spec)
	out, p := a.run("cat /etc/of-the-image; id -un; cat README; ls /usr/share 2>&1 | cat; touch /etc/of-the-image")
	require.NotZero(t, p.ExitCode)
	require.Contains(t, out, "image\nsandbox\nhello\n")
	h.stop(s)
	_, err := os.Stat(filepath.Join(spec.Rootfs, "home"))
	require.ErrorIs(t, err, os.ErrNotExist, "nothing is made in the image")
}
