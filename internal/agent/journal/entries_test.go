package journal

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

type entry struct {
	n     uint64
	value string
}

func entriesOf(t *testing.T, j *Journal, after uint64) []entry {
	t.Helper()
	var list []entry
	require.NoError(t, j.ReadEntries(after, func(n uint64, v []byte) error {
		list = append(list, entry{n, string(v)})
		return nil
	}))
	return list
}

func TestEntriesKeepTheOrderOfTheirChangesAndRiseInEachRun(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, dir)
	require.Empty(t, entriesOf(t, j, 0))
	require.NoError(t, j.Update(ctx, false, Append([]byte("a")), Set("k", []byte("v")), Append([]byte("b"))))
	require.NoError(t, j.Update(ctx, true, Append([]byte("c"))))
	const first = uint64(1) << runShift
	require.Equal(t, []entry{{first, "a"}, {first + 1, "b"}, {first + 2, "c"}}, entriesOf(t, j, 0))
	require.Equal(t, []entry{{first + 2, "c"}}, entriesOf(t, j, first+1))
	require.Equal(t, map[string]string{"k": "v"}, contents(t, j), "records and entries are apart")
	require.NoError(t, j.Close())

	j = mustOpen(t, dir) // proves the checksum over both
	last, count := j.Entries()
	require.Equal(t, first+2, last)
	require.EqualValues(t, 3, count)
	require.NoError(t, j.Update(ctx, false, Append([]byte("d"))))
	require.Equal(t, []entry{{2 * first, "d"}}, entriesOf(t, j, last), "a new run")
	require.NoError(t, j.Close())
	j = mustOpen(t, dir)
	require.NoError(t, j.Close(), "an Open that adds none begins no run")
	j = openForTest(t, dir)
	require.NoError(t, j.Update(ctx, false, Append(nil)))
	last, _ = j.Entries()
	require.Equal(t, 3*first, last)
}

// What was not synced may be gone after a power cut, number and all. That the next run's numbers are greater rests on
// this: a run that anybody has seen a number of is on disk.
func TestTheFirstEntryOfARunIsDurableBeforeItsNumberIsTold(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	require.NoError(t, j.Update(ctx, false, Set("k", nil)))
	seen, err := j.high.read()
	require.NoError(t, err)
	require.Zero(t, seen, "the control: a plain change is not synced")
	require.NoError(t, j.Update(ctx, false, Append(nil)))
	synced, err := j.high.read()
	require.NoError(t, err)
	require.EqualValues(t, 2, synced, "it was asked for without a sync, and had one")
	require.NoError(t, j.Update(ctx, false, Append(nil)))
	again, err := j.high.read()
	require.NoError(t, err)
	require.Equal(t, synced, again, "the next one costs none")
}

func TestForgottenEntriesAreGoneAndCountedOff(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, dir)
	for i := range 5 {
		require.NoError(t, j.Update(ctx, false, Append(fmt.Append(nil, i))))
	}
	all := entriesOf(t, j, 0)
	require.NoError(t, j.Update(ctx, false, Forget(all[0].n), Forget(all[1].n), Forget(all[1].n), Forget(7)))
	require.Equal(t, all[2:], entriesOf(t, j, 0))
	_, count := j.Entries()
	require.EqualValues(t, 3, count)
	require.NoError(t, j.Close())
	j = openForTest(t, dir)
	_, count = j.Entries()
	require.EqualValues(t, 3, count)
	require.Equal(t, all[2:], entriesOf(t, j, 0))
}

func TestWhoeverWaitsForAnEntryIsWokenByEntriesOnly(t *testing.T) {
	j := openForTest(t, filepath.Join(t.TempDir(), "journal"))
	added := j.Appended()
	require.NoError(t, j.Update(ctx, true, Set("k", nil)))
	select {
	case <-added:
		require.Fail(t, "woken by a record")
	default:
	}
	require.NoError(t, j.Update(ctx, false, Append([]byte("x"))))
	<-added
	require.Len(t, entriesOf(t, j, 0), 1, "what it was woken for is there")
}
