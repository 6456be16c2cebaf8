package feature

import (
	"fmt"
	"strings"
)

// ID names a feature of a node, as the lines of a check and the table of docs/host-requirements.md do.
type ID string

// The features.
const (
	Rights        ID = "rights"
	Kernel        ID = "kernel"
	MountAPI      ID = "mount API"
	Openat2       ID = "openat2"
	Pidfd         ID = "pidfd"
	UserNS        ID = "user namespaces"
	IDMaps        ID = "id maps"
	PidNS         ID = "PID namespaces"
	MountNS       ID = "mount namespaces"
	NetNS         ID = "network namespaces"
	IpcNS         ID = "IPC namespaces"
	UtsNS         ID = "UTS namespaces"
	CgroupNS      ID = "cgroup namespaces"
	NestedNS      ID = "namespaces in a sandbox"
	Proc          ID = "fresh /proc"
	NestedProc    ID = "fresh /proc in a sandbox"
	Ptrace        ID = "tracing a child"
	Seccomp       ID = "seccomp filters"
	CgroupPids    ID = "cgroup controller pids"
	CgroupMemory  ID = "cgroup controller memory"
	CgroupCPU     ID = "cgroup controller cpu"
	CgroupKill    ID = "cgroup.kill"
	CloneInto     ID = "clone into a cgroup"
	PidMax        ID = "process ids"
	Hidepid       ID = "hidepid"
	StateSpace    ID = "state disk"
	Fsync         ID = "durable writes"
	Idmap         ID = "idmapped mounts"
	SockDestroy   ID = "destroying sockets"
	Nftables      ID = "nftables"
	IngressAnswer ID = "answers at ingress"
	Conntrack     ID = "connection tracking"
	Egress        ID = "egress bounds"
	Overlay       ID = "overlay"
	Landlock      ID = "Landlock"
	IoUring       ID = "io_uring"
	Lockdown      ID = "lockdown"
	Vsock         ID = "vsock"
	KVM           ID = "KVM"
	Git           ID = "Git"
	ContainerdAPI ID = "containerd"
	Runc          ID = "runc"
	GVisor        ID = "gVisor"
	Kata          ID = "Kata"
	CNI           ID = "CNI"
)

// Need is what of a configuration asks for a feature.
type Need string

// What can need something.
const (
	// NeedAgent: every agent.
	NeedAgent Need = "every agent"
	// NeedShared: sandboxes on the node's own kernel, those of the runtimes embedded and runc.
	NeedShared     Need = "embedded, runc"
	NeedContainerd Need = "runc, gvisor, kata"
	NeedRunc       Need = "runc"
	NeedGVisor     Need = "gvisor"
	NeedKata       Need = "kata"
	// NeedImage: a root file system that is an image.
	NeedImage Need = "an image as rootfs"
	// NeedNetwork: a network mode other than none.
	NeedNetwork Need = "a network mode besides none"
	NeedCNI     Need = "network mode cni"
	// NeedNobody: nothing in this version; it is shown because people ask for it.
	NeedNobody Need = "nothing in this version"
)

// Kept is what becomes of the promises where a feature is missing.
type Kept int

const (
	// Refused: no sandbox can be had that would keep them, so none is made.
	Refused Kept = iota
	// Weaker: a weaker layer takes its place that still holds them.
	Weaker
	// Same: what takes its place is as good.
	Same
)

// Feature is a row of the table.
type Feature struct {
	ID ID
	// Since is the first version that has it: "Linux 5.12", "Git 2.39"; empty where there is none to name.
	Since string
	// For is what it is for, Promises are those that stand on it (docs/architecture.md), "P3, P9".
	For, Promises string
	By            Need
	// Stops: `serve` does not start without it, where it is needed.
	Stops bool
	Kept  Kept
	// Instead is what takes its place when it is missing.
	Instead string
	// Remedy is what an operator can do, in general; a check says it for the node's distribution.
	Remedy string
}

const (
	noSandbox = "nothing: no sandbox is made"
	noStart   = "nothing: the agent does not start"
)

