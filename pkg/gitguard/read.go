package gitguard

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxConfig is how long a configuration may be, bytes.
	maxConfig = 1 << 20
	// listTimeout bounds one run of git config.
	listTimeout = 10 * time.Second
	// nobody runs git config where the caller is root: it parses bytes that anybody may have written.
	nobody = 65534
)

// Entry is one line of a configuration as Git understood it.
type Entry struct {
	// Key is as Git prints it: section and variable in lower case, the subsection verbatim.
	Key   string
	Value string
	// HasValue is false for a key without "=", which Git takes as true.
	HasValue bool
}

// Config is a configuration file as it was read once; every answer about it comes from those bytes.
type Config struct {
	Path string
	// SHA256 of the file's bytes, lower-case hex.
	SHA256  string
	Entries []Entry
	raw     []byte
}

// ReadConfig reads a configuration file of at most 1 MiB, without following a symbolic link anywhere in path and without
// waiting (a FIFO is refused), and has Git parse the bytes. Includes are not read. It fails with ErrConfig where Git
// would not read the file to its end without complaint: Git prints the entries before a mistake too.
func ReadConfig(ctx context.Context, path string) (Config, error) {
	raw, err := readRegular(path, maxConfig)
	if errors.Is(err, os.ErrNotExist) {
		return Config{}, fmt.Errorf("%w: %s: %w", ErrConfig, plain(path), &fileError{why: "it is not there", remedy: fmt.Sprintf(
			"restore it, or have Git write a new one (git init %s), and look at what that lacks", plain(whoseGitFolder(filepath.Dir(path))))})
	}
	if err != nil {
		return Config{}, fmt.Errorf("%w: %s: %w", ErrConfig, plain(path), err)
	}
	return parseConfig(ctx, path, raw)
}

func parseConfig(ctx context.Context, path string, raw []byte) (Config, error) {
	if i := bytes.IndexByte(raw, 0); i >= 0 {
		return Config{}, fmt.Errorf("%w: %s, line %d: %w", ErrConfig, plain(path), 1+bytes.Count(raw[:i], []byte("\n")),
			&fileError{why: "a NUL byte, at which Git would stop reading", remedy: "remove it"})
	}
	list, err := listOnce(ctx, raw)
	if err != nil {
		return Config{}, fmt.Errorf("%w: %s: %w", ErrConfig, plain(path), err)
	}
	entries, err := ParseList(list)
	if err != nil {
		return Config{}, fmt.Errorf("%w: %s: %w", ErrConfig, plain(path), err)
	}
	sum := sha256.Sum256(raw)
	return Config{Path: path, SHA256: hex.EncodeToString(sum[:]), Entries: entries, raw: raw}, nil
}

// fileError is what is wrong with a configuration file before Git reads it, and the remedy.
type fileError struct {
	why, remedy string
	err         error
}

func (e *fileError) Error() string {
	s := e.why + ": " + e.remedy
	if e.err != nil {
		s += ": " + e.err.Error()
	}
	return s
}

func (e *fileError) Unwrap() error { return e.err }

