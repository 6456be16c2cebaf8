package cli

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHelpersAreCopiedAndReplacedWithoutTouchingWhatRuns(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "state", "libexec")
	put := func(content string) {
		for _, name := range []string{"receiptd", "pid1"} {
			require.NoError(t, os.WriteFile(filepath.Join(from, name), []byte(content), 0o755))
		}
	}
	put("one")
	require.NoError(t, copyHelpers(to, filepath.Join(from, "receiptd"), filepath.Join(from, "pid1")))
	receiptd, pid1, err := pairIn(to)
	require.NoError(t, err, "they can be executed")
	running, err := os.Open(receiptd)
	require.NoError(t, err)
	defer running.Close()
	before, err := running.Stat()
	require.NoError(t, err)

	require.NoError(t, copyHelpers(to, filepath.Join(from, "receiptd"), filepath.Join(from, "pid1")))
	same, err := os.Stat(receiptd)
	require.NoError(t, err)
	require.True(t, os.SameFile(before, same), "the same content is not written again")

	put("two")
	require.NoError(t, copyHelpers(to, filepath.Join(from, "receiptd"), filepath.Join(from, "pid1")))
	b, err := os.ReadFile(pid1)
	require.NoError(t, err)
	require.Equal(t, "two", string(b))
	old := make([]byte, 3)
	_, err = running.ReadAt(old, 0)
	require.NoError(t, err)
	require.Equal(t, "one", string(old), "who has the old file keeps it")
	left, err := os.ReadDir(to)
	require.NoError(t, err)
	require.Len(t, left, 2, "nothing else is left in the folder")
}
