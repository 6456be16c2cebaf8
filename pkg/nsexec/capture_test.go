package nsexec

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestP13ACaptureKeepsHeadAndTailOfAnyOutputHoweverItIsCutUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 40).Draw(t, "limit")
		chunks := rapid.SliceOf(rapid.SliceOfN(rapid.Byte(), 0, 30)).Draw(t, "chunks")
		c := NewCapture(uint64(limit))
		var all []byte
		for _, b := range chunks {
			_, _ = c.Write(b)
			all = append(all, b...)
		}
		sum := sha256.Sum256(all)
		require.Equal(t, hex.EncodeToString(sum[:]), c.SHA256())
		require.EqualValues(t, len(all), c.Total())
		kept := c.Kept()
		require.Len(t, kept, min(limit, len(all)))
		from, omitted := c.Omitted()
		require.EqualValues(t, len(all), uint64(len(kept))+omitted)
		if omitted == 0 {
			require.EqualValues(t, len(all), from)
			require.Equal(t, string(all), string(kept))
			return
		}
		require.Equal(t, string(all[:from]), string(kept[:from]))
		require.Equal(t, string(all[from+omitted:]), string(kept[from:]))
	})
}
