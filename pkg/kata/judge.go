package kata

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Severity says what follows from a finding.
type Severity string

// Refuse: no sandbox is started. Warn: it is said, and sandboxes are started.
const (
	Refuse Severity = "refuse"
	Warn   Severity = "warn"
)

// Finding is one thing that speaks against an installation.
type Finding struct {
	Severity Severity
	// Advisory is the id of the published fault that shows the danger; empty where there is none.
	Advisory string
	// Key is the setting ("hypervisor.qemu.kernel_params"), or "version", or "environment".
	Key string
	// At is where the setting stands; the zero value where there is no such place.
	At      Source
	Problem string
	Remedy  string
}

func (f Finding) String() string {
	s := string(f.Severity) + ": " + f.Key
	if f.At.File != "" {
		s += " (" + f.At.String() + ")"
	}
	s += ": " + f.Problem
	if f.Advisory != "" {
		s += " [" + f.Advisory + "]"
	}
	return s + "; " + f.Remedy
}

// Judge judges an installation: its version and its configuration. It reads nothing.
func Judge(shim ShimInfo, c Config) []Finding {
	j := &judge{c: c, found: JudgeVersion(shim.Flavour, shim.Version, c.Hypervisor)}
	j.hypervisor()
	j.files()
	j.annotations()
	j.kernelParams()
	j.virtiofsd()
	j.guest()
	j.host()
	j.debugging()
	return j.found
}

// Refused is nil, or an error that wraps ErrRefused and holds every finding that refuses.
func Refused(found []Finding) error {
	var all []string
	for _, f := range found {
		if f.Severity == Refuse {
			all = append(all, f.String())
		}
	}
	if all == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrRefused, strings.Join(all, "\n"))
}

// JudgeEnvironment judges containerd's own environment, as in /proc/PID/environ. The Rust shim takes its configuration from
// KATA_CONF_FILE before it looks at the runtime option that names the judged one; the Go shim after.
func JudgeEnvironment(environ []string) []Finding {
	for _, e := range environ {
		if name, value, _ := strings.Cut(e, "="); name == "KATA_CONF_FILE" {
			return []Finding{{
				Severity: Refuse, Key: "environment",
				Problem: fmt.Sprintf("containerd has KATA_CONF_FILE=%s in its environment: its shims may read that file and not the one that was judged", value),
				Remedy:  "remove it from containerd's unit and restart containerd",
			}}
		}
	}
	return nil
}

type judge struct {
	c     Config
	found []Finding
}

func (j *judge) say(s Severity, key, advisory, problem, remedy string) {
	j.found = append(j.found, Finding{s, advisory, key, j.c.Where(key), problem, remedy})
}

func (j *judge) hv(key string) string { return "hypervisor." + j.c.Hypervisor + "." + key }

// contracts are the hypervisors whose sockets and processes are known (docs/kata.md). Firecracker has no shared file
// system; acrn, remote and openvmm have processes that nothing here can wait for.
var contracts = []string{"qemu", "clh", "cloud-hypervisor", "dragonball", "stratovirt"}

