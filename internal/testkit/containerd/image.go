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

// Layer is a tar archive of some of the node's programs, each as bin/NAME, of the libraries that they name, and of one file
// of its own, etc/of-the-image.
func Layer(t testing.TB, programs ...string) []byte {
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
	return Archive(t, files)
}

// Archive is a tar archive of files that everybody may read and execute.
func Archive(t testing.TB, files map[string][]byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, content := range files {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg}))
		_, err := w.Write(content)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return buf.Bytes()
}

// Import gives containerd an image of one layer, a tar archive, and answers with its digest.
func (d *Daemon) Import(t testing.TB, name string, layer []byte) string {
	t.Helper()
	sum := sha256.Sum256(layer)
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux", "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}},
	})
	require.NoError(t, err)
	manifest := fmt.Sprintf(`[{"Config":"config.json","RepoTags":[%q],"Layers":["layer.tar"]}]`, name)
	c := d.Client()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	imported, err := c.Import(ctx, bytes.NewReader(Archive(t, map[string][]byte{
		"manifest.json": []byte(manifest), "config.json": config, "layer.tar": layer,
	})))
	require.NoError(t, err)
	require.Len(t, imported, 1)
	return imported[0].Target.Digest.String()
}
