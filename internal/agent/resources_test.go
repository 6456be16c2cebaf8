package agent

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func TestP16FileSystemsInMemoryGetAtMostHalfOfTheMemory(t *testing.T) {
	const mib, gib, tib = int64(1) << 20, int64(1) << 30, int64(1) << 40
	for _, c := range []struct {
		name              string
		memory, tmp, home int64
		want              runtime.Resources
	}{
		{"plenty of memory", 8 * gib, gib, gib, runtime.Resources{TmpBytes: gib, HomeBytes: gib, ShmBytes: 64 * mib}},
		{"no memory limit", 0, gib, gib, runtime.Resources{TmpBytes: gib, HomeBytes: gib, ShmBytes: 64 * mib}},
		{"exactly half", 256 * mib, 32 * mib, 32 * mib, runtime.Resources{TmpBytes: 32 * mib, HomeBytes: 32 * mib, ShmBytes: 64 * mib}},
		{"the defaults", 4 * gib, gib, gib, runtime.Resources{TmpBytes: 992 * mib, HomeBytes: 992 * mib, ShmBytes: 64 * mib}},
		{"as much as the memory", 128 * mib, 128 * mib, 128 * mib, runtime.Resources{TmpBytes: 28 * mib, HomeBytes: 28 * mib, ShmBytes: 8 * mib}},
		{"in proportion", 128 * mib, 300 * mib, 100 * mib, runtime.Resources{TmpBytes: 42 * mib, HomeBytes: 14 * mib, ShmBytes: 8 * mib}},
		{"only /dev/shm gives way", 128 * mib, 8 * mib, 8 * mib, runtime.Resources{TmpBytes: 8 * mib, HomeBytes: 8 * mib, ShmBytes: 8 * mib}},
		{"the least and the most", 16 * mib, tib, tib, runtime.Resources{TmpBytes: 3584 << 10, HomeBytes: 3584 << 10, ShmBytes: mib}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := resourcesOf(resources{MemoryBytes: c.memory, CPUs: 1, Pids: 2}, config.Limits{TmpBytes: c.tmp, HomeBytes: c.home})
			c.want.MemoryBytes, c.want.CPUs, c.want.Pids = c.memory, 1, 2
			require.Equal(t, c.want, got)
			if c.memory > 0 {
				require.LessOrEqual(t, got.TmpBytes+got.HomeBytes+got.ShmBytes, c.memory/2)
			}
		})
	}
}

func TestP16ACommandsOpenFilesAreAFractionOfTheNodes(t *testing.T) {
	for _, c := range []struct {
		name          string
		fileMax, pids int64
		want          uint64
	}{
		{"no bound on the node", math.MaxInt64, 512, 4096},
		{"a node of 24 GiB", 2466165, 512, 1204},
		{"few processes", 2466165, 64, 4096},
		{"a small node", 100000, 512, 256},
		{"unknown", 0, 512, 256},
		{"no limit of processes", 2466165, 0, 256},
	} {
		require.Equal(t, c.want, filesOf(c.fileMax, c.pids), c.name)
	}
	require.Positive(t, nodeFileMax())
}
