package gitguard

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxEntries bounds how many names of a Git folder are looked at.
const maxEntries = 100_000

// gitFolder is one look at a Git folder: by descriptor, so that nothing put in its place meanwhile is followed.
type gitFolder struct {
	path  string
	found []Finding
	left  int
}

func checkGitFolder(path string) ([]Finding, error) {
	g := &gitFolder{path: path, left: maxEntries}
	top, err := openPlain(path, unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer top.Close()
	// What a command may leave for Git to open; not the loose objects, of which there can be millions, nor modules, which
	// are repositories of their own.
	for _, part := range []struct {
		dir  string
		deep bool
	}{{".", false}, {"refs", true}, {"worktrees", true}, {"objects", false}, {"objects/pack", false}, {"objects/info", true}, {"info", true}, {"reftable", true}} {
		if err := g.walk(top, part.dir, part.deep); err != nil {
			return nil, err
		}
	}
	if g.left == 0 {
		g.add(Note, "", fmt.Sprintf("it has more than %d names of refs and worktrees, which were not all looked at", maxEntries), "git pack-refs --all")
	}
	if err := errors.Join(g.outside(top), g.attributes(top), g.remotes(top), g.hooks(top)); err != nil {
		return nil, err
	}
	return bounded(g.found, path), nil
}

func (g *gitFolder) add(k Kind, name, why, remedy string) {
	g.found = append(g.found, Finding{File: plain(filepath.Join(g.path, name)), Kind: k, Why: why, Remedy: remedy})
}

// open opens a name beneath the Git folder; os.ErrNotExist and links are the caller's to judge.
func open(top *os.File, name string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(top.Fd()), name, &unix.OpenHow{
		Flags:   flags | unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "openat2", Path: filepath.Join(top.Name(), name), Err: err}
	}
	return os.NewFile(uintptr(fd), filepath.Join(top.Name(), name)), nil
}

// absent: not there, or a link or file where a folder is expected, which the walk of the folder above has named.
func absent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR)
}

// walk names what is neither a file nor a folder.
func (g *gitFolder) walk(top *os.File, dir string, deep bool) error {
	entries, err := g.list(top, dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		switch {
		case e.Type()&^fs.ModeDir != 0:
			g.add(Layout, name, "it is "+entryType(e.Type())+": Git would wait for it, or follow it out of the repository", "remove it, or put the file or folder itself there")
		case deep && e.IsDir():
			if err := g.walk(top, name, true); err != nil {
				return err
			}
		}
	}
	return nil
}

func (g *gitFolder) list(top *os.File, dir string) ([]fs.DirEntry, error) {
	if g.left == 0 {
		return nil, nil
	}
	f, err := open(top, dir, unix.O_DIRECTORY)
	if absent(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	entries, err := f.ReadDir(g.left)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	g.left -= len(entries)
	return entries, nil
}

func entryType(m fs.FileMode) string {
	switch {
	case m&fs.ModeSymlink != 0:
		return typeName(unix.S_IFLNK)
	case m&fs.ModeNamedPipe != 0:
		return typeName(unix.S_IFIFO)
	case m&fs.ModeSocket != 0:
		return typeName(unix.S_IFSOCK)
	default:
		return typeName(unix.S_IFCHR)
	}
}

// outside names the files by which a repository is not whole by itself.
func (g *gitFolder) outside(top *os.File) error {
	for name, f := range map[string]Finding{
		"commondir": {Kind: Layout, Why: "it makes Git take another folder for the repository", Remedy: "remove it"},
		"objects/info/alternates": {Kind: Clone, Why: "objects come from another repository, which no sandbox sees",
			Remedy: "fetch them into this one: git repack -a -d, and then remove this file"},
		"objects/info/http-alternates": {Kind: Clone, Why: "objects come from another address, which no sandbox reaches", Remedy: "git repack -a -d, and then remove this file"},
		"shallow": {Kind: Note, Why: "the clone is shallow: its history ends early in a sandbox too, and can't be fetched from there",
			Remedy: "git fetch --unshallow, if the whole history is needed"},
		"info/grafts": {Kind: Note, Why: "it replaces parents of commits; sandboxes and trusted Git do not look at it", Remedy: "git replace --convert-graft-file"},
	} {
		text, err := g.read(top, name)
		if err != nil {
			return err
		}
		if len(bytes.TrimSpace(text)) > 0 {
			g.add(f.Kind, name, f.Why, f.Remedy)
		}
	}
	return g.promisors(top)
}

func (g *gitFolder) promisors(top *os.File) error {
	entries, err := g.list(top, "objects/pack")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".promisor") {
			g.add(Clone, filepath.Join("objects/pack", e.Name()), whyPartial, remedyPartial)
			return nil
		}
	}
	return nil
}

// read gives the beginning of a regular file; what is none has been named before.
func (g *gitFolder) read(top *os.File, name string) ([]byte, error) {
	f, err := open(top, name, 0)
	// ENXIO: a socket.
	if absent(err) || errors.Is(err, unix.ENXIO) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, maxConfig))
}

// attributes looks for filters in info/attributes.
func (g *gitFolder) attributes(top *os.File) error {
	text, err := g.read(top, "info/attributes")
	if err != nil {
		return err
	}
	for i, line := range strings.Split(string(text), "\n") {
		if strings.Contains(line, "filter=") && !strings.HasPrefix(strings.TrimSpace(line), "#") {
			g.add(Attribute, "info/attributes", "it has filter= for some files, whose program no sandbox has", "take the line out")
			g.found[len(g.found)-1].Line = i + 1
		}
	}
	return nil
}

// remotes names the old ways to define one (gitrepository-layout(5)).
func (g *gitFolder) remotes(top *os.File) error {
	for _, dir := range []string{"remotes", "branches"} {
		entries, err := g.list(top, dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			g.add(Remote, filepath.Join(dir, e.Name()), "it defines a remote outside of the configuration", "define it in the configuration (git remote add) and remove this file")
		}
	}
	return nil
}

// hooks tells that they will not run.
func (g *gitFolder) hooks(top *os.File) error {
	entries, err := g.list(top, "hooks")
	if err != nil {
		return err
	}
	var names []string
	for _, e := range entries {
		if info, err := e.Info(); err == nil && !e.IsDir() && !strings.HasSuffix(e.Name(), ".sample") && (info.Mode()&0o111 != 0 || info.Mode()&fs.ModeSymlink != 0) {
			names = append(names, plain(e.Name()))
		}
	}
	if len(names) > 0 {
		g.add(Note, "hooks", "hooks do not run in a sandbox unless the operator lets them: "+strings.Join(names[:min(len(names), 30)], ", "), "nothing to do")
	}
	return nil
}
