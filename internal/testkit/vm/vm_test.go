package vm

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestAnInitramfsIsWhatCpioUnpacks(t *testing.T) {
	testkit.Need(t, testkit.Program("cpio"))
	var b bytes.Buffer
	c := &cpio{w: &b}
	c.parents([]string{"dir/odd", "dir/."})
	c.file("dir/odd", 0o755, []byte("12345"))
	c.file("empty", 0o600, nil)
	require.NoError(t, c.close())
	require.Zero(t, b.Len()%4)
	dir := t.TempDir()
	cmd := exec.Command("cpio", "-i", "--quiet")
	cmd.Dir, cmd.Stdin = dir, &b
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	got, err := os.ReadFile(filepath.Join(dir, "dir", "odd"))
	require.NoError(t, err)
	require.Equal(t, "12345", string(got))
	st, err := os.Stat(filepath.Join(dir, "dir", "odd"))
	require.NoError(t, err)
	require.EqualValues(t, 0o755, st.Mode().Perm())
	require.FileExists(t, filepath.Join(dir, "empty"))
}

// bzImage makes one with the given payload.
func bzImage(payload []byte) []byte {
	const sects, offset = 1, 16
	b := make([]byte, (sects+1)*512+offset)
	b[0x1f1] = sects
	binary.LittleEndian.PutUint32(b[0x248:], offset)
	binary.LittleEndian.PutUint32(b[0x24c:], uint32(len(payload)))
	return append(b, payload...)
}

func TestAKernelIsUnpackedAndAnythingElseIsRefused(t *testing.T) {
	testkit.Need(t, testkit.Program("gzip"))
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write([]byte("\x7fELF and so on"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	elf, err := unpack(bzImage(packed.Bytes()))
	require.NoError(t, err)
	require.Equal(t, "\x7fELF and so on", string(elf))
	for name, bad := range map[string][]byte{
		"empty": nil, "another packing": bzImage([]byte("?????")), "cut": bzImage(packed.Bytes())[:1045], "garbage": bzImage([]byte("\x1f\x8b-----")),
	} {
		_, err := unpack(bad)
		require.Error(t, err, name)
	}
}

func TestKernelsAreChosenByTheirVersion(t *testing.T) {
	cache := t.TempDir()
	for _, v := range []string{"5.10.0-46", "6.1.0-57", "6.12.118"} {
		require.NoError(t, os.MkdirAll(filepath.Join(cache, "k", "lib", "modules", v), 0o755))
	}
	ks, err := Kernels(cache, []string{"6.1"})
	require.NoError(t, err)
	require.Equal(t, []Kernel{{Cache: cache, Version: "6.1.0-57"}}, ks)
	ks, err = Kernels(cache, nil)
	require.NoError(t, err)
	require.Len(t, ks, 3)
	_, err = Kernels(cache, []string{"4.19"})
	require.ErrorContains(t, err, "4.19")
	_, err = Kernels(t.TempDir(), nil)
	require.ErrorContains(t, err, "scripts/kernels.sh")
}
