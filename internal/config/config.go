package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// Config is the whole configuration. The zero value is not usable: start from Default.
type Config struct {
	StateDir   string     `json:"state_dir"`
	Socket     Socket     `json:"socket"`
	Runtime    Runtime    `json:"runtime"`
	Containerd Containerd `json:"containerd"`
	// Rootfs is "host", the absolute path of a folder, or the reference of an image (runtime.KindOfRootfs).
	Rootfs string `json:"rootfs"`
	// RootfsAllowTags accepts an image that is named by a tag alone, whose content whoever moves the tag decides on.
	RootfsAllowTags bool      `json:"rootfs_allow_tags"`
	Workspace       Workspace `json:"workspace"`
	// Caches are the operator's: shared between sessions, and therefore read-only in a sandbox. By name.
	Caches    map[string]Cache `json:"caches"`
	Network   Network          `json:"network"`
	Limits    Limits           `json:"limits"`
	Lifetime  Lifetime         `json:"lifetime"`
	Listeners Listeners        `json:"listeners"`
	Retention Retention        `json:"retention"`
	Events    Events           `json:"events"`
	Audit     Audit            `json:"audit"`
	Metrics   Metrics          `json:"metrics"`
	Log       Log              `json:"log"`
}

// Socket is the exec socket.
type Socket struct {
	Path string `json:"path"`
	// Mode is an octal string, "0660".
	Mode string `json:"mode"`
	// AllowUIDs are the peers (SO_PEERCRED) that may call.
	AllowUIDs []uint32 `json:"allow_uids"`
}

// FileMode is Mode as a number; Validate has checked that it parses.
func (s Socket) FileMode() os.FileMode {
	m, _ := strconv.ParseUint(s.Mode, 8, 32)
	return os.FileMode(m)
}

// Runtime names how sandboxes are hosted.
type Runtime struct {
	// Default is what a session gets that names none.
	Default string `json:"default"`
	// Allowed are those that a session can name, in the order in which one is looked for that isolates as a caller asks.
	Allowed []string `json:"allowed"`
	// NestedUserns lets commands make user namespaces of their own, which some build tools and browsers want. It opens
	// the kernel interfaces behind them (namespaces, mounts, netfilter) to code that nobody has read.
	NestedUserns bool `json:"nested_userns"`
	// StartTimeout is how long a sandbox may take from the first step of its start to its proof; a third of it is how long one may
	// take to be attached to. A node that is slow at virtual machines may want more.
	StartTimeout Duration `json:"start_timeout"`
}

// Containerd is where the node's containerd is found, and what its runtimes are called there.
type Containerd struct {
	Address   string `json:"address"`
	Namespace string `json:"namespace"`
	// Snapshotter keeps the root file systems of images; empty: containerd's default.
	Snapshotter string `json:"snapshotter"`
	// ImagesFrom is another namespace of containerd's, from which an image is taken that is not in Namespace; empty: none.
	ImagesFrom string             `json:"images_from"`
	Runtimes   ContainerdRuntimes `json:"runtimes"`
}

// ContainerdRuntimes are the runtimes of containerd by their names in runtime.allowed.
type ContainerdRuntimes struct {
	Runc   ContainerdRuntime `json:"runc"`
	Gvisor ContainerdRuntime `json:"gvisor"`
	Kata   ContainerdKata    `json:"kata"`
}

// ContainerdRuntime is one runtime of containerd.
type ContainerdRuntime struct {
	// Handler is the shim's name, "io.containerd.runc.v2". It must be one of the family that the runtime's name promises.
	Handler string `json:"handler"`
	// Binary is the program that the shim starts; empty: what the shim finds in containerd's PATH.
	Binary string `json:"binary"`
}

// ContainerdKata is Kata. Which programs its shim starts is in Kata's own configuration.
type ContainerdKata struct {
	Handler string `json:"handler"`
	// Config is the absolute path of Kata's configuration; empty: the first where Kata looks itself.
	Config string `json:"config"`
}

