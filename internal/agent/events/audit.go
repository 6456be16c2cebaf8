package events

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// gatherFor is how long the audit log waits for more after it was woken: one write then takes several lines.
	gatherFor = 20 * time.Millisecond
	// complainEvery bounds how often the same trouble is logged.
	complainEvery                 = time.Minute
	firstRetry, lastRetry         = time.Second, 30 * time.Second
	tailBytes                     = 256 << 10 // longer than any line is
	auditFile, auditFolder        = 0o600, 0o700
	writableByOthers       uint32 = 0o022
)

// ErrAudit: the audit log can't be opened; the message names the path and the remedy.
var ErrAudit = errors.New("audit log")

// AuditOptions say where the audit log is.
type AuditOptions struct {
	Path string
	// MaxBytes is how long the file may get before it is rotated to PATH.1, bytes; Keep is how many rotated ones stay.
	MaxBytes int64
	Keep     int
	Log      *slog.Logger
}

// Audit writes the chain to a file, one JSON object per line, and never loses its place: where it left off it reads from
// the file. A file that can't be written holds up nobody: the events wait in the journal.
type Audit struct {
	o     AuditOptions
	chain *Chain
	stop  chan struct{}
	done  chan struct{}

	// What follows belongs to the writing goroutine.
	f         *os.File
	size      int64
	torn      bool // the file ends within a line
	at        Cursor
	complaint time.Time
	silent    uint64 // failures since the last one that was logged

	failures atomic.Uint64
}

// line is one line of the file.
type line struct {
	Cursor string `json:"cursor"`
	Event
}

// OpenAudit opens the file, makes it and its folder if they are absent, and finds where it left off. Others than the
// agent's user must not be able to write to the folder. Run must be called afterwards.
func OpenAudit(c *Chain, o AuditOptions) (*Audit, error) {
	a := &Audit{o: o, chain: c, stop: make(chan struct{}), done: make(chan struct{})}
	if err := a.open(); err != nil {
		return nil, fmt.Errorf("%w %s: %w", ErrAudit, o.Path, err)
	}
	if err := a.findPlace(); err != nil {
		return nil, errors.Join(fmt.Errorf("%w %s: %w", ErrAudit, o.Path, err), a.f.Close())
	}
	return a, nil
}

