package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNoTwoSandboxesShareAHostUid(t *testing.T) {
	s := newSlots(0)
	seen := map[uint32]bool{}
	for i := range maxSlots {
		slot, err := s.take(randomHex(8), 1<<40)
		require.NoError(t, err, i)
		ids := idsOf(slot)
		require.False(t, seen[ids.HostBase])
		seen[ids.HostBase] = true
		require.GreaterOrEqual(t, ids.HostBase, uint32(0x70000000))
		require.LessOrEqual(t, uint64(ids.HostBase)+uint64(ids.Size), uint64(1)<<31)
		require.NotEqual(t, ids.Pid1UID, ids.CommandUID)
	}
	_, err := s.take("one more", 0)
	require.ErrorIs(t, err, ErrExhausted)
}

func TestASlotIsReleasedOnlyByItsOwnSandboxAndNotReusedAtOnce(t *testing.T) {
	s := newSlots(0)
	a, err := s.take("a", 0)
	require.NoError(t, err)
	s.release(a, "another")
	require.Error(t, s.claim(a, "b", 0))
	s.release(a, "a")
	b, err := s.take("b", 0)
	require.NoError(t, err)
	require.NotEqual(t, a, b)
	require.NoError(t, s.claim(a, "c", 0))
}

func TestP16TheMemoryLimitsOfAllSandboxesTogetherAreBounded(t *testing.T) {
	s := newSlots(100)
	a, err := s.take("a", 60)
	require.NoError(t, err)
	_, err = s.take("b", 41)
	require.ErrorIs(t, err, ErrExhausted)
	require.ErrorContains(t, err, "limits.total_memory_bytes")
	b, err := s.take("b", 40)
	require.NoError(t, err)
	_, err = s.take("c", 1)
	require.ErrorIs(t, err, ErrExhausted)
	s.release(a, "another")
	_, err = s.take("c", 1)
	require.ErrorIs(t, err, ErrExhausted, "a slot that was not released")
	s.release(a, "a")
	s.release(a, "a")
	_, err = s.take("c", 61)
	require.ErrorIs(t, err, ErrExhausted, "released twice counts once")
	require.NoError(t, s.claim(a, "d", 200), "what the journal names is there, whatever the bound is now")
	require.NoError(t, s.claim(a, "d", 200))
	s.release(a, "d")
	s.release(b, "b")
	_, err = s.take("c", 100)
	require.NoError(t, err)
}
