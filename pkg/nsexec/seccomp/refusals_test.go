package seccomp_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/seccomp/policy"
)

const (
	badPointer = 1
	badFD      = 0xffffffffffffffff
	cwd        = 0xffffffffffffff9c // AT_FDCWD
	high       = 1 << 32            // a bit that the kernel throws away from an int argument
	badType    = 0xf                // a socket type that no family has: EINVAL, whatever families the kernel was built with
	badFlags   = 0x7fffffff
)

// attempt is one call that a rule refuses, with arguments such that without the filter it fails otherwise or is harmless.
type attempt struct {
	rule string
	call string
	args [6]uint64
}

func args(a ...uint64) (out [6]uint64) {
	copy(out[:], a)
	return out
}

var attempts = func() []attempt {
	var out []attempt
	add := func(rule, call string, a ...uint64) { out = append(out, attempt{rule, call, args(a...)}) }

	// A namespace flag with CLONE_THREAD and without CLONE_SIGHAND is EINVAL for the kernel.
	for _, ns := range []uint64{unix.CLONE_NEWNS, unix.CLONE_NEWCGROUP, unix.CLONE_NEWUTS, unix.CLONE_NEWIPC, unix.CLONE_NEWUSER, unix.CLONE_NEWPID, unix.CLONE_NEWNET} {
		add("namespaces", "clone", ns|unix.CLONE_THREAD)
		add("namespaces", "unshare", ns|unix.CLONE_THREAD<<4|1<<31)
	}
	add("namespaces", "unshare", unix.CLONE_NEWTIME)
	add("namespaces", "unshare", unix.CLONE_NEWUTS)
	add("namespaces", "setns", badFD, 0)
	add("clone3", "clone3", badPointer, 8)
	add("core-limit", "setrlimit", unix.RLIMIT_CORE, badPointer)
	add("core-limit", "prlimit64", 0, unix.RLIMIT_CORE, badPointer, 0)
	add("core-limit", "prlimit64", 0, unix.RLIMIT_CORE|high, high, 0)
	add("mounts", "mount", badPointer, badPointer, badPointer, 0, 0)
	add("mounts", "umount2", badPointer, badFlags)
	add("mounts", "pivot_root", badPointer, badPointer)
	add("mounts", "chroot", badPointer)
	add("mounts", "open_tree", cwd, badPointer, badFlags)
	add("mounts", "open_tree_attr", cwd, badPointer, badFlags, badPointer, 0)
	add("mounts", "move_mount", badFD, badPointer, badFD, badPointer, badFlags)
	add("mounts", "mount_setattr", badFD, badPointer, badFlags, badPointer, 0)
	add("mounts", "fsopen", badPointer, badFlags)
	add("mounts", "fsconfig", badFD, badFlags, 0, 0, 0)
	add("mounts", "fsmount", badFD, badFlags, 0)
	add("mounts", "fspick", badFD, badPointer, badFlags)
	add("hostname", "sethostname", badPointer, badFD)
	add("hostname", "setdomainname", badPointer, badFD)
	add("file-handles", "name_to_handle_at", cwd, badPointer, badPointer, badPointer, badFlags)
	add("file-handles", "open_by_handle_at", badFD, badPointer, 0)
	add("keyrings", "add_key", badPointer, badPointer, 0, 0, 0)
	add("keyrings", "request_key", badPointer, badPointer, 0, 0)
	add("keyrings", "keyctl", badFlags)
	add("kernel-programs", "bpf", badFlags, badPointer, 8)
	add("kernel-programs", "perf_event_open", badPointer, 0, 0, badFD, badFlags)
	add("kernel-programs", "userfaultfd", badFlags)
	add("io_uring", "io_uring_setup", 1, badPointer)
	add("io_uring", "io_uring_enter", badFD, 0, 0, 0, 0, 0)
	add("io_uring", "io_uring_register", badFD, 0, 0, 0)
	add("openat2", "openat2", cwd, badPointer, badPointer, 24)
	for _, bits := range []uint64{0o4755, 0o2755, 0o6755, 0o4000 | high} {
		add("set-id", "chmod", badPointer, bits)
		add("set-id", "fchmod", badFD, bits)
		add("set-id", "fchmodat", cwd, badPointer, bits)
		add("set-id", "fchmodat2", cwd, badPointer, bits, 0)
		add("set-id", "mkdir", badPointer, bits)
		add("set-id", "mkdirat", cwd, badPointer, bits)
		add("set-id", "mknod", badPointer, unix.S_IFREG|bits, 0)
		add("set-id", "mknodat", cwd, badPointer, unix.S_IFREG|bits, 0)
		add("set-id", "creat", badPointer, bits)
		add("set-id", "open", badPointer, unix.O_CREAT|unix.O_WRONLY, bits)
		add("set-id", "open", badPointer, unix.O_TMPFILE|unix.O_WRONLY, bits)
		add("set-id", "openat", cwd, badPointer, unix.O_CREAT|unix.O_WRONLY, bits)
		add("set-id", "openat", cwd, badPointer, unix.O_TMPFILE|unix.O_WRONLY|high, bits)
	}
	for _, kind := range []uint64{unix.S_IFCHR, unix.S_IFBLK, unix.S_IFCHR | 0o600 | high} {
		add("devices", "mknod", badPointer, kind, 0)
		add("devices", "mknodat", cwd, badPointer, kind, 0)
	}
	add("devices", "renameat2", cwd, badPointer, cwd, badPointer, unix.RENAME_WHITEOUT)
	add("devices", "renameat2", cwd, badPointer, cwd, badPointer, unix.RENAME_WHITEOUT|unix.RENAME_NOREPLACE)
	add("xattrs", "setxattr", badPointer, badPointer, badPointer, 0, 0)
	add("xattrs", "lsetxattr", badPointer, badPointer, badPointer, 0, 0)
	add("xattrs", "fsetxattr", badFD, badPointer, badPointer, 0, 0)
	add("xattrs", "setxattrat", cwd, badPointer, badFlags, badPointer, badPointer, 0)
	for _, request := range []uint64{unix.TIOCSTI, 0x541c, unix.TIOCSETD} { // 0x541c is TIOCLINUX
		add("terminals", "ioctl", badFD, request, badPointer)
		add("terminals", "ioctl", badFD, request|high, badPointer)
	}
	for _, family := range []uint64{unix.AF_VSOCK, unix.AF_ALG, unix.AF_PACKET, unix.AF_KEY, unix.AF_BLUETOOTH, unix.AF_TIPC, unix.AF_CAN,
		unix.AF_RDS, unix.AF_X25, unix.AF_XDP, unix.AF_QIPCRTR, unix.AF_NFC, unix.AF_SMC, unix.AF_VSOCK | high} {
		add("socket-families", "socket", family, badType, 0)
		add("socket-families", "socketpair", family, badType, 0, badPointer)
	}
	add("socket-families", "socketpair", unix.AF_INET, badType, 0, badPointer)
	for _, protocol := range []uint64{unix.NETLINK_NETFILTER, unix.NETLINK_SOCK_DIAG, unix.NETLINK_AUDIT, unix.NETLINK_KOBJECT_UEVENT,
		unix.NETLINK_GENERIC, unix.NETLINK_XFRM, unix.NETLINK_CRYPTO, unix.NETLINK_NETFILTER | high} {
		add("netlink", "socket", unix.AF_NETLINK, badType, protocol)
		add("netlink", "socket", unix.AF_NETLINK|high, badType, protocol)
	}
	for _, protocol := range []uint64{unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_UDPLITE, unix.IPPROTO_L2TP, unix.IPPROTO_MPTCP, unix.IPPROTO_RAW, unix.IPPROTO_SCTP | high} {
		add("protocols", "socket", unix.AF_INET, badType, protocol)
		add("protocols", "socket", unix.AF_INET6|high, badType, protocol)
	}
	add("fanotify", "fanotify_init", badFlags, 0)
	add("other-processes", "kcmp", 0, 0, badFlags, 0, 0)
	add("other-processes", "pidfd_getfd", badFD, 0, 0)
	add("other-processes", "process_madvise", badFD, badPointer, 1, badFlags, badFlags)
	add("memory-policy", "mbind", badPointer, 1, badFlags, badPointer, 0, badFlags)
	add("memory-policy", "set_mempolicy", badFlags, badPointer, 0)
	add("memory-policy", "set_mempolicy_home_node", badPointer, 0, badFlags, badFlags)
	add("memory-policy", "migrate_pages", 0, badFD, badPointer, badPointer)
	add("memory-policy", "move_pages", 0, 1, badPointer, badPointer, badPointer, badFlags)
	add("modify_ldt", "modify_ldt", 0, 0, 0)
	add("personality", "personality", 0x0400000) // READ_IMPLIES_EXEC
	add("personality", "personality", 0x0100000) // MMAP_PAGE_ZERO
	add("personality", "personality", 0x0400000|high)
	add("personality", "personality", 0xfffffffe)
	add("clock", "clock_settime", badFlags, badPointer)
	add("clock", "settimeofday", badPointer, 0)
	add("clock", "adjtimex", badPointer)
	add("clock", "clock_adjtime", badFlags, badPointer)
	add("machine", "reboot", 0, 0, 0, 0)
	add("machine", "kexec_load", 0, badFD, badPointer, badFlags)
	add("machine", "kexec_file_load", badFD, badFD, 0, 0, badFlags)
	add("machine", "init_module", badPointer, 1, badPointer)
	add("machine", "finit_module", badFD, badPointer, badFlags)
	add("machine", "delete_module", badPointer, 0)
	add("machine", "swapon", badPointer, 0)
	add("machine", "swapoff", badPointer)
	add("machine", "acct", badPointer)
	add("machine", "quotactl", badFlags, badPointer, 0, badPointer)
	add("machine", "quotactl_fd", badFD, badFlags, 0, badPointer)
	add("machine", "syslog", badFlags, badPointer, 1)
	add("machine", "iopl", badFlags)
	add("machine", "ioperm", badFlags, 1, 1)
	add("machine", "vhangup")
	return out
}()

