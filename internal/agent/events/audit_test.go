package events

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// bound ends a test that hangs.
const bound = 30 * time.Second

// memLog is a log that a test reads while it is written.
type memLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *memLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *memLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (p *place) audit(path string, change ...func(*AuditOptions)) (*Audit, *memLog) {
	p.t.Helper()
	log := &memLog{}
	o := AuditOptions{Path: path, MaxBytes: 1 << 20, Keep: 3, Log: slog.New(slog.NewTextHandler(log, nil))}
	for _, f := range change {
		f(&o)
	}
	a, err := OpenAudit(p.chain, o)
	require.NoError(p.t, err)
	go a.Run()
	return a, log
}

// lines are those of the files, which must all be whole JSON objects.
func lines(t *testing.T, paths ...string) []line {
	t.Helper()
	var out []line
	for _, path := range paths {
		f, err := os.Open(path)
		require.NoError(t, err)
		s := bufio.NewScanner(f)
		s.Buffer(nil, 1<<20)
		for s.Scan() {
			var l line
			require.NoError(t, json.Unmarshal(s.Bytes(), &l), "%s: %s", path, s.Text())
			out = append(out, l)
		}
		require.NoError(t, s.Err())
		require.NoError(t, f.Close())
	}
	return out
}

// requireSame says that the lines are the chain, each event once and in order.
func (p *place) requireSame(got []line) {
	p.t.Helper()
	want := p.all(0, "")
	require.Equal(p.t, len(want), len(got), "events")
	for i, e := range want {
		require.Equal(p.t, line{Cursor: e.Cursor.String(), Event: e.Event}, got[i])
	}
}

func TestTheAuditLogIsTheChainAsJSONLines(t *testing.T) {
	p := newPlace(t, 10_000)
	path := filepath.Join(t.TempDir(), "audit", "audit.jsonl")
	a, _ := p.audit(path)
	p.tell(300)
	require.NoError(t, a.Close())
	p.requireSame(lines(t, path))
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())
	require.Zero(t, a.Failures())
}

func TestTheAuditLogGoesOnWhereItWasAfterARestart(t *testing.T) {
	p := newPlace(t, 10_000)
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	a, _ := p.audit(path)
	p.tell(20)
	require.NoError(t, a.Close())
	p.tell(5) // nobody writes these now
	p.again(false)
	// A kill in the middle of a write leaves a part of a line.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(`{"cursor":"ffffffffffffffff","kind":"exec.res`)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	a, _ = p.audit(path)
	p.tell(5)
	require.NoError(t, a.Close())
	p.requireSame(lines(t, path))
}

func TestTheAuditLogIsRotatedAndTheOldestFileGoes(t *testing.T) {
	p := newPlace(t, 100_000)
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	const most = 64 << 10
	a, _ := p.audit(path, func(o *AuditOptions) { o.MaxBytes, o.Keep = most, 2 })
	p.tell(700) // two files
	require.NoError(t, a.Close())
	p.requireSame(lines(t, path+".1", path))
	a, _ = p.audit(path, func(o *AuditOptions) { o.MaxBytes, o.Keep = most, 2 })
	p.tell(3000)
	require.NoError(t, a.Close())
	files, err := filepath.Glob(path + "*")
	require.NoError(t, err)
	require.ElementsMatch(t, []string{path, path + ".1", path + ".2"}, files)
	for _, f := range files {
		st, err := os.Stat(f)
		require.NoError(t, err)
		require.LessOrEqual(t, st.Size(), int64(most))
	}
	got, all := lines(t, path+".2", path+".1", path), p.all(0, "")
	for i := range got {
		require.Equal(t, all[len(all)-len(got)+i].Cursor.String(), got[i].Cursor, "none is missing between or within the files")
	}
	// Rotated just before the restart: the place is in the file before.
	require.NoError(t, os.Rename(path, path+".1"))
	a, _ = p.audit(path)
	p.tell(1)
	require.NoError(t, a.Close())
	require.Len(t, lines(t, path), 1)
}

