package gitview

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// BenchmarkView measures what a session's commands pay: one that touched nothing, one that committed, and the next one,
// whose refresh looks at what the harvest wrote.
func BenchmarkView(b *testing.B) {
	for _, refs := range []int{0, 100000} {
		w := newWorld(b, func(w *world) {
			var list strings.Builder
			list.WriteString("# pack-refs with: sorted \n")
			id := w.host("rev-parse", "main")
			for i := range refs {
				fmt.Fprintf(&list, "%s refs/tags/t%06d\n", id, i)
			}
			if refs > 0 {
				write(b, w.git+"/packed-refs", list.String())
			}
		})
		dir := w.o.Dir
		b.Run(fmt.Sprintf("open/refs=%d", refs), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				w.o.Dir = fmt.Sprintf("%s-%d", dir, i)
				w.reopen()
			}
		})
		b.Run(fmt.Sprintf("nothing/refs=%d", refs), func(b *testing.B) {
			require.NoError(b, w.v.Refresh(b.Context()))
			w.v.Harvest(b.Context())
			for b.Loop() {
				require.NoError(b, w.v.Refresh(b.Context()))
				require.Equal(b, Unchanged, w.v.Harvest(b.Context()).Status)
			}
		})
		commit := func(b *testing.B) {
			w.inside(func(in *testkit.Inside) { in.Must(w.wt, "date +%N >> README && git commit -q -a -m x") })
		}
		b.Run(fmt.Sprintf("commit/refs=%d", refs), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				require.NoError(b, w.v.Refresh(b.Context()))
				commit(b)
				b.StartTimer()
				require.Equal(b, Harvested, w.v.Harvest(b.Context()).Status)
			}
		})
		b.Run(fmt.Sprintf("refresh/refs=%d", refs), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				require.NoError(b, w.v.Refresh(b.Context()))
				commit(b)
				require.Equal(b, Harvested, w.v.Harvest(b.Context()).Status)
				b.StartTimer()
				require.NoError(b, w.v.Refresh(b.Context()))
			}
		})
	}
}

// BenchmarkJail measures a jail for one run of Git, and a run in one that stays.
func BenchmarkJail(b *testing.B) {
	w := newWorld(b)
	j := w.v.baseJail()
	b.Run("once", func(b *testing.B) {
		for b.Loop() {
			_, err := j.Run(b.Context(), "rev-parse", "HEAD")
			require.NoError(b, err)
		}
	})
	s, err := j.Start(b.Context())
	require.NoError(b, err)
	defer s.Close()
	b.Run("session", func(b *testing.B) {
		for b.Loop() {
			_, err := s.RunCall(b.Context(), gitjail.Call{Args: []string{"rev-parse", "HEAD"}})
			require.NoError(b, err)
		}
	})
}
