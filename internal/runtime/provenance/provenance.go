package provenance

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// state is what changes when a file's content does: the kernel sets ctime with each write, and nobody can set it.
type state struct {
	device, inode uint64
	size          int64
	mtime, ctime  unix.Timespec
}

// settled is how old a file's last change has to be before its digest is remembered: within the same tick of the kernel's
// clock, or second of a coarse file system, another write would leave no trace in ctime.
const settled = 3 * time.Second

// maxKnown bounds what is remembered: a node has two programs, and two more after an update.
const maxKnown = 64

var (
	mu    sync.Mutex
	known = map[state]string{}
)

// SHA256 is the digest of an open regular file, lower-case hex. f may be opened with O_PATH. It fails when the file changes
// meanwhile.
func SHA256(f *os.File) (string, error) {
	before, err := stateOf(f)
	if err != nil {
		return "", err
	}
	mu.Lock()
	sum, ok := known[before]
	mu.Unlock()
	if ok {
		return sum, nil
	}
	if sum, err = hash(f); err != nil {
		return "", err
	}
	after, err := stateOf(f)
	if err != nil {
		return "", err
	}
	if before != after {
		return "", fmt.Errorf("hashing %s: it was changed meanwhile", f.Name())
	}
	remember(after, sum)
	return sum, nil
}

func stateOf(f *os.File) (state, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return state{}, fmt.Errorf("looking at %s: %w", f.Name(), os.NewSyscallError("fstat", err))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return state{}, fmt.Errorf("looking at %s: it is no regular file", f.Name())
	}
	return state{device: st.Dev, inode: st.Ino, size: st.Size, mtime: st.Mtim, ctime: st.Ctim}, nil
}

// hash opens the file again: a descriptor of O_PATH can't be read, and its link in /proc leads to the same inode.
func hash(f *os.File) (string, error) {
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return "", fmt.Errorf("hashing %s: %w", f.Name(), err)
	}
	defer again.Close()
	h := sha256.New()
	if _, err := io.Copy(h, again); err != nil {
		return "", fmt.Errorf("hashing %s: %w", f.Name(), err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func remember(s state, sum string) {
	changed := time.Unix(s.ctime.Unix())
	if age := time.Since(changed); age < settled {
		return // also when the node's clock was set back behind it
	}
	mu.Lock()
	defer mu.Unlock()
	if len(known) >= maxKnown {
		clear(known)
	}
	known[s] = sum
}

// Program is SHA256 of a program that is to be the one with the digest want; any, if want is empty. what names it. It fails
// with runtime.ErrSwapped.
func Program(what string, f *os.File, want string) (string, error) {
	sum, err := SHA256(f)
	if err != nil {
		return "", err
	}
	if want != "" && sum != want {
		return "", fmt.Errorf("%s %s: %w: its SHA-256 is %s, not %s: if it was updated, restart the agent; if not, find out who replaced it",
			what, f.Name(), runtime.ErrSwapped, sum, want)
	}
	return sum, nil
}

// ProgramAt is Program of a path.
func ProgramAt(what, path, want string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("opening %s: %w", what, err)
	}
	defer f.Close()
	return Program(what, f, want)
}
