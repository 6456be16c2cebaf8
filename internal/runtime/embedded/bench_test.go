package embedded

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkStart is one sandbox from nothing to a listening receiptd; its end is not counted.
func BenchmarkStart(b *testing.B) {
	h := newHost(b)
	spec := h.spec(1234, 0)
	var took []time.Duration
	for b.Loop() {
		spec.SandboxID = newID(b)
		spec.Dir = filepath.Join(h.state, spec.SandboxID)
		begin := time.Now()
		s, err := h.r.Create(bound(b), spec)
		require.NoError(b, err)
		took = append(took, time.Since(begin))
		h.stop(s)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[0].Microseconds())/1000, "ms-min")
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
}