func (a *Audit) open() error {
	dir := filepath.Dir(a.o.Path)
	if err := os.MkdirAll(dir, auditFolder); err != nil {
		return fmt.Errorf("making its folder: %w", err)
	}
	if err := checkFolder(dir); err != nil {
		return err
	}
	f, err := os.OpenFile(a.o.Path, os.O_RDWR|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, auditFile)
	if err != nil {
		return fmt.Errorf("%w (audit.path must be a file that the agent can make and nobody else can replace)", err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("it is no regular file: name another audit.path")
	}
	if err == nil {
		err = f.Chmod(auditFile)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	a.f, a.size = f, st.Size()
	return nil
}

// checkFolder: who can rename in the folder can make the log anything.
func checkFolder(dir string) error {
	st, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("looking at its folder: %w", err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.IsDir() {
		return fmt.Errorf("its folder %s is no folder: name another audit.path", dir)
	}
	if self := uint32(os.Geteuid()); sys.Uid != self || sys.Mode&writableByOthers != 0 {
		return fmt.Errorf("its folder %s belongs to uid %d with mode %04o: it must be the agent's (uid %d) and not be writable by others; name a file in a folder of its own, for example /var/log/sandbox-agent/audit.jsonl",
			dir, sys.Uid, st.Mode().Perm(), self)
	}
	return nil
}

// findPlace sets the cursor after the newest line that was written in full, and takes a torn one off the end.
func (a *Audit) findPlace() error {
	at, whole, err := lastCursor(a.f)
	if err != nil {
		return err
	}
	if whole < a.size {
		a.cutTo(whole)
	}
	if at == 0 { // rotated just now, or new
		old, err := os.Open(a.rotated(1))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		default:
			at, _, err = lastCursor(old)
			if err := errors.Join(err, old.Close()); err != nil {
				return err
			}
		}
	}
	a.at = at
	if at == 0 {
		a.at = a.chain.Oldest()
	}
	return nil
}

// cutTo takes what a failed write left off the end; where that can't be (a file that may only be appended to), the next
// write begins a new line.
func (a *Audit) cutTo(size int64) {
	if err := a.f.Truncate(size); err != nil {
		a.torn = true
		return
	}
	a.size, a.torn = size, false
}

// lastCursor reads the cursor of a log's last whole line, 0 if there is none, and where that line ends.
func lastCursor(f *os.File) (at Cursor, whole int64, err error) {
	st, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	from := max(0, st.Size()-tailBytes)
	tail, err := io.ReadAll(io.NewSectionReader(f, from, st.Size()-from))
	if err != nil {
		return 0, 0, fmt.Errorf("reading its end: %w", err)
	}
	end := bytes.LastIndexByte(tail, '\n') + 1
	whole = from + int64(end)
	for _, text := range backwards(bytes.Split(tail[:end], []byte("\n"))) {
		var l line
		if json.Unmarshal(text, &l) != nil || l.Cursor == "" {
			continue
		}
		if at, err := ParseCursor(l.Cursor); err == nil {
			return at, whole, nil
		}
	}
	return 0, whole, nil
}

func backwards(list [][]byte) [][]byte {
	out := make([][]byte, 0, len(list))
	for i := len(list) - 1; i >= 0; i-- {
		out = append(out, list[i])
	}
	return out
}

// Failures is how often the file could not be written since the agent started.
func (a *Audit) Failures() uint64 { return a.failures.Load() }

// Run writes what there is and what comes, until Close.
func (a *Audit) Run() {
	defer close(a.done)
	retry := firstRetry
	for {
		added := a.chain.journal.Appended()
		err := a.catchUp()
		wake := (<-chan time.Time)(nil)
		if err != nil {
			a.complain(err)
			wake, added = time.After(retry), nil
			retry = min(2*retry, lastRetry)
		} else {
			a.relieved()
			retry = firstRetry
		}
		select {
		case <-added:
			select {
			case <-time.After(gatherFor):
			case <-a.stop:
			}
		case <-wake:
		case <-a.stop:
			return
		}
	}
}

// Close writes what is left and closes the file. What can't be written any more the next start writes.
func (a *Audit) Close() error {
	close(a.stop)
	<-a.done
	err := a.catchUp()
	if err != nil {
		a.complaint = time.Time{}
		a.complain(err)
	}
	return errors.Join(err, a.f.Sync(), a.f.Close())
}

func (a *Audit) complain(err error) {
	a.failures.Add(1)
	a.silent++
	if time.Since(a.complaint) < complainEvery {
		return
	}
	a.o.Log.Error("audit log not written; its events wait in the journal, as many as events.keep says", "path", a.o.Path,
		"failures", a.silent, "written_up_to", a.at.String(), "newest", a.chain.Newest().String(), "error", err)
	a.complaint, a.silent = time.Now(), 0
}

// relieved says once that a trouble is over.
func (a *Audit) relieved() {
	if a.complaint.IsZero() {
		return
	}
	a.o.Log.Info("audit log is written again", "path", a.o.Path, "failures", a.failures.Load())
	a.complaint, a.silent = time.Time{}, 0
}

// catchUp writes all events that are not in the file yet.
func (a *Audit) catchUp() error {
	for {
		list, err := a.chain.Read(a.at)
		if errors.Is(err, ErrTooOld) || errors.Is(err, ErrAhead) {
			if err := a.skip(err); err != nil {
				return err
			}
			continue
		}
		if err != nil || len(list) == 0 {
			return err
		}
		for _, part := range a.parts(list) {
			if err := a.write(part.text); err != nil {
				return err
			}
			a.at = part.last
		}
	}
}

// skip says in the file that events are missing there, and goes on with the oldest that is kept.
func (a *Audit) skip(why error) error {
	next := a.chain.Oldest()
	b, err := json.Marshal(line{Cursor: next.String(), Event: Event{Kind: Gap, At: time.Now().UTC(),
		Detail: fmt.Sprintf("Events after %s are not in this file: %v.", a.at, why)}})
	if err != nil {
		return err
	}
	if err := a.write(append(b, '\n')); err != nil {
		return err
	}
	a.at = next
	return nil
}

// part is what one write takes.
type part struct {
	text []byte
	last Cursor
}

// parts encodes events, and cuts where the file must be rotated.
func (a *Audit) parts(list []Entry) []part {
	var out []part
	for _, e := range list {
		b, err := json.Marshal(line{Cursor: e.Cursor.String(), Event: e.Event})
		if err != nil {
			b = nil // it was read from JSON
		}
		b = append(b, '\n')
		if n := len(out); n > 0 && int64(len(out[n-1].text)+len(b)) <= a.o.MaxBytes/2 {
			out[n-1] = part{text: append(out[n-1].text, b...), last: e.Cursor}
			continue
		}
		out = append(out, part{text: b, last: e.Cursor})
	}
	return out
}

// write appends whole lines, all or none of them.
func (a *Audit) write(text []byte) error {
	if err := a.followPath(); err != nil {
		return err
	}
	if a.size > 0 && a.size+int64(len(text)) > a.o.MaxBytes {
		if err := a.rotate(); err != nil {
			a.complain(err) // the file grows on: that is better than losing lines
		}
	}
	if a.torn {
		text = append([]byte("\n"), text...)
	}
	n, err := a.f.Write(text)
	if err != nil {
		a.size += int64(n)
		if n > 0 {
			a.cutTo(a.size - int64(n))
		}
		return fmt.Errorf("writing to it: %w (free space on its file system, or name another audit.path)", err)
	}
	a.size, a.torn = a.size+int64(n), false
	return nil
}

// followPath opens the file anew when somebody else has moved or removed it.
func (a *Audit) followPath() error {
	var there, ours unix.Stat_t
	if err := unix.Fstat(int(a.f.Fd()), &ours); err != nil {
		return fmt.Errorf("looking at it: %w", err)
	}
	err := unix.Lstat(a.o.Path, &there)
	if err == nil && there.Dev == ours.Dev && there.Ino == ours.Ino {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("looking at it: %w", err)
	}
	return a.reopen()
}

func (a *Audit) reopen() error {
	old := a.f
	if err := a.open(); err != nil {
		a.f = old
		return fmt.Errorf("opening it anew: %w", err)
	}
	a.torn = false
	return old.Close()
}

func (a *Audit) rotated(n int) string { return fmt.Sprintf("%s.%d", a.o.Path, n) }

// rotate moves the file to PATH.1 and those before it one further; the one too many goes.
func (a *Audit) rotate() error {
	if err := a.f.Sync(); err != nil {
		return fmt.Errorf("syncing it: %w", err)
	}
	for n := a.o.Keep - 1; n >= 1; n-- {
		if err := os.Rename(a.rotated(n), a.rotated(n+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("rotating it: %w", err)
		}
	}
	if err := os.Rename(a.o.Path, a.rotated(1)); err != nil {
		return fmt.Errorf("rotating it: %w", err)
	}
	return a.reopen()
}
