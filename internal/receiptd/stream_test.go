package receiptd

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
)

// A command that writes byte by byte, while nobody takes its output, makes receiptd use no more memory than one that writes
// in large pieces: receiptd is not held by the command's memory limit.
func TestP16OutputByteByByteTakesNoMoreMemory(t *testing.T) {
	const written = 3 * streamBytes / 2
	for name, next := range map[string]func(i int) receiptdv1.Stream{
		"one stream":    func(int) receiptdv1.Stream { return receiptdv1.Stream_STDOUT },
		"both in turns": func(i int) receiptdv1.Stream { return receiptdv1.Stream_STDOUT + receiptdv1.Stream(i%2) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStream()
			sinks := map[receiptdv1.Stream]func(uint64, []byte){}
			for _, x := range []receiptdv1.Stream{receiptdv1.Stream_STDOUT, receiptdv1.Stream_STDERR} {
				sinks[x] = s.sink(x)
			}
			came := map[receiptdv1.Stream]uint64{}
			for i := range written {
				x := next(i)
				sinks[x](came[x], []byte{byte(i)})
				came[x]++
			}
			chunks, _ := s.take()
			memory := 0
			for _, c := range chunks {
				memory += int(unsafe.Sizeof(*c)) + cap(c.GetData())
			}
			require.NotEmpty(t, chunks)
			require.Less(t, memory, 2*streamBytes)
			for _, x := range []receiptdv1.Stream{receiptdv1.Stream_STDOUT, receiptdv1.Stream_STDERR} {
				requireAccounted(t, chunks, x, came[x], s.lost[x])
			}
		})
	}
}

// requireAccounted wants each byte of a stream to be in a chunk, or counted as lost before the next one or at the end.
func requireAccounted(t *testing.T, chunks []*receiptdv1.Output, x receiptdv1.Stream, came, lost uint64) {
	t.Helper()
	at := uint64(0)
	for _, c := range chunks {
		if c.GetStream() == x {
			require.Equal(t, at+c.GetLostBytes(), c.GetOffset())
			at = c.GetOffset() + uint64(len(c.GetData()))
		}
	}
	require.Equal(t, came, at+lost)
}

// Pieces that waited are given as they came, also after some were lost.
func TestP13PiecesAreGivenInTheirOrder(t *testing.T) {
	s := newStream()
	stdout, stderr := s.sink(receiptdv1.Stream_STDOUT), s.sink(receiptdv1.Stream_STDERR)
	stdout(0, []byte("a"))
	stdout(1, []byte("b"))
	stderr(0, []byte("c"))
	stdout(2, []byte("d"))
	chunks, _ := s.take()
	stdout(3, make([]byte, streamBytes)) // lost
	stdout(3+streamBytes, []byte("e"))
	stdout(4+streamBytes, []byte("f"))
	more, ended := s.take()
	require.False(t, ended)
	var said []string
	for _, c := range append(chunks, more...) {
		said = append(said, string(c.GetData()))
	}
	require.Equal(t, []string{"ab", "c", "d", "ef"}, said)
	require.EqualValues(t, streamBytes, more[0].GetLostBytes())
	require.EqualValues(t, 3+streamBytes, more[0].GetOffset())
}
