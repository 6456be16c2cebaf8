package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
)

const (
	git     = "usr/bin/git"
	gitCore = "usr/lib/git-core"
	// libraries is where Debian's loader for amd64 looks without a cache.
	libraries = "usr/lib/x86_64-linux-gnu"
)

// gitOnly chooses from the sandbox's root file system what Git needs that works on local repositories: the program, the names
// by which it calls itself, and its libraries. What fetches and pushes, and what is a script, is left out: trusted Git has no
// network, and starts nothing that a repository could name.
func (b *build) gitOnly() (*tree, []debian, error) {
	t := newTree()
	for _, link := range links {
		f := b.root.files[link]
		if f == nil || f.header.Typeflag != tar.TypeSymlink {
			return nil, nil, fmt.Errorf("/%s is no link into /usr", link)
		}
		t.files[link] = f
	}
	t.addDirs("usr/sbin", "dev", "proc", "sys", "run", "tmp", "etc", "root", "var/lib", "var/tmp", "usr/share/git-core/templates")
	t.files["tmp"].header.Mode, t.files["var/tmp"].header.Mode, t.files["root"].header.Mode = 0o1777, 0o1777, 0o700
	t.addText("etc/passwd", "root:x:0:0:root:/root:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n")
	t.addText("etc/group", "root:x:0:\nnogroup:x:65534:\n")
	t.addText("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
	t.take(b.root, "etc/os-release", "usr/lib/os-release")
	if err := t.takeProgram(b.root, git); err != nil {
		return nil, nil, err
	}
	// Debian has the program twice.
	t.addLink(gitCore+"/git", "../../bin/git")
	for name, f := range b.root.files {
		if path.Dir(name) == gitCore && f.header.Typeflag == tar.TypeSymlink && f.header.Linkname == "git" {
			t.take(b.root, name)
		}
	}
	packages, err := b.packagesOf(t)
	if err != nil {
		return nil, nil, err
	}
	for _, p := range packages {
		t.take(b.root, "usr/share/doc/"+p.name+"/copyright")
		t.addText("var/lib/dpkg/status.d/"+p.name, p.status())
	}
	return t, packages, nil
}

// take copies entries of another tree, with the folders above them. One that isn't there is left out.
func (t *tree) take(from *tree, names ...string) {
	for _, name := range names {
		if f := from.files[name]; f != nil {
			t.addDirs(path.Dir(name))
			t.files[name] = f
		}
	}
}

// takeProgram copies a program or library, what it is a link to, its loader, and the libraries that it names.
func (t *tree) takeProgram(from *tree, name string) error {
	if t.files[name] != nil {
		return nil
	}
	f := from.files[name]
	if f == nil {
		return fmt.Errorf("/%s is not in the root file system", name)
	}
	t.take(from, name)
	switch f.header.Typeflag {
	case tar.TypeSymlink:
		return t.takeProgram(from, path.Join(path.Dir(name), f.header.Linkname))
	case tar.TypeLink:
		return fmt.Errorf("/%s is a hard link", name)
	}
	needed, err := neededBy(f)
	if err != nil {
		return fmt.Errorf("reading /%s: %w", name, err)
	}
	for _, n := range needed {
		if err := t.takeProgram(from, n); err != nil {
			return err
		}
	}
	return nil
}

// neededBy are the paths of the libraries that an ELF file names, and of its loader.
func neededBy(f *file) ([]string, error) {
	content, err := f.content()
	if err != nil {
		return nil, err
	}
	e, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, p := range e.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		loader, err := io.ReadAll(p.Open())
		if err != nil {
			return nil, err
		}
		paths = append(paths, path.Join("usr", string(bytes.TrimRight(loader, "\x00"))))
	}
	names, err := e.ImportedLibraries()
	for _, n := range names {
		paths = append(paths, path.Join(libraries, n))
	}
	return paths, err
}

// packagesOf are the packages whose files are in a tree.
func (b *build) packagesOf(t *tree) ([]debian, error) {
	var out []debian
	for _, p := range b.lock {
		list, err := b.root.files["var/lib/dpkg/info/"+p.name+".list"].content()
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(strings.Fields(string(list)), t.hasFile) {
			out = append(out, p)
		}
	}
	return out, nil
}

// hasFile says whether a name of a package's list is in the tree, and more than a folder or one of the links into /usr.
func (t *tree) hasFile(name string) bool {
	name = strings.TrimPrefix(name, "/")
	f := t.files[name]
	return f != nil && f.header.Typeflag != tar.TypeDir && !slices.Contains(links, name)
}
