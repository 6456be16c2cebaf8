package gitview

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
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
	// racyTime is more than a tick of the kernel's coarse clock, which change times are of, and racySecond more than that of
	// a file system that keeps whole seconds, or every other one.
	racyTime   = 20 * time.Millisecond
	racySecond = 2*time.Second + racyTime
	// mostRefs bounds how many files and folders below refs are looked at; beyond, each print differs from all others.
	mostRefs = 20000
	// mostDepth bounds how deep the folders of a Git folder are looked at.
	mostDepth = 64
	// mostBaseFiles is up to how many entries of a base clone's refs the files are looked at, and not their folders alone:
	// Git replaces a ref's file, which changes its folder.
	mostBaseFiles = 2000
)

// printer makes a print.
type printer struct {
	dir  *os.File
	hash hash.Hash
	// settled is from when on a change has another time than all that were looked at, nanoseconds since 1970.
	settled int64
	seen    int
	print   print
	// filesOnly leaves out the folders themselves.
	filesOnly bool
}

func newPrinter(dir *os.File) *printer {
	return &printer{dir: dir, print: print{Parts: map[string]string{}}}
}

// part adds one part, of the given names and all that is below those that end in "/".
func (p *printer) part(name string, paths ...string) {
	p.hash = sha256.New()
	for _, path := range paths {
		if tree, isTree := strings.CutSuffix(path, "/"); isTree {
			p.tree(tree, nil)
		} else {
			p.entry(path)
		}
	}
	p.print.Parts[name] = p.sum()
}

func (p *printer) sum() string { return hex.EncodeToString(p.hash.Sum(nil)[:16]) }

func (p *printer) done() print {
	p.print.Racy = p.print.Racy || p.racy()
	return p.print
}

// entry adds one name. What can't be looked at is taken for changed: a command can bring that about, and only a command can
// repair it.
func (p *printer) entry(path string) {
	fd, err := hostfs.Beneath(p.dir, path, unix.O_PATH, 0)
	if err != nil {
		p.missing(path, err)
		return
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		p.print.Racy = true
		return
	}
	p.add(path, &st)
}

// missing adds a name that is not there, or is no folder or file that can be reached without following a link.
func (p *printer) missing(path string, err error) {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		fmt.Fprintf(p.hash, "%q none\n", path)
		return
	}
	p.print.Racy = true
}

func (p *printer) add(path string, st *unix.Stat_t) {
	fmt.Fprintf(p.hash, "%q %d %d %o %d\n", path, st.Ino, st.Ctim.Nano(), st.Mode, st.Size)
	p.settled = max(p.settled, settled(st.Ctim))
	p.seen++
}

// settled is from when on a change has another time than this one. Where the file system has finer times than seconds, a
// whole second is one in a million and more, and only makes that the folder is looked at again.
func settled(change unix.Timespec) int64 {
	if change.Nsec == 0 {
		return change.Nano() + int64(racySecond)
	}
	return change.Nano() + int64(racyTime)
}

// racy says whether the next change could have the time of one that was looked at.
func (p *printer) racy() bool { return p.settled > time.Now().UnixNano() }

// tree adds a folder and what is below it; skip leaves names out.
func (p *printer) tree(path string, skip func(path string, isDir bool) bool) {
	p.entry(path)
	p.below(p.dir, path, path, 0, skip)
}

// below adds what a folder has. It is opened in its parent: the path of a deep one is longer than the kernel takes.
func (p *printer) below(parent *os.File, name, path string, depth int, skip func(path string, isDir bool) bool) {
	d, err := p.openFolder(parent, name, path)
	if err != nil {
		return
	}
	defer d.Close()
	entries, err := d.ReadDir(max(mostRefs-p.seen, 0) + 1) // 0 would be all of them
	if depth >= mostDepth || p.seen+len(entries) > mostRefs || err != nil && !errors.Is(err, io.EOF) {
		p.print.Racy = true
		return
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		at := filepath.Join(path, e.Name())
		if skip != nil && skip(at, e.IsDir()) {
			continue
		}
		if !p.filesOnly || !e.IsDir() {
			p.stat(d, e.Name(), at)
		}
		if e.IsDir() {
			p.below(d, e.Name(), at, depth+1, skip)
		}
	}
}

// folders adds a folder and those below it, without their files: of those there may be any number.
func (p *printer) folders(parent *os.File, name, path string, depth int) {
	d, err := p.openFolder(parent, name, path)
	if err != nil {
		return
	}
	defer d.Close()
	p.stat(d, ".", path)
	var below []string
	for {
		entries, err := d.ReadDir(1024)
		for _, e := range entries {
			if e.IsDir() {
				below = append(below, e.Name())
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || depth >= mostDepth || p.seen+len(below) > mostRefs {
			p.print.Racy = true
			return
		}
	}
	slices.Sort(below)
	for _, name := range below {
		p.folders(d, name, filepath.Join(path, name), depth+1)
	}
}

func (p *printer) openFolder(parent *os.File, name, path string) (*os.File, error) {
	fd, err := hostfs.Beneath(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		p.missing(path, err)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func (p *printer) stat(d *os.File, name, path string) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		p.print.Racy = p.print.Racy || !errors.Is(err, unix.ENOENT) // the base clone is in use
		return
	}
	p.add(path, &st)
}

// printPrivate is of what a command could have changed. meta is the worktree's folder in the private one.
func printPrivate(dir *os.File, meta string) print {
	p := newPrinter(dir)
	in := func(name string) string { return filepath.Join(meta, name) }
	p.part(partHead, in("HEAD"))
	p.part(partIndex, in("index"))
	p.part(partLogs, in("logs/HEAD"), "logs/refs/stash")
	p.part(partNames, ".", meta, in("logs"), "logs")
	p.part(partRefs, "packed-refs", "refs/", in("refs")+"/")
	return p.done()
}

// printBase is of what others could have changed in the base clone: the refs but the sandboxes', and the worktree's
// folder.
func printBase(dir *os.File, meta string) print {
	p := newPrinter(dir)
	in := func(name string) string { return filepath.Join(meta, name) }
	skipped := func(path string, isDir bool) bool {
		return path == "refs/sandboxes" || !isDir && p.seen > mostBaseFiles
	}
	p.part(partHead, in("HEAD"), in("reftable/tables.list"))
	p.part(partIndex, in("index"))
	p.part(partRefs, "packed-refs", "reftable/tables.list")
	p.hash = sha256.New()
	p.tree("refs", skipped)
	p.print.Parts[partRefs] += p.sum()
	return p.done()
}
