package hostkernel

import (
	"errors"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func TestIdsInsideMapToTheSandboxesRange(t *testing.T) {
	require.Equal(t, []specs.LinuxIDMapping{{ContainerID: 0, HostID: 0x70000000, Size: 65536}}, IDMap(0x70000000, 65536, 1000, 0))
	require.Equal(t, []specs.LinuxIDMapping{
		{ContainerID: 0, HostID: 0x70000000, Size: 1000},
		{ContainerID: 1000, HostID: 1234, Size: 1},
		{ContainerID: 1001, HostID: 0x70000000 + 1001, Size: 64535},
	}, IDMap(0x70000000, 65536, 1000, 1234), "only the command's id maps to the on-disk owner")
	require.Len(t, IDMap(100, 5, 4, 1234), 2, "no empty rest")
}

func TestIdRangesThatMixUsersAreRefused(t *testing.T) {
	for name, change := range map[string]func(*runtime.IDs){
		"beginning at the node's root":  func(i *runtime.IDs) { i.HostBase = 0 },
		"command is receiptd":           func(i *runtime.IDs) { i.CommandUID = 0 },
		"command's group is receiptd's": func(i *runtime.IDs) { i.CommandGID = 0 },
		"pid1 is receiptd":              func(i *runtime.IDs) { i.Pid1UID = 0 },
		"pid1 is the command (hole 6)":  func(i *runtime.IDs) { i.Pid1UID = i.CommandUID },
		"too small":                     func(i *runtime.IDs) { i.Size = 1000 },
		"beyond the last id":            func(i *runtime.IDs) { i.HostBase = 1<<32 - 65535 },
	} {
		t.Run(name, func(t *testing.T) {
			ids := testIDs
			change(&ids)
			require.ErrorIs(t, CheckIDs(ids), runtime.ErrUnavailable)
		})
	}
	require.NoError(t, CheckIDs(testIDs))
}

const (
	separateV1 = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime shared:5 - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,release_agent=/lib/systemd/agent,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw`
	togetherV1 = `32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 31 0:29 / /mnt/again rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /cg\040roup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids`
	onlyV2 = `41 31 0:38 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup2 rw,nsdelegate`
)

func v2With(controllers ...string) func(string) []string {
	return func(string) []string { return controllers }
}

func TestEachHierarchyIsFoundAtItsOwnMountPointOnce(t *testing.T) {
	require.Equal(t, []Hierarchy{
		{Mount: "/sys/fs/cgroup/cpu", controllers: []string{"cpu"}},
		{Mount: "/sys/fs/cgroup/cpuacct", controllers: []string{"cpuacct"}},
		{Mount: "/sys/fs/cgroup/memory", controllers: []string{"memory"}},
		{Mount: "/sys/fs/cgroup/pids", controllers: []string{"pids"}},
		{Mount: "/sys/fs/cgroup/systemd", controllers: []string{"name=systemd"}},
		{Mount: "/sys/fs/cgroup/unified", V2: true},
	}, parseHierarchies(separateV1, v2With()))
	require.Equal(t, []Hierarchy{
		{Mount: "/sys/fs/cgroup/cpu,cpuacct", controllers: []string{"cpu", "cpuacct"}},
		{Mount: "/cg roup/memory", controllers: []string{"memory"}},
		{Mount: "/sys/fs/cgroup/pids", controllers: []string{"pids"}},
	}, parseHierarchies(togetherV1, v2With()))
	require.Equal(t, []Hierarchy{{Mount: "/sys/fs/cgroup", V2: true, controllers: []string{"cpu", "memory", "pids"}}},
		parseHierarchies(onlyV2, v2With("cpu", "memory", "pids")))
	require.Empty(t, parseHierarchies("nonsense\n\n1 2 - x", v2With()))
}

func mountsOf(hs []Hierarchy) (out []string) {
	for _, h := range hs {
		out = append(out, h.Mount)
	}
	return out
}

func TestCommandsGetACgroupOfTheirOwnInEveryHierarchyThatBoundsThem(t *testing.T) {
	for _, cpus := range []float64{0, 1} {
		hs, err := SlotHierarchies(parseHierarchies(separateV1, v2With()), runtime.Resources{CPUs: cpus})
		require.NoError(t, err)
		require.Equal(t, []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu"}, mountsOf(hs))
		hs, err = SlotHierarchies(parseHierarchies(onlyV2, v2With("cpu", "memory", "pids")), runtime.Resources{CPUs: cpus})
		require.NoError(t, err)
		require.Equal(t, []string{"/sys/fs/cgroup"}, mountsOf(hs), "v2 has one hierarchy for all")
	}
}

func TestANodeWithoutCpuCgroupsIsRefusedOnlyALimitOfCpus(t *testing.T) {
	without := []Hierarchy{{Mount: "/m", controllers: []string{"memory"}}, {Mount: "/p", controllers: []string{"pids"}}}
	hs, err := SlotHierarchies(without, runtime.Resources{})
	require.NoError(t, err)
	require.Equal(t, []string{"/p", "/m"}, mountsOf(hs))
	_, err = SlotHierarchies(without, runtime.Resources{CPUs: 1})
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, "CONFIG_CGROUP_SCHED")
}

func TestAMissingControllerIsNamedWithItsRemedy(t *testing.T) {
	_, err := SlotHierarchies(parseHierarchies(onlyV2, v2With("cpu", "pids")), runtime.Resources{})
	require.ErrorIs(t, err, runtime.ErrUnavailable)
	require.ErrorContains(t, err, `"memory"`)
	require.ErrorContains(t, err, "cgroup_enable=memory")
	_, err = SlotHierarchies(nil, runtime.Resources{})
	require.ErrorContains(t, err, "CONFIG_CGROUP_PIDS")
}

func values(settings []setting) map[string]string {
	out := map[string]string{}
	for _, s := range settings {
		out[s.file] = s.value
	}
	return out
}

func TestLimitsAreWrittenInEachKernelsWords(t *testing.T) {
	r := runtime.Resources{CPUs: 1.5, MemoryBytes: 1 << 20, Pids: 64}
	v2 := Hierarchy{V2: true, controllers: []string{"cpu", "memory", "pids"}}
	require.Equal(t, map[string]string{"pids.max": "64", "memory.max": "1048576", "memory.swap.max": "0", "cpu.weight": "12", "cpu.max": "150000 100000"}, values(slotSettings(v2, r)))
	require.Equal(t, map[string]string{"memory.limit_in_bytes": "1048576", "memory.memsw.limit_in_bytes": "1048576", "memory.kmem.tcp.limit_in_bytes": "1048576"},
		values(slotSettings(Hierarchy{controllers: []string{"memory"}}, r)))
	require.Equal(t, map[string]string{"cpu.shares": "128", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}, values(slotSettings(Hierarchy{controllers: []string{"cpu", "cpuacct"}}, r)))
	require.Equal(t, map[string]string{"cpu.shares": "128", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"},
		values(slotSettings(Hierarchy{controllers: []string{"cpu"}}, runtime.Resources{CPUs: 0.001})), "the kernel's least")
	require.Equal(t, map[string]string{"cpu.weight": "12"}, values(slotSettings(v2, runtime.Resources{})), "zero is no limit")
	require.Equal(t, map[string]string{"pids.max": "576"}, values(sandboxSettings(v2, r)), "the whole has room for receiptd")
}

func TestReceiptdGetsTheFilesOfASlotInAFixedOrder(t *testing.T) {
	hs := []Hierarchy{{Mount: "/p", controllers: []string{"pids"}}, {Mount: "/m", controllers: []string{"memory"}}}
	var got []string
	for _, f := range slotFiles(hs, "/s/c0") {
		got = append(got, f.path)
	}
	require.Equal(t, []string{"/p/s/c0/cgroup.procs", "/m/s/c0/cgroup.procs", "/p/s/c0/cgroup.procs",
		"/m/s/c0/memory.oom_control", "/m/s/c0/memory.max_usage_in_bytes"}, got)
}

func TestAProcessNameCantForgeAStartTime(t *testing.T) {
	const rest = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21"
	for _, name := range []string{"sleep", "a) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 666 (", "x\ny", ")"} {
		start, state, err := parseStat("42 (" + name + ")" + rest)
		require.NoError(t, err, name)
		require.Equal(t, uint64(4711), start, name)
		require.Equal(t, byte('S'), state, name)
	}
	for _, bad := range []string{"", "42", "42 (x", "42 (x) S 1", "42 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x 20"} {
		_, _, err := parseStat(bad)
		require.Error(t, err, bad)
	}
}

func TestASandboxIdIsNeverAPath(t *testing.T) {
	for _, bad := range []string{"", ".", "..", "a/b", "../x", "A", "a b", "a\x00"} {
		require.Error(t, CheckSandboxID(bad), bad)
	}
	require.NoError(t, CheckSandboxID("sb-0123456789abcdef"))
}

func goodNode() nodeFacts {
	return nodeFacts{sysAdmin: true, sysctls: map[string]string{"user.max_user_namespaces": "1000"}, hierarchies: parseHierarchies(separateV1, v2With())}
}

func TestP14WhatANodeLacksIsNamedWithItsRemedy(t *testing.T) {
	require.NoError(t, goodNode().verdict())
	for _, c := range []struct {
		name   string
		change func(*nodeFacts)
		says   string
	}{
		{"not root", func(f *nodeFacts) { f.euid = 1000 }, "as root"},
		{"no CAP_SYS_ADMIN", func(f *nodeFacts) { f.sysAdmin = false }, "CAP_SYS_ADMIN"},
		{"user namespaces switched off", func(f *nodeFacts) { f.sysctls["user.max_user_namespaces"] = "0" }, "sysctl -w user.max_user_namespaces"},
		{"user namespaces not built in", func(f *nodeFacts) { delete(f.sysctls, "user.max_user_namespaces") }, "CONFIG_USER_NS"},
		{"Debian's switch", func(f *nodeFacts) { f.sysctls["kernel.unprivileged_userns_clone"] = "0" }, "sysctl -w kernel.unprivileged_userns_clone=1"},
		{"Ubuntu's switch, where it refuses", func(f *nodeFacts) {
			f.sysctls[apparmorSwitch], f.userns = "1", errors.New("permission denied")
		}, "kernel.apparmor_restrict_unprivileged_userns=0"},
		{"PID namespaces switched off", func(f *nodeFacts) { f.sysctls["user.max_pid_namespaces"] = "0" }, "sysctl -w user.max_pid_namespaces"},
		{"no cgroups", func(f *nodeFacts) { f.hierarchies = nil }, "CONFIG_CGROUP_PIDS"},
		{"an old kernel", func(f *nodeFacts) { f.mountAPI = errors.New("function not implemented") }, "Linux 5.12"},
		{"user namespaces refused", func(f *nodeFacts) { f.userns = errors.New("refused by something") }, "refused by something"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := goodNode()
			c.change(&f)
			err := f.verdict()
			require.ErrorIs(t, err, runtime.ErrUnavailable)
			require.ErrorContains(t, err, c.says)
		})
	}
}

// TestUbuntusSwitchIsNoVerdict: stock Ubuntu 24.04 has it on, and lets the agent and receiptd through.
func TestUbuntusSwitchIsNoVerdict(t *testing.T) {
	f := goodNode()
	f.sysctls[apparmorSwitch] = "1"
	require.NoError(t, f.verdict())
}

func TestLimitsAreOnlyLoweredAndTheOomScoreOnlyRaised(t *testing.T) {
	require.Equal(t, []Rlimit{{4, 1}, {7, 1000}}, Rlimits(1000, 1<<40))
	require.Equal(t, uint64(NoFile), Rlimits(1<<30, 0)[1].Limit)
	require.Nil(t, OomScoreAdj(0))
	require.Nil(t, OomScoreAdj(300))
	require.Equal(t, 0, *OomScoreAdj(-500))
}

func TestFileSystemsInMemoryAreBoundedInBytesAndInodes(t *testing.T) {
	shm, tmp, home := SmallFileSystems(runtime.Resources{TmpBytes: 1 << 20, HomeBytes: 1})
	require.Equal(t, "mode=1777,size=67108864,nr_inodes=16384", shm)
	require.Equal(t, "mode=1777,size=1048576,nr_inodes=256", tmp)
	require.Equal(t, "mode=0700,size=1,nr_inodes=16", home)
}
