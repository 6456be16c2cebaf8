package cli

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReceiptdAndPid1AreTakenFromTheFirstFolderThatHasBoth(t *testing.T) {
	half, both, other := t.TempDir(), t.TempDir(), t.TempDir()
	put := func(dir, name string, mode os.FileMode) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("x"), mode))
	}
	put(half, "receiptd", 0o755)
	put(both, "receiptd", 0o755)
	put(both, "pid1", 0o755)
	put(other, "receiptd", 0o755)
	put(other, "pid1", 0o755)
	receiptd, pid1, err := findHelpers([]string{half, both, other})
	require.NoError(t, err)
	require.Equal(t, filepath.Join(both, "receiptd"), receiptd)
	require.Equal(t, filepath.Join(both, "pid1"), pid1)

	put(half, "pid1", 0o644)
	_, _, err = findHelpers([]string{half})
	require.ErrorContains(t, err, filepath.Join(half, "pid1")+" is not executable")
	require.ErrorContains(t, err, "make build")
	_, _, err = findHelpers([]string{filepath.Join(half, "none")})
	require.ErrorContains(t, err, "--libexec-dir")
	require.NoError(t, os.Mkdir(filepath.Join(half, "d"), 0o755))
	require.NoError(t, os.Mkdir(filepath.Join(half, "d", "receiptd"), 0o755))
	_, _, err = findHelpers([]string{filepath.Join(half, "d")})
	require.ErrorContains(t, err, "is not a regular file")
}
