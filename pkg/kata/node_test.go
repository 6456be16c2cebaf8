package kata

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// node is a node with everything but KVM: files as devices are not taken, so the devices are /dev/null's.
func node(t *testing.T) (Places, string) {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir, err := os.MkdirTemp("/var/tmp", "kata") // /tmp may be mounted nodev
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	for _, d := range []string{"dev/net", "sys/module/vhost", "sys/kernel/mm/hugepages/hugepages-2048kB", "share"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for _, d := range []string{"kvm", "vhost-net", "vhost-vsock", "net/tun"} {
		require.NoError(t, unix.Mknod(filepath.Join(dir, "dev", d), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	}
	for _, f := range []string{"qemu", "kernel", "image", "virtiofsd"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "share", f), []byte(f), 0o755))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"), []byte("3\n"), 0o644))
	content := strings.NewReplacer(
		"/opt/kata/bin/qemu-system-x86_64\"\nkernel", filepath.Join(dir, "share/qemu")+"\"\nkernel",
		"/opt/kata/share/kata-containers/vmlinux.container", filepath.Join(dir, "share/kernel"),
		"/opt/kata/share/kata-containers/kata-containers.img", filepath.Join(dir, "share/image"),
		"/opt/kata/libexec/virtiofsd", filepath.Join(dir, "share/virtiofsd"),
	).Replace(shipped)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "configuration.toml"), []byte(content), 0o644))
	return Places{
		Shim: script(t, dir, `echo "`+rustLine+`"`), Config: filepath.Join(dir, "configuration.toml"),
		Dev: filepath.Join(dir, "dev"), Sys: filepath.Join(dir, "sys"),
	}, dir
}

func answers(r Report) map[string]Answer {
	all := map[string]Answer{}
	for _, it := range r.Items {
		all[it.Name] = it.Answer
	}
	return all
}

func item(t *testing.T, r Report, name string) Item {
	t.Helper()
	for _, it := range r.Items {
		if it.Name == name {
			return it
		}
	}
	require.Fail(t, "no item", name)
	return Item{}
}

func TestANodeWithEverythingButKVMSaysSo(t *testing.T) {
	p, _ := node(t)
	r := Check(t.Context(), p)
	require.Equal(t, map[string]Answer{
		"kvm": No, "shim": Yes, "config": Yes, "vhost": Yes, "vhost-net": Yes, "vhost-vsock": Yes, "tun": Yes,
		"kernel": Yes, "image": Yes, "vmm": Yes, "virtiofsd": Yes,
	}, answers(r))
	require.Empty(t, r.Findings)
	for _, it := range r.Items {
		require.NotEmpty(t, it.Purpose)
		require.Equal(t, it.Answer == Yes, it.Remedy == "", it.Name)
	}
	// /dev/null opens, and is not KVM.
	require.Contains(t, item(t, r, "kvm").Detail, "KVM_GET_API_VERSION: inappropriate ioctl")
	require.ErrorContains(t, r.Err(), "kata needs kvm (runs the guest)")
}

