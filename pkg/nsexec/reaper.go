package nsexec

import (
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// known are the children that a Prepared waits for itself: ReapStrangers leaves them alone.
var known children

type children struct {
	mu   sync.Mutex
	pids map[int]bool
}

// start forks a child and knows it before has can be asked.
func (c *children) start(path string, argv []string, attr *syscall.ProcAttr) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, err
	}
	if c.pids == nil {
		c.pids = map[int]bool{}
	}
	c.pids[pid] = true
	return pid, nil
}

func (c *children) remove(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pids, pid)
}

func (c *children) has(pid int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pids[pid]
}

// ReapStrangers reaps the children that nobody here started: processes that a container runtime put into the sandbox,
// whose parent ended. It answers how many. Call it on SIGCHLD.
func ReapStrangers() int {
	reaped := 0
	for {
		var info siginfo
		if err := waitAny(&info); err != nil || info.Pid == 0 || known.has(int(info.Pid)) {
			// A known child that waits to be reaped hides strangers behind it; its own wait brings the next SIGCHLD's turn.
			return reaped
		}
		if pid, err := unix.Wait4(int(info.Pid), nil, unix.WNOHANG, nil); err != nil || pid == 0 {
			return reaped
		}
		reaped++
	}
}
