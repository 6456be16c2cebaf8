package containerd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// oomKills are, by the folder's name below the sandbox's cgroup, how many processes the kernel has killed there for want of
// memory.
func oomKills(t *testing.T, id runtime.Identity) map[string]string {
	t.Helper()
	kills := map[string]string{}
	for _, dir := range id.Cgroups {
		for _, name := range []string{"memory.oom_control", "memory.events"} { // cgroup v1, v2
			files, err := filepath.Glob(filepath.Join(dir, "*", name))
			require.NoError(t, err)
			for _, path := range files {
				b, err := os.ReadFile(path)
				require.NoError(t, err)
				_, after, _ := strings.Cut(string(b), "\noom_kill ")
				kills[filepath.Base(filepath.Dir(path))], _, _ = strings.Cut(after, "\n")
			}
		}
	}
	return kills
}

func TestP16WhatTheMemoryLimitEndsIsTheCommandAlone(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.Resources.MemoryBytes = 64 << 20
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	const double = "x=$(printf %1000000s); while :; do x+=$x; done"
	for what, c := range map[string]struct {
		command string
		status  receipt.Status
	}{
		"the command itself": {double, receipt.Signaled},
		"a child of it":      {"bash -c '" + double + "'; echo the child ended: $?", receipt.Exited},
		"many at once, and one that nobody waits for": {"for i in $(seq 8); do setsid bash -c '" + double + "' & done; wait", receipt.Exited},
	} {
		t.Run(what, func(t *testing.T) {
			out, p := a.run(c.command)
			require.True(t, p.OOM, "%+v", p)
			require.Equal(t, c.status, p.Status, "%s", out)
			require.Equal(t, receipt.ReasonOOM, p.Reason)
			if c.status == receipt.Signaled {
				require.EqualValues(t, 9, p.Signal)
			}
			require.LessOrEqual(t, p.Usage.PeakMemory, int64(64<<20))
			require.Equal(t, "empty", p.Boundary.Cgroup)

			out, p = a.run("echo next")
			require.Equal(t, "next", out)
			require.False(t, p.OOM)
		})
	}
	kills := oomKills(t, s.Identity())
	require.Equal(t, "0", kills[hostkernel.InitCgroup], "receiptd and the pid1s are not where the limit is: %v", kills)
	require.NotEqual(t, map[string]string{"c0": "0", "c1": "0", "init": "0"}, kills)
	start, _, err := hostkernel.ProcStat(s.Identity().Pid)
	require.NoError(t, err)
	require.Equal(t, s.Identity().StartTime, start, "the same receiptd")
	h.stop(s)
}

// What a command leaves in /tmp is memory, and counts as that of the cgroup that it ran in, long after its end. The agent makes
// the file systems in memory half as large as the limit at most.
func TestP16WhatIsLeftInTmpKeepsNoCommandFromRunning(t *testing.T) {
	h := newHost(t, Socket)
	spec := h.spec(0)
	spec.Resources.MemoryBytes, spec.Resources.TmpBytes, spec.Resources.HomeBytes = 64<<20, 16<<20, 16<<20
	s := h.create(spec)
	a := h.attach(s, spec, 1)
	for range 4 { // both cgroups of commands, twice
		out, p := a.run("for dir in /tmp $HOME; do head -c 20000000 /dev/zero > $dir/$RANDOM; done 2>&1 | grep -c 'No space left'")
		require.False(t, p.OOM)
		require.Equal(t, "2", out)
	}
	for range 2 {
		out, p := a.run("x=$(printf %10000000s); ls /tmp | wc -l")
		require.False(t, p.OOM)
		require.NotEqual(t, "0", out)
	}
	h.stop(s)
}
