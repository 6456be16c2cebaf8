package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNoTwoSandboxesShareAHostUid(t *testing.T) {
	s := newSlots()
	seen := map[uint32]bool{}
	for i := range maxSlots {
		slot, err := s.take(randomHex(8))
		require.NoError(t, err, i)
		ids := idsOf(slot)
		require.False(t, seen[ids.HostBase])
		seen[ids.HostBase] = true
		require.GreaterOrEqual(t, ids.HostBase, uint32(0x70000000))
		require.LessOrEqual(t, uint64(ids.HostBase)+uint64(ids.Size), uint64(1)<<31)
		require.NotEqual(t, ids.Pid1UID, ids.CommandUID)
	}
	_, err := s.take("one more")
	require.ErrorIs(t, err, ErrExhausted)
}

func TestASlotIsReleasedOnlyByItsOwnSandboxAndNotReusedAtOnce(t *testing.T) {
	s := newSlots()
	a, err := s.take("a")
	require.NoError(t, err)
	s.release(a, "another")
	require.Error(t, s.claim(a, "b"))
	s.release(a, "a")
	b, err := s.take("b")
	require.NoError(t, err)
	require.NotEqual(t, a, b)
	require.NoError(t, s.claim(a, "c"))
}
