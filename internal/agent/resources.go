package agent

import (
	"os"
	"strconv"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

const (
	// shmBytes is the size of /dev/shm where memory allows.
	shmBytes = 64 << 20
	// Bounds of RLIMIT_NOFILE of a command, soft and hard.
	mostFiles, leastFiles = 4096, 256
)

// resourcesOf are the bounds of a session's sandbox. What lies in /tmp, HOME and /dev/shm is memory, counted as that of
// the command that wrote it, and stays when the command ends: together they get at most half of the memory, so that one
// command can't leave the next ones none. Where that is less than configured, /dev/shm gets at most an eighth of the
// half, /tmp and HOME share the rest in the proportion of their limits.
func resourcesOf(r resources, l config.Limits) runtime.Resources {
	out := runtime.Resources{
		CPUs: r.CPUs, MemoryBytes: r.MemoryBytes, Pids: r.Pids,
		TmpBytes: l.TmpBytes, HomeBytes: l.HomeBytes, ShmBytes: shmBytes,
	}
	half := r.MemoryBytes / 2
	if r.MemoryBytes == 0 || out.TmpBytes+out.HomeBytes+out.ShmBytes <= half {
		return out
	}
	out.ShmBytes = min(shmBytes, half/8)
	rest := half - out.ShmBytes
	if both := float64(l.TmpBytes) + float64(l.HomeBytes); both > float64(rest) {
		out.TmpBytes = int64(float64(rest) * (float64(l.TmpBytes) / both))
		out.HomeBytes = rest - out.TmpBytes
	}
	return out
}

// filesOf is how many files each process of a command may have open: so many that all its processes together can't open
// more than a quarter of what the node can (fileMax: fs.file-max, proc_sys_fs(5)), within mostFiles and leastFiles.
func filesOf(fileMax, pids int64) uint64 {
	if pids <= 0 {
		return leastFiles
	}
	return uint64(max(leastFiles, min(mostFiles, fileMax/4/pids)))
}

// nodeFileMax reads fs.file-max; 0, so that a command gets the least, where it can't be read.
func nodeFileMax() int64 {
	b, err := os.ReadFile("/proc/sys/fs/file-max")
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}
