package receiptd

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// However a stream comes in pieces: no file as long as there is no more than a receipt keeps, then its beginning.
func TestASpillHoldsTheStreamsBeginning(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		path := filepath.Join(dir, "spill")
		defer os.Remove(path)
		above := rapid.IntRange(0, 20).Draw(t, "above")
		s := &spill{path: path, above: above, most: above + rapid.IntRange(0, 20).Draw(t, "more")}
		var whole, passed []byte
		sink := s.behind(func(offset uint64, data []byte) {
			if offset != uint64(len(passed)) {
				t.Fatalf("offset %d after %d bytes", offset, len(passed))
			}
			passed = append(passed, data...)
		})
		for _, piece := range rapid.SliceOf(rapid.SliceOfN(rapid.Byte(), 1, 30)).Draw(t, "pieces") {
			sink(uint64(len(whole)), piece)
			whole = append(whole, piece...)
		}
		s.close()
		sink(uint64(len(whole)), []byte("after the end"))
		got, err := os.ReadFile(path)
		switch {
		case len(whole) <= above:
			if !os.IsNotExist(err) {
				t.Fatalf("%d bytes are kept anyway: %q, %v", len(whole), got, err)
			}
		case err != nil || !bytes.Equal(got, whole[:min(len(whole), s.most)]):
			t.Fatalf("%q, %v is not the beginning of %q", got, err, whole)
		}
	})
}

func TestASpillThatCannotBeWrittenCostsNothingElse(t *testing.T) {
	s := &spill{path: filepath.Join(t.TempDir(), "none", "spill"), most: 100}
	passed := 0
	sink := s.behind(func(_ uint64, data []byte) { passed += len(data) })
	sink(0, []byte("one"))
	sink(3, []byte("two"))
	s.close()
	require.Equal(t, 6, passed)

	taken := filepath.Join(t.TempDir(), "spill")
	require.NoError(t, os.WriteFile(taken, []byte("another's"), 0o600))
	s = &spill{path: taken, most: 100}
	s.behind(func(uint64, []byte) {})(0, []byte("one"))
	s.close()
	b, err := os.ReadFile(taken)
	require.NoError(t, err)
	require.Equal(t, "another's", string(b), "a file that is there is not written to")
}

func TestNobodyWhoDoesNotAskGetsASpill(t *testing.T) {
	s := &Server{init: &receiptdv1.InitRequest{Limits: &receiptdv1.Limits{OutputBytes: 10}}}
	require.Equal(t, [2]*spill{}, s.newSpills(&receiptdv1.ExecRequest{}))
	two := s.newSpills(&receiptdv1.ExecRequest{ExecId: "e", SpillBytes: 5})
	require.NotEqual(t, two[0].path, two[1].path)
	require.Equal(t, 5, two[0].above, "never more than is written in all")
}

func TestP16ASpillLeavesRoomForReceiptsAndTheJournal(t *testing.T) {
	testkit.Need(t, testkit.Root)
	free := func(size string) int {
		dir := t.TempDir()
		require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size))
		defer func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
		s := &spill{path: filepath.Join(dir, "spill"), most: 16 << 20}
		sink, passed := s.behind(func(uint64, []byte) {}), 0
		for range 16 {
			sink(uint64(passed), make([]byte, 1<<20))
			passed += 1 << 20
		}
		s.close()
		st, err := os.Stat(s.path)
		if err != nil {
			require.ErrorIs(t, err, os.ErrNotExist)
			return 0
		}
		return int(st.Size())
	}
	require.Equal(t, 16<<20, free("100m"), "there is room for all of it")
	require.Equal(t, 4<<20, free("68m"), "64 MiB are left")
	require.Zero(t, free("40m"))
}