// Workspace says which worktrees are accepted and how Git is set up in them.
type Workspace struct {
	Roots []string `json:"roots"`
	// GitLayout is the node's default: "isolated", where commands write nothing of the base clone, or "shared".
	GitLayout string `json:"git_layout"`
	// Export are patterns of refs that a session may move in the base clone besides its own branches
	// (gitguard.Matches); without one they are kept under refs/sandboxes/ alone.
	Export []string `json:"export"`
	// Hooks is "off", or "inside": a repository's hooks run in the sandbox, as part of the untrusted command.
	Hooks string `json:"hooks"`
	// AllowRootOwned accepts worktrees that root owns on disk.
	AllowRootOwned bool     `json:"allow_root_owned"`
	Identity       Identity `json:"identity"`
	// AllowEnv names variables that a session may set although they are refused by default.
	AllowEnv []string `json:"allow_env"`
}

// Cache is a folder of the node that sessions can ask for.
type Cache struct {
	// Source is the folder on the node.
	Source string `json:"source"`
	// Path is where it is in a sandbox, below HOME.
	Path string `json:"path"`
}

// Identity is the author and committer of commits that a command makes.
type Identity struct {
	Name  string `json:"name"`
	Email string `json:"email"`
}

// Network says which network modes sessions may have, and how they are made.
type Network struct {
	Default string   `json:"default"`
	Allowed []string `json:"allowed"`
	// Nameservers are what sandboxes ask; none: what the node's CNI says, or else the node's own, as far as those are on
	// another host. One that is on the node or on its link is let through on port 53 only if it is named here.
	Nameservers []string      `json:"nameservers"`
	Bridge      NetworkBridge `json:"bridge"`
	CNI         NetworkCNI    `json:"cni"`
	Egress      NetworkEgress `json:"egress"`
}

// NetworkEgress is what sandboxes with a network may reach, of what is not closed to all of them.
type NetworkEgress struct {
	// Default is the policy of a session that names none, Allowed are those that one can name: none, open, allowlist.
	Default string   `json:"default"`
	Allowed []string `json:"allowed"`
	// Allow is the operator's list of destinations. A session's own list has to be within it.
	Allow []EgressEntry `json:"allow"`
	// Resolver are the addresses at which sandboxes with an allowlist ask for names, at most one of each family. The agent
	// gives them to the node's loopback interface while it runs.
	Resolver []string `json:"resolver"`
	// Upstream are the nameservers that the resolver asks; none: network.nameservers, or else the node's own.
	Upstream []string `json:"upstream"`
	// Connections bounds those of one sandbox that are open at once, ConnectionsPerSecond the new ones; BytesOut what one
	// sandbox sends in all, 0 for no bound.
	Connections          int64 `json:"connections"`
	ConnectionsPerSecond int64 `json:"connections_per_second"`
	BytesOut             int64 `json:"bytes_out"`
}

// EgressEntry is one destination of an allowlist; see egress.Spec.
type EgressEntry struct {
	To       string   `json:"to"`
	Ports    []int64  `json:"ports"`
	Protocol string   `json:"protocol"`
	Private  []string `json:"private"`
	Reason   string   `json:"reason"`
}

// NetworkBridge is where sandboxes of the mode "bridge" have their addresses from.
type NetworkBridge struct {
	// Subnet and Subnet6 are private ranges that nothing else uses. An empty Subnet6: no IPv6.
	Subnet  string `json:"subnet"`
	Subnet6 string `json:"subnet6"`
}

// NetworkCNI is where the node has its CNI.
type NetworkCNI struct {
	ConfDir string   `json:"conf_dir"`
	BinDirs []string `json:"bin_dirs"`
	// Network is the name of the configuration; empty: the first by file name, as for pods.
	Network string `json:"network"`
}

