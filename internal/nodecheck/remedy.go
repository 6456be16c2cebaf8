package nodecheck

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// OS is the distribution, from os-release(5).
type OS struct {
	// ID and Like are ID and ID_LIKE: "debian", "ubuntu", "rhel", "talos", "bottlerocket", "flatcar" …
	ID   string
	Like []string
	// Version is VERSION_ID: "12", "24.04"; empty where there is none.
	Version string
	// Name is PRETTY_NAME.
	Name string
}

// ParseOSRelease reads os-release(5).
func ParseOSRelease(text string) OS {
	var o OS
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, `"'`)
		switch key {
		case "ID":
			o.ID = value
		case "ID_LIKE":
			o.Like = strings.Fields(value)
		case "VERSION_ID":
			o.Version = value
		case "PRETTY_NAME":
			o.Name = value
		}
	}
	return o
}

// family is how a distribution is administered.
type family int

const (
	anyLinux family = iota
	debian          // with Ubuntu
	rhel
	talos
	bottlerocket
	flatcar
)

func (o OS) family() family {
	for _, id := range append([]string{o.ID}, o.Like...) {
		switch id {
		case "debian", "ubuntu":
			return debian
		case "rhel", "fedora", "centos", "rocky", "almalinux", "amzn":
			return rhel
		case "talos":
			return talos
		case "bottlerocket":
			return bottlerocket
		case "flatcar":
			return flatcar
		}
	}
	return anyLinux
}

// sysctl says how a setting is made now and for every boot.
func sysctl(o OS, key, value string) string {
	switch o.family() {
	case talos, bottlerocket:
		return sysctlFile(o, key, value)
	}
	return fmt.Sprintf("sysctl -w %s=%s, and for every boot %s", key, value, sysctlFile(o, key, value))
}

// sysctlFile says how a setting is made for every boot.
func sysctlFile(o OS, key, value string) string {
	switch o.family() {
	case talos:
		return fmt.Sprintf(`talosctl patch machineconfig -p '{"machine":{"sysctls":{"%s":"%s"}}}'`, key, value)
	case bottlerocket:
		return fmt.Sprintf(`apiclient apply with [settings.kernel.sysctl] "%s" = "%s"`, key, value)
	case flatcar:
		return fmt.Sprintf("a file in /etc/sysctl.d (Butane: storage.files) with %s=%s", key, value)
	}
	return fmt.Sprintf("echo %s=%s >/etc/sysctl.d/90-sandbox-agent.conf", key, value)
}

// module says how kernel modules are loaded now and at every boot.
func module(o OS, names ...string) string {
	switch o.family() {
	case talos:
		var list []string
		for _, n := range names {
			list = append(list, fmt.Sprintf(`{"name":"%s"}`, n))
		}
		return fmt.Sprintf(`talosctl patch machineconfig -p '{"machine":{"kernel":{"modules":[%s]}}}'`, strings.Join(list, ","))
	case bottlerocket:
		var list []string
		for _, n := range names {
			list = append(list, fmt.Sprintf("[settings.kernel.modules.%s] allowed = true, autoload = true", n))
		}
		return "apiclient apply with " + strings.Join(list, ", ")
	case flatcar:
		return fmt.Sprintf("modprobe -a %s, and for every boot a file in /etc/modules-load.d (Butane: storage.files) that lists them", strings.Join(names, " "))
	}
	return fmt.Sprintf("modprobe -a %s, and for every boot printf '%%s\\n' %s >/etc/modules-load.d/sandbox-agent.conf", strings.Join(names, " "), strings.Join(names, " "))
}

// boot says how a kernel parameter is given.
func boot(o OS, parameter string) string {
	const then = ", then reboot"
	switch o.family() {
	case debian:
		return "add " + parameter + " to GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub" + then
	case rhel:
		return "grubby --update-kernel=ALL --args=" + parameter + then
	case talos:
		return "add " + parameter + " to the kernel arguments of the node's image (Talos Image Factory; machine.install.extraKernelArgs on installs without UKI) and upgrade to it"
	case bottlerocket:
		key, value, _ := strings.Cut(parameter, "=")
		return fmt.Sprintf(`apiclient apply with [settings.boot.kernel-parameters] "%s" = ["%s"]%s`, key, value, then)
	case flatcar:
		return `add set linux_append="$linux_append ` + parameter + `" to /oem/grub.cfg` + then
	}
	return "boot with " + parameter
}

