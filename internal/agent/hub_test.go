package agent

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

const (
	stdout = sandboxv1.Stream_STDOUT
	stderr = sandboxv1.Stream_STDERR
)

func drainAll(t *testing.T, s *subscriber) []*sandboxv1.OutputChunk {
	t.Helper()
	var all []*sandboxv1.OutputChunk
	for {
		c, err := s.receive(t.Context())
		require.NoError(t, err)
		if c == nil {
			return all
		}
		all = append(all, c)
	}
}

func TestAReaderGetsBothStreamsInOrder(t *testing.T) {
	h := newHub(1 << 20)
	s := h.subscribe(0, 0)
	h.publish(chunk{stdout, 0, []byte("ab")})
	h.publish(chunk{stderr, 0, []byte("x")})
	h.publish(chunk{stdout, 2, []byte("cd")})
	h.close()
	all := drainAll(t, s)
	require.Len(t, all, 3)
	require.Equal(t, "ab", string(all[0].GetData()))
	require.Equal(t, stderr, all[1].GetStream())
	require.EqualValues(t, 2, all[2].GetOffset())
	for _, c := range all {
		require.Zero(t, c.GetLostBytes())
	}
}

func TestP13ASlowReaderLosesARangeThatIsNamedAndNeverHoldsTheCommandUp(t *testing.T) {
	h := newHub(1 << 10)
	slow := h.subscribe(0, 0)
	const pieces, size = 10_000, 1000
	for i := range uint64(pieces) { // never blocks: nobody reads
		h.publish(chunk{stdout, i * size, bytes.Repeat([]byte{'x'}, size)})
	}
	h.close()
	var got, lost, next uint64
	for _, c := range drainAll(t, slow) {
		require.Equal(t, next+c.GetLostBytes(), c.GetOffset())
		next = c.GetOffset() + uint64(len(c.GetData()))
		got, lost = got+uint64(len(c.GetData())), lost+c.GetLostBytes()
	}
	require.EqualValues(t, pieces*size, got+lost)
	require.NotZero(t, got)
	require.NotZero(t, lost)
	require.LessOrEqual(t, got, uint64(readerBytes))
}

func TestAFloodOfOneByteChunksIsBoundedInMemory(t *testing.T) {
	h := newHub(1 << 10)
	for i := range uint64(100_000) {
		h.publish(chunk{stdout, i, []byte{'x'}})
	}
	require.LessOrEqual(t, len(h.backlog.chunks), (1<<10)/64+1)
	require.LessOrEqual(t, cap(h.backlog.chunks), 4096)
}

func TestALateReaderGetsTheBacklogFromItsOffsetOn(t *testing.T) {
	h := newHub(1 << 20)
	h.publish(chunk{stdout, 0, []byte("hello ")})
	h.publish(chunk{stdout, 6, []byte("world")})
	s := h.subscribe(3, 0)
	h.close()
	all := drainAll(t, s)
	require.Len(t, all, 2)
	require.Equal(t, "lo ", string(all[0].GetData()))
	require.EqualValues(t, 3, all[0].GetOffset())
	require.Zero(t, all[0].GetLostBytes())
	after := h.subscribe(11, 0)
	require.Empty(t, drainAll(t, after))
}

func TestAWaitingReaderEndsWithItsContext(t *testing.T) {
	h := newHub(1 << 10)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := h.subscribe(0, 0).receive(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestKeptOutputIsGivenAsHeadAndTailWithTheGapNamed(t *testing.T) {
	info := &sandboxv1.OutputInfo{Bytes: 100, Truncated: true, OmittedFrom: 4, OmittedBytes: 92}
	kept := []byte("headtail")
	chunks := keptChunks(stdout, kept, info, 0, 3)
	var data []byte
	for _, c := range chunks {
		data = append(data, c.GetData()...)
	}
	require.Equal(t, "headtail", string(data))
	require.EqualValues(t, 96, chunks[2].GetOffset())
	require.EqualValues(t, 92, chunks[2].GetLostBytes())
	from := keptChunks(stdout, kept, info, 98, 8)
	require.Len(t, from, 1)
	require.Equal(t, "il", string(from[0].GetData()))
	require.Empty(t, keptChunks(stdout, kept, info, 100, 3))
	whole := keptChunks(stdout, kept, &sandboxv1.OutputInfo{Bytes: 8, OmittedFrom: 8}, 2, 100)
	require.Len(t, whole, 1)
	require.Equal(t, "adtail", string(whole[0].GetData()))
}