// native are the calls that must go on working, with the error (0: success) that the kernel itself gives.
var native = []struct {
	call string
	args [6]uint64
	want unix.Errno
}{
	{"getpid", args(), 0},
	{"prlimit64", args(0, unix.RLIMIT_CORE, 0, badPointer), unix.EFAULT},
	{"prlimit64", args(0, unix.RLIMIT_NOFILE, badPointer, 0), unix.EFAULT},
	{"unshare", args(0), 0},
	{"unshare", args(unix.CLONE_FILES), 0},
	{"clone", args(unix.CLONE_THREAD), unix.EINVAL},
	{"socket", args(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0), 0},
	{"socket", args(unix.AF_INET, unix.SOCK_STREAM, 0), 0},
	{"socket", args(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP), 0},
	{"socket", args(unix.AF_INET6, badType, unix.IPPROTO_UDP), unix.EINVAL},
	{"socket", args(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE), 0},
	{"socketpair", args(unix.AF_UNIX, unix.SOCK_STREAM, 0, badPointer), unix.EFAULT},
	{"chmod", args(badPointer, 0o1777), unix.EFAULT},
	{"fchmodat", args(cwd, badPointer, 0o644), unix.EFAULT},
	{"open", args(badPointer, unix.O_CREAT, 0o644), unix.EFAULT},
	{"open", args(badPointer, unix.O_RDONLY, 0o6777), unix.EFAULT},
	{"openat", args(cwd, badPointer, unix.O_RDONLY, 0o6777), unix.EFAULT},
	{"openat", args(cwd, badPointer, unix.O_DIRECTORY, 0o6777), unix.EFAULT},
	{"mknod", args(badPointer, unix.S_IFIFO|0o600, 0), unix.EFAULT},
	{"mknodat", args(cwd, badPointer, unix.S_IFIFO|0o600, 0), unix.EFAULT},
	{"renameat2", args(cwd, badPointer, cwd, badPointer, unix.RENAME_NOREPLACE), unix.EFAULT},
	{"ioctl", args(badFD, unix.TCGETS, 0), unix.EBADF},
	{"personality", args(0xffffffff), 0},
	{"personality", args(0x0040000), 0}, // ADDR_NO_RANDOMIZE
	{"ptrace", args(unix.PTRACE_TRACEME), 0},
	{"process_vm_readv", args(0, badPointer, 1, badPointer, 1, 1), unix.EINVAL},
	{"landlock_create_ruleset", args(badPointer, 1, 0), unix.EINVAL},
	{"seccomp", args(badFlags, 0, 0), unix.EINVAL},
	{"memfd_create", args(badPointer, 0), unix.EFAULT},
	{"inotify_init1", args(0), 0},
	{"getxattr", args(badPointer, badPointer, 0, 0), unix.EFAULT},
}

