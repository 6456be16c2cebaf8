package kernel

import (
	"regexp"
	"strings"

	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
	"github.com/sandbox-agent/sandbox-agent/tests/kernel/seen"
)

// suite is a package whose tests run in the guests.
type suite struct {
	pkg string
	// run chooses the part of every run (go test -run): a guest is ten times slower than the machine.
	run string
	// once chooses what of that is tried on one kernel only (thorough) where nobody asked for certain kernels: it takes the longest,
	// and a shorter test of the same promise is tried on all. Empty: none.
	once string
	// what of the kernel it tries.
	what string
	// agent: it starts the agent, which refuses older kernels than tooOld.before.
	agent bool
	// onlyFull: it takes minutes in a guest, and is left to -full.
	onlyFull bool
}

// suites, in the order in which a guest runs them. Of each promise that a kernel could break every run has the attack that is most
// direct; variants of it, races and exhaustion take minutes in a guest and are left to -full.
var suites = []suite{
	{"pkg/mounts", `^TestP11(SealsAre|ASealCantBeUnm)`, `^TestP11ASealCantBeUnm`, "seals, and mounts by descriptor", false, false},
	{"pkg/nsexec", `^Test(P2AnEnd|P3N|P9|P11ABroken|P11ASealBroken|ThePosture|Hole10ASocketThatO|Hole10WhatADead)`, `^TestHole10WhatADead`, "the boundary, pid1 and the posture of both", false, false},
	{"pkg/nsexec/seccomp", `^TestTheKernelRefuses`, "", "every rule of the filters, as this kernel answers it", false, false},
	{"internal/receiptd", `^TestP(2|6AnExec|6AnOlder)`, "", "commands, receipts and connections", false, false},
	{"internal/runtime/embedded", `^Test(P5OnCgroupV2|PostureOf)`, "", "sandboxes, their evidence and their limits", false, false},
	{"internal/nodecheck", `^Test(EachProbeSaysNo|ARestrictionIsSeen|Idmapped)`, "", "the probes of the node", false, true},
	{"tests/escape", `^Test(P3N|P9ACommandCannotSee|P10|P11ACommandW|Hole1ACommandMakesNoSet|Hole3|Hole6|Hole11)`, "", "the agent itself, attacked over its API", true, true},
	{"internal/network", `^TestP10`, "", "the rules of networks", true, true},
	{"tests/network", `^TestP10(NothingBeside|ASandboxShows)`, "", "networks of the agent's sandboxes, attacked from inside", true, true},
	{"pkg/kata", `^Test(KVMIsTried|VsockIs)`, "", "a KVM that runs and a vsock that connects", false, true},
}

// thorough is the kernel on which the whole part of every run is tried.
const thorough = "6.12-cloud"

// guestLacks are the reasons for which a test may be skipped in a guest. Any other skip is a failure: it would be a hole in the
// matrix.
var guestLacks = []struct{ reason, why string }{
	{`needs (gcc|npm|cpio|busybox|gdb|strace|runc|crun|bwrap|go|jq)\b`, "a guest has the programs of a small node, and no compiler"},
	{`needs a container runtime`, "a guest has no containerd, and the plugins of CNI where the machine has them"},
	{`needs cgroup v1`, "guests have cgroup v2; one of the variations has v1"},
	{`needs a Git that has the reftable format`, "the machine's Git is the guest's"},
	{`came with Linux [0-9]`, "the kernel is older than the feature table says (internal/nodecheck/feature)"},
	{`no modules to load \(an emulated guest\)`, "a guest has no modules but those that it was given"},
	{`needs (the )?Internet|no network`, "guests have no network"},
	{`SANDBOX_TEST_(LONG|RUNTIME)`, "asked for by hand only"},
	{`needs the source|no sources|needs Go`, "a guest has no Go"},
}

var guestLacksRE = func() *regexp.Regexp {
	var all []string
	for _, l := range guestLacks {
		all = append(all, l.reason)
	}
	return regexp.MustCompile(strings.Join(all, "|"))
}()

// outcome is what becomes of a node.
type outcome string

const (
	// works: a session is made, and no attack of a command's reaches anything.
	works outcome = "works"
	// weaker: the same, and the check says DEGRADED with what takes the place of what is missing.
	weaker outcome = "works, with a weaker layer"
	// refused: no sandbox is made, and check and agent say what to do.
	refused outcome = "refused"
)

// expectation is what is expected of a variation on some kernels.
type expectation struct {
	// before is the first kernel that it does not hold for any more, "6.3"; empty: it holds for all.
	before string
	outcome
	// feature is the line of the check that says so, and says what is a part of its remedy. For works: a line that is a note, or
	// empty.
	feature nodecheck.ID
	says    string
	// debians: it is so for what Debian's kernels are built without.
	debians bool
}

// variation is a node on which something is otherwise.
type variation struct {
	seen.Change
	// boot is more of the kernel's command line, cgroupV1 and without (modules) are of the boot too. With none of them it is a
	// change that is made and taken back in one guest.
	boot     string
	cgroupV1 bool
	// every: it is tried on each kernel of every run, and the others with -all.
	every   bool
	without []string
	expect  []expectation
}

func (v variation) ofBoot() bool { return v.boot != "" || v.cgroupV1 || v.without != nil }