// install says how a program comes onto the node; name is the package's with Debian's and RHEL's.
func install(o OS, name string) string {
	switch o.family() {
	case debian:
		return "apt-get install " + name
	case rhel:
		return "dnf install " + name
	case talos:
		return "a system extension that has it (Talos Image Factory), or an agent's image that brings it"
	case bottlerocket:
		return "an agent's image that brings it: programs can't be added to Bottlerocket"
	case flatcar:
		return "a systemd-sysext image that has it, or an agent's image that brings it"
	}
	return "install " + name
}

// remedy says what to do about a fact on this node.
func remedy(f Feature, fact Fact, n Node) string {
	if fact.Remedy != "" {
		return fact.Remedy
	}
	if fact.Answer == Inconclusive && n.UID != 0 {
		return "run this as root"
	}
	if r := special(f, fact, n); r != "" {
		return r
	}
	return f.Remedy
}

func special(f Feature, fact Fact, n Node) string {
	switch f.ID {
	case UserNS, PidNS, MountNS, NetNS, IpcNS, UtsNS, CgroupNS, NestedNS, IDMaps:
		return namespaceRemedy(f.ID, fact, n)
	case Proc, NestedProc:
		return procRemedy(fact, n)
	case Rights:
		if n.Kubernetes {
			return "securityContext.privileged: true, as root, without hostUsers: false"
		}
	case Kernel, CloneInto:
		return kernelRemedy(f, n)
	case MountAPI, Openat2, Pidfd:
		if refusedByFilter(fact, n) && !f.OlderThan(n.Kernel) { // an older one has nothing that a filter could refuse
			return unconfined(n)
		}
		return kernelRemedy(f, n)
	case Seccomp:
		if errors.Is(fact.Errno, unix.EACCES) || errors.Is(fact.Errno, unix.EPERM) {
			return "let the agent's container set filters of its own: " + unconfined(n)
		}
		return kernelRemedy(f, n)
	case CgroupPids, CgroupMemory, CgroupCPU:
		return controllerRemedy(f.ID, n)
	case CgroupKill:
		if n.Cgroups.V1 {
			return boot(n.OS, unified) + "; nothing has to be done"
		}
		return kernelRemedy(f, n)
	case Hidepid:
		return hidepidRemedy(n)
	case Landlock:
		return landlockRemedy(f, n)
	case SockDestroy, Nftables, IngressAnswer, Conntrack, Egress, Overlay, Vsock, KVM:
		return moduleRemedy(f.ID, n)
	case Git:
		return install(n.OS, "git")
	case Runc:
		return runcRemedy(n.OS)
	case GVisor:
		return gvisorRemedy(n.OS)
	case ContainerdAPI:
		return containerdRemedy(fact, n)
	case CNI:
		return cniRemedy(n)
	}
	return ""
}

// moduleRemedy is for what kernel modules bring.
func moduleRemedy(id ID, n Node) string {
	switch id {
	case SockDestroy:
		return module(n.OS, "tcp_diag", "udp_diag") + "; kernel option CONFIG_INET_DIAG_DESTROY"
	case Nftables:
		return module(n.OS, "nf_tables", "nft_fib_inet", "nft_fib_netdev", "nft_reject_inet", "nft_ct", "nft_masq")
	case IngressAnswer:
		return module(n.OS, "nft_reject_netdev") + "; kernel option CONFIG_NFT_REJECT_NETDEV, which Debian's kernels lack; or leave it: the promises hold"
	case Conntrack:
		return module(n.OS, "nf_conntrack_netlink") + "; kernel option CONFIG_NF_CT_NETLINK"
	case Egress:
		return module(n.OS, "nft_connlimit", "nft_limit", "nft_quota", "nft_objref", "nft_log", "nfnetlink_log") + "; kernel options CONFIG_NFT_CONNLIMIT, CONFIG_NFT_LIMIT, CONFIG_NFT_QUOTA, CONFIG_NFT_LOG, CONFIG_NFT_REJECT_INET, CONFIG_NETFILTER_NETLINK_LOG"
	case Overlay:
		return module(n.OS, "overlay")
	case Vsock:
		return module(n.OS, "vsock", "vhost_vsock")
	case KVM:
		return "turn virtualisation on in the firmware, or nested virtualisation for a virtual node, then " + module(n.OS, "kvm_intel") + " (kvm_amd on AMD)"
	}
	return ""
}

