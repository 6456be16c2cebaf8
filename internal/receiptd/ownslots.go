package receiptd

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
)

// ownSlotNames are the cgroups that commands take turns in.
var ownSlotNames = []string{"c0", "c1"}

// ownSlots makes the commands' cgroups in the kernel that the sandbox has for itself, below a folder that commands never see:
// from the node none can be handed over to it. A command is held to pids processes and threads, 0 for any number; there is no
// other limit that gVisor's cgroups enforce. They are a part of the boundary too (nsexec.Slot). oom, when not empty, is a file
// in which the node's kernel counts what the sandbox's memory limit has killed there: no more than one command runs at a time.
func ownSlots(dir string, pids int64, oom string) ([]*nsexec.Slot, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the commands' cgroups: %w", err)
	}
	if err := unix.Mount("cgroup", dir, "cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "pids"); err != nil {
		return nil, fmt.Errorf("making the commands' cgroups: %w", os.NewSyscallError("mount", err))
	}
	var kills *os.File
	if oom != "" {
		var err error
		if kills, err = os.Open(oom); err != nil {
			return nil, fmt.Errorf("opening the node's count of what the memory limit has killed: %w", err)
		}
	}
	var out []*nsexec.Slot
	for _, name := range ownSlotNames {
		s, err := ownSlot(filepath.Join(dir, name), pids)
		if err != nil {
			return nil, fmt.Errorf("making the commands' cgroups: %w", err)
		}
		s.OOM = kills
		out = append(out, s)
	}
	return out, nil
}

func ownSlot(dir string, pids int64) (*nsexec.Slot, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	if pids > 0 {
		if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte(strconv.FormatInt(pids, 10)), 0); err != nil {
			return nil, err
		}
	}
	join, err := os.OpenFile(filepath.Join(dir, "cgroup.procs"), os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	procs, err := os.Open(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		join.Close()
		return nil, err
	}
	return &nsexec.Slot{Name: filepath.Base(dir), Join: []*os.File{join}, Procs: procs, Boundary: true}, nil
}
