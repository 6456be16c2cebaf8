package main

import (
	"archive/tar"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"
)

// tree is the content of a layer: files by their clean path, without a leading slash.
type tree struct {
	files map[string]*file
}

// file is one entry of a layer; open gives the content of a regular file.
type file struct {
	header tar.Header
	open   func() (io.ReadCloser, error)
}

func newTree() *tree { return &tree{files: map[string]*file{}} }

// addDirs adds folders with those above them, unless they are there.
func (t *tree) addDirs(names ...string) {
	for _, name := range names {
		for ; name != "."; name = path.Dir(name) {
			if t.files[name] == nil {
				t.files[name] = &file{header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}}
			}
		}
	}
}

// addLink adds a symbolic link.
func (t *tree) addLink(name, target string) {
	t.addDirs(path.Dir(name))
	t.files[name] = &file{header: tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}}
}

// addText adds a small file of root's.
func (t *tree) addText(name, text string) {
	t.addDirs(path.Dir(name))
	t.files[name] = &file{
		header: tar.Header{Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))},
		open:   func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(text)), nil },
	}
}

// addFile adds a file of the machine, as root's.
func (t *tree) addFile(name, source string, mode int64) error {
	st, err := os.Stat(source)
	if err != nil {
		return err
	}
	t.files[name] = &file{
		header: tar.Header{Typeflag: tar.TypeReg, Mode: mode, Size: st.Size()},
		open:   func() (io.ReadCloser, error) { return os.Open(source) },
	}
	return nil
}

// names are the paths in the order in which they are written: a folder before what is in it.
func (t *tree) names() []string { return slices.Sorted(maps.Keys(t.files)) }

// content reads a regular file.
func (f *file) content() ([]byte, error) {
	r, err := f.open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// write writes the tree as a tar archive.
func (t *tree) write(out io.Writer, epoch time.Time) error {
	names := t.names()
	first := t.firstNames(names)
	w := tar.NewWriter(out)
	for _, name := range names {
		if err := t.writeEntry(w, name, first, epoch); err != nil {
			return fmt.Errorf("writing %s: %w", name, err)
		}
	}
	return w.Close()
}

// firstNames are the hard links that come before what they link to: who unpacks an archive has to find the content first.
func (t *tree) firstNames(names []string) map[string]string {
	first := map[string]string{}
	for _, name := range names {
		f := t.files[name]
		if f.header.Typeflag != tar.TypeLink || name > f.header.Linkname {
			continue
		}
		if _, known := first[f.header.Linkname]; !known {
			first[f.header.Linkname] = name
		}
	}
	return first
}

func (t *tree) writeEntry(w *tar.Writer, name string, first map[string]string, epoch time.Time) error {
	f := t.files[name]
	whole := name // the name under which the archive has the content
	if f.header.Typeflag == tar.TypeLink {
		whole = f.header.Linkname
		if f = t.files[whole]; f == nil || f.header.Typeflag != tar.TypeReg {
			return fmt.Errorf("it is a hard link to %s, which is no file here", whole)
		}
	}
	h := f.headerFor(name, epoch)
	if earlier, ok := first[whole]; ok {
		whole = earlier
	}
	if whole != name {
		h.Typeflag, h.Linkname, h.Size = tar.TypeLink, whole, 0
	}
	if err := w.WriteHeader(&h); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	r, err := f.open()
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(w, r)
	return err
}

func (f *file) headerFor(name string, epoch time.Time) tar.Header {
	h := tar.Header{
		Typeflag: f.header.Typeflag, Name: name, Linkname: f.header.Linkname, Uid: f.header.Uid, Gid: f.header.Gid, ModTime: epoch,
		// Neither image has a use for set-id bits: sandboxes are mounted nosuid, and trusted Git has no_new_privs.
		Mode: f.header.Mode & 0o1777,
	}
	if !f.header.ModTime.IsZero() && f.header.ModTime.Before(epoch) {
		h.ModTime = f.header.ModTime.Truncate(time.Second)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		h.Name += "/"
	case tar.TypeReg:
		h.Size = f.header.Size
	}
	return h
}
