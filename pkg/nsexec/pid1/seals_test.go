package pid1

import (
	"crypto/sha256"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

func TestADigestIsOfTheWholeFileWhateverItsLength(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, n := range []int{0, 1, 4095, 4096, 32<<10 - 1, 32 << 10, 32<<10 + 1, 100_000} {
		content := []byte(strings.Repeat("x", n))
		require.NoError(t, os.WriteFile(path, content, 0o600))
		s, err := statSeal(path)
		require.NoError(t, err)
		require.Equal(t, sha256.Sum256(content), s.SHA256, "%d bytes", n)
	}
	s, err := statSeal(filepath.Dir(path))
	require.NoError(t, err)
	require.Zero(t, s.SHA256, "a folder has none")
}

func TestADigestIsOfTheFileThatWasLookedAtOrAnError(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	was, err := statSeal(path)
	require.NoError(t, err)
	for name, replace := range map[string]func() error{
		"another file": func() error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a FIFO":       func() error { return unix.Mkfifo(path, 0o600) },
		"a link":       func() error { return os.Symlink("/etc/passwd", path) },
	} {
		// The old file stays, so that its inode number is not given to the new one.
		require.NoError(t, os.Rename(path, filepath.Join(dir, "old "+name)))
		require.NoError(t, replace())
		s := wire.SealState{Path: path, Device: was.Device, Inode: was.Inode}
		require.Error(t, digest(&s), name)
		require.Zero(t, s.SHA256, name)
	}
}

// BenchmarkSeals is what a check of the usual four sealed files costs; it is made four times for a command, twice of them
// ahead of it.
func BenchmarkSeals(b *testing.B) {
	var paths []string
	for _, name := range []string{".git", "config", "commondir", "gitdir"} {
		path := filepath.Join(b.TempDir(), name)
		require.NoError(b, os.WriteFile(path, []byte(strings.Repeat("x", 300)), 0o600))
		paths = append(paths, path)
	}
	for b.Loop() {
		if _, err := statSeals(paths); err != nil {
			b.Fatal(err)
		}
	}
}