// tooOld is what every node with a kernel from before Linux 5.12 is, whatever else it has.
var tooOld = expectation{before: "5.12", outcome: refused, feature: nodecheck.MountAPI, says: "boot a kernel of 5.12 or newer"}

// variations, in the order in which a guest tries them: the last one can't be taken back.
var variations = []variation{
	{Change: seen.Change{Name: "as it is"}, every: true, expect: []expectation{{outcome: works}}},
	{Change: seen.Change{Name: "user.max_user_namespaces = 0", Sysctls: [][2]string{{"user.max_user_namespaces", "0"}}}, every: true,
		expect: []expectation{{outcome: refused, feature: nodecheck.UserNS, says: "user.max_user_namespaces"}}},
	{Change: seen.Change{Name: "kernel.unprivileged_userns_clone = 0", Sysctls: [][2]string{{"kernel.unprivileged_userns_clone", "0"}}}, every: true,
		expect: []expectation{{outcome: refused, feature: nodecheck.NestedNS, says: "kernel.unprivileged_userns_clone=1"}}},
	{Change: seen.Change{Name: "kernel.pid_max = 1400", Sysctls: [][2]string{{"kernel.pid_max", "1400"}}},
		expect: []expectation{{outcome: refused, feature: nodecheck.PidMax, says: "kernel.pid_max"}}},
	{Change: seen.Change{Name: "kernel.pid_max = 1400, limits.pids = 256", Sysctls: [][2]string{{"kernel.pid_max", "1400"}}, Config: "limits: {pids: 256}"},
		expect: []expectation{{outcome: works}}},
	{Change: seen.Change{Name: "/proc with hidepid=2", Hidepid: "2"}, expect: []expectation{{outcome: works}}},
	{Change: seen.Change{Name: "/proc with hidepid=2, no CAP_SYS_PTRACE", Hidepid: "2", Without: "sys_ptrace"},
		expect: []expectation{{outcome: refused, feature: nodecheck.Hidepid, says: "hidepid"}}},
	{Change: seen.Change{Name: "no seccomp", NoSeccomp: true},
		expect: []expectation{{outcome: refused, feature: nodecheck.Seccomp, says: "CONFIG_SECCOMP_FILTER"}}},
	{Change: seen.Change{Name: "kernel.yama.ptrace_scope = 2", Sysctls: [][2]string{{"kernel.yama.ptrace_scope", "2"}}},
		expect: []expectation{{outcome: works}}},
	{Change: seen.Change{Name: "kernel.yama.ptrace_scope = 2, no CAP_SYS_PTRACE", Sysctls: [][2]string{{"kernel.yama.ptrace_scope", "2"}}, Without: "sys_ptrace"},
		expect: []expectation{{outcome: refused, feature: nodecheck.Ptrace, says: "CAP_SYS_PTRACE"}}},
	{Change: seen.Change{Name: "kernel.io_uring_disabled = 2", Sysctls: [][2]string{{"kernel.io_uring_disabled", "2"}}},
		expect: []expectation{{outcome: works}}},
	{Change: seen.Change{Name: "workspaces on tmpfs", Tmpfs: true},
		expect: []expectation{{before: "6.3", outcome: weaker, feature: nodecheck.Idmap, says: "6.3"}, {outcome: works}}},
	{Change: seen.Change{Name: "network mode bridge", Config: "network: {default: bridge, allowed: [none, bridge]}"},
		expect: []expectation{{outcome: weaker, feature: nodecheck.IngressAnswer, says: "nft_reject_netdev", debians: true}}},
	{Change: seen.Change{Name: "no Landlock"}, boot: "lsm=capability,yama",
		expect: []expectation{{outcome: works, feature: nodecheck.Landlock}}},
	{Change: seen.Change{Name: "lockdown=confidentiality"}, boot: "lockdown=confidentiality", expect: []expectation{{outcome: works}}},
	{Change: seen.Change{Name: "cgroup_disable=memory"}, boot: "cgroup_disable=memory",
		expect: []expectation{{outcome: refused, feature: nodecheck.CgroupMemory, says: "cgroup_disable=memory"}}},
	{Change: seen.Change{Name: "cgroup v1"}, cgroupV1: true,
		expect: []expectation{{before: "6.12", outcome: works, feature: nodecheck.CgroupKill}, {outcome: refused, feature: nodecheck.CgroupMemory, says: "cgroup v1"}}},
	{Change: seen.Change{Name: "no overlay"}, without: []string{"overlay"}, expect: []expectation{{outcome: works, feature: nodecheck.Overlay}}},
	{Change: seen.Change{Name: "no tcp_diag, no udp_diag"}, without: []string{"tcp_diag", "udp_diag"},
		expect: []expectation{{outcome: weaker, feature: nodecheck.SockDestroy, says: "tcp_diag"}}},
	{Change: seen.Change{Name: "kernel.yama.ptrace_scope = 3", Sysctls: [][2]string{{"kernel.yama.ptrace_scope", "3"}}},
		expect: []expectation{{outcome: refused, feature: nodecheck.Ptrace, says: "kernel.yama.ptrace_scope"}}},
}

// notRun are variations that people ask for and that no kernel here can have.
var notRun = []struct{ name, why string }{
	{"AppArmor's restriction of user namespaces", "it is Ubuntu's own, and these are Debian's kernels"},
}