func (j *judge) hypervisor() {
	switch h := j.c.Hypervisor; {
	case h == "firecracker":
		j.say(Refuse, j.hv("path"), "", "Firecracker has no shared file system: the worktree can't be in the guest", "use qemu or cloud-hypervisor")
	case !slices.Contains(contracts, h):
		j.say(Refuse, j.hv("path"), "", fmt.Sprintf("nothing is known of how a VM of %q ends, so its end could not be shown", h), "use qemu or cloud-hypervisor")
	}
	want := []string{"virtio-fs"}
	if j.c.VMMInShim() {
		want = append(want, "inline-virtio-fs")
	}
	if !slices.Contains(want, j.c.SharedFS) && j.c.Hypervisor != "firecracker" {
		j.say(Refuse, j.hv("shared_fs"), "", fmt.Sprintf("shared_fs is %q: worktree and receipts are shared by virtio-fs, and by nothing else", j.c.SharedFS), `set shared_fs = "virtio-fs"`)
	}
	if j.c.VMTemplate {
		j.say(Refuse, j.factory("enable_template"), "", "VM templates share memory between sandboxes, which tells one about the other", "set enable_template = false")
	}
	if j.c.VMCache != 0 {
		j.say(Refuse, j.factory("vm_cache_number"), "", "a VM from the cache is no child of its shim, so its end could not be shown", "set vm_cache_number = 0")
	}
	if strings.Contains(j.c.VMRootfsDriver, "pmem") && j.c.Hypervisor != "qemu" {
		j.say(Refuse, j.hv("vm_rootfs_driver"), "GHSA-wwj6-vghv-5p64", "the guest's image as persistent memory can be written by the guest", `set vm_rootfs_driver = "virtio-blk-pci"`)
	}
}

// factory names the factory's setting where it stands: the flavours have it in different tables.
func (j *judge) factory(key string) string {
	if k := j.hv("factory." + key); j.c.Where(k).Line != 0 {
		return k
	}
	return "factory." + key
}

func (j *judge) files() {
	if j.c.Image != "" && j.c.Initrd != "" {
		j.say(Refuse, j.hv("initrd"), "", "both image and initrd are set, and Kata takes one", "remove one of them")
	}
	for _, f := range []option{{"path", j.c.VMM}, {"kernel", j.c.Kernel}, {"virtio_fs_daemon", j.c.VirtioFSDaemon}} {
		if f.value != "" && !filepath.IsAbs(f.value) {
			j.say(Refuse, j.hv(f.name), "", fmt.Sprintf("%q is not an absolute path: which file it is depends on the shim's environment", f.value), "give the absolute path")
		}
	}
}

// choosers are the annotations that choose a program, a file or arguments on the host. Others (kernel_params, which the
// releases below 3.31 allow by default) stay within the guest.
var choosers = []string{
	"path", "jailer_path", "ctlpath", "kernel", "image", "initrd", "firmware", "firmware_volume", "pflashes",
	"virtio_fs_daemon", "virtio_fs_extra_args", "shared_fs", "file_mem_backend", "vhost_user_store_path",
	"entropy_source", "guest_hook_path", "seccompsandbox", "disable_seccomp", "disable_selinux", "rootless",
	"enable_vhost_user_store", "vm_rootfs_driver", "extra_monitor_socket",
}

func (j *judge) annotations() {
	key := j.hv("enable_annotations")
	for _, pattern := range j.c.EnableAnnotations {
		re, err := regexp.Compile(pattern) // not anchored, as in both runtimes: "path" allows "ctlpath"
		if err != nil || len(pattern) > 1000 {
			j.say(Refuse, key, "", fmt.Sprintf("%.100q can't be read as a regular expression, so what it allows can't be told", pattern), "set enable_annotations = []")
			continue
		}
		if i := slices.IndexFunc(choosers, re.MatchString); i >= 0 {
			j.say(Refuse, key, "GHSA-rr59-xxvx-96qr", fmt.Sprintf("%q lets an annotation set %s: a program, a file or arguments on the host", pattern, choosers[i]), "set enable_annotations = []")
		} else {
			j.say(Warn, key, "GHSA-rr59-xxvx-96qr", fmt.Sprintf("%q lets an annotation change the VM; this agent passes none, but others on this node may", pattern), "set enable_annotations = []")
		}
	}
}