func TestALogThatSomebodyElseRotatesIsBegunAnew(t *testing.T) {
	p := newPlace(t, 10_000)
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	a, _ := p.audit(path)
	p.tell(3)
	require.Eventually(t, func() bool { b, _ := os.ReadFile(path); return bytes.Count(b, []byte("\n")) == 4 }, bound, time.Millisecond)
	require.NoError(t, os.Rename(path, path+"-20261129"))
	p.tell(2)
	require.NoError(t, a.Close())
	require.Len(t, lines(t, path), 2)
	p.requireSame(lines(t, path+"-20261129", path))
}

func TestAFullDiskHoldsUpNobodyIsSaidOnceAndNothingIsLost(t *testing.T) {
	testkit.Need(t, testkit.Root)
	p := newPlace(t, 10_000)
	dir := t.TempDir()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k,mode=0700"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	path, filler := filepath.Join(dir, "audit.jsonl"), filepath.Join(dir, "filler")
	a, log := p.audit(path)
	p.tell(2)
	require.Eventually(t, func() bool { b, _ := os.ReadFile(path); return bytes.Count(b, []byte("\n")) == 3 }, bound, time.Millisecond)
	require.Error(t, os.WriteFile(filler, make([]byte, 64<<10), 0o600), "the disk is full")
	p.tell(500) // each returns: nothing waits for the log
	require.Eventually(t, func() bool { return a.Failures() >= 2 }, bound, 10*time.Millisecond)
	require.Equal(t, 1, strings.Count(log.String(), "audit log not written"), "at most once a minute")
	require.Contains(t, log.String(), path)
	require.Contains(t, log.String(), "free space")
	require.Contains(t, log.String(), fmt.Sprintf("newest=%s", p.chain.Newest()))
	require.NoError(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=1m,mode=0700"))
	require.NoError(t, os.Remove(filler))
	require.NoError(t, a.Close())
	p.requireSame(lines(t, path))
}

func TestALogThatFellBehindWhatIsKeptSaysSo(t *testing.T) {
	p := newPlace(t, 300)
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	a, _ := p.audit(path)
	p.tell(10)
	require.NoError(t, a.Close())
	before := p.chain.Newest()
	p.tell(1000)
	require.NoError(t, p.chain.trim(t.Context()))
	a, _ = p.audit(path)
	require.NoError(t, a.Close())
	got := lines(t, path)
	require.Len(t, got, 11+1+300)
	require.Equal(t, Gap, got[11].Kind)
	require.Contains(t, got[11].Detail, before.String())
	require.Equal(t, p.chain.Oldest().String(), got[11].Cursor)
	a, _ = p.audit(path)
	require.NoError(t, a.Close())
	require.Len(t, lines(t, path), 11+1+300, "and then goes on as before")
}

func TestAnAuditLogThatOthersCouldReplaceIsRefused(t *testing.T) {
	p := newPlace(t, 1000)
	open := func(path string) error {
		a, err := OpenAudit(p.chain, AuditOptions{Path: path, MaxBytes: 1 << 20, Keep: 1, Log: slog.New(slog.DiscardHandler)})
		if err == nil {
			go a.Run()
			require.NoError(t, a.Close())
		}
		return err
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o777))
	require.ErrorIs(t, open(filepath.Join(dir, "audit.jsonl")), ErrAudit)
	require.ErrorContains(t, open(filepath.Join(dir, "audit.jsonl")), "0777")
	require.NoFileExists(t, filepath.Join(dir, "audit.jsonl"))
	require.NoError(t, os.Chmod(dir, 0o755))
	require.NoError(t, open(filepath.Join(dir, "audit.jsonl")), "the same, once only the agent can write there")
	require.NoError(t, os.Symlink("/dev/null", filepath.Join(dir, "link")))
	require.ErrorIs(t, open(filepath.Join(dir, "link")), ErrAudit)
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	require.ErrorContains(t, open(filepath.Join(dir, "fifo")), "no regular file")
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(dir, 4321, 4321))
		require.ErrorContains(t, open(filepath.Join(dir, "audit.jsonl")), "uid 4321")
		require.NoError(t, os.Chown(dir, 0, 0))
	}
}
