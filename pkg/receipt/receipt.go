package receipt

import "time"

// Types of the Statement (https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md) and of the
// envelope (https://github.com/secure-systems-lab/dsse/blob/master/protocol.md).
const (
	PayloadType   = "application/vnd.in-toto+json"
	StatementType = "https://in-toto.io/Statement/v1"
	PredicateType = "https://sandbox-agent.dev/exec-receipt/v1"
)

// NonceSize is the length of an intent's nonce, bytes.
const NonceSize = 32

// Status is how a command ended. Only these four can stand in a receipt; the API adds CANCELLED, NOT_STARTED and
// UNCERTAIN, which are about what could not be observed, or did not happen.
type Status string

const (
	Exited   Status = "EXITED"
	Signaled Status = "SIGNALED"
	TimedOut Status = "TIMED_OUT"
	Killed   Status = "KILLED"
)

// Output describes one stream of a command. The kept part is the file <exec-id>.stdout (or .stderr) beside the
// receipt: the first OmittedFrom bytes followed by the last Bytes-OmittedFrom-OmittedBytes. No file when Bytes is 0.
type Output struct {
	Bytes        uint64 `json:"bytes"`
	SHA256       string `json:"sha256"`      // of everything, lower-case hex
	KeptBytes    uint64 `json:"keptBytes"`   // size of the kept file
	KeptSHA256   string `json:"keptSha256"`  // of the kept file, lower-case hex
	OmittedFrom  uint64 `json:"omittedFrom"` // where the left-out range begins; Bytes when nothing is
	OmittedBytes uint64 `json:"omittedBytes"`
}

// Truncated says whether a part of the output is counted and hashed but not kept.
func (o Output) Truncated() bool { return o.OmittedBytes > 0 }

// Boundary is how it was established that nothing of the command is alive.
type Boundary struct {
	// PIDNamespace is the inode of the command's PID namespace (readlink /proc/PID/ns/pid).
	PIDNamespace uint64 `json:"pidNamespace"`
	// Method is "wait4": the wait of pid1's own parent, which the kernel answers only once the namespace is empty
	// (zap_pid_ns_processes); or "wait4+cgroup", where the guest's kernel answers earlier (gVisor): then also the command's
	// cgroup, which nothing in the namespace can leave, was seen to be empty.
	Method string `json:"method"`
	// Pid1 is what that wait said of pid1: "exited 0", "killed by signal 9".
	Pid1 string `json:"pid1"`
	// Cgroup is "empty", "populated" or "none" (no cgroup of its own).
	Cgroup string `json:"cgroup"`
	// SocketsDestroyed counts the sockets of the command that outlived it and were destroyed.
	SocketsDestroyed int `json:"socketsDestroyed"`
	// SocketsLeft counts those that could not be destroyed; SocketsUnknown where the kernel doesn't say (gVisor).
	SocketsLeft int `json:"socketsLeft"`
	// Wait is how long something of the command was still there after the end of its own process; zero where pid1 ended
	// without a report.
	Wait time.Duration `json:"waitNs,omitempty"`
}

// SocketsUnknown stands for a number of sockets that nobody could count.
const SocketsUnknown = -1

// Usage is what the command used. Zero where the kernel does not say.
type Usage struct {
	UserCPU    time.Duration `json:"userCpuNs"`
	SystemCPU  time.Duration `json:"systemCpuNs"`
	MaxRSS     int64         `json:"maxRssBytes"`
	PeakMemory int64         `json:"peakMemoryBytes"`
	// Network is zero in a sandbox without a network.
	Network Network `json:"network,omitzero"`
}

// Network is what went over the sandbox's interfaces, loopback excepted, from the command's admission until its sockets were
// destroyed: bytes with all headers, also of what was refused on the way or came unasked. It is counted inside, where nobody
// knows what became of a packet: connections and refusals are the agent's to tell (ExecResult.network), and in no receipt.
type Network struct {
	SentBytes     uint64 `json:"sentBytes"`
	ReceivedBytes uint64 `json:"receivedBytes"`
}

// Texts that receiptd writes into a predicate and that the agent recognises.
const (
	// ReasonOOM is the clause of Reason that goes with OOM.
	ReasonOOM = "the memory limit killed a process of it"
	// SealsUnknown is the one entry of SealsBroken when pid1 ended without comparing them.
	SealsUnknown = "not known: pid1 ended without comparing them"
)

// Provenance is what the command's sandbox was made of, as its runtime saw it and told receiptd.
type Provenance struct {
	Rootfs       string `json:"rootfs"`                 // "host", a folder of the node, or an image's reference
	RootfsKind   string `json:"rootfsKind"`             // "host", "folder" or "image"
	RootfsDigest string `json:"rootfsDigest,omitempty"` // an image's: "sha256:" and lower-case hex
	// ReceiptdSHA256 and Pid1SHA256 are of the two programs as they were mounted, lower-case hex.
	ReceiptdSHA256 string `json:"receiptdSha256"`
	Pid1SHA256     string `json:"pid1Sha256"`
}

// Predicate is the statement's content: one command, its request and how it ended.
type Predicate struct {
	SessionID     string `json:"sessionId"`
	SandboxID     string `json:"sandboxId"`
	Generation    uint64 `json:"generation"`
	ExecID        string `json:"execId"`
	Nonce         string `json:"nonce"`         // 32 bytes, lower-case hex, made by the agent and written into its intent
	RequestDigest string `json:"requestDigest"` // RequestDigest of the request that was run

	StartedAt time.Time `json:"startedAt"`
	EndedAt   time.Time `json:"endedAt"`

	Status    Status `json:"status"`
	ExitCode  int    `json:"exitCode"`            // meaningful with EXITED, and with TIMED_OUT when the command still returned
	Signal    int    `json:"signal"`              // with SIGNALED, and with TIMED_OUT when a signal ended it
	OOM       bool   `json:"oom"`                 // the memory limit killed a process of the command
	Cancelled bool   `json:"cancelled,omitempty"` // it was ended on request
	Reason    string `json:"reason,omitempty"`    // lower-case clauses, joined by "; ", for a status that isn't plain

	Labels       map[string]string `json:"labels,omitempty"`
	GrantsDigest string            `json:"grantsDigest,omitempty"`
	// Provenance is zero in receipts of agents that did not look at it yet.
	Provenance Provenance `json:"provenance,omitzero"`

	Stdout Output `json:"stdout"`
	Stderr Output `json:"stderr"`

	Boundary    Boundary `json:"boundary"`
	SealsIntact bool     `json:"sealsIntact"`
	SealsBroken []string `json:"sealsBroken,omitempty"`
	StaleLocks  []string `json:"staleLocks,omitempty"` // lock files of the command's Git that were removed after it

	Usage Usage `json:"usage"`

	// Sequence counts the sandbox's receipts from 1; Previous is the SHA-256 (lower-case hex) of the envelope file
	// before this one, empty for the first: a missing receipt shows.
	Sequence uint64 `json:"sequence"`
	Previous string `json:"previous"`
}
