package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/workspace"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// The journal's keys. Ids hold no slash, so the keys of one session lie together and in order.
const (
	sessionPrefix = "session/"   // session/<session>: sessionRecord
	tombPrefix    = "tomb/"      // tomb/<session>: tombRecord; the id is never used again
	sandboxPrefix = "sandbox/"   // sandbox/<sandbox>: keyRecord, as long as receipts may be asked for
	execPrefix    = "exec/"      // exec/<session>/<exec>: execRecord
	wsPrefix      = "workspace/" // workspace/<gitview.Key>: workspaceRecord, as long as the agent keeps anything for the worktree
	openPrefix    = "open/"      // open/<session>/<exec>: an intent without an outcome; the value is empty
	expiredPrefix = "expired/"   // expired/<session>/<exec>: expiredRecord, as long as the session
	sweptPrefix   = "swept/"     // swept/<session>/<exec>: sweptRecord of an expired exec whose files may still be there
)

func sessionKey(id string) string            { return sessionPrefix + id }
func tombKey(id string) string               { return tombPrefix + id }
func sandboxKey(id string) string            { return sandboxPrefix + id }
func workspaceKey(worktree string) string    { return wsPrefix + gitview.Key(worktree) }
func execKey(session, exec string) string    { return execPrefix + session + "/" + exec }
func openKey(session, exec string) string    { return openPrefix + session + "/" + exec }
func expiredKey(session, exec string) string { return expiredPrefix + session + "/" + exec }
func sweptKey(session, exec string) string   { return sweptPrefix + session + "/" + exec }

// sessionRecord is what must survive of a session.
type sessionRecord struct {
	ID            string    `json:"id"`
	RequestDigest string    `json:"requestDigest"` // of the CreateSession: the same one again gets the same session
	OwnerEpoch    uint64    `json:"ownerEpoch"`
	Generation    uint64    `json:"generation"`
	State         State     `json:"state"`
	Reason        string    `json:"reason,omitempty"`
	CreatedAt     time.Time `json:"createdAt"`

	Workspace workspace.Workspace `json:"workspace"`
	GitLayout string              `json:"gitLayout"`
	Runtime   string              `json:"runtime"`
	// MinIsolation is the class that every sandbox of the session has at least; 0: none was asked for.
	MinIsolation runtime.Isolation `json:"minIsolation,omitempty"`
	Network      string            `json:"network"`
	// Egress is the policy, empty without a network and in the records of agents that had none; Allow is the session's own list.
	Egress    egress.Mode       `json:"egress,omitempty"`
	Allow     []string          `json:"allow,omitempty"`
	Resources resources         `json:"resources"`
	Env       map[string]string `json:"env,omitempty"`
	Notes     []string          `json:"notes,omitempty"`
	Caches    []cacheRecord     `json:"caches,omitempty"`
	// Grants are names and times alone; GrantsDigest is of the whole set, empty without one (grants.go).
	Grants       []grantRecord `json:"grants,omitempty"`
	GrantsDigest string        `json:"grantsDigest,omitempty"`

	// ConfigSHA256 is of the base clone's configuration as the newest sandbox has it; LeftOut is what of it is not there.
	ConfigSHA256 string             `json:"configSha256,omitempty"`
	LeftOut      []gitguard.Finding `json:"leftOut,omitempty"`
	// LastHarvest is the newest one that did anything.
	LastHarvest *gitview.Harvest `json:"lastHarvest,omitempty"`

	// Sandbox is the newest one; it stays here, with its evidence, after it was stopped.
	Sandbox *sandboxRecord `json:"sandbox,omitempty"`
}

// cacheRecord is a cache that a session asked for: its own, or, read-only, one of the operator's.
type cacheRecord struct {
	Name     string `json:"name"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"readOnly,omitempty"`
}

type resources struct {
	CPUs        float64 `json:"cpus"`
	MemoryBytes int64   `json:"memoryBytes"`
	Pids        int64   `json:"pids"`
}

