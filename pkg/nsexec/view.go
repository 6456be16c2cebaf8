package nsexec

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Config is what a sandbox fixes for all its commands.
type Config struct {
	// Pid1 is an O_PATH descriptor of the pid1 binary. Keep its number low: copying descriptors to high numbers makes
	// the kernel grow the table of a threaded process, which waits for an RCU grace period (7-12 ms).
	Pid1 *os.File
	// Hide lists mount points of this process that commands must not see.
	Hide []string
	// Pid1UID is pid1's uid in this user namespace, CommandUID and CommandGID the command's. They differ: a command of
	// pid1's uid could set its resource limits (facts.md, hole 6).
	Pid1UID, CommandUID, CommandGID uint32
	// NestedUserns lets commands make user namespaces of their own.
	NestedUserns bool
	// Slots are the cgroups that commands take turns in. At least two are needed for a command to run while the next
	// pid1 is prepared; with none, commands have no cgroup of their own.
	Slots []*Slot
	// Seals are mount points that are compared at each command's start and end.
	Seals []string
	// NProc, NoFile and FSize are RLIMIT_* of a command; NProc and FSize 0 leave the limit as it is.
	NProc, NoFile, FSize uint64
}

func (c Config) check() error {
	switch {
	case c.Pid1 == nil:
		return fmt.Errorf("configuring the view: no pid1 binary")
	case c.Pid1UID == c.CommandUID:
		return fmt.Errorf("configuring the view: pid1 and the command have the same uid %d", c.Pid1UID)
	case c.CommandUID == 0:
		return fmt.Errorf("configuring the view: a command must not be root of its namespace")
	case c.NoFile == 0:
		return fmt.Errorf("configuring the view: the limit of open files is 0")
	}
	return nil
}

// View is a thread whose mount namespace lacks what commands must not see. Every pid1 is forked from it.
type View struct {
	cfg   Config
	work  chan func()
	slots chan *Slot
	null  *os.File
}

// NewView starts the thread and takes the hidden mounts away from it.
func NewView(cfg Config) (*View, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the command's standard input: %w", err)
	}
	v := &View{cfg: cfg, work: make(chan func()), slots: make(chan *Slot, len(cfg.Slots)), null: null}
	for _, s := range cfg.Slots {
		v.slots <- s
	}
	ready := make(chan error)
	go v.thread(ready)
	if err := <-ready; err != nil {
		null.Close()
		return nil, err
	}
	return v, nil
}

// Close ends the thread. Commands that run go on.
func (v *View) Close() {
	close(v.work)
	v.null.Close()
}

// thread is never unlocked: its mount namespace is not the process's.
func (v *View) thread(ready chan<- error) {
	runtime.LockOSThread()
	err := hide(v.cfg.Hide)
	ready <- err
	if err != nil {
		return
	}
	for f := range v.work {
		f()
	}
}

// hide makes a mount namespace for this thread and detaches the given mounts in it. A user namespace made from here
// gets copies that are locked together: what is not there can't be brought back.
func hide(paths []string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making the commands' mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making the commands' mounts private: %w", err)
	}
	for _, p := range paths {
		if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("hiding %s from commands: %w", p, err)
		}
	}
	return nil
}

// do runs f on the view's thread.
func (v *View) do(f func()) {
	done := make(chan struct{})
	v.work <- func() { f(); close(done) }
	<-done
}
