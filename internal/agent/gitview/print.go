package gitview

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// A print tells whether anything changed in a Git folder, at the price of a few stats. It is of change times, inodes and
// sizes: a change time can't be set back (inode(7)), a modification time can.
type print struct {
	// Parts are digests, by what they are of: see the constants.
	Parts map[string]string `json:"parts"`
	// Racy: something changed so shortly before the print was taken that the next change could have the same time.
	Racy bool `json:"racy,omitempty"`
}

// The parts of a print.
const (
	partRefs  = "refs"
	partHead  = "head"
	partIndex = "index"
	partLogs  = "logs"
	partNames = "names" // of the folders themselves: files that came, went or were replaced
)

// changed says which parts differ; all of them where one of the two is not to be trusted.
func (p print) changed(now print) map[string]bool {
	out := map[string]bool{}
	for _, part := range []string{partRefs, partHead, partIndex, partLogs, partNames} {
		if p.Racy || p.Parts == nil || p.Parts[part] != now.Parts[part] {
			out[part] = true
		}
	}
	return out
}

const (
	// racyTime is more than a tick of the kernel's coarse clock, which change times are of.
	racyTime = 20 * time.Millisecond
	// mostRefs bounds how many files and folders below refs are looked at; beyond, each print differs from all others.
	mostRefs = 20000
	// mostBaseFiles is up to how many entries of a base clone's refs the files are looked at, and not their folders alone:
	// Git replaces a ref's file, which changes its folder.
	mostBaseFiles = 2000
)

// printer makes a print.
type printer struct {
	dir    *os.File
	hash   hash.Hash
	newest int64
	seen   int
	print  print
}

func newPrinter(dir *os.File) *printer {
	return &printer{dir: dir, print: print{Parts: map[string]string{}}}
}

// part adds one part, of the given names and all that is below those that end in "/".
func (p *printer) part(name string, paths ...string) error {
	p.hash = sha256.New()
	for _, path := range paths {
		var err error
		if tree, isTree := strings.CutSuffix(path, "/"); isTree {
			err = p.tree(tree, nil)
		} else {
			err = p.entry(path)
		}
		if err != nil {
			return err
		}
	}
	p.print.Parts[name] = hex.EncodeToString(p.hash.Sum(nil)[:16])
	return nil
}

func (p *printer) done() print {
	p.print.Racy = p.print.Racy || p.newest > time.Now().Add(-racyTime).UnixNano()
	return p.print
}

func (p *printer) entry(path string) error {
	fd, err := hostfs.Beneath(p.dir, path, unix.O_PATH, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		fmt.Fprintf(p.hash, "%q none\n", path)
		return nil
	case err != nil:
		return fmt.Errorf("looking at %s in %s: openat2: %w", path, p.dir.Name(), err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("looking at %s in %s: fstat: %w", path, p.dir.Name(), err)
	}
	p.add(path, &st)
	return nil
}

func (p *printer) add(path string, st *unix.Stat_t) {
	fmt.Fprintf(p.hash, "%q %d %d %o %d\n", path, st.Ino, st.Ctim.Nano(), st.Mode, st.Size)
	p.newest = max(p.newest, st.Ctim.Nano())
	p.seen++
}

// tree adds a folder and what is below it; skip leaves names out.
func (p *printer) tree(path string, skip func(path string, isDir bool) bool) error {
	if err := p.entry(path); err != nil {
		return err
	}
	fd, err := hostfs.Beneath(p.dir, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil // what is there instead has been added
	case err != nil:
		return fmt.Errorf("reading the folder %s in %s: openat2: %w", path, p.dir.Name(), err)
	}
	d := os.NewFile(uintptr(fd), path)
	defer d.Close()
	entries, err := d.ReadDir(mostRefs - p.seen + 1)
	if p.seen+len(entries) > mostRefs || err != nil && len(entries) > 0 {
		p.print.Racy = true
		return nil
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		name := filepath.Join(path, e.Name())
		if skip != nil && skip(name, e.IsDir()) {
			continue
		}
		if e.IsDir() {
			err = p.tree(name, skip)
		} else {
			err = p.stat(d, e.Name(), name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *printer) stat(d *os.File, name, path string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if errors.Is(err, unix.ENOENT) { // the base clone is in use
			return nil
		}
		return fmt.Errorf("looking at %s in %s: fstatat: %w", path, p.dir.Name(), err)
	}
	p.add(path, &st)
	return nil
}

// printPrivate is of what a command could have changed. meta is the worktree's folder in the private one.
func printPrivate(dir *os.File, meta string) (print, error) {
	p := newPrinter(dir)
	in := func(name string) string { return filepath.Join(meta, name) }
	err := errors.Join(
		p.part(partHead, in("HEAD")),
		p.part(partIndex, in("index")),
		p.part(partLogs, in("logs/HEAD"), "logs/refs/stash"),
		p.part(partNames, ".", meta, in("logs"), "logs"),
		p.part(partRefs, "packed-refs", "refs/", in("refs")+"/"),
	)
	return p.done(), err
}

// printBase is of what others could have changed in the base clone: the refs but the sandboxes', and the worktree's
// folder.
func printBase(dir *os.File, meta string) (print, error) {
	p := newPrinter(dir)
	in := func(name string) string { return filepath.Join(meta, name) }
	skipped := func(path string, isDir bool) bool {
		return path == "refs/sandboxes" || !isDir && p.seen > mostBaseFiles
	}
	err := errors.Join(
		p.part(partHead, in("HEAD"), in("reftable/tables.list")),
		p.part(partIndex, in("index")),
		p.part(partRefs, "packed-refs", "reftable/tables.list"),
	)
	if err != nil {
		return print{}, err
	}
	tables := p.print.Parts[partRefs]
	p.hash = sha256.New()
	if err := p.tree("refs", skipped); err != nil {
		return print{}, err
	}
	p.print.Parts[partRefs] = tables + hex.EncodeToString(p.hash.Sum(nil)[:16])
	return p.done(), nil
}
