package verify

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

var removedAt = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func TestAChainWhoseBeginningWasRemovedOnPurposeVerifiesAndSaysSo(t *testing.T) {
	k := newSigner(t)
	dir := sandbox(t, k, "e1", "e2", "e3", "e4")
	require.NoError(t, receipt.Remove(dir, []string{"e1"}, removedAt))
	require.NoError(t, receipt.Remove(dir, []string{"never", "e2"}, removedAt))
	require.NoError(t, receipt.Remove(dir, []string{"e1", "e2"}, removedAt.Add(time.Hour)), "the same again")
	r, err := Chain(dir, k.Public())
	require.NoError(t, err)
	require.True(t, r.OK(), r.Problems)
	require.Len(t, r.Receipts, 2)
	require.EqualValues(t, 2, r.Removed.Sequence)
	require.Equal(t, removedAt, r.Removed.At, "the second removal, not the one that found nothing")
	for _, name := range []string{"e1.json", "e1.stdout", "e2.json", "e2.stdout"} {
		require.NoFileExists(t, filepath.Join(dir, name))
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range left {
		require.NotContains(t, strings.TrimPrefix(e.Name(), "~"), "~", "no temporary file is left")
	}

	require.NoError(t, receipt.Remove(dir, []string{"e3", "e4"}, removedAt))
	r, err = Chain(dir, k.Public())
	require.NoError(t, err)
	require.True(t, r.OK(), r.Problems)
	require.Empty(t, r.Receipts)
	require.Equal(t, r.Removed.SHA256, r.LastSHA256)
	require.NoError(t, receipt.Remove(filepath.Join(dir, "absent"), []string{"e1"}, removedAt))
}

// A crash between any two steps of a removal leaves one of these.
func TestAnInterruptedRemovalVerifies(t *testing.T) {
	k := newSigner(t)
	for name, there := range map[string][]string{
		"nothing removed yet": nil, "a part": {"e1.json"}, "with a hole": {"e2.json"}, "output left": {"e1.json", "e2.json", "e3.json"},
	} {
		dir := sandbox(t, k, "e1", "e2", "e3", "e4")
		note := removedNote(t, k, dir)
		require.NoError(t, os.WriteFile(filepath.Join(dir, receipt.RemovedName), note, 0o600))
		for _, f := range there {
			require.NoError(t, os.Remove(filepath.Join(dir, f)))
		}
		r, err := Chain(dir, k.Public())
		require.NoError(t, err)
		require.True(t, r.OK(), "%s: %v", name, r.Problems)
		require.NoError(t, receipt.Remove(dir, []string{"e1", "e2", "e3"}, removedAt), name)
		r, err = Chain(dir, k.Public())
		require.NoError(t, err)
		require.True(t, r.OK(), "%s: %v", name, r.Problems)
		require.Len(t, r.Receipts, 1, name)
	}
}

// removedNote is what Remove writes before it removes e1 to e3 of a copy of dir.
func removedNote(t *testing.T, k *receipt.Signer, dir string) []byte {
	t.Helper()
	twin := t.TempDir()
	for _, id := range []string{"e1", "e2", "e3"} {
		require.NoError(t, os.WriteFile(filepath.Join(twin, receipt.FileName(id)), read(t, dir, id), 0o600))
	}
	require.NoError(t, receipt.Remove(twin, []string{"e1", "e2", "e3"}, removedAt))
	b, err := os.ReadFile(filepath.Join(twin, receipt.RemovedName))
	require.NoError(t, err)
	return b
}

func TestP9AHoleIsNotHiddenByWhatWasRemovedOnPurpose(t *testing.T) {
	k := newSigner(t)
	write := func(t *testing.T, dir string, r receipt.Removed) {
		b, err := json.Marshal(r)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, receipt.RemovedName), b, 0o600))
	}
	for name, c := range map[string]struct {
		do  func(t *testing.T, dir string)
		say string
	}{
		"one more at the beginning": {func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "e3.json"))) }, "receipt 3 is missing"},
		"the note is gone":          {func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, receipt.RemovedName))) }, "receipts 1 to 2 are missing"},
		"the note names another end": {func(t *testing.T, dir string) {
			write(t, dir, receipt.Removed{Sequence: 2, SHA256: strings.Repeat("0", 64)})
		}, "receipt 3 (exec e3) follows"},
		"the note is emptied":       {func(t *testing.T, dir string) { truncate(t, dir, receipt.RemovedName) }, "removed on purpose is not known"},
		"the note names no receipt": {func(t *testing.T, dir string) { write(t, dir, receipt.Removed{}) }, "removed on purpose is not known"},
		"the note is a link": {func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(filepath.Join(dir, receipt.RemovedName), filepath.Join(dir, "elsewhere")))
			require.NoError(t, os.Symlink("elsewhere", filepath.Join(dir, receipt.RemovedName)))
		}, "symbolic link"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := sandbox(t, k, "e1", "e2", "e3", "e4", "e5")
			require.NoError(t, receipt.Remove(dir, []string{"e1", "e2"}, removedAt))
			c.do(t, dir)
			r, err := Chain(dir, k.Public())
			require.NoError(t, err)
			require.Contains(t, strings.Join(r.Problems, "\n"), c.say)
		})
	}
}

func TestAStoreGoesOnAfterItsFirstReceiptsWereRemoved(t *testing.T) {
	k := newSigner(t)
	dir := t.TempDir()
	s, err := receipt.OpenStore(dir, 1000)
	require.NoError(t, err)
	for _, id := range []string{"e1", "e2"} {
		_, err := s.Commit(id, predicate(id, []byte(id)), []byte(id), nil, k)
		require.NoError(t, err)
	}
	require.NoError(t, receipt.Remove(dir, []string{"e1", "e2"}, removedAt))
	_, err = s.Commit("e3", predicate("e3", nil), nil, nil, k)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	again, err := receipt.OpenStore(dir, 1000)
	require.NoError(t, err)
	sequence, _ := again.Last()
	require.EqualValues(t, 3, sequence)
	require.NoError(t, receipt.Remove(dir, []string{"e3"}, removedAt))
	require.NoError(t, again.Close())
	last, err := receipt.OpenStore(dir, 1000)
	require.NoError(t, err)
	sequence, sha := last.Last()
	require.EqualValues(t, 3, sequence, "a chain of which nothing is left goes on too")
	require.NotEmpty(t, sha)
	require.NoError(t, last.Close())
	r, err := Chain(dir, k.Public())
	require.NoError(t, err)
	require.True(t, r.OK(), r.Problems)
}