// sandboxRecord names one sandbox beyond doubt. It is durable before the runtime is asked to make anything.
type sandboxRecord struct {
	ID         string       `json:"id"`
	State      SandboxState `json:"state"`
	Generation uint64       `json:"generation"`
	Dir        string       `json:"dir"`
	// Slot is the sandbox's place in the node's range of host uids.
	Slot int `json:"slot"`
	// Identity is empty until the runtime has made the container.
	Identity runtime.Identity `json:"identity"`
	// AttachEpoch is the highest that was ever announced to this receiptd (P6).
	AttachEpoch uint64            `json:"attachEpoch"`
	PublicKey   []byte            `json:"publicKey,omitempty"`
	Plan        mounts.Plan       `json:"plan"`
	Proof       []proofRecord     `json:"proof,omitempty"`
	Seals       []sealRecord      `json:"seals,omitempty"`
	Evidence    *runtime.Evidence `json:"evidence,omitempty"`
	// GrantsDigest is of the set that it was made with.
	GrantsDigest string `json:"grantsDigest,omitempty"`
	// Isolation is its runtime's class, Concessions what that had declared not to be able to keep. 0 in records of agents that
	// had one runtime, which was of class Namespaces.
	Isolation   runtime.Isolation    `json:"isolation,omitempty"`
	Concessions []runtime.Concession `json:"concessions,omitempty"`
	// ProvedAt is when it had proved itself, since the node's start: a sandbox does not outlive that.
	ProvedAt time.Duration `json:"provedAt,omitempty"`
	// Network is nil for the mode "none".
	Network *networkRecord `json:"network,omitempty"`
}

type proofRecord struct {
	Promise string `json:"promise"`
	What    string `json:"what"`
	Holds   bool   `json:"holds"`
	Detail  string `json:"detail,omitempty"`
	// Conceded: it doesn't hold, and is one of the sandbox's concessions.
	Conceded bool `json:"conceded,omitempty"`
}

type sealRecord struct {
	Path     string `json:"path"`
	MountID  uint64 `json:"mountId"`
	Device   uint64 `json:"device"`
	Inode    uint64 `json:"inode"`
	ReadOnly bool   `json:"readOnly"`
	SHA256   string `json:"sha256,omitempty"`
}

// identity is what the runtime is asked about, also when it never said one.
func (s *sandboxRecord) identity(runtimeName string) runtime.Identity {
	if s.Identity.SandboxID != "" {
		return s.Identity
	}
	return runtime.Identity{Runtime: runtimeName, SandboxID: s.ID, Dir: s.Dir}
}

// keyRecord verifies the receipts of a sandbox after the session has gone on to another one.
type keyRecord struct {
	Session    string `json:"session"`
	Generation uint64 `json:"generation"`
	PublicKey  []byte `json:"publicKey"`
	// Provenance is what its receipts have to say.
	Provenance runtime.Provenance `json:"provenance,omitzero"`
	// ConcedesSockets: its runtime had declared that the sockets which its commands leave can't be counted (P3).
	ConcedesSockets bool `json:"concedesSockets,omitempty"`
	// Evidence is set once the sandbox was seen to be gone.
	Evidence *runtime.Evidence `json:"evidence,omitempty"`
}

// workspaceRecord is what outlives a session of its workspace.
type workspaceRecord struct {
	Session   string              `json:"session"` // the last one that had it
	Workspace workspace.Workspace `json:"workspace"`
	Layout    string              `json:"layout"`
	// Device and Inode are of the worktree's Git folder: another worktree at this path has others.
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	// Deleting: DeleteWorkspace has begun, and a part may be gone.
	Deleting bool `json:"deleting,omitempty"`
}

type tombRecord struct {
	DeletedAt time.Time `json:"deletedAt"`
}

// intentRecord is durable before a command starts (P1). What of it is in the receipt is compared with the receipt.
type intentRecord struct {
	ExecID        string            `json:"execId"`
	SessionID     string            `json:"sessionId"`
	SandboxID     string            `json:"sandboxId"`
	ContainerID   string            `json:"containerId"`
	Generation    uint64            `json:"generation"`
	AttachEpoch   uint64            `json:"attachEpoch"`
	OwnerEpoch    uint64            `json:"ownerEpoch"`
	Nonce         string            `json:"nonce"`
	RequestDigest string            `json:"requestDigest"`
	Labels        map[string]string `json:"labels,omitempty"`
	TimeoutMS     uint64            `json:"timeoutMs"`
	GrantsDigest  string            `json:"grantsDigest,omitempty"`
	RequestedAt   time.Time         `json:"requestedAt"`
	// Spill: the caller wants long streams as files too (spill.go).
	Spill bool `json:"spill,omitempty"`
}

