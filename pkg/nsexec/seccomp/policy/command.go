package policy

// Flags and numbers of the kernel's interface, spelled out because the generator writes filters for architectures
// other than its own. They are the same on both (include/uapi).
const (
	word = 0xffffffff

	cloneNamespaces = 0x00020000 | // CLONE_NEWNS
		0x02000000 | // CLONE_NEWCGROUP
		0x04000000 | // CLONE_NEWUTS
		0x08000000 | // CLONE_NEWIPC
		0x10000000 | // CLONE_NEWUSER
		0x20000000 | // CLONE_NEWPID
		0x40000000 // CLONE_NEWNET

	// What unshare(2) may still undo: VM, FS, FILES, SIGHAND, THREAD, SYSVSEM. Everything else is a namespace, of
	// today (CLONE_NEWTIME is 0x80) or to come.
	unshareHarmless = 0x00000100 | 0x00000200 | 0x00000400 | 0x00000800 | 0x00010000 | 0x00040000

	setIDBits = 0o6000
	fileType  = 0o170000
	charDev   = 0o020000
	blockDev  = 0o060000

	openCreates    = 0o100 | 0o20000000 // O_CREAT, __O_TMPFILE
	renameWhiteout = 4

	afUnix, afInet, afInet6, afNetlink = 1, 2, 10, 16

	protoDefault, protoICMP, protoTCP, protoUDP, protoICMPv6 = 0, 1, 6, 17, 58

	netlinkRoute = 0

	rlimitCore = 4

	ioctlTIOCSTI, ioctlTIOCLINUX, ioctlTIOCSETD = 0x5412, 0x541c, 0x5423

	// PER_LINUX32 | UNAME26 | ADDR_NO_RANDOMIZE: another uname, and addresses as debuggers and sanitizers want them.
	personalityHarmless = 0x0008 | 0x0020000 | 0x0040000
	personalityQuery    = 0xffffffff
)

func anyBit(arg int, mask uint32) Test          { return Test{Arg: arg, Op: AnyBit, Mask: mask} }
func in(arg int, mask uint32, v ...uint32) Test { return Test{Arg: arg, Op: In, Mask: mask, Values: v} }
func notIn(arg int, mask uint32, v ...uint32) Test {
	return Test{Arg: arg, Op: NotIn, Mask: mask, Values: v}
}

func calls(names ...string) []Call {
	var out []Call
	for _, n := range names {
		out = append(out, Call{Name: n})
	}
	return out
}

// Command is the filter of a command. nested is the operator's permission to make user namespaces.
func Command(nested bool) Policy {
	p := Policy{Name: "command"}
	without := OnlyWithNested
	if nested {
		p.Name, without = "command-nested-userns", WithoutNested
	}
	for _, r := range Refusals {
		if r.Nested != without {
			p.Rules = append(p.Rules, r)
		}
	}
	return p
}

