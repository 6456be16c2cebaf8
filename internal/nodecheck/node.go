package nodecheck

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
)

// lookAtNode reads what decides on verdicts and remedies. What can't be read stays empty.
func lookAtNode() Node {
	n := Node{
		Kernel: read("/proc/sys/kernel/osrelease"), OS: readOS(), UID: os.Geteuid(), InUserns: inUserns(read("/proc/self/uid_map")),
		Kubernetes: os.Getenv("KUBERNETES_SERVICE_HOST") != "", Sysctls: map[string]string{}, Lockdown: chosen(read("/sys/kernel/security/lockdown")),
		LSMs: read("/sys/kernel/security/lsm"),
	}
	for _, name := range sysctls {
		if v := read("/proc/sys/" + strings.ReplaceAll(name, ".", "/")); v != "" {
			n.Sysctls[name] = v
		}
	}
	n.SysAdmin, n.NetAdmin, n.SysPtrace = capabilities()
	n.Filtered = filtered(read("/proc/thread-self/status"))
	n.Masked, n.Hidepid = procMounts(read("/proc/self/mountinfo"))
	n.Cgroups = lookAtCgroups()
	return n
}

var sysctls = []string{
	"user.max_user_namespaces", "user.max_pid_namespaces", "user.max_mnt_namespaces", "user.max_net_namespaces", "user.max_ipc_namespaces",
	"user.max_uts_namespaces", "user.max_cgroup_namespaces", debianSwitch, apparmorSwitch,
	"kernel.yama.ptrace_scope", "kernel.pid_max", "kernel.io_uring_disabled",
}

func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// readOS reads the node's os-release (os-release(5)). In a container its own is the image's: a pod may have the node's mounted at
// /host, or be in the node's PID namespace, whose process 1 has the node's root (elsewhere it has the container's own).
func readOS() OS {
	for _, path := range []string{"/host/etc/os-release", "/proc/1/root/etc/os-release", "/proc/1/root/usr/lib/os-release", "/etc/os-release", "/usr/lib/os-release"} {
		if text := read(path); text != "" {
			return ParseOSRelease(text)
		}
	}
	return OS{}
}

// inUserns: in the node's own namespace every id maps to itself (user_namespaces(7)).
func inUserns(uidMap string) bool {
	return uidMap != "" && !slices.Equal(strings.Fields(uidMap), []string{"0", "0", "4294967295"})
}

// chosen is the word in brackets of a list such as "none [integrity] confidentiality".
func chosen(list string) string {
	_, after, _ := strings.Cut(list, "[")
	word, _, ok := strings.Cut(after, "]")
	if !ok {
		return ""
	}
	return word
}

func capabilities() (sysAdmin, netAdmin, sysPtrace bool) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&header, &data[0]) != nil {
		return false, false, false
	}
	has := func(c int) bool { return data[0].Effective&(1<<c) != 0 }
	return has(unix.CAP_SYS_ADMIN), has(unix.CAP_NET_ADMIN), has(unix.CAP_SYS_PTRACE)
}

// filtered reads proc_pid_status(5): Seccomp 2 is SECCOMP_MODE_FILTER.
func filtered(status string) bool {
	for line := range strings.Lines(status) {
		if mode, ok := strings.CutPrefix(line, "Seccomp:"); ok {
			return strings.TrimSpace(mode) == "2"
		}
	}
	return false
}

// procMounts finds in a mountinfo (proc_pid_mountinfo(5)) what covers parts of /proc, and its option hidepid.
func procMounts(mountinfo string) (masked []string, hidepid string) {
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 3 {
			continue
		}
		switch {
		case f[4] == "/proc" && g[0] == "proc":
			masked, hidepid = nil, option(g[2], "hidepid")
		// The kernel lets no mount of /proc be covered in another one, empty folders that are made for that purpose excepted.
		case strings.HasPrefix(f[4], "/proc/") && !slices.Contains(emptyFolders, f[4]):
			masked = append(masked, f[4])
		}
	}
	return masked, hidepid
}

// emptyFolders of /proc take mounts without hiding anything (proc_create_mount_point in the kernel).
var emptyFolders = []string{"/proc/fs/nfsd", "/proc/openprom", "/proc/sys/fs/binfmt_misc"}

func option(options, name string) string {
	for _, o := range strings.Split(options, ",") {
		if v, ok := strings.CutPrefix(o, name+"="); ok {
			return v
		}
	}
	return ""
}

var controllers = []string{"pids", "memory", "cpu"}

func lookAtCgroups() Cgroups {
	c := Cgroups{Where: map[string]string{}, Kill: No}
	all, err := hostkernel.Hierarchies()
	if err != nil {
		return c
	}
	for _, h := range all {
		c.V1, c.V2 = c.V1 || !h.V2, c.V2 || h.V2
		used := false
		for _, name := range controllers {
			if _, taken := c.Where[name]; !taken && h.Has(name) {
				c.Where[name] = h.Mount
				used = true
			}
		}
		if used && !writable(h.Mount) {
			c.Unwritable = append(c.Unwritable, h.Mount)
		}
		if used && h.V2 {
			c.Kill = cgroupKillIn(h.Mount)
			if busy(h.Mount) {
				c.Busy = h.Mount
			}
		}
	}
	return c
}

// writable goes by the mount alone where this process isn't root: whether root may is the question.
func writable(mount string) bool {
	var st unix.Statfs_t
	if unix.Statfs(mount, &st) == nil && st.Flags&unix.ST_RDONLY != 0 {
		return false
	}
	return os.Geteuid() != 0 || unix.Access(mount, unix.W_OK) == nil
}

// cgroupKillIn looks for the file in a cgroup below the root, which itself has none.
func cgroupKillIn(mount string) Answer {
	entries, err := os.ReadDir(mount)
	if err != nil {
		return Inconclusive
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if _, err := os.Stat(filepath.Join(mount, e.Name(), "cgroup.kill")); err == nil {
			return Yes
		}
		return No
	}
	return Inconclusive
}

// busy: only the kernel's own root, which has no cgroup.type, may have processes and hand controllers down.
func busy(mount string) bool {
	if _, err := os.Stat(filepath.Join(mount, "cgroup.type")); err != nil {
		return false
	}
	down := strings.Fields(read(filepath.Join(mount, "cgroup.subtree_control")))
	for _, name := range controllers {
		if !slices.Contains(down, name) {
			return read(filepath.Join(mount, "cgroup.procs")) != ""
		}
	}
	return false
}
