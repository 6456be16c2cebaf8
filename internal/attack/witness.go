package attack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/attack/inside"
)

// witness looks at the node while commands are run.
type witness struct {
	g         *grounds
	listeners []net.Listener
	packets   net.PacketConn
	canary    *exec.Cmd
	// canaryWord is the first argument of a process of the node.
	canaryWord string

	mu      sync.Mutex
	reached []string
}

// newWitness starts the canaries: a listener of each kind on the node, and a process, of a program that imports package inside (the agent's
// image has no other one).
func newWitness(ctx context.Context, g *grounds, program string) (*witness, error) {
	w := &witness{g: g, canaryWord: "canary-of-" + filepath.Base(g.dir)}
	if err := w.start(ctx, program); err != nil {
		w.stop()
		return nil, err
	}
	return w, nil
}

func (w *witness) start(ctx context.Context, program string) (err error) {
	var lc net.ListenConfig
	for _, l := range []struct{ network, address string }{{"tcp", "127.0.0.1:0"}, {"unix", "@" + filepath.Base(w.g.dir)}, {"unix", w.socket()}} {
		listener, err := lc.Listen(ctx, l.network, l.address)
		if err != nil {
			return fmt.Errorf("listening as a canary: %w", err)
		}
		w.listeners = append(w.listeners, listener)
		go w.accept(listener)
	}
	if w.packets, err = lc.ListenPacket(ctx, "udp", "127.0.0.1:0"); err != nil {
		return fmt.Errorf("listening as a canary: %w", err)
	}
	go w.receive()
	// Everybody on the node may connect, so that it is the sandbox that keeps a command from it.
	if err := chmodSocket(w.socket()); err != nil {
		return err
	}
	w.canary = exec.CommandContext(ctx, program, inside.Word, "wait")
	w.canary.Args[0] = w.canaryWord
	// It ends with whoever has the other end, however that ends.
	_, err = w.canary.StdinPipe()
	if err == nil {
		err = w.canary.Start()
	}
	if err != nil {
		w.canary = nil
		return fmt.Errorf("starting a canary: %w", err)
	}
	return nil
}

// chmodSocket goes by a descriptor, since a socket can't be opened but for its path.
func chmodSocket(path string) error {
	return unix.Fchmodat(unix.AT_FDCWD, path, 0o666, 0)
}

func (w *witness) socket() string { return filepath.Join(w.g.dir, "socket") }

func (w *witness) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Close()
		w.reach(l.Addr().Network() + " " + l.Addr().String())
	}
}

func (w *witness) receive() {
	b := make([]byte, 64)
	for {
		if _, _, err := w.packets.ReadFrom(b); err != nil {
			return
		}
		w.reach("udp " + w.packets.LocalAddr().String())
	}
}

func (w *witness) reach(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Contains(w.reached, what) {
		w.reached = append(w.reached, what)
	}
}

// takeReached gives what was reached since the last call.
func (w *witness) takeReached() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.reached
	w.reached = nil
	return all
}

func (w *witness) stop() {
	for _, l := range w.listeners {
		l.Close()
	}
	if w.packets != nil {
		w.packets.Close()
	}
	if w.canary != nil {
		_ = w.canary.Process.Kill()
		_ = w.canary.Wait()
	}
}

// addresses are the canaries', for the words of an attack.
func (w *witness) addresses() map[string]string {
	return map[string]string{
		"tcp": w.listeners[0].Addr().String(), "udp": w.packets.LocalAddr().String(), "abstract": strings.TrimPrefix(w.listeners[1].Addr().String(), "@"),
		"unix": w.socket(),
		// The brackets keep what looks for it from finding itself.
		"canary": "[" + w.canaryWord[:1] + "]" + w.canaryWord[1:],
	}
}

// processes are those of the node that have a word among the arguments of one of their threads: a process goes on when its first
// one has ended. What is dead has no arguments.
func processes(word string) (found []string) {
	threads, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/cmdline")
	for _, path := range threads {
		args, _ := os.ReadFile(path)
		if slices.ContainsFunc(bytes.Split(args, []byte{0}), func(arg []byte) bool { return string(arg) == word }) {
			found = append(found, "process "+strings.Split(path, "/")[2])
		}
	}
	return slices.Compact(found)
}

