package nodecheck

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// newerKernel says how a distribution gets a kernel of 5.12 or newer; empty: it is not known.
func newerKernel(o OS) string {
	switch o.family() {
	case debian:
		switch {
		case o.ID == "ubuntu" && o.Version == "20.04":
			return "apt-get install linux-generic-hwe-20.04, then reboot; or upgrade to Ubuntu 22.04 or newer"
		case o.ID == "ubuntu" && slices.Contains([]string{"14.04", "16.04", "18.04"}, o.Version): // no kernel of theirs is new enough
			return "upgrade to Ubuntu 22.04 or newer"
		case o.ID == "ubuntu":
			return ownKernel(o)
		}
		return "apt-get install linux-image-6.1-amd64 on Debian 11, then reboot; or upgrade to Debian 12 or newer"
	case rhel:
		return "upgrade to release 9 or newer (leapp upgrade), whose kernel has it"
	case talos:
		return "talosctl upgrade --image with the installer of a newer Talos"
	case bottlerocket:
		return "apiclient update apply --reboot, or nodes of a newer variant"
	case flatcar:
		return "update_engine_client -update, then reboot"
	}
	return ""
}

// ownKernel says how a distribution's own kernel comes back, which has what a kernel of somebody's own was built without.
func ownKernel(o OS) string {
	switch o.family() {
	case debian:
		if o.ID == "ubuntu" {
			return "apt-get install linux-generic, then reboot into it"
		}
		return "apt-get install linux-image-amd64, then reboot into it"
	case rhel:
		return "dnf install kernel, then reboot into it"
	case talos:
		return "talosctl upgrade --image with an installer of Talos' own kernel"
	case bottlerocket:
		return "nodes of Bottlerocket's own images"
	case flatcar:
		return "nodes of Flatcar's own images"
	}
	return ""
}

// kernelRemedy is for what a kernel has from a version on, or by an option.
func kernelRemedy(f Feature, n Node) string {
	if f.OlderThan(n.Kernel) {
		what := "boot a kernel of " + strings.TrimPrefix(f.Since, "Linux ") + " or newer"
		if how := newerKernel(n.OS); how != "" {
			what += ": " + how
		}
		return what
	}
	return withOwnKernel(f.Remedy, n.OS)
}

func withOwnKernel(what string, o OS) string {
	if how := ownKernel(o); how != "" {
		return what + "; the distribution's own kernel: " + how
	}
	return what
}

const unified = "systemd.unified_cgroup_hierarchy=1"

// controllerRemedy is for a cgroup controller that no hierarchy has. From 6.12 on a kernel may have v1's memory controller no more
// (CONFIG_MEMCG_V1), so that v2 is what helps there.
func controllerRemedy(id ID, n Node) string {
	name := strings.TrimPrefix(string(id), "cgroup controller ")
	option := map[ID]string{CgroupPids: "CONFIG_CGROUP_PIDS", CgroupMemory: "CONFIG_MEMCG", CgroupCPU: "CONFIG_CGROUP_SCHED"}[id]
	var ways []string
	if n.Cgroups.V1 {
		ways = append(ways, "boot with cgroup v2 alone, as kernels from 6.12 on may have no memory controller of v1: "+boot(n.OS, unified))
	} else if !n.Cgroups.V2 {
		ways = append(ways, "mount -t cgroup2 cgroup2 /sys/fs/cgroup")
	}
	ways = append(ways, "take cgroup_disable="+name+" out of the kernel's parameters ("+unboot(n.OS, "cgroup_disable="+name)+")")
	if id == CgroupMemory {
		ways = append(ways, boot(n.OS, "cgroup_enable=memory"))
	}
	return strings.Join(ways, ", or ") + "; kernel option " + option
}

// unboot says how a kernel parameter is taken back.
func unboot(o OS, parameter string) string {
	switch o.family() {
	case debian:
		return "GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub, then reboot"
	case rhel:
		return "grubby --update-kernel=ALL --remove-args=" + parameter + ", then reboot"
	case talos:
		return "the kernel arguments of the node's image (Talos Image Factory), then talosctl upgrade to it"
	case bottlerocket:
		return "[settings.boot.kernel-parameters], apiclient reboot"
	case flatcar:
		return "/oem/grub.cfg, then reboot"
	}
	return "the boot loader's configuration, then reboot"
}

