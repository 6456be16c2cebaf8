package hostkernel

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Hierarchies reads the cgroup hierarchies of this node.
func Hierarchies() ([]Hierarchy, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("finding the cgroup hierarchies: %w", err)
	}
	return parseHierarchies(string(b), func(mount string) []string {
		c, err := os.ReadFile(filepath.Join(mount, "cgroup.controllers"))
		if err != nil {
			return nil
		}
		return strings.Fields(string(c))
	}), nil
}

// Slots are the cgroups of a sandbox's commands: their descriptors for receiptd, and what receiptd is told of them.
type Slots struct {
	Files []*os.File
	Views []*receiptdv1.CgroupSlot
}

func (s *Slots) Close() {
	for _, f := range s.Files {
		f.Close()
	}
	s.Files = nil
}

// firstInherited is the number that the first of a process's ExtraFiles gets.
const firstInherited = 3

// MakeSlots makes the cgroups of a sandbox's commands, sets the limits and opens what receiptd needs of them. The
// kernel checks a migration with the credentials of who opened cgroup.procs, so receiptd needs no right on the cgroup
// file system (cgroups(7); on v2 since Linux 5.16).
func MakeSlots(hs []Hierarchy, cgroup string, r runtime.Resources) (_ *Slots, err error) {
	s := &Slots{}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	for _, h := range hs {
		if err := makeSandboxCgroup(h, cgroup, r); err != nil {
			return nil, err
		}
		for _, name := range slotNames {
			dir := h.Path(cgroup + "/" + name)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return nil, fmt.Errorf("making a command's cgroup: %w", err)
			}
			if err := applySettings(dir, slotSettings(h, r)); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range slotNames {
		if err := s.open(name, slotFiles(hs, cgroup+"/"+name)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// makeSandboxCgroup makes a sandbox's cgroup and what is above it. On v2 each level hands its controllers down; no
// process is ever in one of these cgroups, as v2's "no internal processes" rule asks.
func makeSandboxCgroup(h Hierarchy, cgroup string, r runtime.Resources) error {
	at := ""
	for _, part := range strings.Split(strings.TrimPrefix(cgroup, "/"), "/") {
		if h.V2 {
			if err := delegate(h, h.Path(at)); err != nil {
				return err
			}
		}
		at += "/" + part
		if err := os.Mkdir(h.Path(at), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("making a sandbox's cgroup: %w: mount the cgroup file system writable", err)
		}
	}
	if h.V2 {
		if err := delegate(h, h.Path(cgroup)); err != nil {
			return err
		}
	}
	return applySettings(h.Path(cgroup), sandboxSettings(h, r))
}

// delegate enables the controllers for the children of a v2 cgroup.
func delegate(h Hierarchy, dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return fmt.Errorf("reading the controllers of a cgroup: %w", err)
	}
	on := strings.Fields(string(b))
	for _, c := range []string{"pids", "memory", "cpu"} {
		if !h.Has(c) || slices.Contains(on, c) {
			continue
		}
		if err := WriteCgroup(filepath.Join(dir, "cgroup.subtree_control"), "+"+c); err != nil {
			return fmt.Errorf("handing the controller %s down in %s: %w: no process may be in that cgroup (cgroups(7), no internal processes)", c, dir, err)
		}
	}
	return nil
}

func applySettings(dir string, settings []setting) error {
	for _, s := range settings {
		err := WriteCgroup(filepath.Join(dir, s.file), s.value)
		if err != nil && !(s.optional && errors.Is(err, os.ErrNotExist)) {
			return fmt.Errorf("setting the limit %s=%s: %w", s.file, s.value, err)
		}
	}
	return nil
}

// WriteCgroup writes a control file with one write(2), as the kernel wants it. It never creates one.
func WriteCgroup(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

func (s *Slots) open(name string, files []slotFile) error {
	v := &receiptdv1.CgroupSlot{Name: name, ProcsFd: -1, OomFd: -1, PeakFd: -1}
	for _, sf := range files {
		f, err := sf.openFile()
		if err != nil {
			if sf.role != roleJoin && errors.Is(err, os.ErrNotExist) {
				continue // this kernel has no such file: receiptd reports "unknown"
			}
			return fmt.Errorf("opening a command's cgroup: %w", err)
		}
		fd := int32(firstInherited + len(s.Files))
		s.Files = append(s.Files, f)
		switch sf.role {
		case roleJoin:
			v.JoinFds = append(v.JoinFds, fd)
		case roleProcs:
			v.ProcsFd = fd
		case roleOOM:
			v.OomFd = fd
		case rolePeak:
			v.PeakFd = fd
		}
	}
	s.Views = append(s.Views, v)
	return nil
}

func (sf slotFile) openFile() (*os.File, error) {
	flags := os.O_RDONLY
	switch {
	case sf.write && sf.read:
		flags = os.O_RDWR
	case sf.write:
		flags = os.O_WRONLY
	}
	f, err := os.OpenFile(sf.path, flags, 0)
	if sf.write && sf.read && errors.Is(err, os.ErrPermission) {
		return os.OpenFile(sf.path, os.O_RDONLY, 0) // memory.peak can't be reset before Linux 6.12
	}
	return f, err
}

// Tree is every cgroup of one sandbox, in every hierarchy: the evidence is that all of them are empty and gone.
type Tree struct{ Dirs []string }

func TreeOf(all []Hierarchy, cgroup string) Tree {
	var t Tree
	for _, h := range all {
		t.Dirs = append(t.Dirs, h.Path(cgroup))
	}
	return t
}

// folders are the sandbox's cgroups that exist, children before parents.
func (t Tree) folders() []string {
	var out []string
	for _, top := range t.Dirs {
		_ = filepath.WalkDir(top, func(p string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				out = append(out, p)
			}
			return nil
		})
	}
	slices.Reverse(out)
	return out
}

// Pids are the processes in the sandbox's cgroups.
func (t Tree) Pids() []int {
	set := map[int]bool{}
	for _, dir := range t.folders() {
		f, err := os.Open(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			continue
		}
		for sc := bufio.NewScanner(f); sc.Scan(); {
			if pid, err := strconv.Atoi(sc.Text()); err == nil && pid > 0 {
				set[pid] = true
			}
		}
		f.Close()
	}
	out := make([]int, 0, len(set))
	for pid := range set {
		out = append(out, pid)
	}
	slices.Sort(out)
	return out
}

// Kill sends SIGKILL to everything in the sandbox's cgroups: by cgroup.kill where there is one (v2, Linux 5.14), else
// one by one through a pidfd that is opened first and checked after, so that a recycled pid is never hit.
func (t Tree) Kill() {
	for _, dir := range t.Dirs {
		_ = WriteCgroup(filepath.Join(dir, "cgroup.kill"), "1")
	}
	for _, pid := range t.Pids() {
		t.killOne(pid)
	}
}

// killOne sends SIGKILL to one process, if it is in the sandbox's cgroups.
func (t Tree) killOne(pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if slices.Contains(t.Pids(), pid) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // ESRCH: it has just ended
	}
}

// Remove kills until every cgroup of the sandbox is empty, and removes them. It gives up when ctx ends: a task in
// uninterruptible sleep can't be waited for.
func (t Tree) Remove(ctx context.Context) error {
	pause := time.Millisecond
	for {
		left := t.removeOnce()
		if len(left) == 0 {
			return nil
		}
		t.Kill()
		select {
		case <-ctx.Done():
			return fmt.Errorf("emptying the sandbox's cgroups: %w: processes %v are still in %s", ctx.Err(), t.Pids(), strings.Join(left, ", "))
		case <-time.After(pause):
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
}

// removeOnce removes the cgroups that are empty and says which are left.
func (t Tree) removeOnce() []string {
	var left []string
	for _, dir := range t.folders() {
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
			left = append(left, dir)
		}
	}
	return left
}
