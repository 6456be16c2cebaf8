package nodecheck

import (
	"fmt"
	"strconv"
	"strings"
)

// Verdict is what a fact means for a node.
type Verdict int

// From the best to the worst.
const (
	// OK: it is there.
	OK Verdict = iota + 1
	// Note: it is not, and nothing that is configured needs it, or what takes its place is as good.
	Note
	// Unknown: it is needed, and could not be looked at.
	Unknown
	// Degraded: a weaker layer takes its place, and the promises hold.
	Degraded
	// Missing: something that is configured can't be had.
	Missing
)

func (v Verdict) String() string {
	switch v {
	case OK:
		return "ok"
	case Note:
		return "note"
	case Unknown:
		return "can't say"
	case Degraded:
		return "DEGRADED"
	case Missing:
		return "MISSING"
	}
	return "?"
}

// Line is the verdict about one fact.
type Line struct {
	Feature Feature
	Fact    Fact
	Verdict Verdict
	// Remedy says what to do, for this node's distribution; empty where the verdict is OK.
	Remedy string
}

// Report is a whole check.
type Report struct {
	Node  Node
	Lines []Line
}

// Judge makes verdicts of facts. It looks at nothing else; a feature without a fact has no line.
func Judge(f Facts, n Needs) Report {
	seen := map[ID][]Fact{}
	for id, facts := range f.Seen {
		seen[id] = facts
	}
	for id, fact := range derive(f, n) {
		seen[id] = []Fact{fact}
	}
	r := Report{Node: f.Node}
	for _, feature := range Table {
		for _, fact := range seen[feature.ID] {
			r.Lines = append(r.Lines, judgeOne(feature, fact, f.Node, n))
		}
	}
	return r
}

func judgeOne(feature Feature, fact Fact, node Node, n Needs) Line {
	l := Line{Feature: feature, Fact: fact, Verdict: verdict(feature, fact.Answer, n.has(feature.By))}
	if l.Verdict != OK {
		l.Remedy = remedy(feature, fact, node)
	}
	return l
}

func verdict(f Feature, a Answer, needed bool) Verdict {
	switch {
	case a == Yes:
		return OK
	case !needed || f.Kept == Same:
		return Note
	case a == Inconclusive:
		return Unknown
	case f.Kept == Weaker:
		return Degraded
	}
	return Missing
}

// derive decides what needs no probe beyond what was read of the node.
func derive(f Facts, n Needs) map[ID]Fact {
	return map[ID]Fact{
		Rights:       rights(f.Node),
		Kernel:       kernel(f),
		CgroupPids:   controller(f.Node, "pids"),
		CgroupMemory: controller(f.Node, "memory"),
		CgroupCPU:    controller(f.Node, "cpu"),
		CgroupKill:   cgroupKill(f.Node),
		PidMax:       pidMax(f.Node, n),
		Hidepid:      hidepid(f.Node),
		Ptrace:       ptrace(f.Node),
		Lockdown:     lockdown(f.Node),
	}
}

func rights(n Node) Fact {
	switch {
	case n.UID != 0:
		return unsure("this check runs as uid %d, and the agent as root: what takes root was not looked at", n.UID).do("run this as root")
	case !n.SysAdmin:
		return nof("root without CAP_SYS_ADMIN")
	case n.InUserns:
		return nof("root of a user namespace, which is not the node's root")
	}
	return yes("root, CAP_SYS_ADMIN")
}

// kernel goes by what works: distributions bring features to older versions.
func kernel(f Facts) Fact {
	row, _ := Find(Kernel)
	if !row.OlderThan(f.Node.Kernel) {
		return yes("Linux %s", f.Node.Kernel)
	}
	for _, m := range f.Seen[MountAPI] {
		if m.Answer == Yes {
			return yes("Linux %s, with the mount API of a newer one", f.Node.Kernel)
		}
	}
	return nof("Linux %s", f.Node.Kernel)
}

func controller(n Node, name string) Fact {
	mount, there := n.Cgroups.Where[name]
	if !there {
		return nof("no cgroup hierarchy has it (%s)", versions(n.Cgroups))
	}
	for _, m := range n.Cgroups.Unwritable {
		if m == mount {
			return nof("%s can't be written to", mount).do("mount it read-write: " + inContainer(n, "in Kubernetes with privileged: true, for Docker with --privileged --cgroupns=host"))
		}
	}
	if mount == n.Cgroups.Busy {
		return nof("%s is the root of a cgroup namespace, has processes and hands not all controllers down", mount).
			do("give the agent the node's cgroup namespace, or move its processes into a child cgroup and write \"+pids +memory +cpu\" into cgroup.subtree_control: " +
				inContainer(n, "in Kubernetes a privileged container has the node's; for Docker --cgroupns=host"))
	}
	return yes("%s (%s)", mount, versions(n.Cgroups))
}

