package gitview

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

const (
	// mostEntries bounds how much of a private Git folder is walked.
	mostEntries = 1 << 20
	// mostLocks bounds how many lock files there may be in it: killed Gits leave some.
	mostLocks = 1000
)

var errForeign = errors.New("neither a file nor a folder")

// walk looks at everything in a private Git folder before trusted Git does, by kind alone: a FIFO would make Git hang, a
// link lead it elsewhere. It gives the lock files that it met: no Git runs now, so nobody holds them.
func walk(root *os.File, shown string) (locks []string, err error) {
	w := walker{shown: shown}
	err = w.in(root, ".", ".", 0)
	return w.locks, err
}

type walker struct {
	shown string
	seen  int
	locks []string
}

func (w *walker) at(path string) string { return shortened(filepath.Join(w.shown, path)) }

// in looks at a folder, which is opened in its parent: the path of a deep one is longer than the kernel takes.
func (w *walker) in(parent *os.File, base, path string, depth int) error {
	if depth > mostDepth {
		return fmt.Errorf("%s has more than %d folders in each other: remove them in the session (rm -rf)", w.at(path), mostDepth)
	}
	fd, err := hostfs.Beneath(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("opening %s: %w (a command may have closed it: chmod u+rwx it in the session)", w.at(path), err)
	}
	d := os.NewFile(uintptr(fd), path)
	defer d.Close()
	for {
		entries, err := d.ReadDir(1024)
		for _, e := range entries {
			if err := w.entry(d, e, filepath.Join(path, e.Name()), depth); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the folder %s: %w", w.at(path), err)
		}
	}
}

func (w *walker) entry(d *os.File, e os.DirEntry, name string, depth int) error {
	w.seen++
	switch {
	case w.seen > mostEntries:
		return fmt.Errorf("%s has more than %d files: run git gc in the session", w.shown, mostEntries)
	case e.IsDir():
		return w.in(d, e.Name(), name, depth+1)
	case !e.Type().IsRegular():
		return fmt.Errorf("%s is %w: remove it in the session (rm), and what it was made for works again", w.at(name), errForeign)
	case !strings.HasSuffix(e.Name(), ".lock"):
	case len(w.locks) == mostLocks:
		return fmt.Errorf("%s has more than %d lock files: remove them in the session (find . -name '*.lock' -delete, in its .git)", w.shown, mostLocks)
	default:
		w.locks = append(w.locks, name)
	}
	return nil
}

// mostShown bounds a path in a message, bytes.
const mostShown = 200

// shortened is a path as messages have it: a command chooses how long it is.
func shortened(path string) string {
	if len(path) <= mostShown {
		return path
	}
	return strings.ToValidUTF8(path[:mostShown/2], "") + "…" + strings.ToValidUTF8(path[len(path)-mostShown/3:], "")
}
