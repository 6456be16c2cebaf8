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

// mostEntries bounds how much of a private Git folder is walked.
const mostEntries = 1 << 20

var errForeign = errors.New("neither a file nor a folder")

// walk looks at everything in a private Git folder before trusted Git does, by kind alone: a FIFO would make Git hang, a
// link lead it elsewhere. It gives the lock files that it met: no Git runs now, so nobody holds them.
func walk(root *os.File, shown string) (locks []string, err error) {
	seen := 0
	var in func(path string) error
	in = func(path string) error {
		fd, err := hostfs.Beneath(root, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("opening %s: %w (a command may have closed it: chmod u+rwx it in the session)", filepath.Join(shown, path), err)
		}
		d := os.NewFile(uintptr(fd), path)
		defer d.Close()
		for {
			entries, err := d.ReadDir(1024)
			for _, e := range entries {
				name := filepath.Join(path, e.Name())
				seen++
				switch {
				case seen > mostEntries:
					return fmt.Errorf("%s has more than %d files: run git gc in the session", shown, mostEntries)
				case e.IsDir():
					if err := in(name); err != nil {
						return err
					}
				case !e.Type().IsRegular():
					return fmt.Errorf("%s is %w: remove it in the session (rm), and what it was made for works again", filepath.Join(shown, name), errForeign)
				case strings.HasSuffix(e.Name(), ".lock"):
					locks = append(locks, name)
				}
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("reading the folder %s: %w", filepath.Join(shown, path), err)
			}
		}
	}
	return locks, in(".")
}
