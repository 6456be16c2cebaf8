package kata

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func isOf(err error, targets ...error) bool {
	for _, target := range targets {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

var current = ShimInfo{Flavour: FlavourRust, Version: Version{4, 2, 0, ""}}

func ids(found []Finding) []string {
	var all []string
	for _, f := range found {
		all = append(all, f.Advisory)
	}
	return all
}

func TestAVersionWithAKnownWayToTheNodeIsRefusedWithItsAdvisory(t *testing.T) {
	annotations := []string{"GHSA-mp2j-xm59-qfgw", "GHSA-7fhf-v3p3-rp56"}
	for _, c := range []struct {
		flavour    Flavour
		version    string
		hypervisor string
		want       []string
	}{
		{FlavourRust, "4.2.0", "qemu", nil},
		{FlavourRust, "4.0.0", "qemu", nil},
		{FlavourGo, "4.0.0", "clh", nil},
		{FlavourRust, "4.0.0", "dragonball", []string{"GHSA-fgm4-mv68-h344"}},
		{FlavourRust, "4.1.0", "dragonball", nil},
		{FlavourRust, "4.0.0-rc0", "qemu", annotations},
		{FlavourRust, "3.32.0", "qemu", annotations},
		{FlavourGo, "3.31.0", "qemu", annotations},
		{FlavourRust, "3.30.0", "qemu", append([]string{"GHSA-2gv2-cffp-j227", "GHSA-rr59-xxvx-96qr"}, annotations...)},
		{FlavourGo, "3.30.0", "qemu", append([]string{"GHSA-rr59-xxvx-96qr"}, annotations...)},
		{FlavourGo, "3.26.0", "clh", append([]string{"GHSA-rr59-xxvx-96qr"}, append(annotations, "GHSA-wwj6-vghv-5p64")...)},
		{FlavourGo, "3.25.0", "qemu", append([]string{"GHSA-rr59-xxvx-96qr"}, append(annotations, "GHSA-5fc8-gg7w-3g5c")...)},
	} {
		v, err := ParseVersion(c.version)
		require.NoError(t, err)
		require.Equal(t, c.want, ids(JudgeVersion(c.flavour, v, c.hypervisor)), "%s %s %s", c.flavour, c.version, c.hypervisor)
	}
	// A configuration that can't be read leaves the hypervisor open, and then all of them count.
	require.Contains(t, ids(JudgeVersion(FlavourGo, Version{3, 26, 0, ""}, "")), "GHSA-wwj6-vghv-5p64")
}

func TestEachAdvisoryIsOneThatCanBeLookedUp(t *testing.T) {
	seen := map[string]bool{}
	for _, a := range Advisories {
		require.Regexp(t, `^GHSA(-[23456789cfghjmpqrvwx]{4}){3}$`, a.ID)
		require.Regexp(t, `^$|^CVE-20\d\d-\d{4,}$`, a.CVE)
		require.False(t, seen[a.ID], a.ID)
		seen[a.ID] = true
		require.NotZero(t, a.Fixed.Major)
		require.NotEmpty(t, a.What)
	}
	require.Empty(t, JudgeVersion(FlavourRust, oldest, "qemu"), "the release that is named as the remedy is fine itself")
}

func TestAShippedConfigurationOfACurrentReleaseIsFine(t *testing.T) {
	found := Judge(current, readOK(t, FlavourRust, shipped))
	require.Empty(t, found)
	require.NoError(t, Refused(found))
}

// Each row changes the shipped configuration in one place; the finding names the setting, and where it stands.
func TestDangerousSettingsAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		table, line string
		severity    Severity
		key         string
		advisory    string
	}{
		"debug console":                  {"agent.kata", `debug_console_enabled = true`, Refuse, "agent.kata.debug_console_enabled", ""},
		"agent tracing":                  {"agent.kata", `enable_tracing = true`, Warn, "agent.kata.enable_tracing", ""},
		"agent debugging":                {"agent.kata", `enable_debug = true`, Warn, "agent.kata.enable_debug", ""},
		"runtime debugging":              {"runtime", `enable_debug = true`, Warn, "runtime.enable_debug", ""},
		"VMM debugging":                  {"hypervisor.qemu", `enable_debug = true`, Warn, "hypervisor.qemu.enable_debug", ""},
		"monitor":                        {"hypervisor.qemu", `extra_monitor_socket = "qmp"`, Refuse, "hypervisor.qemu.extra_monitor_socket", ""},
		"pprof":                          {"runtime", `enable_pprof = true`, Warn, "runtime.enable_pprof", ""},
		"any annotation":                 {"hypervisor.qemu", `enable_annotations = [".*"]`, Refuse, "hypervisor.qemu.enable_annotations", "GHSA-rr59-xxvx-96qr"},
		"an empty pattern":               {"hypervisor.qemu", `enable_annotations = [""]`, Refuse, "hypervisor.qemu.enable_annotations", "GHSA-rr59-xxvx-96qr"},
		"the old default":                {"hypervisor.qemu", `enable_annotations = ["virtio_fs_extra_args"]`, Refuse, "hypervisor.qemu.enable_annotations", "GHSA-rr59-xxvx-96qr"},
		"a part of a name":               {"hypervisor.qemu", `enable_annotations = ["tl.ath"]`, Refuse, "hypervisor.qemu.enable_annotations", "GHSA-rr59-xxvx-96qr"},
		"kernel_params by others":        {"hypervisor.qemu", `enable_annotations = ["kernel_params"]`, Warn, "hypervisor.qemu.enable_annotations", "GHSA-rr59-xxvx-96qr"},
		"no regular expression":          {"hypervisor.qemu", `enable_annotations = ["("]`, Refuse, "hypervisor.qemu.enable_annotations", ""},
		"console by kernel":              {"hypervisor.qemu", `kernel_params = "quiet agent.debug_console"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"console by port":                {"hypervisor.qemu", `kernel_params = "agent.debug_console_vport=1026"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"the kernel's own dashes":        {"hypervisor.qemu", `kernel_params = "systemd.debug-shell=1"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"another init":                   {"hypervisor.qemu", `kernel_params = "init=/bin/sh"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"side channels":                  {"hypervisor.qemu", `kernel_params = "mitigations=off"`, Warn, "hypervisor.qemu.kernel_params", ""},
		"virtiofsd, one word":            {"hypervisor.qemu", `virtio_fs_extra_args = ["--sandbox=none"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, two words":           {"hypervisor.qemu", `virtio_fs_extra_args = ["--seccomp", "none"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, -o":                  {"hypervisor.qemu", `virtio_fs_extra_args = ["-o", "announce_submounts,source=/"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-rr59-xxvx-96qr"},
		"virtiofsd, -o joined":           {"hypervisor.qemu", `virtio_fs_extra_args = ["-osandbox=none"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, another share":       {"hypervisor.qemu", `virtio_fs_extra_args = ["--shared-dir=/"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-rr59-xxvx-96qr"},
		"virtiofsd, capabilities":        {"hypervisor.qemu", `virtio_fs_extra_args = ["--modcaps=+sys_admin"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, seccomp that logs":   {"hypervisor.qemu", `virtio_fs_extra_args = ["--seccomp=log"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, no seccomp's value":  {"hypervisor.qemu", `virtio_fs_extra_args = ["--seccomp"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, a value that is one": {"hypervisor.qemu", `virtio_fs_extra_args = ["--seccomp", "--announce-submounts"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, chroot":              {"hypervisor.qemu", `virtio_fs_extra_args = ["--sandbox", "chroot"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-2gv2-cffp-j227"},
		"virtiofsd, an old socket":       {"hypervisor.qemu", `virtio_fs_extra_args = ["--socket=/x"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", "GHSA-rr59-xxvx-96qr"},
		"virtiofsd, cache":               {"hypervisor.qemu", `virtio_fs_extra_args = ["--cache=always"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, cache of metadata":   {"hypervisor.qemu", `virtio_fs_extra_args = ["--cache", "metadata"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, cache by -o":         {"hypervisor.qemu", `virtio_fs_extra_args = ["-o", "cache=always"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, cache for a second":  {"hypervisor.qemu", `virtio_fs_extra_args = ["--cache=auto"]`, Warn, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, an unknown cache":    {"hypervisor.qemu", `virtio_fs_extra_args = ["--cache=x"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, a number and more":   {"hypervisor.qemu", `virtio_fs_extra_args = ["--thread-pool-size=1x"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, a switch's value":    {"hypervisor.qemu", `virtio_fs_extra_args = ["--announce-submounts=x"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, unknown":             {"hypervisor.qemu", `virtio_fs_extra_args = ["--allow-mmap"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, unknown by -o":       {"hypervisor.qemu", `virtio_fs_extra_args = ["-o", "announce_submounts,writeback"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, + after -":           {"hypervisor.qemu", `virtio_fs_extra_args = ["--modcaps=-mknod:+sys_admin"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, end of options":      {"hypervisor.qemu", `virtio_fs_extra_args = ["--"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, a lone word":         {"hypervisor.qemu", `virtio_fs_extra_args = ["x"]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"virtiofsd, an empty word":       {"hypervisor.qemu", `virtio_fs_extra_args = [""]`, Refuse, "hypervisor.qemu.virtio_fs_extra_args", ""},
		"another agent's settings":       {"hypervisor.qemu", `kernel_params = "agent.config_file=/etc/a.toml"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"quoted":                         {"hypervisor.qemu", `kernel_params = '"init=/bin/sh"'`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"quoted for init":                {"hypervisor.qemu", `kernel_params = "quiet='a b'"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"a letter with a space's byte":   {"hypervisor.qemu", `kernel_params = "quiet=\u00e0init=/bin/sh"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"a program":                      {"hypervisor.qemu", `kernel_params = "systemd.run=/bin/sh"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"a unit":                         {"hypervisor.qemu", `kernel_params = "systemd.unit=rescue.target"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"a unit that is wanted":          {"hypervisor.qemu", `kernel_params = "systemd.wants=debug-shell.service"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"the ramdisk's shell":            {"hypervisor.qemu", `kernel_params = "rd.systemd.debug_shell"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"a word for init":                {"hypervisor.qemu", `kernel_params = "quiet single"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"the rest for init":              {"hypervisor.qemu", `kernel_params = "--"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"an unknown parameter":           {"hypervisor.qemu", `kernel_params = "agent.something=1"`, Refuse, "hypervisor.qemu.kernel_params", ""},
		"the agent's log":                {"hypervisor.qemu", `kernel_params = "agent.log=debug"`, Warn, "hypervisor.qemu.kernel_params", ""},
		"cache for ever":                 {"hypervisor.qemu", `virtio_fs_cache = "always"`, Refuse, "hypervisor.qemu.virtio_fs_cache", ""},
		"cache for a second":             {"hypervisor.qemu", `virtio_fs_cache = "auto"`, Warn, "hypervisor.qemu.virtio_fs_cache", ""},
		"no shared files":                {"hypervisor.qemu", `shared_fs = "none"`, Refuse, "hypervisor.qemu.shared_fs", ""},
		"9p":                             {"hypervisor.qemu", `shared_fs = "virtio-9p"`, Refuse, "hypervisor.qemu.shared_fs", ""},
		"two images":                     {"hypervisor.qemu", `initrd = "/x"`, Refuse, "hypervisor.qemu.initrd", ""},
		"a relative program":             {"hypervisor.qemu", `virtio_fs_daemon = "virtiofsd"`, Refuse, "hypervisor.qemu.virtio_fs_daemon", ""},
		"memory in a file":               {"hypervisor.qemu", `file_mem_backend = "/var/tmp"`, Warn, "hypervisor.qemu.file_mem_backend", ""},
		"dumps":                          {"hypervisor.qemu", `guest_memory_dump_path = "/var/crash"`, Warn, "hypervisor.qemu.guest_memory_dump_path", ""},
		"hooks":                          {"hypervisor.qemu", `guest_hook_path = "/usr/share/oci/hooks"`, Warn, "hypervisor.qemu.guest_hook_path", ""},
		"no seccomp for the VMM":         {"hypervisor.qemu", `disable_seccomp = true`, Refuse, "hypervisor.qemu.disable_seccomp", ""},
		"no guest seccomp":               {"runtime", `disable_guest_seccomp = true`, Warn, "runtime.disable_guest_seccomp", ""},
		"the host's network":             {"runtime", `disable_new_netns = true`, Refuse, "runtime.disable_new_netns", ""},
		"a shim that stays":              {"runtime", `keep_abnormal = true`, Refuse, "runtime.keep_abnormal", ""},
		"cgroups":                        {"runtime", `sandbox_cgroup_only = false`, Warn, "runtime.sandbox_cgroup_only", ""},
		"a mount in each guest":          {"runtime", `sandbox_bind_mounts = ["/srv"]`, Warn, "runtime.sandbox_bind_mounts", ""},
		"a writable one":                 {"runtime", `sandbox_bind_mounts = ["/srv:rw"]`, Refuse, "runtime.sandbox_bind_mounts", ""},
		"experiments":                    {"runtime", `experimental = ["x"]`, Warn, "runtime.experimental", ""},
		"templates":                      {"factory", `enable_template = true`, Refuse, "factory.enable_template", ""},
		"templates, Rust's place":        {"hypervisor.qemu.factory", `enable_template = true`, Refuse, "hypervisor.qemu.factory.enable_template", ""},
		"cached VMs":                     {"factory", `vm_cache_number = 2`, Refuse, "factory.vm_cache_number", ""},
	} {
		t.Run(name, func(t *testing.T) {
			config := readOK(t, FlavourRust, shipped, "50.toml", "["+c.table+"]\n"+c.line+"\n")
			found := Judge(current, config)
			require.Len(t, found, 1, "%v", found)
			f := found[0]
			require.Equal(t, c.severity, f.Severity)
			require.Equal(t, c.key, f.Key)
			require.Equal(t, c.advisory, f.Advisory)
			require.Equal(t, Source{config.DropIns[0], 2}, f.At)
			require.NotEmpty(t, f.Remedy)
			err := Refused(found)
			if c.severity == Warn {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, f.Remedy)
			require.ErrorContains(t, err, "50.toml:2")
		})
	}
}

func TestAGroupOfShortArgumentsIsRefused(t *testing.T) {
	for _, args := range []string{`"-do", "source=/"`, `"-d"`, `"-fo", "x"`} {
		found := Judge(current, readOK(t, FlavourRust, shipped, "50.toml", "[hypervisor.qemu]\nvirtio_fs_extra_args = ["+args+"]\n"))
		require.NotEmpty(t, found, args)
		require.ErrorIs(t, Refused(found[:1]), ErrRefused, "the very first one")
	}
}

func TestWhatIsKnownToBeHarmlessIsLet(t *testing.T) {
	for _, line := range []string{
		`virtio_fs_extra_args = []`, `virtio_fs_extra_args = ["--thread-pool-size=1", "--announce-submounts"]`,
		`virtio_fs_extra_args = ["--thread-pool-size", "0", "-o", "announce_submounts", "--log-level=info", "--modcaps=-mknod:-setfcap"]`,
		`virtio_fs_extra_args = ["--seccomp=kill", "--sandbox", "namespace", "-oseccomp=trap,cache=never", "--cache", "never"]`,
		`kernel_params = ""`, `kernel_params = "agent.log=info agent.hotplug-timeout=20\tmitigations=auto,nosmt panic=1"`,
		`kernel_params = "cgroup_no_v1=all pci=realloc pci=nocrs systemd.unified_cgroup_hierarchy=1 quiet"`,
		`virtio_fs_cache = ""`, `virtio_fs_cache = "none"`,
	} {
		require.Empty(t, Judge(current, readOK(t, FlavourRust, shipped, "50.toml", "[hypervisor.qemu]\n"+line+"\n")), line)
	}
}

func TestAHypervisorWithoutAContractIsRefused(t *testing.T) {
	for _, h := range []string{"firecracker", "acrn", "remote", "openvmm", "made-up"} {
		found := Judge(current, readOK(t, FlavourRust, strings.ReplaceAll(shipped, "qemu", h)))
		require.Len(t, found, 1, "%v", found)
		require.Equal(t, Refuse, found[0].Severity)
	}
	for _, h := range []string{"cloud-hypervisor", "clh", "dragonball", "stratovirt"} {
		require.Empty(t, Judge(current, readOK(t, FlavourRust, strings.ReplaceAll(shipped, "qemu", h))), h)
	}
	inline := strings.NewReplacer("qemu", "dragonball", `shared_fs = "virtio-fs"`, `shared_fs = "inline-virtio-fs"`)
	require.Empty(t, Judge(current, readOK(t, FlavourRust, inline.Replace(shipped))))
}

func TestAnEnvironmentThatChoosesTheConfigurationIsRefused(t *testing.T) {
	require.Empty(t, JudgeEnvironment([]string{"PATH=/usr/bin", "KATA_CONF_FILE_X=1", ""}))
	require.ErrorIs(t, Refused(JudgeEnvironment([]string{"PATH=/usr/bin", "KATA_CONF_FILE=/tmp/x"})), ErrRefused)
}

// However the arguments are spelt, what virtiofsd would take for --sandbox=none is found.
func FuzzVirtiofsdOptions(f *testing.F) {
	f.Add("--sandbox=none")
	f.Add("-o sandbox=none --x")
	f.Add("--sandbox none")
	bad := regexp.MustCompile(`^--sandbox[= ]none$`)
	f.Fuzz(func(t *testing.T, line string) {
		found := false
		for _, o := range virtiofsdOptions(strings.Split(line, " ")) {
			found = found || o == option{"sandbox", "none"}
		}
		if bad.MatchString(line) {
			require.True(t, found)
		}
	})
}