// Limits are the node's bounds; a caller can go below them, never above.
type Limits struct {
	// Timeout is what a command gets when its caller names none; MaxTimeout is what a caller may name.
	Timeout    Duration `json:"timeout"`
	MaxTimeout Duration `json:"max_timeout"`
	// OutputBytes are kept of each stream: half of them head, half tail.
	OutputBytes int64 `json:"output_bytes"`
	// SpillBytes is the most of each stream that a caller can have written to a file in the worktree as well; 0: nothing.
	SpillBytes   int64   `json:"spill_bytes"`
	CommandBytes int64   `json:"command_bytes"`
	Pids         int64   `json:"pids"`
	TmpBytes     int64   `json:"tmp_bytes"`
	HomeBytes    int64   `json:"home_bytes"`
	MemoryBytes  int64   `json:"memory_bytes"`
	CPUs         float64 `json:"cpus"`
	// Queue is how many commands of one session may wait for their turn.
	Queue    int64 `json:"queue"`
	Sessions int64 `json:"sessions"`
	// TotalMemoryBytes bounds the memory limits of all sandboxes together; 0: no bound.
	TotalMemoryBytes int64 `json:"total_memory_bytes"`
	// Grace is the time between SIGTERM and the end of a command whose time is up.
	Grace Duration `json:"grace"`
	// Boundary is how long the boundary may take after a command's time and its grace are over. A task in uninterruptible sleep (a
	// dead NFS server), or a guest that hangs, can hold it up without end; then it is reported, not waited for.
	Boundary Duration `json:"boundary"`
}

// Lifetime says when a sandbox is removed although nobody asked for it; the workspace stays. 0: never.
type Lifetime struct {
	// Idle is how long a sandbox may be without a command.
	Idle Duration `json:"idle"`
	// Max is how old a sandbox may become; a command that runs then comes to its end first.
	Max Duration `json:"max"`
	// DrainGrace is how long running commands may go on when the node is drained and the caller names no time.
	DrainGrace Duration `json:"drain_grace"`
}

// Listeners are what a command must never reach.
type Listeners struct {
	TCP  []int    `json:"tcp"`
	UDP  []int    `json:"udp"`
	Unix []string `json:"unix"`
}

// Retention bounds how many records of ended commands are kept, and for how long.
type Retention struct {
	Execs int64    `json:"execs"`
	Age   Duration `json:"age"`
}

// Events bounds how many events of the node can be asked for again.
type Events struct {
	Keep int64 `json:"keep"`
}

// Audit is the log of events as JSON lines.
type Audit struct {
	// Path is the file; empty for none. Its folder must be the agent's alone.
	Path string `json:"path"`
	// MaxBytes is how long the file gets before it is rotated to PATH.1; Keep is how many rotated ones stay.
	MaxBytes int64 `json:"max_bytes"`
	Keep     int64 `json:"keep"`
	// Commands also writes the first 4096 bytes of each command's text.
	Commands bool `json:"commands"`
}

// Log is what is written to the log. Commands also logs command texts, at level debug.
type Log struct {
	Level    string `json:"level"`
	Commands bool   `json:"commands"`
}

// Duration is a time.Duration written as Go writes it: "90s", "2m", "1h".
type Duration time.Duration

// Std is d as the standard library's type.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// UnmarshalJSON takes a string only: a bare number has no unit.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("reading duration %s: write it with its unit, for example \"90s\" or \"2m\"", b)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("reading duration %q: write it with its unit, for example \"90s\" or \"2m\"", s)
	}
	*d = Duration(v)
	return nil
}

// MarshalJSON writes what UnmarshalJSON reads.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

const (
	gib             = int64(1) << 30
	defaultMemory   = 4 * gib
	maxFileBytes    = 1 << 20
	argStrlen       = 131072 // MAX_ARG_STRLEN: 32 pages (execve(2)); one byte of it is the closing NUL.
	maxCommandBytes = argStrlen - 1
)

