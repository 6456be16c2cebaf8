package nodecheck

import (
	"errors"
	"fmt"
	"syscall"
)

// Answer is what a probe came to.
type Answer string

// Inconclusive: it could not be told now; the detail says why.
const (
	Yes          Answer = "yes"
	No           Answer = "no"
	Inconclusive Answer = "inconclusive"
)

// Fact is what one probe saw.
type Fact struct {
	Answer Answer `json:"answer"`
	// Subject tells facts of one feature apart: a path, a device, a part. Often empty.
	Subject string `json:"subject,omitempty"`
	// Detail is what was seen.
	Detail string `json:"detail,omitempty"`
	// Errno is the kernel's own word for No, 0 where there is none.
	Errno syscall.Errno `json:"errno,omitempty"`
	// Remedy stands before the table's, for a probe that knows better what to do.
	Remedy string `json:"remedy,omitempty"`
}

func yes(format string, args ...any) Fact {
	return Fact{Answer: Yes, Detail: fmt.Sprintf(format, args...)}
}

func no(err error) Fact {
	f := Fact{Answer: No, Detail: err.Error()}
	if e, ok := errors.AsType[syscall.Errno](err); ok {
		f.Errno = e
	}
	return f
}

func nof(format string, args ...any) Fact {
	return Fact{Answer: No, Detail: fmt.Sprintf(format, args...)}
}

func unsure(format string, args ...any) Fact {
	return Fact{Answer: Inconclusive, Detail: fmt.Sprintf(format, args...)}
}

func (f Fact) of(subject string) Fact { f.Subject = subject; return f }

func (f Fact) do(remedy string) Fact { f.Remedy = remedy; return f }

// Facts are what was seen of a node. They are all that Judge decides on.
type Facts struct {
	Node Node
	Seen map[ID][]Fact
}

func (f *Facts) add(id ID, facts ...Fact) {
	if f.Seen == nil {
		f.Seen = map[ID][]Fact{}
	}
	f.Seen[id] = append(f.Seen[id], facts...)
}

// Node is what decides on remedies, and what needs no probe but reading.
type Node struct {
	// Kernel is its release, as uname says it.
	Kernel string
	OS     OS
	// UID is who looks. SysAdmin, NetAdmin and SysPtrace are effective capabilities of that process.
	UID                           int
	SysAdmin, NetAdmin, SysPtrace bool
	// InUserns: this process is not in the node's own user namespace.
	InUserns bool
	// Filtered: this process is under a seccomp filter, as a container runtime's default is.
	Filtered bool
	// Kubernetes: this process is in a pod.
	Kubernetes bool
	// Sysctls by name, without those that this kernel does not have.
	Sysctls map[string]string
	// Masked are mounts that cover parts of this process's /proc.
	Masked []string
	// Hidepid is the option of this process's /proc: "", "0", "1", "2", "invisible" …
	Hidepid string
	// Lockdown is the level that is in force: "", "none", "integrity" or "confidentiality".
	Lockdown string
	// LSMs are the kernel's security modules, in their order, as the parameter lsm= has them; empty where they can't be read.
	LSMs    string
	Cgroups Cgroups
}

// Cgroups are the node's cgroup hierarchies, as this process sees them.
type Cgroups struct {
	// Where is the mount that has each of the controllers "pids", "memory" and "cpu".
	Where map[string]string
	// V1 and V2: there is a hierarchy of that version.
	V1, V2 bool
	// Unwritable are the mounts among those of Where in which this process can't make a cgroup.
	Unwritable []string
	// Busy is a v2 mount among those of Where whose root is not the kernel's, has processes, and hands not all of the
	// controllers down: it can't then (cgroups(7), no internal processes).
	Busy string
	// Kill says whether cgroup.kill was seen.
	Kill Answer
}
