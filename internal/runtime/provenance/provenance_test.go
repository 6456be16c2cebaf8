package provenance

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o755))
	return path
}

func sumOf(content string) string {
	sum := sha256.Sum256([]byte(content))
	return hex.EncodeToString(sum[:])
}

func openPath(t *testing.T, path string) *os.File {
	t.Helper()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestADescriptorWithoutTheRightToReadIsHashedToo(t *testing.T) {
	sum, err := SHA256(openPath(t, write(t, "receiptd")))
	require.NoError(t, err)
	require.Equal(t, sumOf("receiptd"), sum)
}

func TestP9ASwappedProgramIsNoticedHoweverItWasSwapped(t *testing.T) {
	for name, swap := range map[string]func(t *testing.T, path string){
		"another file under its name": func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path+".new", []byte("forged!!"), 0o755))
			require.NoError(t, os.Rename(path+".new", path))
		},
		"written over, of the same size": func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte("forged!!"), 0o755))
		},
		"written over, and its times set back": func(t *testing.T, path string) {
			st, err := os.Stat(path)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, []byte("forged!!"), 0o755))
			require.NoError(t, os.Chtimes(path, st.ModTime(), st.ModTime()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, "receiptd")
			want, err := ProgramAt("receiptd", path, "")
			require.NoError(t, err)
			again, err := ProgramAt("receiptd", path, want)
			require.NoError(t, err)
			require.Equal(t, want, again)
			swap(t, path)
			_, err = ProgramAt("receiptd", path, want)
			require.ErrorIs(t, err, runtime.ErrSwapped)
			for _, named := range []string{"receiptd", path, want, sumOf("forged!!"), "restart the agent"} {
				require.ErrorContains(t, err, named)
			}
		})
	}
}

func TestADigestIsRememberedOnceTheFileHasSettledAndNotBefore(t *testing.T) {
	now := time.Now()
	at := func(age time.Duration) state {
		return state{inode: uint64(age), ctime: unix.NsecToTimespec(now.Add(-age).UnixNano())}
	}
	for age, remembered := range map[time.Duration]bool{0: false, time.Second: false, -time.Hour: false, time.Hour: true} {
		remember(at(age), "sum")
		mu.Lock()
		_, ok := known[at(age)]
		mu.Unlock()
		require.Equal(t, remembered, ok, age)
	}
	for i := range 2 * maxKnown {
		s := at(time.Hour)
		s.inode = uint64(i)
		remember(s, "sum")
	}
	mu.Lock()
	defer mu.Unlock()
	require.LessOrEqual(t, len(known), maxKnown)
}

func TestWhatIsNoRegularFileHasNoDigest(t *testing.T) {
	_, err := ProgramAt("pid1", t.TempDir(), "")
	require.ErrorContains(t, err, "no regular file")
	_, err = ProgramAt("pid1", filepath.Join(t.TempDir(), "missing"), "")
	require.ErrorIs(t, err, os.ErrNotExist)
}