func TestEachThingThatIsMissingHasItsRemedy(t *testing.T) {
	for name, c := range map[string]struct {
		spoil  func(p *Places, dir string) error
		item   string
		answer Answer
		remedy string
	}{
		"no vhost-net":      {func(_ *Places, d string) error { return os.Remove(filepath.Join(d, "dev/vhost-net")) }, "vhost-net", No, "modprobe vhost_net"},
		"a file for vsock":  {func(_ *Places, d string) error { return replace(filepath.Join(d, "dev/vhost-vsock")) }, "vhost-vsock", No, "modprobe vhost_vsock"},
		"no vhost":          {func(_ *Places, d string) error { return os.Remove(filepath.Join(d, "sys/module/vhost")) }, "vhost", Inconclusive, "modprobe vhost"},
		"no kernel":         {func(_ *Places, d string) error { return os.Remove(filepath.Join(d, "share/kernel")) }, "kernel", No, "install it again"},
		"an empty image":    {func(_ *Places, d string) error { return os.Truncate(filepath.Join(d, "share/image"), 0) }, "image", No, "install it again"},
		"somebody's VMM":    {func(_ *Places, d string) error { return os.Chown(filepath.Join(d, "share/qemu"), 1000, 0) }, "vmm", No, "as root's own"},
		"a writable daemon": {func(_ *Places, d string) error { return os.Chmod(filepath.Join(d, "share/virtiofsd"), 0o775) }, "virtiofsd", No, "as root's own"},
		"no configuration":  {func(p *Places, _ string) error { p.Config = "/nowhere"; return nil }, "config", No, "mend the configuration"},
		"no shim":           {func(p *Places, _ string) error { p.Shim = "/nowhere"; return nil }, "shim", No, "install Kata Containers 4.0.0 or newer"},
	} {
		t.Run(name, func(t *testing.T) {
			p, dir := node(t)
			require.NoError(t, c.spoil(&p, dir))
			r := Check(t.Context(), p)
			it := item(t, r, c.item)
			require.Equal(t, c.answer, it.Answer, it.Detail)
			require.Contains(t, it.Remedy, c.remedy)
			if c.answer == No {
				require.ErrorContains(t, r.Err(), it.Remedy)
			}
			require.Contains(t, answers(r), "vhost-vsock", "what else is missing is said at once")
		})
	}
}

func replace(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	return os.WriteFile(path, nil, 0o600)
}

func TestHugePagesAreAskedForOnlyWhereTheyAreWanted(t *testing.T) {
	p, dir := node(t)
	require.NotContains(t, answers(Check(t.Context(), p)), "hugepages")
	dropIn := filepath.Join(dir, "config.d", "1")
	require.NoError(t, os.Mkdir(filepath.Dir(dropIn), 0o755))
	require.NoError(t, os.WriteFile(dropIn, []byte("[hypervisor.qemu]\nenable_hugepages = true\n"), 0o644))
	require.Equal(t, "3 free", item(t, Check(t.Context(), p), "hugepages").Detail)
	free := filepath.Join(dir, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	require.NoError(t, os.WriteFile(free, []byte("0\n"), 0o644))
	require.Equal(t, No, item(t, Check(t.Context(), p), "hugepages").Answer)
	require.NoError(t, os.Remove(free))
	require.Contains(t, item(t, Check(t.Context(), p), "hugepages").Detail, "no huge pages")
}

func TestAnInstallationThatIsRefusedIsAnErrorOfTheNode(t *testing.T) {
	p, dir := node(t)
	script(t, dir, `echo "`+strings.Replace(rustLine, "4.2.0", "3.30.0", 1)+`"`)
	r := Check(t.Context(), p)
	require.ErrorIs(t, r.Err(), ErrRefused)
	require.ErrorContains(t, r.Err(), "GHSA-2gv2-cffp-j227")
	// Also when the configuration can't be read.
	p.Config = "/nowhere"
	require.ErrorContains(t, Check(t.Context(), p).Err(), "GHSA-2gv2-cffp-j227")
}

// On a machine with KVM the instruction runs; where there is none, the answer is no. Either way it is one of the three,
// and a device that opens is not enough for a yes.
func TestKVMIsTriedForReal(t *testing.T) {
	it := tryKVM("/dev/kvm")
	if _, err := os.Stat("/dev/kvm"); err != nil {
		require.Equal(t, No, it.Answer)
		require.Equal(t, "opening /dev/kvm: no such file or directory", it.Detail)
		require.Contains(t, it.Remedy, "kvm_intel or kvm_amd")
		t.Skip("this machine has no /dev/kvm: that an instruction runs is tried where there is one")
	}
	require.Contains(t, []Answer{Yes, No, Inconclusive}, it.Answer)
	// The guests of tests/kernel have an emulated processor whose KVM is known to work.
	if cpu, err := os.ReadFile("/proc/cpuinfo"); err == nil && strings.Contains(string(cpu), "QEMU TCG CPU") {
		require.Equal(t, Yes, it.Answer, it.Detail)
	}
	require.Equal(t, it.Answer == Yes, it.Remedy == "", "%+v", it)
}