func inContainer(n Node, how string) string {
	if n.Kubernetes {
		return "securityContext.privileged: true"
	}
	return how
}

func versions(c Cgroups) string {
	switch {
	case c.V1 && c.V2:
		return "cgroup v1 and v2"
	case c.V1:
		return "cgroup v1"
	case c.V2:
		return "cgroup v2"
	}
	return "no cgroups are mounted"
}

func cgroupKill(n Node) Fact {
	switch {
	case n.Cgroups.Kill == Yes:
		return yes("the cgroups of v2 have it")
	case n.Cgroups.Kill == Inconclusive:
		return unsure("no cgroup of v2 could be looked at")
	case n.Cgroups.V1:
		return nof("the controllers are in cgroup v1, which has none")
	}
	return nof("the cgroups of v2 have none")
}

// spareIDs are the process ids that everything besides one command takes: the node's own processes, receiptd, pid1.
const spareIDs = 1024

func pidMax(node Node, n Needs) Fact {
	text, known := node.Sysctls["kernel.pid_max"]
	most, err := strconv.ParseInt(text, 10, 64)
	if !known || err != nil {
		return unsure("kernel.pid_max could not be read")
	}
	if least := n.Pids + spareIDs; most < least {
		return nof("kernel.pid_max is %d, and one command may have %d processes (limits.pids): it would take every process id of the node", most, n.Pids).
			do(sysctl(node.OS, "kernel.pid_max", strconv.FormatInt(max(least, 32768), 10)) + "; or set limits.pids to less")
	}
	return yes("kernel.pid_max is %d, limits.pids %d", most, n.Pids)
}

func hidepid(n Node) Fact {
	switch n.Hidepid {
	case "", "0", "off":
		return yes("/proc shows all processes")
	}
	switch {
	case n.SysPtrace:
		return yes("/proc has hidepid=%s, and CAP_SYS_PTRACE sees past it", n.Hidepid)
	case n.UID != 0:
		return unsure("/proc has hidepid=%s; the agent sees past it with CAP_SYS_PTRACE", n.Hidepid)
	}
	return nof("/proc has hidepid=%s, and this process no CAP_SYS_PTRACE", n.Hidepid)
}

// ptrace: with scope 3 the kernel refuses PTRACE_TRACEME too (Yama.rst), with 2 it wants CAP_SYS_PTRACE of the tracer.
func ptrace(n Node) Fact {
	scope, known := n.Sysctls["kernel.yama.ptrace_scope"]
	switch {
	case !known:
		return yes("Yama does not restrict it")
	case scope == "3":
		return nof("kernel.yama.ptrace_scope is 3").do("set kernel.yama.ptrace_scope to 2 where it is set, and reboot: 3 can't be taken back (" + sysctlFile(n.OS, "kernel.yama.ptrace_scope", "2") + ")")
	case scope == "2" && n.UID == 0 && !n.SysPtrace:
		return nof("kernel.yama.ptrace_scope is 2, and this process has no CAP_SYS_PTRACE").do("leave the agent CAP_SYS_PTRACE, or " + sysctl(n.OS, "kernel.yama.ptrace_scope", "1"))
	}
	return yes("kernel.yama.ptrace_scope is %s", scope)
}

func lockdown(n Node) Fact {
	if n.Lockdown == "" || n.Lockdown == "none" {
		return yes("off")
	}
	return yes("%s; nothing here is in its way", n.Lockdown)
}

// Refusal is an error when a promise can't be kept on this node by what is configured: the agent must not start then. Its
// text is that of the lines of a check.
func (r Report) Refusal() error {
	var missing []string
	for _, l := range r.Lines {
		if l.Verdict == Missing && l.Feature.Stops {
			missing = append(missing, Text(l.Proto()))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("this node can't keep the promises of what is configured (\"sandbox-agent check\" shows all of it):\n%s",
		strings.TrimSuffix(strings.Join(missing, ""), "\n"))
}