// landlockRemedy puts Landlock before the modules that the kernel has now.
func landlockRemedy(f Feature, n Node) string {
	if f.OlderThan(n.Kernel) || n.LSMs == "" {
		return ""
	}
	return boot(n.OS, "lsm=landlock,"+n.LSMs)
}

// hidepidRemedy: what the agent's own /proc hides.
func hidepidRemedy(n Node) string {
	if n.Kubernetes {
		return "securityContext.privileged: true, which has CAP_SYS_PTRACE"
	}
	return "leave the agent CAP_SYS_PTRACE (systemd: CapabilityBoundingSet=), or mount -o remount,hidepid=0 /proc and take hidepid= out where it is set (/etc/fstab, or ProtectProc= of the agent's unit)"
}

// gvisorRemedy: containerd looks for both programs in its own PATH.
func gvisorRemedy(o OS) string {
	switch o.family() {
	case debian:
		return "apt-get install runsc, from gVisor's repository (https://gvisor.dev/docs/user_guide/install/)"
	case talos:
		return "the system extension siderolabs/gvisor (Talos Image Factory), then talosctl upgrade to that image"
	case bottlerocket:
		return "another runtime, or nodes of another distribution: programs can't be added to Bottlerocket"
	case flatcar:
		return "runsc and containerd-shim-runsc-v1 of a release of gVisor's in /opt/bin (Butane: storage.files), and that folder in containerd's PATH (a drop-in of containerd.service)"
	}
	return "runsc and containerd-shim-runsc-v1 of a release of gVisor's in /usr/local/bin (https://gvisor.dev/docs/user_guide/install/), which has to be in containerd's PATH"
}

// runcRemedy: what containerd comes with on distributions that nothing can be installed on.
func runcRemedy(o OS) string {
	const named = "name the program in containerd.runtimes.runc.binary"
	switch o.family() {
	case talos, bottlerocket, flatcar:
		return named + ": this distribution has one, beside its containerd"
	}
	return install(o, "runc") + " (1.5 or newer; containerd.io of Docker's repository comes with one), or " + named
}

func containerdRemedy(fact Fact, n Node) string {
	const named = ", or name its socket in containerd.address"
	if n.Kubernetes && fact.Errno == unix.ENOENT {
		return "mount the node's /run/containerd into the agent's pod (daemonset/base)" + named + " (k3s: /run/k3s/containerd/containerd.sock)"
	}
	switch n.OS.family() {
	case debian, rhel:
		// Debian's own is older than version 2, and RHEL has none.
		return "systemctl start containerd" + named + "; where there is none: containerd.io of Docker's repository (https://docs.docker.com/engine/install/)"
	case talos:
		return "talosctl service cri restart" + named
	case bottlerocket:
		return "systemctl start containerd in the admin container's sheltie" + named
	case flatcar:
		return "systemctl start containerd" + named
	}
	return ""
}

// cniRemedy: in a cluster the network's own DaemonSet brings configuration and plugins.
func cniRemedy(n Node) string {
	if n.Kubernetes {
		return "install the cluster's network, which puts a configuration into /etc/cni/net.d and plugins into /opt/cni/bin of the node, and give the agent's pod both folders (daemonset/components/network)"
	}
	const configuration = ", and a configuration in network.cni.conf_dir"
	switch n.OS.family() {
	case debian:
		return "apt-get install containernetworking-plugins, which are in /usr/lib/cni (network.cni.bin_dirs)" + configuration
	case rhel:
		return "dnf install containernetworking-plugins, which are in /usr/libexec/cni (network.cni.bin_dirs)" + configuration
	case flatcar:
		return "the release of the CNI plugins in /opt/cni/bin (Butane: storage.files)" + configuration
	case talos, bottlerocket:
		return fmt.Sprintf("%s comes with its cluster's network: run the agent in a pod of the component network", n.OS.Name)
	}
	return ""
}
