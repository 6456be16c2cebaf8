package workspace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// checkText refuses a path that can't be recorded as it is (JSON is UTF-8), or that would make two lines where Git prints
// one.
func checkText(what, path string) error {
	switch {
	case !utf8.ValidString(path):
		return fmt.Errorf("%w: %s %q is not valid UTF-8: rename it", ErrRefused, what, path)
	case strings.ContainsFunc(path, unicode.IsControl):
		return fmt.Errorf("%w: %s %q holds a control character (a line break, say): rename it", ErrRefused, what, path)
	}
	return nil
}

// checkAlternates refuses a clone that borrows another repository's objects: that one lies outside of what a sandbox and
// trusted Git see, so that objects would be missing.
func checkAlternates(repo, common string) error {
	path := filepath.Join(common, "objects", "info", "alternates")
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); errors.Is(err, unix.ENOENT) {
		return nil
	} else if err != nil {
		return fmt.Errorf("looking at %s: lstat: %w", path, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == 0 {
		return nil
	}
	return fmt.Errorf("%w: repository %s borrows objects of another one (%s), which a sandbox can't see: copy them (git -C %[2]s repack -a -d) and remove that file",
		ErrRefused, repo, path)
}

// checkWritable refuses a repository of which a folder is closed to its owner, mostly because Git was once run in it by
// somebody else: what a command commits would fail to be stored later, when it has been made.
func checkWritable(common string, owner Owner) error {
	dir, err := hostfs.OpenDir("the repository's Git folder", common)
	if err != nil {
		return err
	}
	defer dir.Close()
	objects, err := os.ReadDir(filepath.Join(common, "objects"))
	if err != nil {
		return fmt.Errorf("looking into the repository's objects: %w", err)
	}
	folders := []string{".", "objects", "refs", "refs/heads", "refs/tags", "logs", "logs/refs", "logs/refs/heads", "worktrees", "reftable"}
	for _, e := range objects {
		if e.IsDir() {
			folders = append(folders, filepath.Join("objects", e.Name()))
		}
	}
	return hostfs.AsOwner(owner, func() error {
		for _, name := range folders {
			var st unix.Stat_t
			if err := unix.Fstatat(int(dir.Fd()), name, &st, 0); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
				continue // with the reftable format refs/heads is a file, for older programs to stop at
			}
			// AT_EACCESS: as the owner whom this thread acts for, and not as the agent.
			err := unix.Faccessat(int(dir.Fd()), name, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
			// A link is Git's to refuse or follow, in its jail.
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ELOOP) && !errors.Is(err, unix.ENOTDIR) {
				return fmt.Errorf("%w: the repository's owner, %s, can't write to %s (%w): give all of it to one owner (chown -R), or let that one write (chmod u+wx)",
					ErrRefused, owner, filepath.Join(common, name), err)
			}
		}
		return nil
	})
}

const (
	// maxWalked bounds a look for what Git may have waited for, entries; maxNamed is how many of them are named.
	maxWalked = 100_000
	maxNamed  = 10
	// maxDepth bounds the folders that are open at once.
	maxDepth = 64
)

// explainHang adds to an error of a Git whose time was up what it may have waited for. Git opens what has the name of an
// object, a reference or an index as a file: of a FIFO it waits for a writer, without bound.
func explainHang(common string, hung error) error {
	odd, all := oddFiles(common)
	switch {
	case len(odd) > 0:
		return fmt.Errorf("%w: %w; neither a file nor a folder, so that Git may have waited for it: %s: look at it, and remove it",
			ErrRefused, hung, strings.Join(odd, ", "))
	case !all:
		return fmt.Errorf("%w (the first %d files in %s are no FIFO; find %[3]s -type p looks at all)", hung, maxWalked, common)
	}
	return fmt.Errorf("%w (all that is in %s is a file or a folder: see that its storage answers, and that no other Git is at work)", hung, common)
}

// oddFiles names what is neither a file nor a folder in a Git folder, and says whether it saw all. References, worktrees
// and logs are many less than objects, so it looks at those first.
func oddFiles(common string) (odd []string, all bool) {
	top, err := hostfs.OpenDir("the repository's Git folder", common)
	if err != nil {
		return nil, false
	}
	defer top.Close()
	w := walk{top: top, left: maxWalked}
	w.files(".", func(name string) bool { return name != "objects" })
	w.files("objects", nil)
	return w.odd, w.left > 0 && !w.skipped
}

// walk goes through a folder by descriptor: nothing of it leads elsewhere, whoever changes it meanwhile.
type walk struct {
	top     *os.File
	left    int
	odd     []string
	skipped bool // a folder that is too deep, or can't be opened
}

// files looks at a folder below top and at what enter, or everything where that is nil, lets it enter.
func (w *walk) files(dir string, enter func(name string) bool) {
	if strings.Count(dir, "/") >= maxDepth {
		w.skipped = true
		return
	}
	fd, err := hostfs.Beneath(w.top, dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		w.skipped = true
		return
	}
	f := os.NewFile(uintptr(fd), filepath.Join(w.top.Name(), dir))
	defer f.Close()
	for w.left > 0 && len(w.odd) < maxNamed {
		entries, err := f.ReadDir(1000)
		for _, e := range entries {
			w.left--
			w.entry(filepath.Join(dir, e.Name()), e, enter)
		}
		if err != nil { // io.EOF at the end
			return
		}
	}
}

func (w *walk) entry(path string, e fs.DirEntry, enter func(name string) bool) {
	switch {
	case w.left <= 0 || len(w.odd) >= maxNamed:
	case e.IsDir():
		if enter == nil || enter(e.Name()) {
			w.files(path, nil)
		}
	case !e.Type().IsRegular():
		w.odd = append(w.odd, filepath.Join(w.top.Name(), path))
	}
}