// harmlessParams are the guest's kernel parameters that are known to leave Kata's agent and the guest's boundaries as they
// are, with "_" for "-". Each value of theirs is fine, but for those that param judges before.
var harmlessParams = []string{
	"agent.hotplug_timeout", "agent.log", "agent.trace", "agent.unified_cgroup_hierarchy", "cgroup_no_v1", "ipv6.disable", "loglevel",
	"maxcpus", "mitigations", "net.ifnames", "no_timer_check", "nopti", "noreplace_smp", "nospectre_v1", "nospectre_v2",
	"nr_cpus", "panic", "pci", "quiet", "random.trust_cpu", "swiotlb", "systemd.legacy_systemd_cgroup_controller",
	"systemd.show_status", "systemd.unified_cgroup_hierarchy", "transparent_hugepage", "tsc",
}

// param judges one word of the guest's kernel command line. The kernel takes "-" and "_" in a name for the same.
func param(word string) (Severity, string) {
	name, value, _ := strings.Cut(word, "=")
	name = strings.ReplaceAll(name, "-", "_")
	switch {
	case strings.HasPrefix(name, "agent.debug_console"), name == "agent.devmode":
		return Refuse, "opens a root shell in the guest, without a password, to whoever reaches its vsock"
	case name == "systemd.debug_shell", name == "rd.systemd.debug_shell", name == "rd.break", name == "init", name == "rdinit",
		name == "systemd.run", name == "systemd.unit", name == "rd.systemd.unit", name == "systemd.wants", name == "rd.systemd.wants":
		return Refuse, "starts something else than Kata's agent as the guest's root"
	case name == "agent.server_addr", name == "agent.config_file":
		return Refuse, "has the agent be elsewhere, or do otherwise, than anybody expects"
	case !slices.Contains(harmlessParams, name):
		return Refuse, "is not among the parameters that are known to be harmless (docs/kata.md)"
	case name == "mitigations" && value != "auto" && value != "auto,nosmt", strings.HasPrefix(name, "nospectre"), name == "nopti":
		return Warn, "turns off the guest kernel's protection from side channels"
	case name == "agent.log" && (value == "debug" || value == "trace"):
		return Warn, "has the agent log commands and their environment"
	case name == "agent.trace" && value != "false":
		return Warn, "has the agent send traces out of the guest, and the VM wait for them at its end"
	}
	return "", ""
}

func (j *judge) kernelParams() {
	key := j.hv("kernel_params")
	if i := strings.IndexFunc(j.c.KernelParams, obscure); i >= 0 {
		j.say(Refuse, key, "", fmt.Sprintf("with %.8q in it, the kernel, its init and the agent may each read other words than are judged here", j.c.KernelParams[i:]),
			"write kernel_params in plain words, without quotes")
		return
	}
	for _, word := range strings.Fields(j.c.KernelParams) {
		if severity, why := param(word); severity != "" {
			j.say(severity, key, "", fmt.Sprintf("%q %s", word, why), "remove it from kernel_params")
		}
	}
}

// obscure says of a character that it may bind words together or part them: a quote, a backslash, or what is not ASCII (the
// kernel takes the byte 0xa0 for a space, and it is in many letters of UTF-8).
func obscure(r rune) bool {
	return strings.ContainsRune("\"'`\\", r) || r > '~' || r < ' ' && !strings.ContainsRune("\t\n\v\f\r", r)
}

func (j *judge) virtiofsd() {
	key := j.hv("virtio_fs_extra_args")
	for _, o := range virtiofsdOptions(j.c.VirtioFSExtraArgs) {
		switch o.name {
		case "sandbox", "seccomp":
			if harmless(o) {
				continue
			}
			j.say(Refuse, key, "GHSA-2gv2-cffp-j227", fmt.Sprintf("virtiofsd with %s %.80q and not with its whole %[1]s: the guest's root reaches the host's files through it", o.name, o.value), "remove the argument")
		case "source", "shared-dir", "socket", "socket-path", "fd":
			j.say(Refuse, key, "GHSA-rr59-xxvx-96qr", fmt.Sprintf("virtiofsd is told %s %.80q: the shim chooses what is shared, and with whom", o.name, o.value), "remove the argument")
		case "cache":
			j.cache(key, o.value, "remove the argument")
		default:
			if !harmless(o) {
				j.say(Refuse, key, "", fmt.Sprintf("virtiofsd's argument %.80q is not among those that are known to be harmless (docs/kata.md)", o), "remove the argument")
			}
		}
	}
	if j.c.VirtioFSCache != "" { // both runtimes' default is never
		j.cache(j.hv("virtio_fs_cache"), j.c.VirtioFSCache, `set virtio_fs_cache = "never"`)
	}
}