// Table are all features, in the order in which a check shows them.
var Table = []Feature{
	{ID: Rights, For: "making namespaces, mounts, cgroups and id ranges", Promises: "all", By: NeedAgent, Stops: true,
		Instead: noStart, Remedy: "run the agent as root with CAP_SYS_ADMIN, in the node's own user namespace"},
	{ID: Kernel, Since: "Linux 5.12", For: "a mount never exists without its restrictions (mount_setattr)", Promises: "P9, P11", By: NeedAgent,
		Instead: noSandbox, Remedy: "boot a kernel of 5.12 or newer; 6.3 or newer is better (idmapped tmpfs)"},
	{ID: MountAPI, Since: "Linux 5.12", For: "mounts by descriptor, with their restrictions from the start (open_tree, mount_setattr, move_mount)", Promises: "P9, P11", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "boot a kernel of 5.12 or newer; in a container, a seccomp profile that allows these calls"},
	{ID: Openat2, Since: "Linux 5.6", For: "trusted code never follows a link that a command made", Promises: "P11, P12", By: NeedAgent, Stops: true,
		Instead: noStart, Remedy: "boot a newer kernel; in a container, a seccomp profile that allows openat2"},
	{ID: Pidfd, Since: "Linux 5.4", For: "knowing that the process that ended is the one that was meant", Promises: "P5", By: NeedAgent, Stops: true,
		Instead: noStart, Remedy: "boot a newer kernel; in a container, a seccomp profile that allows pidfd_open and pidfd_send_signal"},
	{ID: UserNS, Since: "Linux 3.8", For: "a command is never the node's root", Promises: "P9, P16", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_user_namespaces above 0; kernel option CONFIG_USER_NS; no seccomp profile or LSM that refuses them"},
	{ID: IDMaps, Since: "Linux 4.15", For: "each sandbox has ids of its own, receiptd, pid1 and commands included", Promises: "P2, P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "run the agent in the node's own user namespace, with CAP_SETUID and CAP_SETGID (Kubernetes: not with hostUsers: false)"},
	{ID: PidNS, Since: "Linux 3.8", For: "the boundary: nothing outlives pid1", Promises: "P3", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_pid_namespaces above 0; kernel option CONFIG_PID_NS"},
	{ID: MountNS, Since: "Linux 2.4.19", For: "what a command must not see is not there", Promises: "P9, P11", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_mnt_namespaces above 0"},
	{ID: NetNS, Since: "Linux 3.0", For: "a command reaches no listener of the node", Promises: "P10", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_net_namespaces above 0; kernel option CONFIG_NET_NS"},
	{ID: IpcNS, Since: "Linux 3.0", For: "no shared memory or queue with the node", Promises: "P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_ipc_namespaces above 0; kernel option CONFIG_IPC_NS"},
	{ID: UtsNS, Since: "Linux 3.0", For: "a host name of its own", Promises: "", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_uts_namespaces above 0; kernel option CONFIG_UTS_NS"},
	{ID: CgroupNS, Since: "Linux 4.6", For: "a command does not see where its cgroups are", Promises: "P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "sysctl user.max_cgroup_namespaces above 0; kernel option CONFIG_CGROUPS"},
	{ID: Proc, Since: "Linux 3.8", For: "a sandbox sees its own processes, and none of the node's", Promises: "P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "leave the agent's /proc unmasked: run it on the node itself, or in a privileged container"},
	{ID: NestedNS, Since: "Linux 3.8", For: "each command has namespaces of its own in its sandbox, made without rights on the node", Promises: "P3, P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "allow user namespaces to unprivileged processes: kernel.unprivileged_userns_clone = 1, kernel.apparmor_restrict_unprivileged_userns = 0 or a profile with the userns rule"},
	{ID: NestedProc, Since: "Linux 5.8", For: "a command sees its own processes, and pid1 is hidden from it (hidepid=2)", Promises: "P3, P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "leave /proc unmasked: any mount over a part of it keeps the kernel from mounting another"},
	{ID: Ptrace, Since: "", For: "holding a user namespace open while a sandbox is made with it", Promises: "P9", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "kernel.yama.ptrace_scope 0 or 1, or 2 with CAP_SYS_PTRACE; from 3 it takes a reboot"},
	{ID: Seccomp, Since: "Linux 4.14", For: "system calls that a command must not make; foreign system-call ABIs", Promises: "P9, P10", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "boot a kernel with CONFIG_SECCOMP_FILTER"},
	{ID: CgroupPids, Since: "Linux 4.3", For: "a bound on a command's processes; knowing that a cgroup is empty", Promises: "P5, P16", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "mount cgroups v2 (or the v1 controller) at /sys/fs/cgroup, writable; kernel option CONFIG_CGROUP_PIDS"},
	{ID: CgroupMemory, Since: "Linux 2.6.25", For: "a bound on a command's memory, which takes the command and not receiptd", Promises: "P16", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "boot without cgroup_disable=memory (on some boards with cgroup_enable=memory); kernel option CONFIG_MEMCG"},
	{ID: CgroupCPU, Since: "Linux 2.6.24", For: "a bound on a command's CPU time; the clock that ends it has a share of its own", Promises: "P16", By: NeedShared, Stops: true,
		Instead: noSandbox, Remedy: "mount it at /sys/fs/cgroup, writable; kernel option CONFIG_CGROUP_SCHED"},
	{ID: CgroupKill, Since: "Linux 5.14", For: "ending all of a sandbox in one step (cgroup v2 only)", Promises: "P5", By: NeedShared, Kept: Same,
		Instead: "the end of its PID namespace ends all of it; what is left in the cgroup is ended one by one until it is empty", Remedy: "boot with systemd.unified_cgroup_hierarchy=1 on 5.14 or newer"},
	{ID: PidMax, Since: "", For: "a command's bound on processes is met before the node's", Promises: "P16", By: NeedShared, Stops: true,
		Instead: noStart, Remedy: "raise kernel.pid_max, or lower limits.pids"},
	{ID: Hidepid, Since: "", For: "the agent sees the processes of its sandboxes", Promises: "P5", By: NeedShared, Stops: true,
		Instead: noStart, Remedy: "mount /proc without hidepid, or leave the agent CAP_SYS_PTRACE"},
	{ID: Idmap, Since: "Linux 5.12", For: "a command owns the worktree's files, and the node's ids stay as they are", Promises: "P11", By: NeedShared, Kept: Weaker,
		Instead: "commands run as the worktree's owner on disk; a worktree that root owns is refused", Remedy: "put it on a file system that can: ext4, xfs, btrfs, f2fs (5.12 to 5.18), tmpfs (6.3); overlay needs a very new kernel"},
	{ID: SockDestroy, Since: "Linux 4.5", For: "no socket of a command sends after its answer", Promises: "P3", By: NeedShared, Kept: Weaker,
		Instead: "the sandbox of a command that leaves an internet socket ends before its answer; where they are not even listed, every command is UNCERTAIN", Remedy: "load tcp_diag and udp_diag; kernel option CONFIG_INET_DIAG_DESTROY"},
	{ID: StateSpace, For: "the journal and the receipts have room", Promises: "P1, P6, P13", By: NeedAgent, Stops: true,
		Instead: noStart, Remedy: "free space on the disk of state_dir, or name another"},
	{ID: Fsync, For: "an intent is on disk before its command starts; a receipt before its answer", Promises: "P1, P6", By: NeedAgent, Stops: true,
		Instead: noStart, Remedy: "put state_dir on a local disk"},
	{ID: Git, Since: "Git 2.39", For: "everything about the repository is asked of Git itself", Promises: "P11, P12", By: NeedAgent,
		Instead: "nothing: no session can be made", Remedy: "install Git on the node, 2.39 or newer"},
	{ID: Nftables, Since: "Linux 5.2", For: "rules that keep a command from listeners and destinations (fib at an interface's ingress; skuid, sets with timeouts, fib, ct, nat)", Promises: "P10", By: NeedNetwork,
		Instead: "nothing: only network mode none", Remedy: "load nf_tables and its expressions; kernel options CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FIB_NETDEV, CONFIG_NF_TABLES_INET, CONFIG_NFT_FIB_INET, CONFIG_NFT_REJECT_INET, CONFIG_NFT_CT, CONFIG_NFT_MASQ"},
	{ID: IngressAnswer, Since: "Linux 5.11", For: "a connection that is refused at an interface's ingress fails at once", Promises: "P10", By: NeedNetwork, Kept: Weaker,
		Instead: "it is answered as soon as it is routed; what a CNI plugin's bridge carries from port to port without br_netfilter is dropped and hangs", Remedy: "load nft_reject_netdev; kernel option CONFIG_NFT_REJECT_NETDEV, which Debian's kernels lack"},
	{ID: Conntrack, Since: "Linux 2.6.20", For: "a sandbox does not go on with the connections of the one that had its address before it", Promises: "P3, P10", By: NeedNetwork,
		Instead: "nothing: only network mode none", Remedy: "load nf_conntrack_netlink; kernel option CONFIG_NF_CT_NETLINK"},
	{ID: Egress, Since: "Linux 5.9", For: "refusing what a sandbox may not reach before it is routed, bounds on its connections and bytes, and the log of what was refused", Promises: "P10, P16", By: NeedNetwork,
		Instead: "nothing: only network mode none", Remedy: "load nft_connlimit, nft_limit, nft_quota, nft_log and nfnetlink_log; kernel options CONFIG_NFT_CONNLIMIT, CONFIG_NFT_LIMIT, CONFIG_NFT_QUOTA, CONFIG_NFT_LOG, CONFIG_NFT_REJECT_INET, CONFIG_NETFILTER_NETLINK_LOG"},
	{ID: CNI, For: "networks as the node's clusters have them", Promises: "", By: NeedCNI,
		Instead: "nothing: only the other network modes", Remedy: "install a CNI configuration and its plugins"},
	{ID: ContainerdAPI, Since: "containerd 2.4", For: "hosts the sandboxes of runc, gVisor and Kata", Promises: "P14", By: NeedContainerd,
		Instead: "an error for each session of these runtimes, until it answers", Remedy: "start containerd, or name its socket in containerd.address"},
	{ID: Runc, Since: "runc 1.5", For: "starts the containers of the runtime runc", Promises: "P14", By: NeedRunc,
		Instead: "an error for each session of this runtime", Remedy: "install runc and containerd's shim for it, or name the program in containerd.runtimes.runc.binary"},
	{ID: GVisor, For: "another kernel answers a command's system calls", Promises: "P14", By: NeedGVisor,
		Instead: "an error for each session of this runtime", Remedy: "install runsc and containerd-shim-runsc-v1"},
	{ID: Kata, Since: "Kata 4.0", For: "a virtual machine around each sandbox", Promises: "P14", By: NeedKata,
		Instead: "an error for each session of this runtime", Remedy: "see docs/kata.md"},
	{ID: KVM, For: "runs Kata's guest", Promises: "", By: NeedKata,
		Instead: "an error for each session of this runtime", Remedy: "turn virtualisation on (on a virtual node: nested virtualisation), load kvm_intel or kvm_amd"},
	{ID: Vsock, Since: "Linux 4.8", For: "the way into Kata's guest", Promises: "", By: NeedKata,
		Instead: "an error for each session of this runtime, unless its hypervisor has sockets of its own", Remedy: "load vsock and vhost_vsock"},
	{ID: Overlay, Since: "Linux 3.18", For: "root file systems that are images, with containerd's default snapshotter", Promises: "", By: NeedImage, Kept: Weaker,
		Instead: "another snapshotter, for example native (containerd.snapshotter)", Remedy: "load overlay; kernel option CONFIG_OVERLAY_FS"},
	{ID: Landlock, Since: "Linux 5.13", For: "could be one more layer around a command", Promises: "", By: NeedNobody, Kept: Same,
		Instead: "namespaces, mounts and seccomp, which all promises stand on", Remedy: "boot with landlock in the lsm= list"},
	{ID: CloneInto, Since: "Linux 5.7", For: "could start a command in its cgroup", Promises: "", By: NeedNobody, Kept: Same,
		Instead: "the launcher joins its cgroup before it becomes the command", Remedy: "boot a newer kernel"},
	{ID: IoUring, Since: "Linux 5.1", For: "refused to commands by seccomp, whatever the node has", Promises: "", By: NeedNobody, Kept: Same,
		Instead: "nothing is needed in its place", Remedy: "nothing to do"},
	{ID: Lockdown, For: "keeps the node's root from the kernel's memory; nothing here needs that access", Promises: "", By: NeedNobody, Kept: Same,
		Instead: "nothing is needed in its place", Remedy: "nothing to do"},
}

// Find gives a feature's row.
func Find(id ID) (Feature, bool) {
	for _, f := range Table {
		if f.ID == id {
			return f, true
		}
	}
	return Feature{}, false
}

// OlderThan says whether a kernel of this release ("5.10.0-46-amd64") is older than the one that the feature came with. A test
// may do without a feature only there. A release that can't be read is not older, and neither is any for a feature without
// a version of Linux.
func (f Feature) OlderThan(release string) bool {
	var major, minor, m, n int
	if _, err := fmt.Sscanf(f.Since, "Linux %d.%d", &major, &minor); err != nil {
		return false
	}
	if _, err := fmt.Sscanf(release, "%d.%d", &m, &n); err != nil {
		return false
	}
	return m < major || m == major && n < minor
}

// Markdown is the table as docs/host-requirements.md has it.
func Markdown() string {
	var b strings.Builder
	b.WriteString("| feature | since | needed by | what it is for | promises | where it is missing | what to do |\n|---|---|---|---|---|---|---|\n")
	for _, f := range Table {
		instead := f.Instead
		switch {
		case f.Kept == Weaker:
			instead = "**degraded**, the promises hold: " + instead
		case f.Kept == Same:
			instead = "as good: " + instead
		case f.Stops:
			instead = "**`serve` does not start**; " + instead
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", f.ID, orDash(f.Since), f.By, f.For, orDash(f.Promises), instead, f.Remedy)
	}
	return b.String()
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}
