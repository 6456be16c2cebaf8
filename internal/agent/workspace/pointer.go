package workspace

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

// readPointer reads a linked worktree's .git file, "gitdir: PATH", and gives the path as absolute and clean. Git is not
// asked: of a file that belongs to someone else it only says that a check of its own could be switched off.
func readPointer(worktree string, owner Owner) (string, error) {
	w, err := hostfs.OpenDir("worktree", worktree)
	if err != nil {
		return "", err
	}
	defer w.Close()
	fd, err := hostfs.Beneath(w, ".git", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOENT):
		return "", errors.New("its .git is not a file")
	case err != nil:
		return "", fmt.Errorf("opening its .git: openat2: %w", err)
	}
	f := os.NewFile(uintptr(fd), filepath.Join(worktree, ".git"))
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return "", fmt.Errorf("looking at its .git: fstat: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", errors.New("its .git is not a file")
	}
	if st.Uid != owner.UID {
		return "", fmt.Errorf("its .git file belongs to uid %d, the worktree to uid %d", st.Uid, owner.UID)
	}
	const longest = int64(len("gitdir: ")) + unix.PathMax + 1
	b, err := io.ReadAll(io.LimitReader(f, longest))
	if err != nil {
		return "", fmt.Errorf("reading its .git: %w", err)
	}
	path, ok := strings.CutPrefix(strings.TrimRight(string(b), "\r\n"), "gitdir: ")
	if !ok || path == "" {
		return "", errors.New("its .git file names no Git folder")
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(worktree, path) // extensions.relativeWorktrees
	}
	return filepath.Clean(path), nil
}

// whose says to which repository a worktree's Git folder belongs.
func whose(meta string) string {
	common, kind := filepath.Dir(filepath.Dir(meta)), filepath.Base(filepath.Dir(meta))
	if kind != "worktrees" {
		return fmt.Sprintf("its Git folder is %q", meta)
	}
	if filepath.Base(common) == ".git" {
		common = filepath.Dir(common)
	}
	return fmt.Sprintf("it is one of %q", common)
}