// Refusals are the rules of both variants of a command's filter.
//
// Not refused, with the reason: ptrace and process_vm_readv/writev (a debugger inside one's own command is ordinary
// work; pid1 is not dumpable, has another uid and was exec'd in an outer user namespace, so the kernel refuses it
// as a target; since Linux 4.8 a tracer can't change a call behind the filter), seccomp and landlock (they only
// restrict further, and an older filter's refusal wins over a newer one's answer), SCM_RIGHTS (nothing outside the
// command shares a socket with it).
//
// Calls that only the kernel's past knows (uselib, nfsservctl, lookup_dcookie) and all that are yet to come
// need no rule: the container's allow list answers ENOSYS.
var Refusals = []Rule{
	{
		ID:     "namespaces",
		Nested: WithoutNested,
		Calls: []Call{
			{Name: "clone", When: []Test{anyBit(0, cloneNamespaces)}},
			{Name: "unshare", When: []Test{anyBit(0, ^uint32(unshareHarmless))}},
			{Name: "setns"},
		},
		Answer: EPERM,
		Why:    "in a user namespace of its own a command has every capability, and most kernel faults of the last years start there",
		Source: "facts.md, Protecting PID 1; CVE-2022-0185, CVE-2023-32233, CVE-2024-1086",
	},
	{
		ID:     "clone3",
		Calls:  calls("clone3"),
		Answer: ENOSYS,
		Why:    "its flags lie in memory, where a filter can't look; libc falls back to clone, whose flags are checked",
		Source: "facts.md, Protecting PID 1; moby pull request 42681",
	},
	{
		ID:     "mounts",
		Nested: WithoutNested,
		Calls: calls("mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "mount_setattr",
			"fsopen", "fsconfig", "fsmount", "fspick"),
		Answer: EPERM,
		Why:    "the view of files is receiptd's and pid1's to make: sealed paths, masks, what is hidden",
		Source: "facts.md, Mounts; CVE-2022-0185 (fsconfig)",
	},
	{
		ID:     "hostname",
		Nested: WithoutNested,
		Calls:  calls("sethostname", "setdomainname"),
		Answer: EPERM,
		Why:    "the UTS namespace is shared by nobody, but its name is part of the fixed environment",
		Source: "capabilities(7), CAP_SYS_ADMIN",
	},
	{
		ID:     "file-handles",
		Calls:  calls("name_to_handle_at", "open_by_handle_at"),
		Answer: EPERM,
		Why:    "a handle opens a file past every mount and mask of the view",
		Source: "the shocker exploit of 2014; open_by_handle_at(2)",
	},
	{
		ID:     "keyrings",
		Calls:  calls("add_key", "request_key", "keyctl"),
		Answer: EPERM,
		Why:    "keyrings belong to a user, not to a namespace of processes: one is shared by all sandboxes of a uid and outlives the boundary",
		Source: "keyrings(7); CVE-2016-0728",
	},
	{
		ID:     "kernel-programs",
		Calls:  calls("bpf", "perf_event_open", "userfaultfd"),
		Answer: EPERM,
		Why:    "code and hooks inside the kernel: a large surface, and the usual helpers of an exploit (userfaultfd stops the kernel in the middle of a copy)",
		Source: "CVE-2021-3490 (bpf), CVE-2013-2094 (perf); userfaultfd(2), vm.unprivileged_userfaultfd",
	},
	{
		ID:     "io_uring",
		Calls:  calls("io_uring_setup", "io_uring_enter", "io_uring_register"),
		Answer: ENOSYS,
		Why:    "its operations (openat, mkdirat, socket, fchmod...) run without passing this filter; libraries fall back on ENOSYS",
		Source: "facts.md, hole 1; CVE-2022-29582, CVE-2023-2598",
	},
	{
		ID:     "openat2",
		Calls:  calls("openat2"),
		Answer: ENOSYS,
		Why:    "flags and mode lie in memory, so set-id bits of a new file can't be seen; libraries fall back to openat",
		Source: "facts.md, hole 1",
	},
	{
		ID: "set-id",
		Calls: []Call{
			{Name: "chmod", When: []Test{anyBit(1, setIDBits)}},
			{Name: "fchmod", When: []Test{anyBit(1, setIDBits)}},
			{Name: "fchmodat", When: []Test{anyBit(2, setIDBits)}},
			{Name: "fchmodat2", When: []Test{anyBit(2, setIDBits)}},
			{Name: "mkdir", When: []Test{anyBit(1, setIDBits)}},
			{Name: "mkdirat", When: []Test{anyBit(2, setIDBits)}},
			{Name: "mknod", When: []Test{anyBit(1, setIDBits)}},
			{Name: "mknodat", When: []Test{anyBit(2, setIDBits)}},
			{Name: "creat", When: []Test{anyBit(1, setIDBits)}},
			{Name: "open", When: []Test{anyBit(1, openCreates), anyBit(2, setIDBits)}},
			{Name: "openat", When: []Test{anyBit(2, openCreates), anyBit(3, setIDBits)}},
		},
		Answer: EPERM,
		Why:    "the worktree's files belong to its on-disk owner: a set-id bit made inside is one on the node, where nothing says nosuid",
		Source: "facts.md, hole 1",
	},
	{
		ID: "devices",
		Calls: []Call{
			{Name: "mknod", When: []Test{in(1, fileType, charDev, blockDev)}},
			{Name: "mknodat", When: []Test{in(2, fileType, charDev, blockDev)}},
			{Name: "renameat2", When: []Test{anyBit(4, renameWhiteout)}},
		},
		Answer: EPERM,
		Why:    "device files, and the 0:0 one (an overlay's whiteout, which needs no capability since Linux 5.8) that makes a file vanish for whoever mounts the worktree as a layer",
		Source: "mknod(2), renameat2(2); kernel commit a3c751a50fe6",
	},
	{
		ID:     "xattrs",
		Nested: OnlyWithNested,
		Calls:  calls("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
		Answer: EOPNOTSUPP,
		Why:    "root of a nested user namespace may write security.capability, and an idmapped mount turns its root id into the worktree's on-disk owner: with a root-owned worktree that is a file capability on the node. The name lies in memory; tools treat the answer as a file system without attributes",
		Source: "capabilities(7), Namespaced file capabilities; cap_convert_nscap in security/commoncap.c",
	},
	{
		ID: "terminals",
		Calls: []Call{
			{Name: "ioctl", When: []Test{in(1, word, ioctlTIOCSTI, ioctlTIOCLINUX, ioctlTIOCSETD)}},
		},
		Answer: EPERM,
		Why:    "TIOCSTI and TIOCLINUX type into a terminal that somebody else reads; TIOCSETD loads line disciplines",
		Source: "CVE-2017-5226, CVE-2023-1523 (TIOCLINUX), CVE-2019-10063 (the high half), CVE-2017-2636 (line discipline)",
	},
	{
		ID: "socket-families",
		Calls: []Call{
			{Name: "socket", When: []Test{notIn(0, word, afUnix, afInet, afInet6, afNetlink)}},
			{Name: "socketpair", When: []Test{notIn(0, word, afUnix)}},
		},
		Answer: EAFNOSUPPORT,
		Why:    "AF_VSOCK ignores network namespaces before Linux 7.0 and reaches a Kata agent that asks for no credential; AF_ALG, AF_PACKET and the rest are surface without a use in a build",
		Source: "facts.md, What reaches what",
	},
	{
		ID: "netlink",
		Calls: []Call{
			{Name: "socket", When: []Test{in(0, word, afNetlink), notIn(2, word, netlinkRoute)}},
		},
		Answer: EPROTONOSUPPORT,
		Why:    "getifaddrs(3) and ip(8) need NETLINK_ROUTE; netfilter, sock_diag, audit, uevents and the others are faults' favourite doors",
		Source: "facts.md, What reaches what; CVE-2024-1086, CVE-2023-32233 (netfilter)",
	},
	{
		ID: "protocols",
		Calls: []Call{
			{Name: "socket", When: []Test{in(0, word, afInet, afInet6), notIn(2, word, protoDefault, protoICMP, protoTCP, protoUDP, protoICMPv6)}},
		},
		Answer: EPROTONOSUPPORT,
		Why:    "SCTP, DCCP, UDP-Lite and L2TP load modules on demand and are not destroyed with the command's other sockets; neither is MPTCP, for which callers fall back to TCP",
		Source: "facts.md, hole 10; CVE-2017-6074 (DCCP)",
	},
	{
		ID:     "fanotify",
		Calls:  calls("fanotify_init"),
		Answer: EPERM,
		Why:    "watches whole mounts; builds use inotify",
		Source: "fanotify_init(2)",
	},
	{
		ID:     "other-processes",
		Calls:  calls("kcmp", "pidfd_getfd", "process_madvise"),
		Answer: EPERM,
		Why:    "reach into other processes for what no debugger needs; the default profile has them only with CAP_SYS_PTRACE",
		Source: "containerd's default profile",
	},
	{
		ID:     "memory-policy",
		Calls:  calls("mbind", "set_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages"),
		Answer: ENOSYS,
		Why:    "placing memory on the node's NUMA nodes is the operator's business, and move_pages tells where other pages lie",
		Source: "containerd's default profile; CVE-2017-14140 (move_pages)",
	},
	{
		ID:     "modify_ldt",
		Calls:  calls("modify_ldt"),
		Answer: ENOSYS,
		Why:    "16-bit segments have no use here; the answer is that of a kernel without CONFIG_MODIFY_LDT_SYSCALL",
		Source: "CVE-2015-5157, CVE-2015-3290",
	},
	{
		ID: "personality",
		Calls: []Call{
			{Name: "personality", When: []Test{notIn(0, word, personalityQuery), anyBit(0, ^uint32(personalityHarmless))}},
		},
		Answer: EPERM,
		Why:    "READ_IMPLIES_EXEC, MMAP_PAGE_ZERO and foreign execution domains weaken the kernel's own defences; ADDR_NO_RANDOMIZE stays for gdb and sanitizers",
		Source: "personality(2); containerd's default profile",
	},
	{
		ID: "core-limit",
		Calls: []Call{
			{Name: "setrlimit", When: []Test{in(0, word, rlimitCore)}},
			{Name: "prlimit64", When: []Test{in(1, word, rlimitCore), notIn(2, word, 0)}},
			{Name: "prlimit64", When: []Test{in(1, word, rlimitCore), {Arg: 2, Op: AnyBit, Mask: word, High: true}}},
		},
		Answer: Pretend,
		Why:    "where core_pattern is a pipe, the kernel starts that program as the node's root for every crash, unless the limit is exactly 1: a command must not lower it to 0",
		Source: "core(5); fs/coredump.c, coredump_pipe",
	},
	{
		ID:     "clock",
		Calls:  calls("clock_settime", "settimeofday", "adjtimex", "clock_adjtime"),
		Answer: EPERM,
		Why:    "the clock is the node's; adjtimex's modes lie in memory, so it can't be read either",
		Source: "capabilities(7), CAP_SYS_TIME",
	},
	{
		ID: "machine",
		Calls: calls("reboot", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "swapon", "swapoff",
			"acct", "quotactl", "quotactl_fd", "syslog", "iopl", "ioperm", "vhangup"),
		Answer: EPERM,
		Why:    "they administer the node; a second line behind the missing capabilities",
		Source: "capabilities(7)",
	},
}
