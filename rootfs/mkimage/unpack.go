package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// unpack makes the root file system of packages, whose archives lie in a folder under their checksums. Their scripts are not
// run: settle does what is needed of them. Contents go through the file spool.
func unpack(ctx context.Context, packages []debian, debs string, spool *os.File) (*tree, error) {
	t := newTree()
	// It brings the links /bin, /lib and so on, through which the others' files go.
	at := slices.IndexFunc(packages, func(p debian) bool { return p.name == "base-files" })
	if at < 0 {
		return nil, errors.New("base-files is not among the packages: add it")
	}
	for _, p := range append([]debian{packages[at]}, slices.Delete(slices.Clone(packages), at, at+1)...) {
		if err := t.unpack(ctx, p, filepath.Join(debs, p.sha256+".deb"), spool); err != nil {
			return nil, fmt.Errorf("unpacking %s: %w", p.name, err)
		}
	}
	return t, t.settle(packages)
}

func (t *tree) unpack(ctx context.Context, p debian, deb string, spool *os.File) error {
	archive, err := os.ReadFile(deb)
	if err != nil {
		return err
	}
	if sum := sha256.Sum256(archive); hex.EncodeToString(sum[:]) != p.sha256 {
		return fmt.Errorf("%s is not what the lock names: remove it", deb)
	}
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	names, err := t.readTar(out, spool)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		return err
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("dpkg-deb: %w", err)
	}
	t.addText("var/lib/dpkg/info/"+p.name+".list", "/"+strings.Join(names, "\n/")+"\n")
	return nil
}

// readTar adds what a package's archive holds, and gives the names.
func (t *tree) readTar(in io.Reader, spool *os.File) ([]string, error) {
	var names []string
	r := tar.NewReader(in)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			_, err := io.Copy(io.Discard, in) // the padding: dpkg-deb has to get rid of it
			return names, err
		}
		if err != nil {
			return nil, err
		}
		name := merged(path.Clean(h.Name))
		if name == "." || unwanted(name) {
			continue
		}
		names = append(names, name)
		if err := t.readEntry(name, h, r, spool); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
}

func (t *tree) readEntry(name string, h *tar.Header, content io.Reader, spool *os.File) error {
	there := t.files[name]
	switch h.Typeflag {
	case tar.TypeDir:
		if there != nil {
			return nil
		}
	case tar.TypeSymlink, tar.TypeReg:
	case tar.TypeLink:
		h.Linkname = merged(path.Clean(h.Linkname))
	default:
		return fmt.Errorf("it has the type %q: an image has no devices, pipes or sockets", h.Typeflag)
	}
	if there != nil {
		return errors.New("another package has it too")
	}
	at, err := spool.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if _, err := io.Copy(spool, content); err != nil {
		return err
	}
	size := h.Size
	t.files[name] = &file{header: *h, open: func() (io.ReadCloser, error) {
		return io.NopCloser(io.NewSectionReader(spool, at, size)), nil
	}}
	return nil
}

// merged is where a path leads in Debian's merged /usr.
func merged(name string) string {
	top, rest, below := strings.Cut(name, "/")
	if below && slices.Contains(links, top) {
		return path.Join("usr", top, rest)
	}
	return name
}

// links are the links of the root folder into /usr.
var links = []string{"bin", "sbin", "lib", "lib64"}

// unwanted are documents, save for the licences, and translations.
func unwanted(name string) bool {
	if strings.HasPrefix(name, "usr/share/doc/") {
		return path.Base(name) != "copyright"
	}
	for _, dir := range []string{"man", "info", "locale", "lintian", "bug", "bash-completion", "doc-base", "menu"} {
		if strings.HasPrefix(name, "usr/share/"+dir+"/") {
			return true
		}
	}
	return false
}

// alternatives are the names that packages' scripts would make by update-alternatives.
var alternatives = map[string]string{
	"usr/bin/awk": "mawk", "usr/bin/nawk": "mawk", "usr/bin/which": "which.debianutils",
}

const (
	authorities = "usr/share/ca-certificates/mozilla/"
	bundle      = "etc/ssl/certs/ca-certificates.crt"
)

// settle does what the packages' scripts would do, as far as commands need it: users, alternatives, the bundle of certificate
// authorities, and dpkg's record of what is there.
func (t *tree) settle(packages []debian) error {
	for name, target := range alternatives {
		if t.files[path.Join(path.Dir(name), target)] == nil {
			return fmt.Errorf("/%s would be a link to %s, which is not there", name, target)
		}
		t.addLink(name, target)
	}
	for _, name := range []string{"passwd", "group"} {
		f := t.files["usr/share/base-passwd/"+name+".master"]
		if f == nil {
			return fmt.Errorf("base-passwd has no list for /etc/%s", name)
		}
		t.files["etc/"+name] = f
	}
	if err := t.trust(); err != nil {
		return err
	}
	var status strings.Builder
	for _, p := range packages {
		status.WriteString(p.status() + "\n")
	}
	t.addText("var/lib/dpkg/status", status.String())
	return nil
}

// trust makes the bundle of certificate authorities. OpenSSL looks for one of its own name, or else for a folder of links by
// hash, which would need its program.
func (t *tree) trust() error {
	var pem bytes.Buffer
	for _, name := range t.names() {
		if !strings.HasPrefix(name, authorities) || path.Ext(name) != ".crt" {
			continue
		}
		content, err := t.files[name].content()
		if err != nil {
			return err
		}
		pem.Write(bytes.TrimSpace(content))
		pem.WriteByte('\n')
	}
	if pem.Len() == 0 {
		return errors.New("ca-certificates has no certificate")
	}
	t.addText(bundle, pem.String())
	t.addLink("usr/lib/ssl/cert.pem", "/"+bundle)
	return nil
}
