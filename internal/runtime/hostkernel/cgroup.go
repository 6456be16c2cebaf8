package hostkernel

import (
	"fmt"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Names below a sandbox's cgroup: where receiptd and the pid1s are, and where commands take turns.
const InitCgroup = "init"

var slotNames = []string{"c0", "c1"}

// pidsForReceiptd is how many processes and threads beyond the command's a whole sandbox may have: receiptd, two
// pid1s, and room for their Go runtimes.
const pidsForReceiptd = 512

// cpuPeriod is the period of CPU quotas, microseconds (the kernel's default).
const cpuPeriod = 100000

// CPUQuota is the time that cpus CPUs give in each period, both in microseconds; at least the kernel's least, 1 ms.
func CPUQuota(cpus float64) (quota int64, period uint64) {
	return max(int64(cpus*cpuPeriod), 1000), cpuPeriod
}

// Hierarchy is one mounted cgroup hierarchy.
type Hierarchy struct {
	Mount       string
	controllers []string // of v1, sorted; of v2, cgroup.controllers of its root
	V2          bool
}

// Path is a cgroup's folder in the hierarchy.
func (h Hierarchy) Path(cgroup string) string { return h.Mount + cgroup }

// Has says whether it has a controller.
func (h Hierarchy) Has(controller string) bool { return slices.Contains(h.controllers, controller) }

// parseHierarchies finds the cgroup hierarchies in a mountinfo (proc_pid_mountinfo(5)). v2 gives the controllers of a
// v2 mount. A Hierarchy that is mounted more than once counts once; controllers that are mounted together are one.
func parseHierarchies(mountinfo string, v2 func(mount string) []string) []Hierarchy {
	var out []Hierarchy
	seen := map[string]bool{}
	for _, line := range strings.Split(mountinfo, "\n") {
		before, after, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 3 || seen[f[2]] {
			continue
		}
		h := Hierarchy{Mount: unescape(f[4])}
		switch g[0] {
		case "cgroup":
			h.controllers = v1Controllers(g[2])
		case "cgroup2":
			h.V2, h.controllers = true, v2(h.Mount)
		default:
			continue
		}
		seen[f[2]] = true
		out = append(out, h)
	}
	return out
}

// v1Controllers picks the controllers out of super options such as "rw,cpu,cpuacct".
func v1Controllers(options string) []string {
	var out []string
	for _, o := range strings.Split(options, ",") {
		switch o {
		case "rw", "ro", "xattr", "clone_children", "noprefix", "cpuset_v2_mode", "favordynmods":
			continue
		}
		if !strings.HasPrefix(o, "release_agent=") {
			out = append(out, o)
		}
	}
	sort.Strings(out)
	return out
}

// unescape turns the octal escapes of mountinfo back (proc_pid_mountinfo(5): space, tab, newline, backslash).
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// SlotHierarchies picks the hierarchies in which commands get a cgroup of their own: that of pids, because it also says
// when a slot is empty, that of memory, and that of cpu, because in one cgroup with receiptd and the pid1s a command of
// many processes would take the CPU from the clock that ends it. Without a limit of CPUs a node may lack that one.
func SlotHierarchies(all []Hierarchy, r runtime.Resources) ([]Hierarchy, error) {
	var out []Hierarchy
	for _, c := range []string{"pids", "memory", "cpu"} {
		i := slices.IndexFunc(all, func(h Hierarchy) bool { return h.Has(c) })
		if i < 0 && c == "cpu" && r.CPUs == 0 {
			continue
		}
		if i < 0 {
			return nil, fmt.Errorf("%w: the cgroup controller %q is not there: %s", runtime.ErrUnavailable, c, controllerRemedy(c))
		}
		if !slices.ContainsFunc(out, func(h Hierarchy) bool { return h.Mount == all[i].Mount }) {
			out = append(out, all[i])
		}
	}
	return out, nil
}

func controllerRemedy(c string) string {
	switch c {
	case "memory":
		return "boot with cgroup_enable=memory, or mount it (kernel option CONFIG_MEMCG)"
	case "cpu":
		return "mount it at /sys/fs/cgroup (kernel option CONFIG_CGROUP_SCHED), or set no limit of CPUs"
	}
	return "mount it at /sys/fs/cgroup (kernel option CONFIG_CGROUP_" + strings.ToUpper(c) + ")"
}

// setting is one value written into one cgroup file. Optional ones may be missing on this kernel.
type setting struct {
	file, value string
	optional    bool
}

// slotSettings are the limits of a command in one hierarchy.
func slotSettings(h Hierarchy, r runtime.Resources) []setting {
	var out []setting
	if r.Pids > 0 && h.Has("pids") {
		out = append(out, setting{file: "pids.max", value: strconv.FormatInt(r.Pids, 10)})
	}
	if r.MemoryBytes > 0 && h.Has("memory") {
		v := strconv.FormatInt(r.MemoryBytes, 10)
		if h.V2 {
			out = append(out, setting{file: "memory.max", value: v}, setting{file: "memory.swap.max", value: "0", optional: true})
		} else {
			// The sum of memory and swap can't be below the memory limit: that one first.
			// v1 doesn't count what sockets hold, of whatever protocol, unless it has a limit of its own (v2 does).
			out = append(out, setting{file: "memory.limit_in_bytes", value: v}, setting{file: "memory.memsw.limit_in_bytes", value: v, optional: true},
				setting{file: "memory.kmem.tcp.limit_in_bytes", value: v, optional: true})
		}
	}
	if h.Has("cpu") {
		out = append(out, slotWeight(h))
	}
	if r.CPUs > 0 && h.Has("cpu") {
		q, p := CPUQuota(r.CPUs)
		quota, period := strconv.FormatInt(q, 10), strconv.FormatUint(p, 10)
		if h.V2 {
			out = append(out, setting{file: "cpu.max", value: quota + " " + period})
		} else {
			out = append(out, setting{file: "cpu.cfs_period_us", value: period}, setting{file: "cpu.cfs_quota_us", value: quota})
		}
	}
	return out
}

// slotWeight is a command's part of its own sandbox's CPU time: an eighth of receiptd's and the pid1s' part, which is the
// kernel's default. They hardly use theirs, and a command has all that is left; against other sandboxes, and the node,
// it is the sandbox's part that counts.
func slotWeight(h Hierarchy) setting {
	if h.V2 {
		return setting{file: "cpu.weight", value: "12"} // of 100
	}
	return setting{file: "cpu.shares", value: "128"} // of 1024
}

// sandboxSettings are the limits of a whole sandbox in one hierarchy: only a bound that receiptd never meets.
func sandboxSettings(h Hierarchy, r runtime.Resources) []setting {
	if r.Pids > 0 && h.Has("pids") {
		return []setting{{file: "pids.max", value: strconv.FormatInt(r.Pids+pidsForReceiptd, 10)}}
	}
	return nil
}

// slotFile is one descriptor that receiptd gets of a slot.
type slotFile struct {
	path  string
	write bool
	read  bool
	role  role
}

type role int

const (
	roleJoin role = iota
	roleProcs
	roleOOM
	rolePeak
)

// slotFiles are the files of one slot that receiptd is handed, in the order of their descriptors. optional ones may
// not exist on this kernel (memory.peak: Linux 5.19).
func slotFiles(hs []Hierarchy, cgroup string) []slotFile {
	var out []slotFile
	for _, h := range hs {
		out = append(out, slotFile{path: filepath.Join(h.Path(cgroup), "cgroup.procs"), write: true, role: roleJoin})
	}
	for _, h := range hs {
		dir := h.Path(cgroup)
		if h.Has("pids") {
			out = append(out, slotFile{path: filepath.Join(dir, "cgroup.procs"), read: true, role: roleProcs})
		}
		if h.Has("memory") {
			oom, peak := "memory.oom_control", "memory.max_usage_in_bytes"
			if h.V2 {
				oom, peak = "memory.events", "memory.peak"
			}
			out = append(out,
				slotFile{path: filepath.Join(dir, oom), read: true, role: roleOOM},
				slotFile{path: filepath.Join(dir, peak), read: true, write: true, role: rolePeak})
		}
	}
	return out
}
