package kata

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// proc is what /proc tells of one process at one moment.
type proc struct {
	pid, parent int
	start       uint64 // field 22 of /proc/PID/stat, clock ticks since boot
	kernel      bool   // a thread of the kernel's
	dev, ino    uint64 // of its program; 0 of a zombie's
	args        []string
}

// kthread is PF_KTHREAD of <linux/sched.h>.
const kthread = 0x00200000

// readStat reads /proc/PID/stat. The second field is the program's name in brackets, and may hold anything, brackets too.
func readStat(pid int) (proc, error) {
	name := fmt.Sprintf("/proc/%d/stat", pid)
	data, err := os.ReadFile(name)
	if err != nil {
		return proc{}, err
	}
	p := proc{pid: pid}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 20 { // fields 3 to 22
		return p, fmt.Errorf("%s: %q has too few fields", name, data)
	}
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	if err == nil {
		p.parent, err = strconv.Atoi(fields[1])
	}
	if err == nil {
		p.start, err = strconv.ParseUint(fields[19], 10, 64)
	}
	p.kernel = flags&kthread != 0
	if err != nil {
		return p, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

// processes is every process that /proc shows, by pid. One that ends meanwhile is left out.
func processes() (map[int]proc, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	all := map[int]proc{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, err := readStat(pid)
		if err != nil {
			continue
		}
		p.readProgram()
		all[pid] = p
	}
	return all, nil
}

func (p *proc) readProgram() {
	// By device and inode: a program in a mount namespace of its own, or an upgraded one, has a path that says nothing.
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/exe", p.pid), &st); err == nil {
		p.dev, p.ino = st.Dev, st.Ino
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
	if err == nil {
		p.args = strings.Split(string(data), "\x00")
	}
}

// mentions says whether an argument holds the id as a whole: not as a part of a longer one.
func (p proc) mentions(id string) bool {
	for _, arg := range p.args {
		for rest := arg; ; {
			i := strings.Index(rest, id)
			if i < 0 {
				break
			}
			before, after := rest[:i], rest[i+len(id):]
			if !endsInID(before) && !startsInID(after) {
				return true
			}
			rest = rest[i+1:]
		}
	}
	return false
}

// Kata writes the id as a folder's name or in words like QEMU's "-name sandbox-ID,…".
func endsInID(before string) bool {
	return before != "" && idByte(before[len(before)-1]) && !strings.HasSuffix(before, "sandbox-")
}

func startsInID(after string) bool { return after != "" && idByte(after[0]) }

func idByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c == '-'
}

// descendants adds a process and everything below it to found.
func descendants(all map[int]proc, root int, found map[int]bool) {
	if _, ok := all[root]; !ok || found[root] {
		return
	}
	found[root] = true
	for pid, p := range all {
		if p.parent == root {
			descendants(all, pid, found)
		}
	}
}

// members are the pids in a cgroup and all below it. A cgroup that is not there has none.
func members(dir string) ([]int, error) {
	var pids []int
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		data, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) { // removed meanwhile
			return nil
		} else if err != nil {
			return err
		}
		for _, line := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(line)
			if err != nil || pid == 0 {
				return fmt.Errorf("%s: %q: a process outside this PID namespace; run the agent in the host's", path, line)
			}
			pids = append(pids, pid)
		}
		return nil
	})
	return pids, err
}

// hold opens a pidfd of a recorded process. No process: it has ended (its pid is free, or another's by now).
func hold(p Process) (*os.File, bool, error) {
	fd, err := unix.PidfdOpen(p.Pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, false, nil
	} else if err != nil {
		return nil, false, os.NewSyscallError("pidfd_open", err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	// The pidfd first, the start time after: if they agree, the pidfd is of the recorded process.
	now, err := readStat(p.Pid)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH), err == nil && now.start != p.StartTime:
		f.Close()
		return nil, false, nil
	case err != nil:
		f.Close()
		return nil, false, err
	}
	return f, true, nil
}

// await waits until a pidfd says that its process has ended, all threads included.
func await(ctx context.Context, pidfd *os.File) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = pidfd.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	over := func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n == 1
	}
	err = raw.Read(over)
	if err == nil || ctx.Err() == nil {
		return err
	}
	// A context that had ended before may have kept Read from the first look.
	last := false
	if err := raw.Control(func(fd uintptr) { last = over(fd) }); err != nil || last {
		return err
	}
	return ctx.Err()
}

func kill(pidfd *os.File) error {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var killErr error
	if err := raw.Control(func(fd uintptr) { killErr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err != nil {
		return err
	}
	if errors.Is(killErr, unix.ESRCH) {
		return nil
	}
	return os.NewSyscallError("pidfd_send_signal", killErr)
}

func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data)), err
}
