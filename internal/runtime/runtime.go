package runtime

import (
	"context"
	"errors"
	"net"
	"os"
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
	// ErrUnreachable: what hosts the sandboxes (containerd) does not answer. That says nothing of any sandbox: they go on,
	// or are gone, and the runtime is asked again later.
	ErrUnreachable = errors.New("the runtime can't be reached")
	// ErrSwapped: a program that goes into the sandbox is not the one that the agent was started with.
	ErrSwapped = errors.New("not the program that the agent was started with")
)

// Isolation is the class of what stands between a command and the node's kernel. A higher one is stronger.
type Isolation int

const (
	// Namespaces: the command's system calls reach the node's kernel, which keeps it in namespaces, cgroups and seccomp.
	Namespaces Isolation = iota + 1
	// SeparateKernel: another kernel answers the command's system calls, be it a program (gVisor) or a guest's.
	SeparateKernel
	// VirtualMachine: that kernel is a guest's, and hardware virtualisation keeps it from the node's.
	VirtualMachine
)

// Suffices says whether a sandbox of class i may host a session that asks for at least floor; 0 asks for nothing.
func (i Isolation) Suffices(floor Isolation) bool { return i >= floor }

func (i Isolation) String() string {
	switch i {
	case Namespaces:
		return "namespaces"
	case SeparateKernel:
		return "separate-kernel"
	case VirtualMachine:
		return "virtual-machine"
	}
	return "unknown"
}

// Concession is a part of a promise that a class of sandboxes can't keep by its nature, declared beforehand. Whatever is
// not declared has to be proven before a sandbox is ready.
type Concession struct {
	Promise string `json:"promise"` // "P3", "P10" …
	// What is the thing that can't hold, in the very words of the proof's item where the proof looks at it
	// (receiptdv1.ProofItem.What); an item of other words is no part of the concession.
	What string `json:"what"`
	// Why it can't, and what is there instead: for an operator who decides whether that is enough.
	Why string `json:"why"`
}

// ConcedesSockets is what of P3 a runtime concedes under which nobody can count or destroy the sockets that a command leaves. Without
// it a receipt that does not know their number is no proof.
const ConcedesSockets = "no socket of a command sends after its end"

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
	// Rootfs is "host", the absolute path of a folder, or the reference of an image; RootfsKind tells them apart.
	Rootfs    string
	IDs       IDs
	Workspace mounts.Plan
	Resources Resources
	// Network is the sandbox's network mode; "none": a loopback interface and nothing else.
	Network string
	// Connect connects the sandbox's new network namespace, of a mode that isn't "none". The runtime makes the namespace so
	// that the sandbox's user namespace, if there is one, owns it, calls Connect once while nothing runs in it, and has the
	// sandbox join it at the path that Connect answers. It never undoes that: the caller of Create does, once the sandbox is
	// gone.
	Connect func(ctx context.Context, netns *os.File) (Connection, error) `json:"-"`
	// Grants are mounted read-only at GrantsPath. Their contents are secret: they are held in memory, and neither written
	// to a disk nor logged.
	Grants []Grant
	// Dir is the sandbox's own folder in the agent's state: root file system skeleton, control socket, runtime state.
	Dir string
	// ReceiptsDir is the host folder mounted at ReceiptsPath for receiptd alone.
	ReceiptsDir string
	// Receiptd and Pid1 are host paths of the static binaries.
	Receiptd, Pid1 string
	// ReceiptdSHA256 and Pid1SHA256 are what these are to be, lower-case hex: Create fails with ErrSwapped when what it
	// mounts is something else. Empty: whatever is there.
	ReceiptdSHA256, Pid1SHA256 string
}

// Connection is how a connected network namespace is used.
type Connection struct {
	// Path is where it is found, also by other programs of the node, for as long as the sandbox lives.
	Path string
	// ResolvConf is the content of the sandbox's /etc/resolv.conf.
	ResolvConf string
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
	// Provenance is what it was made of; zero in records of agents that did not look yet.
	Provenance Provenance `json:"provenance,omitzero"`
}

// Provenance is what a sandbox was made of, as its runtime saw it when it was started.
type Provenance struct {
	Rootfs     string     `json:"rootfs"` // as it is configured
	RootfsKind RootfsKind `json:"rootfsKind"`
	// RootfsDigest is an image's: "sha256:" and lower-case hex. Empty for a folder and for the node's own files, whose
	// content nobody has hashed.
	RootfsDigest string `json:"rootfsDigest,omitempty"`
	// ReceiptdSHA256 and Pid1SHA256 are of the programs as they were mounted, lower-case hex.
	ReceiptdSHA256 string `json:"receiptdSha256"`
	Pid1SHA256     string `json:"pid1Sha256"`
}

// EvidenceItem is one observation that a sandbox is gone.
type EvidenceItem struct {
	Source     string    `json:"source"` // "pidfd", "exit_event", "no_task", "deleted", "cgroup_empty", "boot_id"
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
	// Dial opens a connection to receiptd. ErrUnreachable: the sandbox may be well, ask again later.
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
//
// Making one reaches for nothing outside the agent: what does the work (containerd) may be down then, and come later.
// Methods that need it fail with ErrUnreachable meanwhile, after a bounded time.
type Runtime interface {
	// Name is how the configuration and the records call it: "embedded", "runc", "gvisor", "kata".
	Name() string
	// Isolation is the class of its sandboxes. It never changes.
	Isolation() Isolation
	// Concessions are what its sandboxes can't keep by their nature, by promise; none for a runtime that keeps them all.
	Concessions() []Concession
	// TakesRootfs says whether sandboxes can be made of this root file system, by its kind alone; an error wraps
	// ErrUnavailable and says what can.
	TakesRootfs(kind RootfsKind) error
	// Reachable asks whatever does the work for a sign of life, and fails with ErrUnreachable. It takes milliseconds, or
	// until ctx ends; nil for a runtime that needs nobody else.
	Reachable(ctx context.Context) error
	// Check says whether this node can host sandboxes; an error wraps ErrUnavailable or ErrUnreachable and names the
	// remedy.
	Check(ctx context.Context) error
	// Create starts a sandbox: when it returns, receiptd listens. On an error nothing of it is left.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Load finds a sandbox that an earlier agent started. ErrNotFound: it is not running any more; ask Remove for the
	// evidence. ErrUnreachable: ask again later.
	Load(ctx context.Context, id Identity) (Sandbox, error)
	// Remove ends whatever is left of a sandbox, also one whose start was cut short (an Identity with only SandboxID
	// and Dir set), and answers with the evidence that it is gone.
	Remove(ctx context.Context, id Identity) (Evidence, error)
	// List names the sandbox ids of which this runtime still has anything.
	List(ctx context.Context) ([]string, error)
}
