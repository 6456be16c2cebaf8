package main

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// image is what one image is made of.
type image struct {
	name, title     string
	layers          []*tree
	packages        []debian
	programs        []string
	entrypoint, cmd []string
	env             []string
}

// repository is the part of the images' names before their own.
const repository = "localhost/sandbox-agent/"

// write writes an image in every form: as an OCI layout, as a tar archive of that, and beside it its digest, the list of its
// packages and its SBOM.
func (b *build) write(img image) error {
	dir := filepath.Join(b.out, img.name)
	if err := os.MkdirAll(filepath.Join(dir, v1.ImageBlobsDir, "sha256"), 0o755); err != nil {
		return err
	}
	manifest, err := b.writeLayout(dir, img)
	if err != nil {
		return fmt.Errorf("writing the image %s: %w", img.name, err)
	}
	sbom, err := b.sbom(img, manifest.Digest)
	if err != nil {
		return fmt.Errorf("describing the image %s: %w", img.name, err)
	}
	for suffix, content := range map[string][]byte{".spdx.json": sbom, ".packages": []byte(list(img.packages)), ".digest": []byte(manifest.Digest + "\n")} {
		if err := os.WriteFile(dir+suffix, content, 0o644); err != nil {
			return err
		}
	}
	size, err := archive(dir, dir+".tar")
	if err != nil {
		return fmt.Errorf("writing %s.tar: %w", dir, err)
	}
	_, err = fmt.Fprintf(b.said, "%s%s:%s\n  digest    %s\n  archive   %s.tar, %.1f MB\n  packages  %d of Debian\n", repository, img.name, b.version, manifest.Digest, img.name,
		float64(size)/1e6, len(img.packages))
	return err
}

func (b *build) writeLayout(dir string, img image) (v1.Descriptor, error) {
	manifest := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest}
	config := v1.Image{
		Created:  &b.epoch,
		Platform: v1.Platform{Architecture: "amd64", OS: "linux"},
		Config: v1.ImageConfig{
			Entrypoint: img.entrypoint, Cmd: img.cmd, WorkingDir: "/",
			Env: append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, img.env...),
			Labels: map[string]string{
				v1.AnnotationTitle: img.title, v1.AnnotationVersion: b.version, v1.AnnotationLicenses: "NOASSERTION",
			},
		},
		RootFS: v1.RootFS{Type: "layers"},
	}
	for _, layer := range img.layers {
		descriptor, diffID, err := b.writeLayer(dir, layer)
		if err != nil {
			return v1.Descriptor{}, err
		}
		manifest.Layers = append(manifest.Layers, descriptor)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, diffID)
		config.History = append(config.History, v1.History{Created: &b.epoch, CreatedBy: "scripts/image.sh"})
	}
	var err error
	if manifest.Config, err = writeBlob(dir, v1.MediaTypeImageConfig, config); err != nil {
		return v1.Descriptor{}, err
	}
	descriptor, err := writeBlob(dir, v1.MediaTypeImageManifest, manifest)
	if err != nil {
		return v1.Descriptor{}, err
	}
	descriptor.Platform = &config.Platform
	inIndex := descriptor
	inIndex.Annotations = map[string]string{
		v1.AnnotationRefName: b.version,
		// containerd's importer takes the whole name from here.
		"io.containerd.image.name": repository + img.name + ":" + b.version,
	}
	index := v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{inIndex}}
	if err := writeJSON(filepath.Join(dir, v1.ImageIndexFile), index); err != nil {
		return v1.Descriptor{}, err
	}
	return descriptor, writeJSON(filepath.Join(dir, v1.ImageLayoutFile), v1.ImageLayout{Version: v1.ImageLayoutVersion})
}

// writeLayer writes a tree as a compressed layer, and gives also the digest of what is compressed.
func (b *build) writeLayer(dir string, t *tree) (v1.Descriptor, digest.Digest, error) {
	f, err := os.CreateTemp(dir, "layer-*")
	if err != nil {
		return v1.Descriptor{}, "", err
	}
	defer os.Remove(f.Name()) // it is elsewhere when all went well
	defer f.Close()
	whole, compressed := sha256.New(), sha256.New()
	size := counter{}
	z := gzip.NewWriter(io.MultiWriter(f, compressed, &size))
	if err := t.write(io.MultiWriter(z, whole), b.epoch); err != nil {
		return v1.Descriptor{}, "", err
	}
	if err := z.Close(); err != nil {
		return v1.Descriptor{}, "", err
	}
	d := v1.Descriptor{MediaType: v1.MediaTypeImageLayerGzip, Digest: digestOf(compressed), Size: size.n}
	if err := f.Chmod(0o644); err != nil {
		return v1.Descriptor{}, "", err
	}
	return d, digestOf(whole), os.Rename(f.Name(), blob(dir, d.Digest))
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

func digestOf(h hash.Hash) digest.Digest { return digest.NewDigest(digest.SHA256, h) }

func blob(dir string, d digest.Digest) string {
	return filepath.Join(dir, v1.ImageBlobsDir, "sha256", d.Encoded())
}

func writeBlob(dir, mediaType string, v any) (v1.Descriptor, error) {
	content, err := json.Marshal(v)
	if err != nil {
		return v1.Descriptor{}, err
	}
	d := v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
	return d, os.WriteFile(blob(dir, d.Digest), content, 0o644)
}

func writeJSON(name string, v any) error {
	content, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(name, content, 0o644)
}

// archive writes a folder as a tar archive without times or owners, and gives its size in bytes.
func archive(dir, name string) (int64, error) {
	t := newTree()
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			t.addDirs(rel)
			return nil
		}
		return t.addFile(rel, p, 0o644)
	})
	if err != nil {
		return 0, err
	}
	f, err := os.Create(name)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := t.write(f, time.Unix(0, 0).UTC()); err != nil {
		return 0, err
	}
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), f.Close()
}
