package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
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

// writePause writes the image of the program that holds a pod's namespaces, as an OCI layout in a tar archive.
func writePause(path string, program []byte) error {
	layer, err := archive(map[string][]byte{"pause": program})
	if err != nil {
		return err
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
		Config:   v1.ImageConfig{Entrypoint: []string{"/pause"}},
		RootFS:   v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{layerDesc.Digest}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		Config: blob(v1.MediaTypeImageConfig, config), Layers: []v1.Descriptor{layerDesc},
	})
	if err != nil {
		return err
	}
	of := blob(v1.MediaTypeImageManifest, manifest)
	of.Annotations = map[string]string{imageName: "test.local/pause:1"}
	index := v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{of}}
	if layout["index.json"], err = json.Marshal(index); err != nil {
		return err
	}
	b, err := archive(layout)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// imageName is the annotation from which containerd's importer takes an image's name.
const imageName = "io.containerd.image.name"

// imagesEnv names a folder that make image has written, for tests of these images. Without it they are built anew.
const imagesEnv = "SANDBOX_TEST_IMAGES"

// buildImages makes the images that people deploy, from the packages in the cache or the machine's mirrors; it answers with their folder.
// Their tools are not tried here: tests/image does that.
func buildImages(root, dir string) (string, error) {
	if given := os.Getenv(imagesEnv); given != "" {
		return filepath.Abs(given)
	}
	out := filepath.Join(dir, "images")
	said, err := exec.Command(filepath.Join(root, "scripts", "image.sh"), "-n", "-o", out).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building the images: %w\n%s", err, said)
	}
	return out, nil
}

// deployedImage is an image as a pod names it.
type deployedImage struct{ name, digest string }

func (i deployedImage) String() string { return i.name + "@" + i.digest }

// importImage gives an image to the kubelet's containerd as docs/kubernetes.md says, in the place of a registry.
func importImage(t *testing.T, name string) deployedImage {
	t.Helper()
	dir := os.Getenv(imagesEnv)
	index := decode[v1.Index](t, read(t, filepath.Join(dir, name, "index.json")))
	require.Len(t, index.Manifests, 1)
	tag := index.Manifests[0].Annotations[imageName]
	repository, _, _ := strings.Cut(tag, ":")
	image := deployedImage{repository, strings.TrimSpace(read(t, filepath.Join(dir, name+".digest")))}
	run(t, "ctr", "-n", "k8s.io", "images", "import", filepath.Join(dir, name+".tar"))
	run(t, "ctr", "-n", "k8s.io", "images", "tag", tag, image.String())
	return image
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}