func arch(t *testing.T) policy.Arch {
	t.Helper()
	for _, a := range policy.Arches() {
		if a.GOARCH == runtime.GOARCH {
			return a
		}
	}
	t.Fatalf("there is no filter for %s", runtime.GOARCH)
	return policy.Arch{}
}

var variants = map[string]policy.Policy{"command": policy.Command(false), "nested": policy.Command(true)}

// refusedIn gives the attempts that a variant refuses on this architecture, with their call and the rule's answer.
func refusedIn(t *testing.T, variant string) (tried []attempt, calls []rawCall, want []unix.Errno) {
	t.Helper()
	a, p := arch(t), variants[variant]
	for _, at := range attempts {
		nr, ok := a.Calls[at.call]
		if !ok || p.RuleFor(a, nr, at.args) == "" {
			continue
		}
		require.Equal(t, at.rule, p.RuleFor(a, nr, at.args), "%s %x", at.call, at.args)
		tried = append(tried, at)
		calls = append(calls, rawCall{nr, at.args})
		want = append(want, unix.Errno(p.Decide(a, a.Audit, nr, at.args).Errno()))
	}
	return tried, calls, want
}

func TestEveryRuleIsReachedByAnAttempt(t *testing.T) {
	a := arch(t)
	for variant, p := range variants {
		reached := map[string]bool{}
		tried, _, _ := refusedIn(t, variant)
		for _, at := range tried {
			reached[at.rule+" "+at.call] = true
		}
		for _, r := range p.Rules {
			for _, c := range r.Calls {
				if _, ok := a.Calls[c.Name]; ok {
					require.True(t, reached[r.ID+" "+c.Name], "%s: nobody needs rule %s for %s: add an attempt or drop it", variant, r.ID, c.Name)
				}
			}
		}
	}
}