// cache judges how long the guest may keep what it has seen of a file.
func (j *judge) cache(key, value, remedy string) {
	switch value {
	case "never", "none": // none is never's old name
	case "auto":
		j.say(Warn, key, "", "the guest may see a file as it was up to a second before the host changed it", remedy)
	case "always", "metadata":
		j.say(Refuse, key, "", fmt.Sprintf("with cache %q the guest never sees what trusted Git changes on the host", value), remedy)
	default:
		j.say(Refuse, key, "", fmt.Sprintf("nothing is known of the cache %.80q", value), remedy)
	}
}

type option struct{ name, value string }

func (o option) String() string {
	if o.value == "" {
		return o.name
	}
	return strings.TrimPrefix(o.name+"="+o.value, "=")
}

// harmlessArgs are virtiofsd's arguments that are known to leave its own boundaries as they are, each with its values. One
// without any is a switch.
var harmlessArgs = map[string]*regexp.Regexp{
	"announce-submounts": nil,
	"killpriv-v2":        nil,
	"no-killpriv-v2":     nil,
	"no-readdirplus":     nil,
	"readdirplus":        nil,
	"log-level":          regexp.MustCompile(`^(off|error|warn|info)$`),
	"modcaps":            regexp.MustCompile(`^-[a-z_]+(:-[a-z_]+)*$`), // takes capabilities away
	"rlimit-nofile":      regexp.MustCompile(`^[0-9]{1,7}$`),
	"sandbox":            regexp.MustCompile(`^namespace$`),
	"seccomp":            regexp.MustCompile(`^(kill|trap)$`),
	"thread-pool-size":   regexp.MustCompile(`^[0-9]{1,4}$`),
}

func harmless(o option) bool {
	values, ok := harmlessArgs[o.name]
	if values == nil {
		return ok && o.value == ""
	}
	return values.MatchString(o.value)
}

// valued says whether an argument takes the next one for its value. What is not known here is refused, with whatever value.
func valued(name string) bool {
	values := harmlessArgs[name]
	return values != nil || slices.Contains([]string{"source", "shared-dir", "socket", "socket-path", "fd", "cache"}, name)
}

// virtiofsdOptions reads virtiofsd's arguments in all their spellings: --name=value, --name value, -o name=value,… What is
// none of these, a group of short ones too, is an option without a name.
func virtiofsdOptions(args []string) []option {
	var all []option
	for i := 0; i < len(args); i++ {
		arg := args[i]
		next := ""
		if i+1 < len(args) {
			next = args[i+1]
		}
		switch {
		case arg == "-o":
			all = append(all, mountOptions(next)...)
			i++
		case strings.HasPrefix(arg, "-o"):
			all = append(all, mountOptions(strings.TrimPrefix(arg[2:], "="))...)
		case strings.HasPrefix(arg, "--"):
			name, value, given := strings.Cut(arg[2:], "=")
			if !given && valued(name) {
				value = next
				i++
			}
			all = append(all, option{name, value})
		default:
			all = append(all, option{"", arg})
		}
	}
	return all
}

func mountOptions(list string) []option {
	var all []option
	for _, o := range strings.Split(list, ",") {
		name, value, _ := strings.Cut(o, "=")
		all = append(all, option{strings.ReplaceAll(strings.TrimSpace(name), "_", "-"), strings.TrimSpace(value)})
	}
	return all
}