// execRecord is an intent and, once it is known, its outcome: the answer without output and receipt, which lie in
// the receipts folder. The command's text is not kept, its digest is.
type execRecord struct {
	Intent  intentRecord `json:"intent"`
	Outcome []byte       `json:"outcome,omitempty"` // sandbox.v1.ExecResult, binary
	// BoundaryTold: of one without an outcome, its exec.boundary is among the events already.
	BoundaryTold bool `json:"boundaryTold,omitempty"`
	// EndedAt is when the outcome was recorded. Sequence is the receipt's place in its sandbox's chain, 0 without one.
	EndedAt  time.Time `json:"endedAt,omitzero"`
	Sequence uint64    `json:"sequence,omitempty"`

	// expired is set instead of an outcome when only the digest is left.
	expired *expiredRecord
}

// expiredRecord is what retention leaves of an exec: enough to never run it again.
type expiredRecord struct {
	RequestDigest string    `json:"requestDigest"`
	EndedAt       time.Time `json:"endedAt"`
	ExpiredAt     time.Time `json:"expiredAt"`
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		// Only plain structs of this package come here.
		panic(fmt.Sprintf("encoding a journal record: %v", err))
	}
	return b
}

// encodeOutcome strips what lies in the receipts folder.
func encodeOutcome(r *sandboxv1.ExecResult) ([]byte, error) {
	b, err := proto.Marshal(withoutBytes(r))
	if err != nil {
		return nil, fmt.Errorf("encoding the outcome of %s: %w", r.GetExecId(), err)
	}
	return b, nil
}

func decodeOutcome(b []byte) (*sandboxv1.ExecResult, error) {
	r := &sandboxv1.ExecResult{}
	if err := proto.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%w: decoding a recorded outcome: %w", ErrDataLoss, err)
	}
	return r, nil
}

// requestDigest tells one CreateSession from another under the same id.
func requestDigest(r *sandboxv1.CreateSessionRequest) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		panic(fmt.Sprintf("encoding a request: %v", err))
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// ---- records as the API shows them ----

func (r *sessionRecord) proto() *sandboxv1.Session {
	w := r.Workspace
	s := &sandboxv1.Session{
		SessionId: r.ID, OwnerEpoch: r.OwnerEpoch, Generation: r.Generation, Reason: r.Reason,
		State: sandboxv1.Session_State(sandboxv1.Session_State_value[string(r.State)]),
		Workspace: &sandboxv1.Workspace{
			Repository: w.Repository, Worktree: w.Worktree, Branch: w.Branch, BaseRef: w.BaseRef, GitLayout: r.GitLayout,
		},
		Resources: &sandboxv1.Resources{Cpus: r.Resources.CPUs, MemoryBytes: r.Resources.MemoryBytes, Pids: r.Resources.Pids},
		Network:   &sandboxv1.Network{Mode: r.Network, Egress: string(r.Egress), Allow: r.Allow},
		Env:       r.Env, CreatedAt: timestamppb.New(r.CreatedAt), Notes: r.Notes,
		Runtime: r.Runtime, MinIsolation: sandboxv1.Isolation(r.MinIsolation),
	}
	if r.Sandbox != nil {
		s.Sandbox = r.Sandbox.proto(r.Runtime)
		s.Sandbox.Network = r.Sandbox.Network.proto(r.Network)
		s.Mounts = mountsProto(r.Sandbox.Plan)
		if r.Sandbox.GrantsDigest != "" { // of memory: it has no source
			s.Mounts = append(s.Mounts, &sandboxv1.Mount{Target: runtime.GrantsPath, ReadOnly: true, Seal: true})
		}
	}
	for _, g := range r.Grants {
		s.GrantNames = append(s.GrantNames, g.Name)
	}
	for _, c := range r.Caches {
		s.Caches = append(s.Caches, &sandboxv1.Cache{Name: c.Name, Path: c.Path, ReadOnly: c.ReadOnly})
	}
	s.LeftOut = findingsProto(r.LeftOut)
	if r.LastHarvest != nil {
		s.LastHarvest = harvestProto(r.LastHarvest.Whole())
	}
	return s
}

