package nodecheck

import (
	"embed"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// recordings are os-release files as these distributions have them.
//
//go:embed testdata/os-release
var recordings embed.FS

func recorded(name string) string {
	b, err := recordings.ReadFile("testdata/os-release/" + name)
	if err != nil {
		panic(err)
	}
	return string(b)
}

var (
	bookworm = recorded("debian-12")
	noble    = recorded("ubuntu-24.04")
	rhel9    = recorded("rhel-9")
	rocky    = recorded("rocky-9")
	talosOS  = recorded("talos")
	bottle   = recorded("bottlerocket")
	flat     = recorded("flatcar")
)

// alpine is a distribution that nothing is known of.
const alpine = "ID=alpine\n"

func TestARecordedDistributionIsKnownByItsFile(t *testing.T) {
	for text, want := range map[string]struct {
		family family
		name   string
	}{
		bookworm: {debian, "Debian GNU/Linux 12 (bookworm)"}, noble: {debian, "Ubuntu 24.04.4 LTS"}, rhel9: {rhel, "Red Hat Enterprise Linux 9.4 (Plow)"},
		rocky: {rhel, "Rocky Linux 9.6 (Blue Onyx)"}, talosOS: {talos, "Talos (v1.13.7)"}, bottle: {bottlerocket, "Bottlerocket OS 1.47.0 (aws-k8s-1.34)"},
		flat: {flatcar, "Flatcar Container Linux by Kinvolk 3227.2.4 (Oklo)"}, alpine: {anyLinux, ""},
	} {
		o := ParseOSRelease(text)
		require.Equal(t, want.family, o.family(), want.name)
		require.Equal(t, want.name, o.Name)
	}
}

// healthy are the facts of a node that has everything.
func healthy() Facts {
	f := Facts{Node: Node{
		Kernel: "6.12.0-1-amd64", OS: ParseOSRelease(bookworm), SysAdmin: true, NetAdmin: true, SysPtrace: true,
		Sysctls: map[string]string{"kernel.pid_max": "4194304", "kernel.yama.ptrace_scope": "1", "user.max_user_namespaces": "30000"}, Lockdown: "none",
		Cgroups: Cgroups{V2: true, Kill: Yes, Where: map[string]string{"pids": "/sys/fs/cgroup", "memory": "/sys/fs/cgroup", "cpu": "/sys/fs/cgroup"}},
	}}
	derived := derive(f, Needs{Pids: 512})
	for _, row := range Table {
		if _, ok := derived[row.ID]; !ok {
			f.add(row.ID, yes("seen"))
		}
	}
	return f
}

func needs(t *testing.T, change func(c *config.Config), asked ...string) Needs {
	t.Helper()
	c := config.Default(8 << 30)
	if change != nil {
		change(&c)
	}
	n, err := NeedsOf(&c, asked)
	require.NoError(t, err)
	return n
}

func (r Report) of(id ID) Line {
	for _, l := range r.Lines {
		if l.Feature.ID == id {
			return l
		}
	}
	return Line{}
}

func TestANodeThatHasEverythingIsWell(t *testing.T) {
	r := Judge(healthy(), needs(t, nil, Runtimes...))
	require.Len(t, r.Lines, len(Table), "a line for each feature")
	for _, l := range r.Lines {
		require.Equal(t, OK, l.Verdict, l.Feature.ID)
		require.Empty(t, l.Remedy)
		require.Equal(t, 1, strings.Count(Text(l.Proto()), "\n"), "one line")
	}
	require.Zero(t, ExitCode(r.Proto().GetVerdict()))
	require.NoError(t, r.Refusal())
}

func TestOnlyWhatIsConfiguredOrAskedForIsMissed(t *testing.T) {
	lacks := func(ids ...ID) Facts {
		f := healthy()
		for _, id := range ids {
			f.Seen[id] = []Fact{nof("not there")}
		}
		return f
	}
	allow := func(runtimes ...string) func(c *config.Config) {
		return func(c *config.Config) { c.Runtime.Allowed = runtimes }
	}
	network := func(mode string) func(c *config.Config) {
		return func(c *config.Config) { c.Network.Allowed = []string{"none", mode} }
	}
	for name, c := range map[string]struct {
		lacks   []ID
		needs   Needs
		want    Verdict
		code    int
		refuses bool
	}{
		"gVisor, not configured":           {[]ID{GVisor}, needs(t, nil), Note, 0, false},
		"gVisor, asked for":                {[]ID{GVisor}, needs(t, nil, "gvisor"), Missing, 2, false},
		"gVisor, allowed":                  {[]ID{GVisor}, needs(t, allow("embedded", "gvisor")), Missing, 2, false},
		"containerd, not configured":       {[]ID{ContainerdAPI}, needs(t, nil), Note, 0, false},
		"containerd, for runc":             {[]ID{ContainerdAPI}, needs(t, allow("runc")), Missing, 2, false},
		"KVM, for Kata":                    {[]ID{KVM}, needs(t, nil, "kata"), Missing, 2, false},
		"nftables, no network":             {[]ID{Nftables}, needs(t, nil), Note, 0, false},
		"nftables, bridge":                 {[]ID{Nftables}, needs(t, network("bridge")), Missing, 2, false},
		"egress bounds, no network":        {[]ID{Egress}, needs(t, nil), Note, 0, false},
		"egress bounds, bridge":            {[]ID{Egress}, needs(t, network("bridge")), Missing, 2, false},
		"connection tracking, cni":         {[]ID{Conntrack}, needs(t, network("cni")), Missing, 2, false},
		"CNI, bridge":                      {[]ID{CNI}, needs(t, network("bridge")), Note, 0, false},
		"CNI, cni":                         {[]ID{CNI}, needs(t, network("cni")), Missing, 2, false},
		"overlay, the node's files":        {[]ID{Overlay}, needs(t, nil), Note, 0, false},
		"overlay, an image":                {[]ID{Overlay}, needs(t, func(c *config.Config) { c.Rootfs = "registry.example/tools@sha256:" + strings.Repeat("0", 64) }), Degraded, 1, false},
		"user namespaces, embedded":        {[]ID{UserNS}, needs(t, nil), Missing, 2, true},
		"user namespaces, Kata alone":      {[]ID{UserNS}, needs(t, allow("kata")), Note, 0, false},
		"pidfd, whatever the runtime":      {[]ID{Pidfd}, needs(t, allow("kata")), Missing, 2, true},
		"idmapped mounts":                  {[]ID{Idmap}, needs(t, nil), Degraded, 1, false},
		"destroying sockets":               {[]ID{SockDestroy}, needs(t, nil), Degraded, 1, false},
		"Landlock":                         {[]ID{Landlock}, needs(t, nil), Note, 0, false},
		"a disk that does not sync":        {[]ID{Fsync}, needs(t, nil), Missing, 2, true},
		"degraded and missing is missing":  {[]ID{Idmap, Git}, needs(t, nil), Degraded, 2, false},
		"Git, without which no promise is": {[]ID{Git}, needs(t, nil), Missing, 2, false},
	} {
		r := Judge(lacks(c.lacks...), c.needs)
		l := r.of(c.lacks[0])
		require.Equal(t, c.want, l.Verdict, name)
		require.Equal(t, c.code, ExitCode(r.Proto().GetVerdict()), name)
		require.NotEmpty(t, l.Remedy, name)
		require.Equal(t, c.refuses, r.Refusal() != nil, name)
	}
}

func TestWhatCouldNotBeLookedAtIsNeitherWellNorMissing(t *testing.T) {
	f := healthy()
	f.Node.UID = 1000
	f.Seen[NestedNS] = []Fact{unsure("only root can try it")}
	f.Seen[GVisor] = []Fact{unsure("what is that")}
	r := Judge(f, needs(t, nil))
	require.Equal(t, Unknown, r.of(NestedNS).Verdict)
	require.Equal(t, Unknown, r.of(Rights).Verdict)
	require.Equal(t, "run this as root", r.of(NestedNS).Remedy)
	require.Equal(t, Note, r.of(GVisor).Verdict, "nobody needs it")
	require.Equal(t, 1, ExitCode(r.Proto().GetVerdict()))
	require.NoError(t, r.Refusal(), "a doubt is no reason to refuse")
}

// TestEachDistributionGetsItsOwnRemedy has what these distributions and Kubernetes are known to switch off.
func TestEachDistributionGetsItsOwnRemedy(t *testing.T) {
	limit := func(id ID, name string) func(f *Facts) {
		return func(f *Facts) {
			f.Node.Sysctls[name] = "0"
			f.Seen[id] = []Fact{no(unix.ENOSPC)}
		}
	}
	refused := func(id ID, e unix.Errno) func(f *Facts) { return func(f *Facts) { f.Seen[id] = []Fact{no(e)} } }
	both := func(all ...func(f *Facts)) func(f *Facts) {
		return func(f *Facts) {
			for _, change := range all {
				change(f)
			}
		}
	}
	pod := func(f *Facts) { f.Node.Kubernetes = true }
	filtered := func(f *Facts) { f.Node.Filtered = true }
	masked := func(f *Facts) { f.Node.Masked = []string{"/proc/kcore", "/proc/acpi"} }
	without := func(controller string) func(f *Facts) {
		return func(f *Facts) { delete(f.Node.Cgroups.Where, controller) }
	}
	sysctl := func(name, value string) func(f *Facts) { return func(f *Facts) { f.Node.Sysctls[name] = value } }
	for name, c := range map[string]struct {
		os      string
		change  func(f *Facts)
		feature ID
		want    Verdict
		says    []string
	}{
		"RHEL 7's default, and a STIG of RHEL 9": {rhel9, limit(UserNS, "user.max_user_namespaces"), UserNS, Missing,
			[]string{"sysctl -w user.max_user_namespaces=15000", "/etc/sysctl.d/"}},
		"Talos' hardening": {talosOS, limit(UserNS, "user.max_user_namespaces"), UserNS, Missing,
			[]string{"talosctl patch machineconfig", `"sysctls":{"user.max_user_namespaces":"15000"}`}},
		"Bottlerocket's default": {bottle, limit(UserNS, "user.max_user_namespaces"), UserNS, Missing,
			[]string{"apiclient", `[settings.kernel.sysctl] "user.max_user_namespaces" = "15000"`}},
		"Flatcar": {flat, limit(PidNS, "user.max_pid_namespaces"), PidNS, Missing, []string{"sysctl -w user.max_pid_namespaces=15000", "Butane"}},
		"no user namespaces: what is made within one": {bookworm, both(limit(UserNS, "user.max_user_namespaces"), refused(PidNS, unix.ENOSPC)), PidNS, Missing,
			[]string{"sysctl -w user.max_user_namespaces=15000"}},
		"no user namespaces: their maps": {bookworm, both(limit(UserNS, "user.max_user_namespaces"), refused(IDMaps, unix.ENOSPC)), IDMaps, Missing,
			[]string{"sysctl -w user.max_user_namespaces=15000"}},
		"as many user namespaces as there may be": {bookworm, refused(IDMaps, unix.ENOSPC), IDMaps, Missing, []string{"sysctl -w user.max_user_namespaces=15000"}},
		"Debian's old switch": {bookworm, both(sysctl(debianSwitch, "0"), refused(NestedNS, unix.EPERM)), NestedNS, Missing,
			[]string{"sysctl -w kernel.unprivileged_userns_clone=1"}},
		"Ubuntu's AppArmor": {noble, both(sysctl(apparmorSwitch, "1"), refused(NestedNS, unix.EACCES)), NestedNS, Missing,
			[]string{"userns", "apparmor_parser", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"}},
		"Ubuntu's AppArmor, which lets a namespace be made and takes its rights": {noble, both(sysctl(apparmorSwitch, "1"), refused(NestedProc, unix.EACCES)), NestedProc, Missing,
			[]string{"userns", "apparmor_parser", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"}},
		"Ubuntu's AppArmor, where it does not reach receiptd": {noble, sysctl(apparmorSwitch, "1"), NestedNS, OK, nil},
		"a kernel without PID namespaces":                     {alpine, refused(PidNS, unix.EINVAL), PidNS, Missing, []string{"boot a kernel", "CONFIG_PID_NS"}},
		"SELinux":                                             {rocky, refused(NestedNS, unix.EACCES), NestedNS, Missing, []string{"audit log"}},
		"a pod under RuntimeDefault": {bookworm, both(pod, filtered, refused(UserNS, unix.EPERM)), UserNS, Missing,
			[]string{"privileged: true", "seccompProfile: {type: Unconfined}"}},
		"a container of Docker": {bookworm, both(filtered, refused(MountAPI, unix.ENOSYS)), MountAPI, Missing, []string{"seccomp=unconfined"}},
		"the same on Linux 5.10": {bookworm, both(filtered, func(f *Facts) { f.Node.Kernel = "5.10.0-46-cloud-amd64" }, refused(MountAPI, unix.ENOSYS)), MountAPI, Missing,
			[]string{"boot a kernel of 5.12 or newer"}},
		"a pod with hostUsers: false": {bookworm, both(pod, func(f *Facts) { f.Node.InUserns = true }, refused(IDMaps, unix.EPERM)), IDMaps, Missing,
			[]string{"without hostUsers: false"}},
		"the same, as a right":  {bookworm, func(f *Facts) { f.Node.InUserns = true }, Rights, Missing, []string{"own user namespace"}},
		"a pod's masked /proc":  {bookworm, both(pod, masked, refused(Proc, unix.EPERM)), Proc, Missing, []string{"/proc/kcore, /proc/acpi", "privileged: true", "procMount: Unmasked"}},
		"a unit's masked /proc": {bookworm, both(masked, refused(NestedProc, unix.EPERM)), NestedProc, Missing, []string{"ProtectKernelTunables"}},
		"Linux 5.10":            {bookworm, both(func(f *Facts) { f.Node.Kernel = "5.10.0-46-cloud-amd64" }, refused(MountAPI, unix.ENOSYS)), Kernel, Missing, []string{"5.12 or newer"}},
		"cgroup v1 on a kernel without its memory controller": {bookworm, both(without("memory"), func(f *Facts) { f.Node.Cgroups.V1, f.Node.Cgroups.V2 = true, false }), CgroupMemory, Missing,
			[]string{"systemd.unified_cgroup_hierarchy=1", "update-grub"}},
		"no cgroups":                        {bookworm, both(without("pids"), func(f *Facts) { f.Node.Cgroups.V2 = false }), CgroupPids, Missing, []string{"mount -t cgroup2 cgroup2 /sys/fs/cgroup"}},
		"hidepid in a pod":                  {bookworm, both(pod, func(f *Facts) { f.Node.Hidepid, f.Node.SysPtrace = "2", false }), Hidepid, Missing, []string{"privileged: true"}},
		"a pod without rights":              {bookworm, both(pod, func(f *Facts) { f.Node.SysAdmin = false }), Rights, Missing, []string{"privileged: true"}},
		"a pod without containerd's folder": {bookworm, both(pod, refused(ContainerdAPI, unix.ENOENT)), ContainerdAPI, Note, []string{"/run/containerd into the agent's pod"}},
		"a pod without the node's network":  {bookworm, both(pod, refused(CNI, unix.ENOENT)), CNI, Note, []string{"daemonset/components/network"}},
		"what RHEL brought back":            {rhel9, func(f *Facts) { f.Node.Kernel = "5.11.0-1.el9.x86_64" }, Kernel, OK, nil},
		"no memory controller":              {bookworm, without("memory"), CgroupMemory, Missing, []string{"cgroup_disable=memory", "update-grub"}},
		"the same on RHEL":                  {rocky, without("memory"), CgroupMemory, Missing, []string{"grubby"}},
		"the same on Talos":                 {talosOS, without("memory"), CgroupMemory, Missing, []string{"extraKernelArgs"}},
		"the same on Bottlerocket":          {bottle, without("memory"), CgroupMemory, Missing, []string{`[settings.boot.kernel-parameters] "cgroup_enable" = ["memory"]`}},
		"the same on Flatcar":               {flat, without("memory"), CgroupMemory, Missing, []string{"linux_append", "/oem/grub.cfg"}},
		"no pids controller":                {bookworm, without("pids"), CgroupPids, Missing, []string{"CONFIG_CGROUP_PIDS"}},
		"cgroups that are read-only": {bookworm, both(pod, func(f *Facts) { f.Node.Cgroups.Unwritable = []string{"/sys/fs/cgroup"} }), CgroupPids, Missing,
			[]string{"privileged: true"}},
		"a cgroup namespace with processes at its root": {bookworm, func(f *Facts) { f.Node.Cgroups.Busy = "/sys/fs/cgroup" }, CgroupCPU, Missing,
			[]string{"cgroup.subtree_control", "--cgroupns=host"}},
		"cgroup v1": {bookworm, func(f *Facts) { f.Node.Cgroups.V1, f.Node.Cgroups.Kill = true, No }, CgroupKill, Note, []string{"systemd.unified_cgroup_hierarchy=1"}},
		"a small pid_max": {bookworm, sysctl("kernel.pid_max", "1200"), PidMax, Missing,
			[]string{"sysctl -w kernel.pid_max=32768", "limits.pids"}},
		"hidepid":                      {bookworm, func(f *Facts) { f.Node.Hidepid, f.Node.SysPtrace = "2", false }, Hidepid, Missing, []string{"CAP_SYS_PTRACE"}},
		"hidepid, with CAP_SYS_PTRACE": {bookworm, func(f *Facts) { f.Node.Hidepid = "invisible" }, Hidepid, OK, nil},
		"ptrace_scope 3":               {bookworm, sysctl("kernel.yama.ptrace_scope", "3"), Ptrace, Missing, []string{"reboot", "kernel.yama.ptrace_scope=2"}},
		"ptrace_scope 2, without CAP_SYS_PTRACE": {bookworm, both(sysctl("kernel.yama.ptrace_scope", "2"), func(f *Facts) { f.Node.SysPtrace = false }), Ptrace, Missing,
			[]string{"CAP_SYS_PTRACE"}},
		"ptrace_scope 2":         {bookworm, sysctl("kernel.yama.ptrace_scope", "2"), Ptrace, OK, nil},
		"lockdown":               {bookworm, func(f *Facts) { f.Node.Lockdown = "confidentiality" }, Lockdown, OK, nil},
		"no seccomp":             {bookworm, refused(Seccomp, unix.EINVAL), Seccomp, Missing, []string{"CONFIG_SECCOMP_FILTER"}},
		"no connection tracking": {talosOS, refused(Conntrack, unix.ENOENT), Conntrack, Note, []string{`"modules":[{"name":"nf_conntrack_netlink"}]`, "CONFIG_NF_CT_NETLINK"}},
		"no egress bounds": {bottle, refused(Egress, unix.ENOENT), Egress, Note,
			[]string{"[settings.kernel.modules.nft_connlimit] allowed = true, autoload = true", "CONFIG_NETFILTER_NETLINK_LOG"}},
		"no diagnostics":     {talosOS, refused(SockDestroy, unix.ENOENT), SockDestroy, Degraded, []string{`"modules":[{"name":"tcp_diag"},{"name":"udp_diag"}]`}},
		"the same, Flatcar":  {flat, refused(SockDestroy, unix.ENOENT), SockDestroy, Degraded, []string{"modprobe -a tcp_diag udp_diag", "modules-load.d"}},
		"the same, Debian":   {bookworm, refused(SockDestroy, unix.ENOENT), SockDestroy, Degraded, []string{"modprobe -a tcp_diag udp_diag"}},
		"no Git":             {bookworm, refused(Git, unix.ENOENT), Git, Missing, []string{"apt-get install git"}},
		"no Git on RHEL":     {rocky, refused(Git, unix.ENOENT), Git, Missing, []string{"dnf install git"}},
		"no Git on Talos":    {talosOS, refused(Git, unix.ENOENT), Git, Missing, []string{"image"}},
		"no Landlock":        {bookworm, refused(Landlock, unix.EOPNOTSUPP), Landlock, Note, []string{"lsm="}},
		"no CAP_SYS_ADMIN":   {bookworm, func(f *Facts) { f.Node.SysAdmin = false }, Rights, Missing, []string{"CAP_SYS_ADMIN"}},
		"a probe that knows": {bookworm, func(f *Facts) { f.Seen[CNI] = []Fact{nof("x").do("mend it")} }, CNI, Note, []string{"mend it"}},
	} {
		f := healthy()
		f.Node.OS = ParseOSRelease(c.os)
		c.change(&f)
		l := Judge(f, needs(t, nil)).of(c.feature)
		require.Equal(t, c.want, l.Verdict, name)
		if c.want == OK {
			require.Empty(t, l.Remedy, name)
		}
		for _, s := range c.says {
			require.Contains(t, l.Remedy, s, name)
		}
	}
}

// TestWhatADistributionHasItsOwnWayForIsSaidInItsWords: a sentence that fits every Linux helps nobody on these.
func TestWhatADistributionHasItsOwnWayForIsSaidInItsWords(t *testing.T) {
	words := map[string]string{
		bookworm: `apt-get install|update-grub|modprobe -a|systemctl start`, noble: `apt-get install|update-grub|modprobe -a|systemctl start`,
		rhel9:   `dnf install|grubby|modprobe -a|systemctl start|leapp|/usr/local/bin`,
		talosOS: `talosctl|Talos|this distribution has one`, bottle: `apiclient|Bottlerocket|sheltie|this distribution has one`,
		flat: `Butane|linux_append|/oem/grub.cfg|modprobe -a|systemctl start|update_engine_client|Flatcar|sysext|this distribution has one`,
	}
	ids := []ID{
		Kernel, MountAPI, Openat2, Pidfd, Seccomp, CgroupPids, CgroupMemory, CgroupCPU, CgroupKill, SockDestroy, Nftables, IngressAnswer, Conntrack, Egress,
		Overlay, Landlock, CloneInto, Vsock, KVM, Git, ContainerdAPI, Runc, GVisor, CNI,
	}
	for text, own := range words {
		for _, release := range []string{"4.18.0", "6.12.0"} {
			n := Node{OS: ParseOSRelease(text), Kernel: release, LSMs: "capability,yama", Sysctls: map[string]string{}}
			for _, id := range ids {
				if id == Landlock && release == "4.18.0" {
					continue // no parameter brings it there
				}
				said := remedy(row(id), no(unix.ENOSYS), n)
				require.Regexp(t, own, said, "%s on %s, Linux %s", id, n.OS.Name, release)
				require.NotContains(t, said, "  ")
			}
		}
	}
	old := func(text string) string {
		return remedy(row(MountAPI), no(unix.ENOSYS), Node{OS: ParseOSRelease(text), Kernel: "5.4.0", Sysctls: map[string]string{}})
	}
	require.Contains(t, old("ID=debian\nVERSION_ID=\"11\"\n"), "boot a kernel of 5.12 or newer: apt-get install linux-image-6.1-amd64 on Debian 11")
	require.Contains(t, old("ID=ubuntu\nID_LIKE=debian\nVERSION_ID=\"20.04\"\n"), "linux-generic-hwe-20.04")
	require.Equal(t, "boot a kernel of 5.12 or newer: upgrade to Ubuntu 22.04 or newer", old("ID=ubuntu\nID_LIKE=debian\nVERSION_ID=\"18.04\"\n"), "its newest is 5.4")
	require.Equal(t, "boot a kernel of 5.12 or newer", old(alpine))
	require.Equal(t, `add lsm=landlock,capability,yama to GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub, then reboot`,
		remedy(row(Landlock), no(unix.EOPNOTSUPP), Node{OS: ParseOSRelease(bookworm), Kernel: "6.12.0", LSMs: "capability,yama"}))
}

func TestTheRefusalHasTheTextOfTheCheck(t *testing.T) {
	f := healthy()
	f.Node.Sysctls["user.max_user_namespaces"] = "0"
	f.Seen[UserNS] = []Fact{no(unix.ENOSPC)}
	f.Seen[Proc] = []Fact{no(unix.EPERM)}
	f.Seen[Git] = []Fact{nof("not there")}
	r := Judge(f, needs(t, nil))
	err := r.Refusal()
	require.Error(t, err)
	for _, id := range []ID{UserNS, Proc} {
		require.Contains(t, err.Error()+"\n", Text(r.of(id).Proto()))
	}
	require.NotContains(t, err.Error(), "MISSING    Git", "no promise falls with it")
	require.Equal(t, strings.Join([]string{
		"MISSING    user namespaces: no space left on device",
		"           for: a command is never the node's root (P9, P16)",
		"           instead: nothing: no sandbox is made",
		"           do: sysctl -w user.max_user_namespaces=15000, and for every boot echo user.max_user_namespaces=15000 >/etc/sysctl.d/90-sandbox-agent.conf",
		""}, "\n"), Text(r.of(UserNS).Proto()))
}

func TestVerdictsAreTheAPIs(t *testing.T) {
	for v, want := range map[Verdict]sandboxv1.CheckVerdict{
		OK: sandboxv1.CheckVerdict_CHECK_OK, Note: sandboxv1.CheckVerdict_CHECK_NOTE, Unknown: sandboxv1.CheckVerdict_CHECK_UNKNOWN,
		Degraded: sandboxv1.CheckVerdict_CHECK_DEGRADED, Missing: sandboxv1.CheckVerdict_CHECK_MISSING,
	} {
		require.Equal(t, want, v.proto())
		require.NotEqual(t, "?", v.String())
	}
}

func TestAnUnknownRuntimeIsRefusedByName(t *testing.T) {
	c := config.Default(8 << 30)
	_, err := NeedsOf(&c, []string{"docker"})
	require.ErrorContains(t, err, `no runtime "docker": name one of embedded, runc, gvisor, kata`)
}
