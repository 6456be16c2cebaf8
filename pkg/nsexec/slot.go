package nsexec

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Slot is a cgroup that commands take turns in: a cgroup for each command would leak on cgroup v1, where a removed one
// stays pinned by page cache (facts.md, hole 9). Files may be nil where the kernel has none.
type Slot struct {
	Name string
	// Join are cgroup.procs files, one for each hierarchy, opened for writing by real root.
	Join []*os.File
	// Procs is a cgroup.procs for reading.
	Procs *os.File
	// OOM is memory.oom_control (v1) or memory.events (v2).
	OOM *os.File
	// Peak is memory.max_usage_in_bytes (v1) or memory.peak (v2).
	Peak *os.File
	// Boundary says that the kernel's wait for a PID namespace's init does not include the rest of the namespace, as Linux's
	// does: it has been told to end, and has ended when this cgroup, which nothing in it can leave, is empty (gVisor:
	// exitChildrenLocked in pkg/sentry/kernel/task_exit.go).
	Boundary bool
}

// How a boundary is established.
const (
	// ByWait: by the wait for pid1 alone.
	ByWait = "wait4"
	// ByWaitAndCgroup: by that and by the emptiness of the command's cgroup.
	ByWaitAndCgroup = "wait4+cgroup"
)

func (s *Slot) method() string {
	if s != nil && s.Boundary {
		return ByWaitAndCgroup
	}
	return ByWait
}

// How often a cgroup that is a boundary is looked at: its processes are dying, which takes them about a millisecond.
const (
	firstLook = 100 * time.Microsecond
	lastLook  = 10 * time.Millisecond
)

// awaitEmpty waits for what pid1's end has ended. As the wait for pid1 it has no bound: without a boundary there is no answer.
func (s *Slot) awaitEmpty() {
	if s == nil || !s.Boundary {
		return
	}
	for pause := firstLook; s.Empty() != "empty"; pause = min(2*pause, lastLook) {
		<-time.After(pause) // nothing tells of it
	}
}

// Empty says "empty", "populated", or "none" where that can't be read.
func (s *Slot) Empty() string {
	if s == nil || s.Procs == nil {
		return "none"
	}
	b, err := readAt(s.Procs)
	switch {
	case err != nil:
		return "none"
	case len(bytes.TrimSpace(b)) > 0:
		return "populated"
	}
	return "empty"
}

// oomKills counts the processes that the slot's memory limit has killed so far; -1: unknown.
func (s *Slot) oomKills() int64 {
	if s == nil || s.OOM == nil {
		return -1
	}
	b, err := readAt(s.OOM)
	if err != nil {
		return -1
	}
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			if n, err := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}

// resetPeak starts a new measurement. Where the kernel can't (memory.peak before Linux 6.12 is read-only), peak
// answers 0 from then on, which means unknown.
func (s *Slot) resetPeak() bool {
	if s == nil || s.Peak == nil {
		return false
	}
	_, err := unix.Pwrite(int(s.Peak.Fd()), []byte("0"), 0)
	return err == nil
}

func (s *Slot) peak() int64 {
	b, err := readAt(s.Peak)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// readAt reads a small cgroup file from its start.
func readAt(f *os.File) ([]byte, error) {
	b := make([]byte, 4096)
	n, err := unix.Pread(int(f.Fd()), b, 0)
	if err != nil {
		return nil, err
	}
	return b[:n], nil
}
