package journal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

var ctx = context.Background()

func mustOpen(t testing.TB, dir string) *Journal {
	t.Helper()
	j, err := Open(dir, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return j
}

func openForTest(t testing.TB, dir string) *Journal {
	t.Helper()
	j := mustOpen(t, dir)
	t.Cleanup(func() { require.NoError(t, j.Close()) })
	return j
}

func contents(t require.TestingT, j *Journal) map[string]string {
	got := map[string]string{}
	require.NoError(t, j.Scan("", "", func(k string, v []byte) error {
		got[k] = string(v)
		return nil
	}))
	return got
}

func TestWhatWasSetIsThereAndWhatWasDeletedIsNot(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	require.NoError(t, j.Update(ctx, true, Set("a", []byte("1")), Set("b", nil), Set("c", []byte("3"))))
	require.NoError(t, j.Update(ctx, false, Delete("c"), Set("a", []byte("2")), Delete("never there")))

	v, err := j.Get("a")
	require.NoError(t, err)
	require.Equal(t, "2", string(v))
	v, err = j.Get("b")
	require.NoError(t, err)
	require.Empty(t, v)
	_, err = j.Get("c")
	require.ErrorIs(t, err, ErrNotFound)
	require.ErrorContains(t, err, `"c"`)
}

func TestAScanPagesThroughAPrefixInOrder(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	var ops []Op
	for i := range 10 {
		ops = append(ops, Set(fmt.Sprintf("exec/s1/%d", i), nil))
	}
	ops = append(ops, Set("exec/s0/9", nil), Set("exec/s2/0", nil), Set("exec/s1", nil), Set("exec/s1\xff", nil))
	require.NoError(t, j.Update(ctx, true, ops...))

	var pages [][]string
	for after := ""; ; {
		var page []string
		require.NoError(t, j.Scan("exec/s1/", after, func(k string, _ []byte) error {
			page = append(page, k)
			if len(page) == 4 {
				return ErrStop
			}
			return nil
		}))
		if len(page) == 0 {
			break
		}
		pages, after = append(pages, page), page[len(page)-1]
	}
	require.Equal(t, [][]string{
		{"exec/s1/0", "exec/s1/1", "exec/s1/2", "exec/s1/3"},
		{"exec/s1/4", "exec/s1/5", "exec/s1/6", "exec/s1/7"},
		{"exec/s1/8", "exec/s1/9"},
	}, pages)
}

func TestAScansOwnErrorComesBackAsItIs(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	require.NoError(t, j.Update(ctx, false, Set("a", nil)))
	mine := errors.New("mine")
	require.Equal(t, mine, j.Scan("", "", func(string, []byte) error { return mine }))
}

func TestBadRecordsAreRefusedAndNothingOfTheirUpdateIsMade(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	for name, bad := range map[string]Op{
		"empty key":       Set("", nil),
		"a key of ours":   Set(stateKey, nil),
		"a delete of it":  Delete(stateKey),
		"a key too long":  Set(strings.Repeat("k", MaxKey+1), nil),
		"value too large": Set("k", make([]byte, MaxValue+1)),
	} {
		require.ErrorIs(t, j.Update(ctx, true, Set("good", nil), bad), ErrBadKey, name)
	}
	require.Empty(t, contents(t, j))
}

func TestAnEndedContextEndsTheWait(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	ended, cancel := context.WithCancel(ctx)
	cancel()
	err := j.Update(ended, true, Set("a", nil))
	if err != nil {
		require.ErrorIs(t, err, context.Canceled)
	}
	require.NoError(t, j.Update(ctx, true, Set("b", nil)), "the journal goes on")
}

func TestAClosedJournalSaysSo(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, dir)
	require.NoError(t, j.Close())
	require.NoError(t, j.Close())
	require.ErrorIs(t, j.Update(ctx, true, Set("a", nil)), ErrClosed)
	_, err := j.Get("a")
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, j.Scan("", "", nil), ErrClosed)
	mustOpenAndClose(t, dir)
}

func mustOpenAndClose(t testing.TB, dir string) {
	t.Helper()
	require.NoError(t, mustOpen(t, dir).Close())
}

// The model is a map; now and then the journal is closed and opened again, which also checks its running checksum.
func TestTheJournalBehavesAsAMapAlsoAcrossReopening(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "")
		require.NoError(r, err)
		j, model := mustOpen(t, dir), map[string]string{}
		defer func() { require.NoError(r, j.Close()) }()
		for range rapid.IntRange(1, 20).Draw(r, "steps") {
			if rapid.IntRange(0, 5).Draw(r, "kind") == 0 {
				require.NoError(r, j.Close())
				j = mustOpen(t, dir)
			}
			ops := drawOps(r, model)
			require.NoError(r, j.Update(ctx, rapid.Bool().Draw(r, "durable"), ops...))
			require.Equal(r, model, contents(r, j))
		}
	})
}

