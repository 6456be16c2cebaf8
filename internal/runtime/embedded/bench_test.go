package embedded

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkStart is one sandbox from nothing to a listening receiptd; its end is not counted.
func BenchmarkStart(b *testing.B) {
	h := newHost(b)
	spec := h.spec(1234, 0)
	for b.Loop() {
		spec.SandboxID = newID(b)
		spec.Dir = filepath.Join(h.state, spec.SandboxID)
		s, err := h.r.Create(bound(b), spec)
		require.NoError(b, err)
		b.StopTimer()
		h.stop(s)
		b.StartTimer()
	}
}
