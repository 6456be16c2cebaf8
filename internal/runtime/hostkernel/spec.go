package hostkernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"golang.org/x/sys/unix"
)

// CheckSpec refuses what no sandbox can be made of. Every error but that of the id wraps runtime.ErrUnavailable.
func CheckSpec(spec runtime.Spec) error {
	if err := CheckSandboxID(spec.SandboxID); err != nil {
		return err
	}
	if err := CheckIDs(spec.IDs); err != nil {
		return fmt.Errorf("starting sandbox %s: %w", spec.SandboxID, err)
	}
	if (spec.Network != "none") != (spec.Connect != nil) {
		return fmt.Errorf("starting sandbox %s: %w: this agent can't connect a sandbox with the network mode %q", spec.SandboxID, runtime.ErrUnavailable, spec.Network)
	}
	for name, path := range map[string]string{"folder": spec.Dir, "receipts folder": spec.ReceiptsDir, "receiptd": spec.Receiptd, "pid1": spec.Pid1} {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("starting sandbox %s: %w: the path of its %s, %q, is not absolute", spec.SandboxID, runtime.ErrUnavailable, name, path)
		}
	}
	return nil
}

// CheckIDs refuses id ranges that would let two parts of a sandbox be one user.
func CheckIDs(ids runtime.IDs) error {
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

// IDMap maps ids 0..size-1 to base..., except that one of them may map to a host id of its own (IDs.CommandHostUID).
func IDMap(base, size, id, own uint32) []specs.LinuxIDMapping {
	if own == 0 {
		return []specs.LinuxIDMapping{{ContainerID: 0, HostID: base, Size: size}}
	}
	m := []specs.LinuxIDMapping{
		{ContainerID: 0, HostID: base, Size: id},
		{ContainerID: id, HostID: own, Size: 1},
	}
	if rest := size - id - 1; rest > 0 {
		m = append(m, specs.LinuxIDMapping{ContainerID: id + 1, HostID: base + id + 1, Size: rest})
	}
	return m
}

// Defaults for the small file systems where the caller sets no limit; bytes.
const (
	defaultTmpBytes  = 1 << 30
	defaultHomeBytes = 1 << 30
	defaultShmBytes  = 64 << 20
)

// bytesPerInode decides how many files a tmpfs may have: one for every 4 KiB, a page, which is the least that a file
// with content takes.
const bytesPerInode = 4096

// tmpfsData bounds both bytes and inodes (tmpfs(5)): a million empty files would otherwise be free.
func tmpfsData(bytes int64, mode string) string {
	return fmt.Sprintf("mode=%s,size=%d,nr_inodes=%d", mode, bytes, max(bytes/bytesPerInode, 16))
}

// SmallFileSystems are the options of the file systems in memory (tmpfs(5)): /dev/shm, /tmp, and HOME, which is to be the
// command's.
func SmallFileSystems(r runtime.Resources) (shm, tmp, home string) {
	return tmpfsData(orDefault(r.ShmBytes, defaultShmBytes), "1777"), tmpfsData(orDefault(r.TmpBytes, defaultTmpBytes), "1777"),
		tmpfsData(orDefault(r.HomeBytes, defaultHomeBytes), "0700")
}

// orDefault is v, or def where v is no limit.
func orDefault(v, def int64) int64 {
	if v > 0 {
		return v
	}
	return def
}

// NoFile is receiptd's limit of open files; a command has one of its own, which can't be above.
const NoFile = 65536

// Rlimit is a limit of a resource (RLIMIT_…, getrlimit(2)), soft and hard alike.
type Rlimit struct {
	Resource int
	Limit    uint64
}

// Rlimits are receiptd's. Only lowered, never raised: raising takes CAP_SYS_RESOURCE, which an agent need not have.
func Rlimits(hardNoFile, hardCore uint64) []Rlimit {
	n, core := min(NoFile, hardNoFile), min(1, hardCore)
	return []Rlimit{
		// 1 is what keeps the kernel from starting a core_pattern's program; see pid1's limitCores.
		{unix.RLIMIT_CORE, core},
		{unix.RLIMIT_NOFILE, n},
	}
}

// HardLimit is this process's own; otherwise where it can't be read.
func HardLimit(resource int, otherwise uint64) uint64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(resource, &r); err != nil {
		return otherwise
	}
	return r.Max
}

// OomScoreAdj is what receiptd's has to be set to: 0 when the agent's own is below, nil when there is nothing to do
// or no right to do it (lowering takes CAP_SYS_RESOURCE).
func OomScoreAdj(agents int) *int {
	if agents >= 0 {
		return nil
	}
	zero := 0
	return &zero
}

// OwnOOMScoreAdj is this process's own (proc_pid_oom_score_adj(5)); 0 where it can't be read.
func OwnOOMScoreAdj() int {
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

// MakeDirs makes the sandbox's folder, and in it and for it what only receiptd may see.
func MakeDirs(spec runtime.Spec) error {
	if err := mkdir(spec.Dir, 0o711); err != nil {
		return err
	}
	for _, dir := range []string{ControlDir(spec.Dir), spec.ReceiptsDir} {
		if err := mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	return nil
}

// CheckTraversable finds the folder that shuts everybody but its owner out. The container's root is not root on the
// host, and has to get to its root file system.
func CheckTraversable(dir string) error {
	for d := dir; ; d = filepath.Dir(d) {
		st, err := os.Stat(d)
		if err != nil {
			return fmt.Errorf("looking at the folder %s: %w", d, err)
		}
		if st.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("%w: the container's root can't get through the folder %s: chmod o+x it, or put state_dir elsewhere", runtime.ErrUnavailable, d)
		}
		if d == "/" {
			return nil
		}
	}
}

// ControlDir is where a sandbox's own folder has receiptd's socket.
func ControlDir(dir string) string { return filepath.Join(dir, "control") }

// LogPath is where a sandbox's own folder has what receiptd says.
func LogPath(dir string) string { return filepath.Join(dir, "receiptd.log") }

// Hostname is every sandbox's.
const Hostname = "sandbox"

// Capabilities are what receiptd may do in its own user namespace, and why:
var Capabilities = []string{
	"CAP_SYS_ADMIN", // mount namespace of the commands' view, namespaces of each pid1
	"CAP_SETUID",    // uid maps of a pid1's user namespace
	"CAP_SETGID",    // gid maps of the same
	"CAP_SETPCAP",   // to drop from the bounding set, and to give itself no more
	"CAP_KILL",      // to end a command and a pid1, whose uids differ from its own
	"CAP_NET_ADMIN", // to destroy the sockets that outlive a command (SOCK_DESTROY)
	// To open canaries in the sandbox's network namespace at any listed port.
	"CAP_NET_BIND_SERVICE",
}

// DeviceNodes are the devices of /dev: numbers as in the kernel's Documentation/admin-guide/devices.txt.
var DeviceNodes = []struct {
	Path         string
	Major, Minor int64
}{
	{"/dev/null", 1, 3}, {"/dev/zero", 1, 5}, {"/dev/full", 1, 7}, {"/dev/random", 1, 8}, {"/dev/urandom", 1, 9}, {"/dev/tty", 5, 0},
}
