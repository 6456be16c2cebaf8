package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
)

// archive is a tar archive of files that everybody may read and execute, always the same for the same files.
func archive(files map[string][]byte) ([]byte, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(files[name])), Typeflag: tar.TypeReg}); err != nil {
			return nil, err
		}
		if _, err := w.Write(files[name]); err != nil {
			return nil, err
		}
	}
	return buf.Bytes(), w.Close()
}

// writeImage writes an image of one layer as an OCI layout in a tar archive, under its tag and its digest, with which it answers.
func writeImage(path, name, tag string, entrypoint []string, files map[string][]byte) (digest.Digest, error) {
	layer, err := archive(files)
	if err != nil {
		return "", err
	}
	layout := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	blob := func(mediaType string, b []byte) v1.Descriptor {
		sum := sha256.Sum256(b)
		hexSum := hex.EncodeToString(sum[:])
		layout["blobs/sha256/"+hexSum] = b
		return v1.Descriptor{MediaType: mediaType, Digest: digest.NewDigestFromEncoded(digest.SHA256, hexSum), Size: int64(len(b))}
	}
	layerDesc := blob(v1.MediaTypeImageLayer, layer)
	config, err := json.Marshal(v1.Image{
		Platform: v1.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config:   v1.ImageConfig{Entrypoint: entrypoint, Env: []string{"PATH=/usr/bin:/bin"}},
		RootFS:   v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{layerDesc.Digest}},
	})
	if err != nil {
		return "", err
	}
	manifest, err := json.Marshal(v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		Config: blob(v1.MediaTypeImageConfig, config), Layers: []v1.Descriptor{layerDesc},
	})
	if err != nil {
		return "", err
	}
	of := blob(v1.MediaTypeImageManifest, manifest)
	index := v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex}
	for _, full := range []string{name + ":" + tag, name + "@" + of.Digest.String()} {
		named := of
		named.Annotations = map[string]string{"io.containerd.image.name": full}
		index.Manifests = append(index.Manifests, named)
	}
	if layout["index.json"], err = json.Marshal(index); err != nil {
		return "", err
	}
	b, err := archive(layout)
	if err != nil {
		return "", err
	}
	return of.Digest, os.WriteFile(path, b, 0o600)
}

// The images' names.
const (
	agentImage  = "test.local/sandbox-agent"
	rootfsImage = "test.local/sandbox-rootfs"
)

// importImages makes both images and gives them to the kubelet's containerd, as if it had pulled them; it answers with their digests.
func importImages(t *testing.T) (agent, rootfs digest.Digest) {
	t.Helper()
	dir := t.TempDir()
	programs := containerd.Programs(t, "git")
	for _, p := range []string{"sandbox-agent", "receiptd", "pid1"} {
		b, err := os.ReadFile(filepath.Join(os.Getenv(programsEnv), p))
		require.NoError(t, err)
		programs["usr/bin/"+p] = b
	}
	agent, err := writeImage(filepath.Join(dir, "agent.tar"), agentImage, "1", []string{"/usr/bin/sandbox-agent"}, programs)
	require.NoError(t, err)
	rootfs, err = writeImage(filepath.Join(dir, "rootfs.tar"), rootfsImage, "1", nil, containerd.Programs(t, "bash", "git", "cat", "ls", "sleep", "touch", "id", "chown", "rm", "timeout"))
	require.NoError(t, err)
	for _, name := range []string{"agent.tar", "rootfs.tar"} {
		run(t, "ctr", "-n", "k8s.io", "images", "import", "--local", filepath.Join(dir, name))
	}
	return agent, rootfs
}
