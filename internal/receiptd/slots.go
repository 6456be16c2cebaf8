package receiptd

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
)

// descriptors gives what the runtime calls descriptor fd of a cgroup; nil for -1.
type descriptors func(fd int32, name string) (*os.File, error)

// openSlots takes over the descriptors of the cgroups that the runtime handed to this process at its start.
func openSlots(slots []*receiptdv1.CgroupSlot, descriptor descriptors) ([]*nsexec.Slot, error) {
	out := make([]*nsexec.Slot, 0, len(slots))
	for _, s := range slots {
		slot := &nsexec.Slot{Name: s.GetName()}
		for _, fd := range s.GetJoinFds() {
			f, err := ofCgroup(descriptor, fd, s.GetName())
			if err != nil {
				return nil, err
			}
			if f == nil {
				return nil, fmt.Errorf("cgroup %s: there is no descriptor %d to join it by", s.GetName(), fd)
			}
			slot.Join = append(slot.Join, f)
		}
		for _, x := range []struct {
			fd int32
			to **os.File
		}{{s.GetProcsFd(), &slot.Procs}, {s.GetOomFd(), &slot.OOM}, {s.GetPeakFd(), &slot.Peak}} {
			f, err := ofCgroup(descriptor, x.fd, s.GetName())
			if err != nil {
				return nil, err
			}
			*x.to = f
		}
		out = append(out, slot)
	}
	return out, nil
}

// ofCgroup takes nothing but a file of a cgroup: what is written to join it succeeds on any other file too, and then the
// command has no limits.
func ofCgroup(descriptor descriptors, fd int32, name string) (*os.File, error) {
	f, err := descriptor(fd, name)
	if f == nil || err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("cgroup %s: descriptor %d: fstatfs: %w", name, fd, err)
	}
	if st.Type != unix.CGROUP_SUPER_MAGIC && st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("cgroup %s: descriptor %d is no file of a cgroup (file system %#x)", name, fd, st.Type)
	}
	return f, nil
}

// inherited is nil for -1. A descriptor that is not open is an error: a limit that is believed to hold, and doesn't,
// is worse than none.
func inherited(fd int32, name string) (*os.File, error) {
	if fd < 0 {
		return nil, nil
	}
	if fd < 3 {
		return nil, fmt.Errorf("cgroup %s: descriptor %d is not one that was handed over", name, fd)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return nil, fmt.Errorf("cgroup %s: descriptor %d: %w", name, fd, err)
	}
	unix.CloseOnExec(int(fd))
	return os.NewFile(uintptr(fd), fmt.Sprintf("cgroup %s fd %d", name, fd)), nil
}

// openPath opens a file for executing it by descriptor only.
func openPath(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}