func TestEveryAttemptIsRefusedByOneVariant(t *testing.T) {
	a := arch(t)
	for _, at := range attempts {
		nr, ok := a.Calls[at.call]
		if !ok {
			continue
		}
		found := policy.Command(false).RuleFor(a, nr, at.args) + policy.Command(true).RuleFor(a, nr, at.args)
		require.NotEmpty(t, found, "%s %x", at.call, at.args)
	}
}

func TestTheKernelRefusesEveryAttemptWithTheErrorOfItsRule(t *testing.T) {
	for variant := range variants {
		t.Run(variant, func(t *testing.T) {
			tried, calls, want := refusedIn(t, variant)
			for i, got := range errnosOf(t, []string{variant}, calls...) {
				require.Equal(t, want[i], got, "%s: %s %x: %v", tried[i].rule, tried[i].call, tried[i].args, got)
			}
		})
	}
}

func TestUnderTheContainersFilterTheRefusalsAnswerIsStillTheRules(t *testing.T) {
	tried, calls, want := refusedIn(t, "command")
	for i, got := range errnosOf(t, []string{"container", "command"}, calls...) {
		require.Equal(t, want[i], got, "%s: %s %x", tried[i].rule, tried[i].call, tried[i].args)
	}
}

func TestWithoutTheFilterTheKernelAnswersEveryAttemptOtherwise(t *testing.T) {
	testkit.Need(t, testkit.Root)
	seen := map[rawCall]bool{}
	for variant := range variants {
		tried, calls, want := refusedIn(t, variant)
		for i, c := range calls {
			if seen[c] {
				continue
			}
			seen[c] = true
			got := errnosOf(t, nil, c)[0]
			if got == unix.ENOSYS && want[i] == unix.ENOSYS {
				t.Logf("%s: this kernel lacks the call by itself", tried[i].call)
				continue
			}
			require.NotEqual(t, want[i], got, "%s: %s %x", tried[i].rule, tried[i].call, tried[i].args)
		}
	}
}

func TestOrdinaryCallsAreLeftToTheKernel(t *testing.T) {
	a := arch(t)
	lacks := map[string]bool{} // calls that this kernel is too old for
	for _, filters := range [][]string{nil, {"command"}, {"nested"}, {"container"}, {"container", "command"}, {"container", "nested"}} {
		for _, n := range native {
			nr, ok := a.Calls[n.call]
			if filters == nil && ok && errnosOf(t, nil, rawCall{nr, n.args})[0] == unix.ENOSYS {
				t.Logf("%s: this kernel lacks the call by itself", n.call)
				lacks[n.call] = true
			}
			if !ok || lacks[n.call] {
				continue
			}
			got := errnosOf(t, filters, rawCall{nr, n.args})[0]
			require.Equal(t, n.want, got, "%v: %s %x: %v", filters, n.call, n.args, got)
		}
	}
}

func TestWithNestedNamespacesTheLiftedCallsReachTheKernel(t *testing.T) {
	a, lifted := arch(t), map[string]bool{"namespaces": true, "mounts": true, "hostname": true}
	for _, at := range attempts {
		nr, ok := a.Calls[at.call]
		if !ok || !lifted[at.rule] {
			continue
		}
		got := errnosOf(t, []string{"container", "nested"}, rawCall{nr, at.args})[0]
		require.NotEqual(t, unix.EPERM, got, "%s %x", at.call, at.args)
	}
}

func TestACallThatTheContainersListLacksDoesNotExist(t *testing.T) {
	a := arch(t)
	for _, name := range []string{"kexec_load", "bpf", "io_uring_setup", "add_key", "file_setattr", "rseq_slice_yield"} {
		nr, ok := a.Calls[name]
		require.True(t, ok, name)
		require.Equal(t, unix.ENOSYS, errnosOf(t, []string{"container"}, rawCall{nr, args()})[0], name)
	}
	require.Equal(t, unix.ENOSYS, errnosOf(t, []string{"container"}, rawCall{1023, args()})[0], "a call of a later kernel")
	require.Equal(t, unix.EAFNOSUPPORT, errnosOf(t, []string{"container"}, rawCall{a.Calls["socket"], args(unix.AF_VSOCK, badType)})[0])
}
