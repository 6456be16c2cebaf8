package kata

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// Whoever is given the path follows it after it was judged: who can turn a link on the way decides what is run then.
func TestAPathIsRootsOnlyWithEveryFolderThatItsLinksLieIn(t *testing.T) {
	for name, change := range map[string]func(dir string) error{
		"the folder of the link":     func(dir string) error { return os.Chmod(filepath.Join(dir, "a"), 0o777) },
		"its owner":                  func(dir string) error { return os.Chown(filepath.Join(dir, "a"), 1000, 0) },
		"the folder of the second":   func(dir string) error { return os.Chmod(filepath.Join(dir, "b"), 0o757) },
		"the link's owner":           func(dir string) error { return os.Lchown(filepath.Join(dir, "a", "link"), 1000, 0) },
		"the link's own to a folder": func(dir string) error { return os.Lchown(filepath.Join(dir, "b", "folder"), 1000, 0) },
		"where it ends":              func(dir string) error { return os.Chmod(filepath.Join(dir, "c", "file"), 0o666) },
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Need(t, testkit.Root)
			dir := t.TempDir()
			for _, d := range []string{"a", "b", "c"} {
				require.NoError(t, os.Mkdir(filepath.Join(dir, d), 0o755))
			}
			want := filepath.Join(dir, "c", "file")
			require.NoError(t, os.WriteFile(want, []byte("x"), 0o644))
			require.NoError(t, os.Symlink("../c", filepath.Join(dir, "b", "folder")))
			path := filepath.Join(dir, "a", "link")
			require.NoError(t, os.Symlink(dir+"/b/./folder/../c//file", path))
			got, err := resolve(path)
			require.NoError(t, err, "the control case")
			require.Equal(t, want, got)
			require.NoError(t, change(dir))
			_, err = resolve(path)
			require.ErrorIs(t, err, ErrUntrusted)
		})
	}
}

func TestAPathThatLeadsNowhereIsSaidToDoSo(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := t.TempDir()
	require.NoError(t, os.Symlink("loop", filepath.Join(dir, "loop")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	for path, want := range map[string]error{"loop": unix.ELOOP, "none/x": os.ErrNotExist, "file/x": unix.ENOTDIR} {
		_, err := resolve(filepath.Join(dir, path))
		require.ErrorIs(t, err, want, path)
	}
	_, err := resolve("relative")
	require.ErrorContains(t, err, "not an absolute path")
}
