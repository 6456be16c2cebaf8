package receipt

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// smallFileSystem mounts a new ext4 of 24 MiB, made with the options, and gives a folder in it.
func smallFileSystem(t *testing.T, options ...string) string {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("mkfs.ext4"), testkit.Program("mount"))
	top := testkit.StateDir(t)
	image, at := filepath.Join(top, "image"), filepath.Join(top, "fs")
	f, err := os.Create(image)
	require.NoError(t, err)
	require.NoError(t, errors.Join(f.Truncate(24<<20), f.Close()))
	run(t, "mkfs.ext4", append(append([]string{"-q", "-m", "0"}, options...), image)...)
	require.NoError(t, os.Mkdir(at, 0o700))
	run(t, "mount", "-o", "loop", image, at)
	t.Cleanup(func() { run(t, "umount", at) })
	dir := filepath.Join(at, "receipts")
	require.NoError(t, os.Mkdir(dir, 0o700))
	return dir
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s %v: %s", name, args, out)
}

// fill uses up what is left of dir's file system: first in large writes, then to the last byte.
func fill(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "..", "filler"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	defer f.Close()
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			require.ErrorIs(t, err, unix.ENOSPC)
			size /= 2
			continue
		}
	}
	require.NoError(t, f.Sync())
}

// release gives back n bytes of what fill took.
func release(t *testing.T, dir string, n int64) {
	t.Helper()
	path := filepath.Join(dir, "..", "filler")
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, st.Size()-n))
	unix.Sync()
}

func requireFull(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "..", "one more"))
	if err == nil {
		_, err = f.Write(make([]byte, 4096))
		f.Close()
	}
	require.ErrorIs(t, err, unix.ENOSPC)
}

func TestP16AReservedReceiptIsWrittenOnAFullDisk(t *testing.T) {
	for name, options := range map[string][]string{
		"ext4":                   {"-b", "4096"},
		"ext4 with small blocks": {"-b", "1024"},
		"ext4 without a journal": {"-b", "1024", "-O", "^has_journal"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := smallFileSystem(t, options...)
			s, k := openStore(t, dir, 256<<10), signer(t)
			require.Equal(t, name != "ext4 without a journal", s.oneJournal)
			require.NoError(t, s.Reserve())
			fill(t, dir)
			requireFull(t, dir)

			stdout, stderr := bytes.Repeat([]byte("o"), 256<<10), bytes.Repeat([]byte("e"), 256<<10)
			_, err := commitExec(s, "full", stdout, stderr, k)
			require.NoError(t, err)
			requireExec(t, dir, "full", stdout, stderr)

			_ = os.Remove(filepath.Join(dir, "..", "one more"))
			fill(t, dir)
			err = s.Reserve()
			require.ErrorIs(t, err, ErrNoSpace, "now nothing may start")
			require.ErrorContains(t, err, dir)
			require.ErrorContains(t, err, "free space")

			release(t, dir, 4<<20)
			require.NoError(t, s.Reserve(), "space given back is found")
			_, err = commitExec(s, "after", stdout, nil, k)
			require.NoError(t, err)
		})
	}
}

func requireExec(t *testing.T, dir, id string, stdout, stderr []byte) {
	t.Helper()
	b, err := Read(dir, id)
	require.NoError(t, err)
	e, err := Parse(b)
	require.NoError(t, err)
	for stream, want := range map[Stream][]byte{Stdout: stdout, Stderr: stderr} {
		got, err := ReadKept(dir, &e.Predicate, stream)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got))
	}
}

// A long name, again and again, so that the folder needs new blocks while the disk is full.
func TestP16TheFolderCanGrowOnAFullDisk(t *testing.T) {
	for _, block := range []string{"1024", "4096"} {
		t.Run(block, func(t *testing.T) {
			dir := smallFileSystem(t, "-b", block)
			s, k := openStore(t, dir, 8<<10), signer(t)
			require.NoError(t, s.Reserve())
			fill(t, dir)
			grown := 0
			for i := range 120 {
				release(t, dir, 128<<10)
				require.NoError(t, s.Reserve())
				fill(t, dir)
				before := sizeOf(t, dir)
				id := strings.Repeat("x", MaxExecID-4) + fmt.Sprintf("%04d", i)
				_, err := commitExec(s, id, []byte("out"), []byte("err"), k)
				require.NoError(t, err, "commit %d", i)
				if sizeOf(t, dir) > before {
					grown++
				}
			}
			require.Greater(t, grown, 2, "the folder grew while the disk was full")
			sequence, _ := s.Last()
			require.Equal(t, uint64(120), sequence)
		})
	}
}

func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	st, err := os.Stat(path)
	require.NoError(t, err)
	return st.Size()
}

func TestP16AReservedReceiptIsWrittenOnAFullTmpfs(t *testing.T) {
	testkit.Need(t, testkit.Root)
	top := testkit.StateDir(t)
	require.NoError(t, unix.Mount("tmpfs", top, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(top, 0)) })
	dir := filepath.Join(top, "receipts")
	require.NoError(t, os.Mkdir(dir, 0o700))
	s, k := openStore(t, dir, 256<<10), signer(t)
	require.False(t, s.oneJournal)
	require.NoError(t, s.Reserve())
	fill(t, dir)
	out := bytes.Repeat([]byte("o"), 256<<10)
	_, err := commitExec(s, "full", out, out, k)
	require.NoError(t, err)
	requireExec(t, dir, "full", out, out)
}

func TestP16NoInodesLeftIsSaidByReserveAndHarmsNoReservedReceipt(t *testing.T) {
	dir := smallFileSystem(t, "-N", "48")
	s, k := openStore(t, dir, 8<<10), signer(t)
	require.NoError(t, s.Reserve())
	for i := 0; ; i++ {
		f, err := os.Create(filepath.Join(dir, "..", fmt.Sprint("inode", i)))
		if err != nil {
			require.ErrorIs(t, err, unix.ENOSPC)
			break
		}
		require.NoError(t, f.Close())
	}
	_, err := commitExec(s, "full", []byte("o"), []byte("e"), k)
	require.NoError(t, err)
	err = s.Reserve()
	require.ErrorIs(t, err, ErrNoSpace)
	require.ErrorContains(t, err, "inodes")
}

func BenchmarkCommit(b *testing.B) {
	for name, out := range map[string][]byte{"no output": nil, "300 bytes": make([]byte, 300), "256 KiB": make([]byte, 256<<10)} {
		b.Run(name, func(b *testing.B) {
			s, k := openStore(b, testkit.StateDir(b), 256<<10), signer(b)
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				require.NoError(b, s.Reserve())
				b.StartTimer()
				_, err := commitExec(s, fmt.Sprint(i), out, nil, k)
				require.NoError(b, err)
			}
		})
	}
}