var maxima = map[ID]string{
	UserNS: "user.max_user_namespaces", IDMaps: "user.max_user_namespaces", NestedNS: "user.max_user_namespaces", PidNS: "user.max_pid_namespaces", MountNS: "user.max_mnt_namespaces",
	NetNS: "user.max_net_namespaces", IpcNS: "user.max_ipc_namespaces", UtsNS: "user.max_uts_namespaces", CgroupNS: "user.max_cgroup_namespaces",
}

// suggestedNamespaces is enough for a full node: a dozen for each session and command.
const suggestedNamespaces = "15000"

const (
	debianSwitch   = "kernel.unprivileged_userns_clone"
	apparmorSwitch = "kernel.apparmor_restrict_unprivileged_userns"
)

// namespaceRemedy goes by what the kernel said: ENOSPC is a sysctl's (user_namespaces(7)), EPERM and EACCES are a
// distribution's switch, a filter or an LSM, EINVAL a kernel without that kind.
func namespaceRemedy(id ID, fact Fact, n Node) string {
	limit := maxima[id]
	switch {
	case n.Sysctls[maxima[UserNS]] == "0": // all of them are made within one
		return sysctl(n.OS, maxima[UserNS], suggestedNamespaces)
	case fact.Errno == unix.ENOSPC || limit != "" && n.Sysctls[limit] == "0":
		return sysctl(n.OS, limit, suggestedNamespaces)
	case fact.Errno == unix.EINVAL:
		return withOwnKernel("boot a kernel with that kind of namespace: "+row(id).Remedy, n.OS)
	case n.InUserns:
		return "run the agent in the node's own user namespace (Kubernetes: without hostUsers: false)"
	case refusedByFilter(fact, n):
		return unconfined(n)
	case n.Sysctls[debianSwitch] == "0":
		return sysctl(n.OS, debianSwitch, "1")
	case n.Sysctls[apparmorSwitch] == "1":
		return appArmor(n)
	case fact.Errno == unix.EPERM || fact.Errno == unix.EACCES:
		return "something refuses it to the agent: its seccomp profile, an LSM (SELinux, AppArmor: see the audit log), or missing capabilities"
	}
	return ""
}

// appArmor: Ubuntu lets such a namespace be made, and takes away what its maker could do in it, or refuses it (apparmor.d(5), userns).
func appArmor(n Node) string {
	return "an AppArmor profile with the userns rule for the agent, receiptd and pid1 (abi <abi/4.0>, profile sandbox-agent /usr/local/bin/{sandbox-agent,receiptd,pid1} flags=(unconfined) { userns, } in /etc/apparmor.d, then apparmor_parser -r), or for all programs " +
		sysctl(n.OS, apparmorSwitch, "0")
}

func row(id ID) Feature {
	f, _ := Find(id)
	return f
}

// refusedByFilter: EPERM and ENOSYS are what the default profiles of container runtimes answer.
func refusedByFilter(fact Fact, n Node) bool {
	return n.Filtered && (fact.Errno == unix.EPERM || fact.Errno == unix.ENOSYS || fact.Errno == syscall.ENOTSUP)
}

func unconfined(n Node) string {
	if n.Kubernetes {
		return "securityContext.privileged: true in the agent's pod, or seccompProfile: {type: Unconfined} with the capabilities that docs/host-requirements.md lists"
	}
	return "start the agent's container without its runtime's default seccomp profile (Docker: --security-opt seccomp=unconfined, Kubernetes: seccompProfile: {type: Unconfined})"
}

// procRemedy: "mount too revealing" is EPERM (mount_too_revealing, fs/namespace.c).
func procRemedy(fact Fact, n Node) string {
	switch {
	case len(n.Masked) > 0 && n.Kubernetes:
		return "parts of the agent's /proc are covered (" + strings.Join(n.Masked, ", ") + "): securityContext.privileged: true, whose /proc is whole; procMount: Unmasked does the same, yet Kubernetes wants hostUsers: false with it, which the agent can't have"
	case len(n.Masked) > 0:
		return "parts of the agent's /proc are covered (" + strings.Join(n.Masked, ", ") + "): unmount them for the agent (systemd: no ProtectKernelTunables=, ProtectProc=, ProtectControlGroups=, InaccessiblePaths= below /proc; Docker: --security-opt systempaths=unconfined)"
	case refusedByFilter(fact, n):
		return unconfined(n)
	case n.Sysctls[apparmorSwitch] == "1" && (fact.Errno == unix.EPERM || fact.Errno == unix.EACCES):
		return appArmor(n)
	}
	return ""
}
