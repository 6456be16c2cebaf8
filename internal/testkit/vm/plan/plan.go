// Package plan is what a harness tells its guest, and how the guest answers.
package plan

const (
	// Path is the plan's in the initramfs, as JSON.
	Path = "/plan.json"
	// Order is the path in the initramfs of the list of its kernel modules, one line for each, in the order in which they are
	// loaded.
	Order = "/modules.order"
	// Port is the name of the virtio port that results go to.
	Port = "sandbox-agent.results"
	// Begin starts the line before a program's output, Done the last line of all.
	Begin = "=== guest: "
	Done  = "=== guest is done: "
)

// Plan is what a guest does.
type Plan struct {
	// Controllers are those of cgroup v2 that the root hands down.
	Controllers []string
	// CgroupV1 has each controller in a hierarchy of version 1, as an init system of old mounts them, and none of version 2.
	CgroupV1 bool
	Env      []string
	Runs     []Run
}

// Run is one program.
type Run struct {
	Name, Dir string
	Argv      []string
	// Stdin is what it reads.
	Stdin string
}
