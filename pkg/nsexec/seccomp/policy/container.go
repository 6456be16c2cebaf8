package policy

// Container is the allow list for everything in a sandbox: receiptd loads it for all its threads before it does
// anything else, so pid1 and every command are under it too, whatever the container runtime did with its own profile
// (Kata drops it by default: facts.md).
//
// It is containerd's default profile for a container without capabilities, plus what receiptd and pid1 need. A command may reach
// those calls only where its own filter lets it. Anything else, the calls of future kernels included, doesn't exist.
func Container() Policy {
	p := Policy{Name: "container", Otherwise: ENOSYS}
	p.Allowed = append(p.Allowed, containerdDefault...)
	for _, n := range Needed {
		p.Allowed = append(p.Allowed, n.Calls...)
	}
	p.Rules = []Rule{{
		ID:     "container-socket-families",
		Calls:  []Call{{Name: "socket", When: []Test{notIn(0, word, afUnix, afInet, afInet6, afNetlink)}}},
		Answer: EAFNOSUPPORT,
		Why:    "nothing in a sandbox speaks vsock: the Kata agent listens there and asks for no credential",
		Source: "facts.md, What reaches what",
	}}
	return p
}

// Need is a group of calls that the default profile lacks, and who needs them.
type Need struct {
	Calls []string
	Who   string
}

// Needed is what stands in the allow list beyond containerd's default.
var Needed = []Need{
	{[]string{"clone"}, "everybody: threads and processes; the flags are the command's filter's to check"},
	{[]string{"clone3"}, "receiptd and pid1: CLONE_INTO_CGROUP, CLONE_PIDFD"},
	{[]string{"unshare", "setns"}, "receiptd: namespaces for a command, and looking into one; a command where the operator allows nested ones"},
	{[]string{"mount", "umount2", "pivot_root", "open_tree", "move_mount", "mount_setattr", "fsopen", "fsconfig", "fsmount", "fspick"},
		"receiptd and pid1: the view of a command; a command where the operator allows nested namespaces"},
	{[]string{"chroot", "sethostname", "setdomainname"}, "pid1; a command where the operator allows nested namespaces"},
	{[]string{"personality"}, "a command's debuggers; its filter checks the value"},
	{[]string{"socket"}, "everybody; the families are checked below"},
	{[]string{"ptrace", "process_vm_readv", "process_vm_writev"}, "a command's debuggers; containerd has them from Linux 4.8 on"},
	{[]string{"arch_prctl"}, "amd64: thread-local storage"},
}