// openPlain opens a path of which no component is a symbolic link.
func openPlain(path string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		// O_NONBLOCK: a FIFO must not hang the caller.
		Flags:   flags | unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, &fileError{why: "it is a symbolic link, or its path has one", remedy: "put the file itself there, name the real path", err: err}
	case err != nil:
		return nil, fmt.Errorf("opening it: openat2: %w", err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// readRegular reads a regular file of at most most bytes.
func readRegular(path string, most int64) ([]byte, error) {
	f, err := openPlain(path, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("looking at it: fstat: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, &fileError{why: "it is " + typeName(st.Mode) + ", not a file", remedy: "remove it, and put the file itself there"}
	}
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, fmt.Errorf("reading it: %w", err)
	}
	if int64(len(b)) > most {
		return nil, &fileError{why: fmt.Sprintf("it is longer than %d bytes", most), remedy: "make it shorter, for what does not belong into a configuration is in it"}
	}
	return b, nil
}

func typeName(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "a file"
	case unix.S_IFDIR:
		return "a folder"
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFIFO:
		return "a FIFO"
	case unix.S_IFSOCK:
		return "a socket"
	default:
		return "a device"
	}
}

// listKey is a configuration's bytes and the Git that lists them: a new version may see them otherwise.
type listKey struct {
	sum          [sha256.Size]byte
	inode        uint64
	changed      unix.Timespec
	size, device uint64
}

// lists are what Git made of configurations, of those that it took. The same bytes are read several times for each session.
var lists struct {
	sync.Mutex
	of map[listKey][]byte
}

const (
	// mostLists bounds how many lists are remembered, and mostListed how long each is, bytes.
	mostLists  = 64
	mostListed = 64 << 10
)

// listOnce has Git list a configuration that it did not list before.
func listOnce(ctx context.Context, raw []byte) ([]byte, error) {
	git, err := findGit()
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Stat(git, &st); err != nil {
		return nil, fmt.Errorf("looking at %s: stat: %w", git, err)
	}
	key := listKey{sum: sha256.Sum256(raw), inode: st.Ino, changed: st.Ctim, size: uint64(st.Size), device: st.Dev}
	lists.Lock()
	list, known := lists.of[key]
	lists.Unlock()
	if known {
		return list, nil
	}
	if list, err = listConfig(ctx, raw); err != nil || len(list) > mostListed {
		return list, err
	}
	lists.Lock()
	defer lists.Unlock()
	if lists.of == nil || len(lists.of) >= mostLists {
		lists.of = map[listKey][]byte{}
	}
	lists.of[key] = list
	return list, nil
}

// listConfig has Git list a configuration. What it printed before a mistake comes with the error.
func listConfig(ctx context.Context, raw []byte) ([]byte, error) {
	git, err := findGit()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, git, "config", "--file", "-", "--no-includes", "-z", "--list")
	// No repository is looked for: neither in the working folder nor above it.
	cmd.Dir, cmd.Env = "/", append(Env(), "GIT_DIR=/dev/null")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(raw), &stdout, &stderr
	cmd.WaitDelay = time.Second
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	err = cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("git config took longer than %s or was cancelled: %w", listTimeout, ctx.Err())
	case err != nil:
		said := plain(strings.TrimSpace(strings.ReplaceAll(stderr.String(), "\n", "; ")))
		return stdout.Bytes(), fmt.Errorf("git does not read it (%w): %s", err, said)
	}
	return stdout.Bytes(), nil
}

// findGit looks where trusted Git is, not where the caller's environment says.
func findGit() (string, error) {
	for _, dir := range filepath.SplitList(Path) {
		p := filepath.Join(dir, "git")
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("no git in %s: install it (apt install git)", Path)
}

// ParseList reads the output of git config -z --list: "key LF value NUL", or "key NUL" for a key without a value.
func ParseList(b []byte) ([]Entry, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if b[len(b)-1] != 0 {
		return nil, errors.New("git's list of the configuration does not end with a NUL byte")
	}
	var out []Entry
	for _, field := range strings.Split(string(b[:len(b)-1]), "\x00") {
		key, value, has := strings.Cut(field, "\n")
		if key == "" {
			return nil, errors.New("git's list of the configuration has an entry without a key")
		}
		out = append(out, Entry{Key: key, Value: value, HasValue: has})
	}
	return out, nil
}

// split takes a key apart. has says that there is a subsection, which may be empty and may have dots.
func (e Entry) split() (section, subsection string, has bool, variable string) {
	first, last := strings.IndexByte(e.Key, '.'), strings.LastIndexByte(e.Key, '.')
	switch {
	case first < 0:
		return "", "", false, e.Key
	case first == last:
		return e.Key[:first], "", false, e.Key[last+1:]
	default:
		return e.Key[:first], e.Key[first+1 : last], true, e.Key[last+1:]
	}
}

// off says that Git surely takes the value for false.
func (e Entry) off() bool {
	if !e.HasValue {
		return false
	}
	switch strings.ToLower(e.Value) {
	case "false", "no", "off", "0", "":
		return true
	}
	return false
}

// isBool says that Git surely takes the value for true or false.
func (e Entry) isBool() bool {
	if !e.HasValue || e.off() {
		return true
	}
	switch strings.ToLower(e.Value) {
	case "true", "yes", "on", "1":
		return true
	}
	return false
}