// Default is the configuration of a node that has no file. nodeMemory is in bytes (NodeMemory).
func Default(nodeMemory int64) Config {
	return Config{
		StateDir: "/var/lib/sandbox-agent",
		Socket:   Socket{Path: "/run/sandbox-agent/exec.sock", Mode: "0660", AllowUIDs: []uint32{0}},
		Runtime:  Runtime{Default: "embedded", Allowed: []string{"embedded"}, StartTimeout: Duration(time.Minute)},
		Containerd: Containerd{
			Address: "/run/containerd/containerd.sock", Namespace: "sandbox-agent",
			Runtimes: ContainerdRuntimes{
				Runc:   ContainerdRuntime{Handler: "io.containerd.runc.v2"},
				Gvisor: ContainerdRuntime{Handler: "io.containerd.runsc.v1"},
				Kata:   ContainerdKata{Handler: "io.containerd.kata.v2"},
			},
		},
		Rootfs: "host",
		Workspace: Workspace{
			Roots:     []string{"/var/lib/sandbox-workspaces", "/home", "/srv", "/workspaces", "/mnt"},
			GitLayout: IsolatedLayout,
			Hooks:     "off",
			Identity:  Identity{Name: "Sandbox Agent", Email: "sandbox-agent@localhost"},
		},
		Network: Network{
			Default: NoNetwork, Allowed: []string{NoNetwork},
			Bridge: NetworkBridge{Subnet: "10.231.0.0/16"},
			CNI:    NetworkCNI{ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}},
			Egress: NetworkEgress{
				Default: string(egress.Open), Allowed: []string{string(egress.Open)}, Resolver: []string{"169.254.53.53"},
				Connections: 1024, ConnectionsPerSecond: 200,
			},
		},
		Limits: Limits{
			Timeout: Duration(2 * time.Minute), MaxTimeout: Duration(time.Hour), Grace: Duration(2 * time.Second), Boundary: Duration(time.Minute),
			OutputBytes: 262144, SpillBytes: 16 << 20, CommandBytes: maxCommandBytes, Pids: 512,
			TmpBytes: gib, HomeBytes: gib, MemoryBytes: memoryDefault(nodeMemory), Queue: 16, Sessions: 256,
		},
		Lifetime: Lifetime{
			Idle: Duration(30 * time.Minute), Max: Duration(24 * time.Hour), DrainGrace: Duration(30 * time.Second),
		},
		Listeners: Listeners{TCP: []int{44772, 18080}},
		Retention: Retention{Execs: 10000, Age: Duration(720 * time.Hour)},
		Events:    Events{Keep: 100_000},
		Audit:     Audit{MaxBytes: 100 << 20, Keep: 10},
		Log:       Log{Level: "info"},
	}
}

// memoryDefault leaves a quarter of a small node to everything else.
func memoryDefault(node int64) int64 { return min(defaultMemory, node/4*3) }

// NodeMemory is the node's RAM in bytes (sysinfo(2)).
func NodeMemory() (int64, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return 0, fmt.Errorf("reading the node's memory: sysinfo: %w", err)
	}
	return int64(uint64(si.Totalram) * uint64(si.Unit)), nil
}

// Load reads the file at path over the defaults; an empty path gives the defaults. The result is not yet
// validated, because flags may still override it: call Validate afterwards.
func Load(path string) (Config, error) {
	mem, err := NodeMemory()
	if err != nil {
		return Config{}, err
	}
	c := Default(mem)
	if path == "" {
		return c, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return Config{}, fmt.Errorf("reading the configuration: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return Config{}, fmt.Errorf("reading the configuration %s: %w", path, err)
	}
	if err := Parse(b, &c); err != nil {
		return Config{}, fmt.Errorf("reading the configuration %s: %w", path, err)
	}
	return c, nil
}

// Parse reads strict YAML over c: keys that are not named keep their value, unknown and doubled keys are errors.
func Parse(b []byte, c *Config) error {
	if len(b) > maxFileBytes {
		return fmt.Errorf("%w: the file is larger than %d bytes", ErrInvalid, maxFileBytes)
	}
	asJSON, err := yaml.YAMLToJSONStrict(b)
	if err != nil {
		return fmt.Errorf("%w: %s (every key is listed in docs/operations.md)", ErrInvalid, yamlWords(err))
	}
	var file any
	d := json.NewDecoder(bytes.NewReader(asJSON))
	d.UseNumber()
	if err := d.Decode(&file); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	bareOff(file)
	if err := newShape(c).check("", file, reflect.TypeFor[Config]()); err != nil {
		return fmt.Errorf("%w (every key is listed in docs/operations.md)", err)
	}
	if asJSON, err = json.Marshal(file); err == nil {
		err = json.Unmarshal(asJSON, c)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// bareOff gives "workspace: {hooks: off}" its meaning: YAML 1.1 reads a bare off as false.
func bareOff(file any) {
	top, _ := file.(map[string]any)
	if w, _ := top["workspace"].(map[string]any); w["hooks"] == false {
		w["hooks"] = "off"
	}
}

// yamlWords is what is wrong with the YAML, on one line and without the library's own machinery.
func yamlWords(err error) string {
	return strings.NewReplacer("yaml: unmarshal errors:\n  ", "", "\n  ", "; ", "json: unsupported value: ", "no key takes ").Replace(err.Error())
}
