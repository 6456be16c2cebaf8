package runtime

import (
	"context"
	"errors"
	"net"
	"time"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrUnavailable: this node cannot host a sandbox; the message names what is missing and the remedy.
	ErrUnavailable = errors.New("no sandbox can be had on this node")
	// ErrNotFound: the runtime knows nothing of that sandbox and nothing of it is left.
	ErrNotFound = errors.New("sandbox not found")
	// ErrNoEvidence: the sandbox could not be seen to be gone.
	ErrNoEvidence = errors.New("no evidence that the sandbox is gone")
)

// IDs are the ids of one sandbox. Inside, receiptd is 0, pid1 is Pid1UID and commands are CommandUID.
type IDs struct {
	// HostBase is the first of Size host uids (and gids) that belong to this sandbox alone.
	HostBase uint32
	Size     uint32
	// Pid1UID and CommandUID are ids inside the sandbox's user namespace; they always differ (facts.md, hole 6).
	Pid1UID    uint32
	CommandUID uint32
	CommandGID uint32
	// CommandHostUID, when not 0, is the host uid (CommandHostGID the gid) that CommandUID maps to instead of
	// HostBase+CommandUID: the fallback where the worktree's file system can't do idmapped mounts.
	CommandHostUID uint32
	CommandHostGID uint32
}

// Resources bound a command. Zero: not limited; for the file systems in memory (/tmp, HOME, /dev/shm) the runtime's default.
type Resources struct {
	CPUs        float64
	MemoryBytes int64
	Pids        int64
	TmpBytes    int64
	HomeBytes   int64
	ShmBytes    int64
}

// Spec is everything that a runtime needs to start one sandbox.
type Spec struct {
	SandboxID  string // also the container's id: [a-z0-9-], fixed length
	SessionID  string
	Generation uint64
	// Rootfs is "host" or the absolute path of a folder.
	Rootfs    string
	IDs       IDs
	Workspace mounts.Plan
	Resources Resources
	// Network is "none".
	Network string
	// Grants are mounted read-only at GrantsPath. Their contents are secret: they are held in memory, and neither written
	// to a disk nor logged.
	Grants []Grant
	// Dir is the sandbox's own folder in the agent's state: root file system skeleton, control socket, runtime state.
	Dir string
	// ReceiptsDir is the host folder mounted at ReceiptsPath for receiptd alone.
	ReceiptsDir string
	// Receiptd and Pid1 are host paths of the static binaries.
	Receiptd, Pid1 string
}

// Grant is a folder of files below GrantsPath.
type Grant struct {
	Name  string
	Files []GrantFile
}

// GrantFile is a file of a grant; its path is clean and relative to the grant's folder.
type GrantFile struct {
	Path    string
	Content []byte
}

// Where things are inside the container. All of it lies under one folder, which the commands' view lacks.
const (
	InternalDir  = "/.sandbox"
	ReceiptsPath = InternalDir + "/receipts"
	ControlPath  = InternalDir + "/control"
	BinPath      = InternalDir + "/bin"
	SocketName   = "receiptd.sock"
	HomePath     = "/home/sandbox"
	// GrantsPath is where a command finds its session's grants.
	GrantsPath = "/run/grants"
)

// Identity names one container beyond doubt, also after the agent's or the node's restart. It is what the journal
// records; a bare pid is never enough.
type Identity struct {
	Runtime     string    `json:"runtime"`
	SandboxID   string    `json:"sandboxId"`
	ContainerID string    `json:"containerId"`
	BootID      string    `json:"bootId"`
	Pid         int       `json:"pid"`       // of the container's init, in the agent's PID namespace
	StartTime   uint64    `json:"startTime"` // field 22 of /proc/PID/stat, clock ticks since boot
	Cgroups     []string  `json:"cgroups"`   // absolute cgroup folders that hold everything of the sandbox
	Dir         string    `json:"dir"`
	StartedAt   time.Time `json:"startedAt"`
}

// EvidenceItem is one observation that a sandbox is gone.
type EvidenceItem struct {
	Source     string    `json:"source"` // "pidfd", "deleted", "cgroup_empty", "boot_id"
	Detail     string    `json:"detail"`
	ObservedAt time.Time `json:"observedAt"`
}

// Evidence is the typed set of promise P5. Complete says that it holds all that the runtime asks for.
type Evidence struct {
	Runtime     string         `json:"runtime"`
	ContainerID string         `json:"containerId"`
	Items       []EvidenceItem `json:"items"`
	Complete    bool           `json:"complete"`
}

// Sandbox is a running container. Its methods are safe for concurrent use.
type Sandbox interface {
	Identity() Identity
	// Dial opens a connection to receiptd.
	Dial(ctx context.Context) (net.Conn, error)
	// View is the part of receiptd's Init request that the runtime decides: cgroup slots, ids, what to hide.
	View() *receiptdv1.View
	// Exited is closed once the container's init has been seen to end.
	Exited() <-chan struct{}
	// Stop kills everything of the sandbox, waits until it is gone, and removes what the runtime keeps of it. It can
	// be called again after an error. Without complete evidence the error wraps ErrNoEvidence.
	Stop(ctx context.Context) (Evidence, error)
	// Close lets go of the sandbox without stopping it (the agent shuts down, the sandbox goes on).
	Close() error
}

// Runtime hosts sandboxes.
type Runtime interface {
	Name() string
	// Check says whether this node can host sandboxes; an error wraps ErrUnavailable and names the remedy.
	Check(ctx context.Context) error
	// Create starts a sandbox: when it returns, receiptd listens. On an error nothing of it is left.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Load finds a sandbox that an earlier agent started. ErrNotFound: it is not running any more; ask Remove for the
	// evidence.
	Load(ctx context.Context, id Identity) (Sandbox, error)
	// Remove ends whatever is left of a sandbox, also one whose start was cut short (an Identity with only SandboxID
	// and Dir set), and answers with the evidence that it is gone.
	Remove(ctx context.Context, id Identity) (Evidence, error)
	// List names the sandbox ids of which this runtime still has anything.
	List(ctx context.Context) ([]string, error)
}
