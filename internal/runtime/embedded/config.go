package embedded

import (
	"fmt"
	"os"
	"strconv"

	"github.com/opencontainers/cgroups"
	// Registers the device rules of cgroups with libcontainer; without it a v1 container can't be started.
	_ "github.com/opencontainers/cgroups/devices"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

const hostname = "sandbox"

// Defaults for the small file systems where the caller sets no limit; bytes.
const (
	defaultTmpBytes  = 1 << 30
	defaultHomeBytes = 1 << 30
	defaultShmBytes  = 64 << 20
)

// bytesPerInode decides how many files a tmpfs may have: one for every 4 KiB, a page, which is the least that a file
// with content takes.
const bytesPerInode = 4096

// receiptdCapabilities are what receiptd may do in its own user namespace, and why:
var receiptdCapabilities = []string{
	"CAP_SYS_ADMIN", // mount namespace of the commands' view, namespaces of each pid1
	"CAP_SETUID",    // uid maps of a pid1's user namespace
	"CAP_SETGID",    // gid maps of the same
	"CAP_SETPCAP",   // to drop from the bounding set, and to give itself no more
	"CAP_KILL",      // to end a command and a pid1, whose uids differ from its own
	"CAP_NET_ADMIN", // to destroy the sockets that outlive a command (SOCK_DESTROY)
}

// deviceNodes are the devices of /dev: numbers as in the kernel's Documentation/admin-guide/devices.txt.
var deviceNodes = []struct {
	path         string
	major, minor int64
}{
	{"/dev/null", 1, 3}, {"/dev/zero", 1, 5}, {"/dev/full", 1, 7}, {"/dev/random", 1, 8}, {"/dev/urandom", 1, 9}, {"/dev/tty", 5, 0},
}

// checkIDs refuses id ranges that would let two parts of a sandbox be one user.
func checkIDs(ids runtime.IDs) error {
	switch {
	case ids.HostBase == 0:
		return fmt.Errorf("%w: the sandbox's host ids begin at 0, which is the node's root", runtime.ErrUnavailable)
	case ids.CommandUID == 0 || ids.CommandGID == 0 || ids.Pid1UID == 0:
		return fmt.Errorf("%w: only receiptd may be id 0 inside", runtime.ErrUnavailable)
	case ids.CommandUID == ids.Pid1UID:
		return fmt.Errorf("%w: pid1 and commands have the same uid %d", runtime.ErrUnavailable, ids.Pid1UID)
	case ids.CommandUID >= ids.Size || ids.CommandGID >= ids.Size || ids.Pid1UID >= ids.Size || uint64(ids.HostBase)+uint64(ids.Size) > 1<<32-1:
		return fmt.Errorf("%w: the id range of %d from %d does not hold the ids %d, %d, %d", runtime.ErrUnavailable,
			ids.Size, ids.HostBase, ids.CommandUID, ids.CommandGID, ids.Pid1UID)
	}
	return nil
}

// idMap maps ids 0..size-1 to base..., except that one of them may map to a host id of its own (IDs.CommandHostUID).
func idMap(base, size, id, own uint32) []configs.IDMap {
	if own == 0 {
		return []configs.IDMap{{ContainerID: 0, HostID: int64(base), Size: int64(size)}}
	}
	m := []configs.IDMap{
		{ContainerID: 0, HostID: int64(base), Size: int64(id)},
		{ContainerID: int64(id), HostID: int64(own), Size: 1},
	}
	if rest := size - id - 1; rest > 0 {
		m = append(m, configs.IDMap{ContainerID: int64(id) + 1, HostID: int64(base) + int64(id) + 1, Size: int64(rest)})
	}
	return m
}

// containerConfig is what libcontainer is told: everything but the bind mounts, which a hook attaches (attach.go).
func containerConfig(spec runtime.Spec, rootfs, cgroup string, hook func(*specs.State) error) *configs.Config {
	ids := spec.IDs
	return &configs.Config{
		Rootfs: rootfs,
		// Keeps the nosuid and nodev that the hook has set.
		Readonlyfs: true,
		Namespaces: configs.Namespaces{
			{Type: configs.NEWUSER}, {Type: configs.NEWPID}, {Type: configs.NEWNS}, {Type: configs.NEWIPC},
			{Type: configs.NEWUTS}, {Type: configs.NEWNET}, {Type: configs.NEWCGROUP},
		},
		UIDMappings: idMap(ids.HostBase, ids.Size, ids.CommandUID, ids.CommandHostUID),
		GIDMappings: idMap(ids.HostBase, ids.Size, ids.CommandGID, ids.CommandHostGID),
		Hostname:    hostname,
		Networks:    []*configs.Network{{Type: "loopback"}},
		Cgroups: &cgroups.Cgroup{
			Path: cgroup + "/" + initCgroup,
			// No limits: receiptd and the pid1s are never under the command's. Devices need no rule either: nobody
			// in a user namespace can make a device node, and every mount but /dev's six nodes is nodev.
			Resources: &cgroups.Resources{Devices: allDevices()},
		},
		RootPropagation: unix.MS_PRIVATE | unix.MS_REC,
		NoNewPrivileges: true,
		Capabilities: &configs.Capabilities{
			Bounding: receiptdCapabilities, Effective: receiptdCapabilities, Permitted: receiptdCapabilities,
		},
		Mounts:  smallFileSystems(spec),
		Devices: deviceList(),
		// No masked or read-only paths: they would cover parts of /proc, and then a command's own /proc could not be
		// mounted ("mount too revealing"); pid1 masks that one instead.
		Hooks: configs.Hooks{configs.CreateRuntime: configs.HookList{configs.NewFunctionHook(hook)}},
	}
}

// allDevices is the one rule "everything": see containerConfig.
func allDevices() []*devices.Rule {
	return []*devices.Rule{{Type: devices.WildcardDevice, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "rwm", Allow: true}}
}

func deviceList() []*devices.Device {
	var out []*devices.Device
	for _, d := range deviceNodes {
		out = append(out, &devices.Device{
			Path: d.path, FileMode: 0o666,
			Rule: devices.Rule{Type: devices.CharDevice, Major: d.major, Minor: d.minor, Permissions: "rwm", Allow: true},
		})
	}
	return out
}

// smallFileSystems are the mounts that have to be made inside the container's namespaces.
func smallFileSystems(spec runtime.Spec) []*configs.Mount {
	const plain = unix.MS_NOSUID | unix.MS_NODEV
	owner := fmt.Sprintf(",uid=%d,gid=%d", spec.IDs.CommandUID, spec.IDs.CommandGID)
	return []*configs.Mount{
		{Source: "proc", Destination: "/proc", Device: "proc", Flags: plain | unix.MS_NOEXEC},
		// Read-only once everything is in it.
		{Source: "tmpfs", Destination: "/dev", Device: "tmpfs", Flags: plain | unix.MS_NOEXEC | unix.MS_STRICTATIME | unix.MS_RDONLY, Data: "mode=755,size=64k,nr_inodes=64"},
		{Source: "devpts", Destination: "/dev/pts", Device: "devpts", Flags: unix.MS_NOSUID | unix.MS_NOEXEC, Data: "newinstance,ptmxmode=0666,mode=0620,max=64"},
		{Source: "shm", Destination: "/dev/shm", Device: "tmpfs", Flags: plain | unix.MS_NOEXEC, Data: tmpfsData(orDefault(spec.Resources.ShmBytes, defaultShmBytes), "1777")},
		{Source: "tmpfs", Destination: "/tmp", Device: "tmpfs", Flags: plain, Data: tmpfsData(orDefault(spec.Resources.TmpBytes, defaultTmpBytes), "1777")},
		{Source: "tmpfs", Destination: runtime.HomePath, Device: "tmpfs", Flags: plain, Data: tmpfsData(orDefault(spec.Resources.HomeBytes, defaultHomeBytes), "0700") + owner},
	}
}

// tmpfsData bounds both bytes and inodes (tmpfs(5)): a million empty files would otherwise be free.
func tmpfsData(bytes int64, mode string) string {
	return fmt.Sprintf("mode=%s,size=%d,nr_inodes=%d", mode, bytes, max(bytes/bytesPerInode, 16))
}

func orDefault(v, def int64) int64 {
	if v > 0 {
		return v
	}
	return def
}

// noFile is receiptd's limit of open files; a command has one of its own, which can't be above.
const noFile = 65536

// rlimits are receiptd's. Only lowered, never raised: raising takes CAP_SYS_RESOURCE, which an agent need not have.
func rlimits(hardNoFile, hardCore uint64) []configs.Rlimit {
	n, core := min(noFile, hardNoFile), min(1, hardCore)
	return []configs.Rlimit{
		// 1 is what keeps the kernel from starting a core_pattern's program; see pid1's limitCores.
		{Type: unix.RLIMIT_CORE, Hard: core, Soft: core},
		{Type: unix.RLIMIT_NOFILE, Hard: n, Soft: n},
	}
}

// hardLimit is this process's own; otherwise where it can't be read.
func hardLimit(resource int, otherwise uint64) uint64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(resource, &r); err != nil {
		return otherwise
	}
	return r.Max
}

// oomScoreAdj is what receiptd's has to be set to: 0 when the agent's own is below, nil when there is nothing to do
// or no right to do it (lowering takes CAP_SYS_RESOURCE).
func oomScoreAdj(agents int) *int {
	if agents >= 0 {
		return nil
	}
	zero := 0
	return &zero
}

func ownOOMScoreAdj() int {
	b, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil || len(b) == 0 {
		return 0
	}
	n, err := strconv.Atoi(string(b[:len(b)-1]))
	if err != nil {
		return 0
	}
	return n
}
