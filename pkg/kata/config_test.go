package kata

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// shipped is what kata-deploy installs for the Rust shim with QEMU, as far as anything here looks at it.
const shipped = `
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
kernel = "/opt/kata/share/kata-containers/vmlinux.container"
image = "/opt/kata/share/kata-containers/kata-containers.img"
machine_type = "q35"
enable_annotations = []
valid_hypervisor_paths = ["/opt/kata/bin/qemu-system-x86_64"]
kernel_params = "cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1"
default_vcpus = 1.0
shared_fs = "virtio-fs"
virtio_fs_daemon = "/opt/kata/libexec/virtiofsd"
virtio_fs_extra_args = ["--thread-pool-size=1", "-o", "announce_submounts"]
virtio_fs_cache = "never"

[agent.kata]
kernel_modules = []

[runtime]
name = "virt_container"
hypervisor_name = "qemu"
agent_name = "kata"
disable_guest_seccomp = false
sandbox_cgroup_only = true
static_sandbox_resource_mgmt = true
sandbox_bind_mounts = []
experimental = []
`

// installed writes a configuration and its drop-ins (name, content, …) and returns the main file.
func installed(t *testing.T, content string, dropIns ...string) string {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir := t.TempDir()
	path := filepath.Join(dir, "configuration.toml")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	for i := 0; i < len(dropIns); i += 2 {
		file := filepath.Join(dir, "config.d", dropIns[i])
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(dropIns[i+1]), 0o644))
	}
	return path
}

func readOK(t *testing.T, f Flavour, content string, dropIns ...string) Config {
	t.Helper()
	c, err := ReadConfig(installed(t, content, dropIns...), f)
	require.NoError(t, err)
	return c
}

func TestAShippedConfigurationIsReadByBothFlavours(t *testing.T) {
	for _, f := range []Flavour{FlavourRust, FlavourGo} {
		c := readOK(t, f, shipped)
		require.Equal(t, "qemu", c.Hypervisor)
		require.Equal(t, "/opt/kata/bin/qemu-system-x86_64", c.VMM)
		require.Equal(t, "/opt/kata/libexec/virtiofsd", c.VirtioFSDaemon)
		require.Equal(t, []string{"--thread-pool-size=1", "-o", "announce_submounts"}, c.VirtioFSExtraArgs)
		require.True(t, c.SandboxCgroupOnly)
		require.True(t, c.StaticSandboxResource)
		require.False(t, c.HybridVsock())
		require.Equal(t, Source{c.Path, 9}, c.Where("hypervisor.qemu.kernel_params"))
		require.Equal(t, Source{c.Path, 23}, c.Where("runtime.disable_guest_seccomp"))
		require.Equal(t, Source{File: c.Path}, c.Where("runtime.keep_abnormal"))
	}
}

// The drop-ins lie beside the file that the link leads to, and count in the order of their names, whatever these end with.
func TestDropInsAreMergedAsKataDoes(t *testing.T) {
	path := installed(t, shipped,
		"20-last", "[hypervisor.qemu]\nkernel_params = \"quiet\"\n",
		"10-first.toml", "[hypervisor.qemu]\nkernel_params = \"agent.debug_console\"\nenable_hugepages = true\n\n[agent.kata]\ndebug_console_enabled = true\n",
	)
	link := filepath.Join(t.TempDir(), "configuration.toml")
	require.NoError(t, os.Symlink(path, link))
	require.NoError(t, os.MkdirAll(filepath.Join(filepath.Dir(link), "config.d"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(link), "config.d", "30.toml"), []byte("[runtime]\nkeep_abnormal = true\n"), 0o644))
	for _, f := range []Flavour{FlavourRust, FlavourGo} {
		c, err := ReadConfig(link, f)
		require.NoError(t, err)
		require.Equal(t, path, c.Path)
		require.Len(t, c.DropIns, 2)
		require.Equal(t, "quiet", c.KernelParams)
		require.Equal(t, Source{filepath.Join(filepath.Dir(path), "config.d", "20-last"), 2}, c.Where("hypervisor.qemu.kernel_params"))
		require.True(t, c.HugePages, "what the later drop-in does not name stays")
		require.True(t, c.DebugConsole)
		require.False(t, c.KeepAbnormal, "a drop-in beside the link is none")
		require.Equal(t, "/opt/kata/libexec/virtiofsd", c.VirtioFSDaemon)
	}
}

// The Go runtime's library takes "Debug_Console_Enabled" for debug_console_enabled; the Rust one's does not.
func TestTheCaseOfAKeyCountsAsItDoesForTheFlavour(t *testing.T) {
	const odd = shipped + "\n[agent.other]\nDebug_Console_Enabled = true\n"
	require.True(t, readOK(t, FlavourGo, odd).DebugConsole)
	require.False(t, readOK(t, FlavourRust, odd).DebugConsole)
	_, err := ReadConfig(installed(t, shipped+"\n[factory]\nenable_template = false\nEnable_Template = true\n"), FlavourGo)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "differing in case only")
}

func TestWhatCannotBeJudgedIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		flavour          Flavour
		content, message string
		dropIns          []string
	}{
		"no TOML":              {FlavourRust, "[hypervisor.qemu\n", ":1: ", nil},
		"a doubled key":        {FlavourRust, "[runtime]\nenable_debug = true\nenable_debug = false\n", ":3: ", nil},
		"a string for a bool":  {FlavourRust, shipped + "[factory]\nenable_template = \"false\"\n", "configuration.toml:29: factory.enable_template is a string where Kata wants a bool", nil},
		"a number in a list":   {FlavourRust, "[runtime]\nexperimental = [1]\n", "runtime.experimental holds a int64", nil},
		"a value for a table":  {FlavourRust, shipped, "where Kata wants a map", []string{"1.toml", "agent = 3\n"}},
		"no hypervisor":        {FlavourRust, "[runtime]\nhypervisor_name = \"qemu\"\n", "there is no [hypervisor.qemu]", nil},
		"no hypervisor's name": {FlavourRust, "[hypervisor.qemu]\n", "runtime.hypervisor_name is not set", nil},
		"two for Go":           {FlavourGo, shipped + "[hypervisor.clh]\n", "2 tables [hypervisor.…] (clh, qemu)", nil},
		"none for Go":          {FlavourGo, "[runtime]\n", "0 tables", nil},
		"too long":             {FlavourGo, string(make([]byte, maxConfig+1)), "longer than", nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ReadConfig(installed(t, c.content, c.dropIns...), c.flavour)
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, c.message)
		})
	}
}

func TestAConfigurationThatOthersCanChangeIsRefused(t *testing.T) {
	changes := map[string]func(path string) error{
		"the file's mode":       func(p string) error { return os.Chmod(p, 0o666) },
		"the file's owner":      func(p string) error { return os.Chown(p, 65534, 0) },
		"the folder's mode":     func(p string) error { return os.Chmod(filepath.Dir(p), 0o777) },
		"the drop-in's mode":    func(p string) error { return os.Chmod(filepath.Join(filepath.Dir(p), "config.d", "1"), 0o602) },
		"the drop-ins' folder":  func(p string) error { return os.Chown(filepath.Join(filepath.Dir(p), "config.d"), 1000, 0) },
		"group of the drop-ins": func(p string) error { return os.Chmod(filepath.Join(filepath.Dir(p), "config.d"), 0o775) },
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			path := installed(t, shipped, "1", "[runtime]\n")
			_, err := ReadConfig(path, FlavourRust)
			require.NoError(t, err, "as it is, it is fine")
			require.NoError(t, change(path))
			_, err = ReadConfig(path, FlavourRust)
			require.ErrorIs(t, err, ErrUntrusted)
			require.Regexp(t, `chown root|chmod go-w`, err.Error())
		})
	}
}

func TestALinkedDropInIsReadForGoAndRefusedForRust(t *testing.T) {
	path := installed(t, shipped, "1", "[runtime]\nkeep_abnormal = true\n")
	dir := filepath.Join(filepath.Dir(path), "config.d")
	require.NoError(t, os.Rename(filepath.Join(dir, "1"), filepath.Join(filepath.Dir(path), "elsewhere")))
	require.NoError(t, os.Symlink("../elsewhere", filepath.Join(dir, "1")))
	c, err := ReadConfig(path, FlavourGo)
	require.NoError(t, err)
	require.True(t, c.KeepAbnormal)
	_, err = ReadConfig(path, FlavourRust)
	require.ErrorContains(t, err, "the Rust shim refuses")
}

func TestNoConfigurationIsNoInstallation(t *testing.T) {
	_, err := ReadConfig(filepath.Join(t.TempDir(), "configuration.toml"), FlavourGo)
	require.ErrorIs(t, err, ErrNotInstalled)
	_, err = FindConfig(Places{ConfigPaths: []string{"/nowhere/a", "/nowhere/b"}}, ShimInfo{Flavour: FlavourGo})
	require.ErrorIs(t, err, ErrNotInstalled)
	require.ErrorContains(t, err, "/nowhere/a, /nowhere/b")
}

func TestEachFlavourHasItsOwnListOfConfigurations(t *testing.T) {
	require.Equal(t, []string{"/etc/kata-containers/configuration.toml", "/opt/kata/share/defaults/kata-containers/configuration.toml"}, ConfigCandidates(FlavourGo, "/opt/kata/bin/"+ShimName))
	require.Equal(t, []string{"/etc/kata-containers/configuration.toml", "/usr/share/defaults/kata-containers/configuration.toml"}, ConfigCandidates(FlavourGo, "/usr/bin/"+ShimName))
	rust := ConfigCandidates(FlavourRust, "/usr/bin/"+ShimName)
	require.Len(t, rust, 3)
	require.Equal(t, "/etc/kata-containers/runtime-rs/configuration.toml", rust[0])
	first := installed(t, shipped)
	found, err := FindConfig(Places{ConfigPaths: []string{"/nowhere", first}}, ShimInfo{})
	require.NoError(t, err)
	require.Equal(t, first, found)
}

// Whatever a file says, reading it ends with a configuration or with an error that says so.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(shipped), true)
	f.Add([]byte("[hypervisor]\nqemu = 3\n[runtime]\nhypervisor_name='qemu'\n"), false)
	f.Add([]byte("a.b.c = {d = [1, {e = 2}]}\n[[x.y]]\n"), true)
	f.Fuzz(func(t *testing.T, data []byte, rust bool) {
		flavour := FlavourGo
		if rust {
			flavour = FlavourRust
		}
		path := filepath.Join(t.TempDir(), "c.toml")
		require.NoError(t, os.WriteFile(path, data, 0o600))
		c, err := ReadConfig(path, flavour)
		if err != nil {
			require.True(t, isOf(err, ErrConfig, ErrNotInstalled), "%v", err)
			return
		}
		for _, finding := range Judge(ShimInfo{Flavour: flavour, Version: oldest}, c) {
			require.NotEmpty(t, finding.Remedy)
		}
	})
}