func (j *judge) guest() {
	if j.c.DebugConsole {
		j.say(Refuse, "agent.kata.debug_console_enabled", "", "a root shell in the guest, without a password, for whoever reaches its vsock", "set debug_console_enabled = false")
	}
	if j.c.AgentTracing {
		j.say(Warn, "agent.kata.enable_tracing", "", "the agent sends traces out of the guest, and the VM waits for them at its end", "set enable_tracing = false")
	}
	if j.c.DisableGuestSeccomp {
		j.say(Warn, "runtime.disable_guest_seccomp", "", "the container's seccomp profile is dropped in the guest; pid1's own filter holds, receiptd has none", "set disable_guest_seccomp = false")
	}
	if j.c.GuestHookPath != "" {
		j.say(Warn, j.hv("guest_hook_path"), "", "programs of the guest's image run beside the sandbox", "remove guest_hook_path")
	}
	for _, m := range j.c.SandboxBindMounts {
		severity, what := Warn, "is in every guest"
		if strings.HasSuffix(m, ":rw") {
			severity, what = Refuse, "can be written from every guest"
		}
		j.say(severity, "runtime.sandbox_bind_mounts", "", fmt.Sprintf("the host's %s %s", strings.TrimSuffix(m, ":rw"), what), "set sandbox_bind_mounts = []")
	}
}

func (j *judge) host() {
	if j.c.DisableNewNetns {
		j.say(Refuse, "runtime.disable_new_netns", "", "shim and VMM are in the host's network namespace, the guest's network with them", "set disable_new_netns = false")
	}
	if j.c.KeepAbnormal {
		j.say(Refuse, "runtime.keep_abnormal", "", "a shim whose VM is lost stays: its end could not be shown", "set keep_abnormal = false")
	}
	if j.c.DisableVMMSeccomp {
		j.say(Refuse, j.hv("disable_seccomp"), "", "the VMM runs without its seccomp filter", "set disable_seccomp = false")
	}
	if !j.c.SandboxCgroupOnly {
		j.say(Warn, "runtime.sandbox_cgroup_only", "", "processes of the VM may be outside the sandbox's cgroup: its limits do not hold for them", "set sandbox_cgroup_only = true")
	}
	if f := j.c.FileMemBackend; f != "" && f != "/dev/shm" && !strings.HasPrefix(f, "/dev/shm/") {
		j.say(Warn, j.hv("file_mem_backend"), "", fmt.Sprintf("the guest's memory, grants included, lies in a file in %s", f), `set file_mem_backend = "/dev/shm"`)
	}
	if j.c.GuestMemoryDump != "" {
		j.say(Warn, j.hv("guest_memory_dump_path"), "", fmt.Sprintf("the memory of a guest that panics, grants included, is written to %s", j.c.GuestMemoryDump), "remove guest_memory_dump_path")
	}
	if len(j.c.Experimental) > 0 {
		j.say(Warn, "runtime.experimental", "", "experimental features: "+strings.Join(j.c.Experimental, ", "), "set experimental = []")
	}
}

func (j *judge) debugging() {
	if j.c.ExtraMonitorSocket != "" {
		j.say(Refuse, j.hv("extra_monitor_socket"), "", "whoever reaches the extra monitor socket owns the VMM", `set extra_monitor_socket = ""`)
	}
	for _, debug := range []struct {
		key string
		on  bool
	}{{j.hv("enable_debug"), j.c.HypervisorDebug}, {"agent.kata.enable_debug", j.c.AgentDebug}, {"runtime.enable_debug", j.c.RuntimeDebug}} {
		if debug.on {
			j.say(Warn, debug.key, "", "logs hold commands and their environment, and the guest's console is readable", "set enable_debug = false")
		}
	}
	if j.c.Pprof {
		j.say(Warn, "runtime.enable_pprof", "", "the shim's memory can be read through its management socket", "set enable_pprof = false")
	}
}
