package testkit

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"
)

// leakPatience bounds how long a check waits for what the kernel lets go of by itself (a detached mount, a cgroup
// whose last task was just reaped). It is a bound for the failing case only.
const leakPatience = 5 * time.Second

// Leaks takes note of what the process and the machine hold now, and fails the test if at its end there is more of it:
// mounts, cgroup folders of tests of this process, receiptd and pid1 processes, named network namespaces, open descriptors.
//
// Call it first in a test: cleanups run last to first. What other test processes hold at the same time doesn't
// count: processes and cgroups are looked for by this process's cgroup parents (CgroupParent) and descent, mounts by
// this process's scratch folders.
func Leaks(t testing.TB) {
	t.Helper()
	before := snapshot()
	t.Cleanup(func() {
		deadline := time.Now().Add(leakPatience)
		for {
			left := snapshot().beyond(before)
			if len(left) == 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
				return
			}
			runtime.GC() // a file that nobody references is closed by its finaliser
			time.Sleep(20 * time.Millisecond)
		}
	})
}

// held maps what is held to how many of it.
type held map[string]int

func (h held) beyond(before held) []string {
	var more []string
	for what, n := range h {
		if n > before[what] {
			more = append(more, fmt.Sprintf("%s (%d, %d before)", what, n, before[what]))
		}
	}
	sort.Strings(more)
	return more
}

func snapshot() held {
	h := held{}
	for _, add := range []func(held){addMounts, addCgroups, addProcesses, addNetns, addDescriptors} {
		add(h)
	}
	return h
}

func addMounts(h held) {
	for _, line := range strings.Split(readTrimmed("/proc/self/mountinfo"), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		rest, below := strings.CutPrefix(f[4], scratchRoot+"/")
		name, _, _ := strings.Cut(rest, "/")
		if _, ours := scratches.Load(filepath.Join(scratchRoot, name)); below && ours {
			h["mount "+f[4]]++
		}
	}
}

func testCgroupPrefix() string { return fmt.Sprintf("/sandbox-agent-test-%d-", os.Getpid()) }

func addCgroups(h held) {
	for _, mount := range cgroupMounts() {
		dirs, _ := filepath.Glob(mount + testCgroupPrefix() + "*")
		for _, d := range dirs {
			for _, sub := range subfolders(d) {
				if sub != d { // the parent itself is CgroupParent's to remove
					h["cgroup "+sub]++
				}
			}
		}
	}
}

// addProcesses counts what is in this process's test cgroups, and receiptd and pid1 among its descendants.
func addProcesses(h held) {
	parent, comm := map[int]int{}, map[int]string{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat := readTrimmed(fmt.Sprintf("/proc/%d/stat", pid))
		open, end := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
		if open < 0 || end < open {
			continue
		}
		comm[pid] = stat[open+1 : end]
		if f := strings.Fields(stat[end+1:]); len(f) > 1 {
			parent[pid], _ = strconv.Atoi(f[1])
		}
	}
	for pid, name := range comm {
		inCgroup := strings.Contains(readTrimmed(fmt.Sprintf("/proc/%d/cgroup", pid)), testCgroupPrefix())
		inside := name == "receiptd" || name == "pid1"
		if inCgroup || inside && descends(parent, pid, os.Getpid()) {
			h[fmt.Sprintf("process %d %s", pid, name)]++
		}
	}
}

func descends(parent map[int]int, pid, from int) bool {
	for i := 0; pid > 1 && i < 1000; i++ {
		pid = parent[pid]
		if pid == from {
			return true
		}
	}
	return false
}

func addNetns(h held) {
	entries, _ := os.ReadDir("/run/netns")
	for _, e := range entries {
		h["network namespace "+e.Name()]++
	}
}

// addDescriptors counts by what is open, not by number. The Go runtime's own poller is left out: it is made once, on
// first use.
func addDescriptors(h held) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || target == "anon_inode:[eventpoll]" || target == "anon_inode:[eventfd]" {
			continue
		}
		if kind, _, isNumbered := strings.Cut(target, ":["); isNumbered {
			target = kind // "pipe:[123]", "socket:[45]": the number differs each time
		}
		h["descriptor "+target]++
	}
}

func cgroupMounts() []string {
	seen := map[string]bool{}
	for _, line := range strings.Split(readTrimmed("/proc/self/mounts"), "\n") {
		if f := strings.Fields(line); len(f) > 2 && (f[2] == "cgroup" || f[2] == "cgroup2") {
			seen[f[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// cgroupDirs are the folders of a cgroup path in every hierarchy, the deepest first.
func cgroupDirs(path string) []string {
	var dirs []string
	for _, mount := range cgroupMounts() {
		dirs = append(dirs, subfolders(mount+path)...)
	}
	slices.Reverse(dirs)
	return dirs
}

// subfolders are dir and all folders below it, a parent before its children; none if dir does not exist.
func subfolders(dir string) []string {
	var out []string
	filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			out = append(out, p)
		}
		return nil
	})
	return out
}