func drawOps(r *rapid.T, model map[string]string) []Op {
	var ops []Op
	for range rapid.IntRange(0, 6).Draw(r, "ops") {
		key := rapid.StringMatching(`[a-c]{1,2}`).Draw(r, "key")
		if rapid.Bool().Draw(r, "delete") {
			ops = append(ops, Delete(key))
			delete(model, key)
			continue
		}
		value := rapid.String().Draw(r, "value")
		ops = append(ops, Set(key, []byte(value)))
		model[key] = value
	}
	return ops
}

func TestUpdatesFromManySidesAreAllThere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, dir)
	want := map[string]string{}
	var wg sync.WaitGroup
	for w := range 8 {
		for i := range 25 {
			want[fmt.Sprintf("%d/%d", w, i)] = fmt.Sprint(i)
		}
		wg.Go(func() {
			for i := range 25 {
				if err := j.Update(ctx, true, Set(fmt.Sprintf("%d/%d", w, i), []byte(fmt.Sprint(i)))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.Equal(t, want, contents(t, j))
	require.NoError(t, j.Close())
	require.Equal(t, want, contents(t, openForTest(t, dir)))
}

func TestUpdatesThatWaitTogetherShareOneSync(t *testing.T) {
	j := &Journal{queue: make(chan *update, maxGroup)}
	waiting := make([]*update, maxGroup)
	for i := range waiting {
		waiting[i] = &update{}
		if i > 0 {
			j.queue <- waiting[i]
		}
	}
	require.Equal(t, waiting, j.gather(waiting[0]))
}

func TestASecondJournalOnTheFolderIsRefusedAndNamesTheHolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	openForTest(t, dir)
	_, err := Open(dir, slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, dir)
	require.ErrorContains(t, err, fmt.Sprintf("pid %d", os.Getpid()))
}

func TestALockOfADeadProcessHoldsNobodyUp(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, lockName), []byte("999999999\n"), 0o600))
	mustOpenAndClose(t, dir)
	b, err := os.ReadFile(filepath.Join(dir, lockName))
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintln(os.Getpid()), string(b))
}

func TestAFolderThatCannotBeWrittenIsNamedWithTheRemedy(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := filepath.Join(testkit.StateDir(t), "ro")
	require.NoError(t, os.Mkdir(dir, 0o700))
	mountTmpfs(t, dir, "ro")
	_, err := Open(filepath.Join(dir, "journal"), slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, unix.EROFS)
	require.ErrorContains(t, err, filepath.Join(dir, "journal"))
	require.ErrorContains(t, err, "writable file system")
}

func TestAFileInTheFoldersPlaceIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err := Open(path, slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, unix.ENOTDIR)
	require.ErrorContains(t, err, path)
}

func TestP16AFullFileSystemIsSaidBeforeAnythingIsWritten(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	mountTmpfs(t, dir, "size=64m")
	j := openForTest(t, filepath.Join(dir, "journal"))
	require.NoError(t, j.Update(ctx, true, Set("before", nil)))

	filler := filepath.Join(dir, "filler")
	fillUntil(t, filler, dir, 24<<20)
	err := j.Update(ctx, true, Set("intent", nil))
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, dir)
	require.NoError(t, j.Update(ctx, false, Set("outcome", nil)), "an outcome still finds room")

	fillUntil(t, filler, dir, 8<<20)
	require.ErrorIs(t, j.Update(ctx, false, Set("outcome", nil)), ErrNoSpace)
	require.NoError(t, os.Remove(filler))
	require.NoError(t, j.Update(ctx, true, Set("after", nil)), "the journal is unharmed")
	require.Equal(t, []string{"after", "before", "outcome"}, slices.Sorted(maps.Keys(contents(t, j))))
}

func TestP16OpeningOnAFullFileSystemSaysSo(t *testing.T) {
	testkit.Need(t, testkit.Root)
	dir := testkit.StateDir(t)
	mountTmpfs(t, dir, "size=8m")
	_, err := Open(filepath.Join(dir, "journal"), slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, dir)
}

func mountTmpfs(t *testing.T, dir, options string) {
	t.Helper()
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", mountFlags(options), strings.TrimPrefix(options, "ro")))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
}

func mountFlags(options string) uintptr {
	if options == "ro" {
		return unix.MS_RDONLY
	}
	return 0
}

// fillUntil makes the filler larger until at most left bytes are free.
func fillUntil(t *testing.T, filler, dir string, left uint64) {
	t.Helper()
	f, err := os.OpenFile(filler, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	defer f.Close()
	for chunk := make([]byte, 1<<20); ; {
		var st unix.Statfs_t
		require.NoError(t, unix.Statfs(dir, &st))
		if st.Bavail*uint64(st.Bsize) <= left {
			return
		}
		_, err := f.Write(chunk)
		require.NoError(t, err)
	}
}
