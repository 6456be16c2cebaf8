package containerd

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Layer is a tar archive of Programs.
func Layer(t testing.TB, programs ...string) []byte {
	t.Helper()
	return Archive(t, Programs(t, programs...))
}

// Programs are some of the node's programs, each as bin/NAME, the libraries that they name, and one file of the image's own,
// etc/of-the-image.
func Programs(t testing.TB, programs ...string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{"etc/of-the-image": []byte("image\n")}
	for _, name := range programs {
		p, err := exec.LookPath(name)
		require.NoError(t, err)
		real, err := filepath.EvalSymlinks(p)
		require.NoError(t, err)
		files["bin/"+name], err = os.ReadFile(real)
		require.NoError(t, err)
		out, err := exec.Command("ldd", p).Output()
		require.NoError(t, err)
		for _, lib := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
			files[lib[1:]], err = os.ReadFile(lib)
			require.NoError(t, err)
		}
	}
	return files
}

// Archive is a tar archive of files that everybody may read and execute, and of entries that have no content.
func Archive(t testing.TB, files map[string][]byte, entries ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, content := range files {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg}))
		_, err := w.Write(content)
		require.NoError(t, err)
	}
	for _, e := range entries {
		require.NoError(t, w.WriteHeader(&e))
	}
	require.NoError(t, w.Close())
	return buf.Bytes()
}

// Import gives containerd an image of layers, each a tar archive, the lowest first, and answers with its digest.
func (d *Daemon) Import(t testing.TB, name string, layers ...[]byte) string {
	t.Helper()
	files := map[string][]byte{}
	var names, sums []string
	for i, layer := range layers {
		sum := sha256.Sum256(layer)
		names, sums = append(names, fmt.Sprintf("layer-%d.tar", i)), append(sums, "sha256:"+hex.EncodeToString(sum[:]))
		files[names[i]] = layer
	}
	var err error
	files["config.json"], err = json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux", "config": map[string]any{}, "rootfs": map[string]any{"type": "layers", "diff_ids": sums},
	})
	require.NoError(t, err)
	files["manifest.json"], err = json.Marshal([]any{map[string]any{"Config": "config.json", "RepoTags": []string{name}, "Layers": names}})
	require.NoError(t, err)
	c := d.Client()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	imported, err := c.Import(ctx, bytes.NewReader(Archive(t, files)))
	require.NoError(t, err)
	require.Len(t, imported, 1)
	return imported[0].Target.Digest.String()
}