func (s *sandboxRecord) proto(runtimeName string) *sandboxv1.Sandbox {
	p := &sandboxv1.Sandbox{
		Id: s.ID, Runtime: runtimeName, ContainerId: s.Identity.ContainerID, Generation: s.Generation,
		PublicKey: s.PublicKey, State: sandboxv1.Sandbox_State(sandboxv1.Sandbox_State_value[string(s.State)]), Evidence: evidenceProto(s.Evidence),
		Isolation: sandboxv1.Isolation(max(s.Isolation, runtime.Namespaces)), Provenance: provenanceProto(s.Identity.Provenance),
		Concessions: concessionsProto(s.Concessions),
	}
	if !s.Identity.StartedAt.IsZero() {
		p.StartedAt = timestamppb.New(s.Identity.StartedAt)
	}
	for _, i := range s.Proof {
		p.Proof = append(p.Proof, &sandboxv1.ProofItem{Promise: i.Promise, What: i.What, Holds: i.Holds, Detail: i.Detail, Conceded: i.Conceded})
	}
	for _, i := range s.Seals {
		p.Seals = append(p.Seals, &sandboxv1.Seal{Path: i.Path, MountId: i.MountID, Device: i.Device, Inode: i.Inode, ReadOnly: i.ReadOnly, Sha256: i.SHA256})
	}
	return p
}

func mountsProto(p mounts.Plan) []*sandboxv1.Mount {
	var out []*sandboxv1.Mount
	for _, m := range p.Mounts {
		out = append(out, &sandboxv1.Mount{
			Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly, Seal: m.Seal, Idmapped: m.Idmap, Empty: m.Empty,
		})
	}
	return out
}

func findingsProto(list []gitguard.Finding) []*sandboxv1.GuardFinding {
	var out []*sandboxv1.GuardFinding
	for _, f := range list {
		out = append(out, &sandboxv1.GuardFinding{Key: f.Key, File: f.File, Line: uint32(max(f.Line, 0)), Why: f.Why, Remedy: f.Remedy})
	}
	return out
}

func harvestProto(h gitview.Harvest) *sandboxv1.Harvest {
	p := &sandboxv1.Harvest{Status: h.Status, Refs: h.Refs, Objects: h.Objects, StaleLocks: h.StaleLocks, Detail: h.Detail}
	for _, c := range h.Conflicts {
		p.Conflicts = append(p.Conflicts, &sandboxv1.HarvestConflict{
			Ref: c.Ref, BaseId: c.BaseID, SessionId: c.SessionID, BeforeId: c.BeforeID, Remedy: c.Remedy,
		})
	}
	if len(h.Conflicts) > 0 {
		p.Conflict = conflictSentence(h.Conflicts[0])
	}
	return p
}

// conflictSentence names a conflict and its remedy.
func conflictSentence(c gitview.Conflict) string {
	if c.BeforeID == "" && c.BaseID == "" && c.SessionID == "" { // the index has no id
		return c.Ref + ": " + c.Remedy
	}
	did := func(who, id string) string {
		switch {
		case id == c.BeforeID && id == "":
			return who + " has none"
		case id == c.BeforeID:
			return who + " left it there"
		case id == "":
			return who + " deleted it"
		case c.BeforeID == "":
			return who + " made it at " + id
		}
		return who + " moved it to " + id
	}
	was := "was at " + c.BeforeID
	if c.BeforeID == "" {
		was = "was not there"
	}
	return fmt.Sprintf("%s %s, %s and %s: %s", c.Ref, was, did("the base clone", c.BaseID), did("the session", c.SessionID), c.Remedy)
}

func evidenceProto(e *runtime.Evidence) *sandboxv1.Evidence {
	if e == nil {
		return nil
	}
	p := &sandboxv1.Evidence{Runtime: e.Runtime, ContainerId: e.ContainerID, Complete: e.Complete}
	for _, i := range e.Items {
		p.Items = append(p.Items, &sandboxv1.EvidenceItem{Source: i.Source, Detail: i.Detail, ObservedAt: timestamppb.New(i.ObservedAt)})
	}
	return p
}