// beats is how much the processes have written that stay behind, which is seen whatever kernel they run on.
func (w *witness) beats() int64 {
	st, err := os.Lstat(filepath.Join(w.g.worktree, inside.Beat))
	if err != nil {
		return 0
	}
	return st.Size()
}

// still gives what is alive after an answer. More than once, because a walk through /proc misses a thread that begins while
// another one ends, and because a beat takes its time.
func (w *witness) still(ctx context.Context, word string) (alive []string) {
	before := w.beats()
	for range 3 {
		alive = append(alive, processes(word)...)
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	if w.beats() != before {
		alive = append(alive, "something that writes to "+inside.Beat)
	}
	slices.Sort(alive)
	return slices.Compact(alive)
}

// sealed are the parts of the base clone that Git takes its orders from, and what must not be made there.
var sealed = []string{"config", "config.worktree", "hooks", "info", "commondir", "objects/info", "worktrees"}

// changing are what the trusted side writes there itself.
var changing = []string{"index", "HEAD", "ORIG_HEAD", "FETCH_HEAD", "COMMIT_EDITMSG", "logs", "refs", "gc.pid", "index.lock"}

// print is what each file of the node that must not change has: its kind, mode, owner and content.
type print map[string]string

// look takes the print of the clone's sealed parts, of the worktree's pointer to it, and of all that lies beside.
func (w *witness) look() (print, error) {
	p := print{}
	git := filepath.Join(w.g.repo, ".git")
	for _, name := range sealed {
		if err := p.walk(filepath.Join(git, name), func(path string) bool { return slices.Contains(changing, filepath.Base(path)) }); err != nil {
			return nil, err
		}
	}
	entries, err := os.ReadDir(git)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !slices.Contains(changing, e.Name()) {
			p[filepath.Join(git, e.Name())] += e.Type().String()
		}
	}
	all, err := os.ReadDir(w.g.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range all {
		p[filepath.Join(w.g.dir, e.Name())] += e.Type().String()
	}
	for _, path := range []string{filepath.Join(w.g.worktree, ".git"), w.g.secret, w.g.beside} {
		if err := p.walk(path, func(string) bool { return false }); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p print) walk(top string, skip func(path string) bool) error {
	return filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case skip(path) && d.IsDir():
			return fs.SkipDir
		case skip(path):
			return nil
		}
		p[path], err = printOf(path)
		return err
	})
}

func printOf(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	text := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		b, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		text += fmt.Sprintf(" %d.%09d %x", st.Mtim.Sec, st.Mtim.Nsec, sha256.Sum256(b))
	}
	return text, nil
}

// changed names what is not the same in another print.
func (p print) changed(after print) (all []string) {
	for path, was := range p {
		if is, there := after[path]; !there {
			all = append(all, path+" is gone")
		} else if is != was {
			all = append(all, path)
		}
	}
	for path := range after {
		if _, there := p[path]; !there {
			all = append(all, path+" was made")
		}
	}
	slices.Sort(all)
	return all
}

// dangerous names what lies in the worktree that would give its owner's rights, or a device, to whoever uses it, and what a
// program left that a trusted Git command should not have run.
func (w *witness) dangerous() (all []string, err error) {
	err = filepath.WalkDir(w.g.worktree, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // a folder that nobody may enter is no danger
		}
		st, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // it is gone
		}
		if st.Mode()&(os.ModeSetuid|os.ModeSetgid|os.ModeDevice|os.ModeCharDevice) != 0 {
			all = append(all, path+" is "+st.Mode().String())
		}
		return nil
	})
	for _, mark := range []string{filepath.Join(w.g.worktree, ranMark), filepath.Join(w.g.beside, ranMark)} {
		if _, lstatErr := os.Lstat(mark); lstatErr == nil {
			all = append(all, mark+" was written by what trusted Git ran")
		}
	}
	return all, err
}

// ranMark is what a program of the attacker's makes when the trusted side runs it.
const ranMark = "ran"
