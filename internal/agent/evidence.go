package agent

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// readProven reads an exec's receipt from the receipts folder, never from what anyone said of it, and checks it
// against the intent (P2): signature, nonce, exec id, session, sandbox, generation, request digest, kept output; and that
// its sandbox was made of what the agent knows that it was made of; and that nothing of it can still send, unless its runtime
// had conceded that (P3).
// wantSHA, if not empty, is what receiptd said that the envelope's SHA-256 is. An error that wraps
// receipt.ErrNotFound: there is no receipt; every other error: there is one that must not be believed.
func readProven(dir string, in *intentRecord, known *keyRecord, wantSHA string) (*proven, error) {
	envelope, err := receipt.Read(dir, in.ExecID)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(envelope); wantSHA != "" && hex.EncodeToString(sum[:]) != wantSHA {
		return nil, fmt.Errorf("%w: the receipt of exec %s is not the one that receiptd wrote", verify.ErrMismatch, in.ExecID)
	}
	p, err := verify.Envelope(envelope, known.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("checking the receipt of exec %s: %w", in.ExecID, err)
	}
	expect := verify.Expect{
		SessionID: in.SessionID, SandboxID: in.SandboxID, ExecID: in.ExecID,
		Nonce: in.Nonce, RequestDigest: in.RequestDigest, Generation: in.Generation,
	}
	if err := expect.Match(p); err != nil {
		return nil, fmt.Errorf("checking the receipt of exec %s: %w", in.ExecID, err)
	}
	if p.GrantsDigest != in.GrantsDigest {
		return nil, fmt.Errorf("%w: the receipt of exec %s names the grants %q, not %q", verify.ErrMismatch, in.ExecID, p.GrantsDigest, in.GrantsDigest)
	}
	if want := signedProvenance(known.Provenance); p.Provenance != want {
		return nil, fmt.Errorf("%w: the receipt of exec %s names a sandbox made of %+v, not %+v", verify.ErrMismatch, in.ExecID, p.Provenance, want)
	}
	if p.Boundary.SocketsLeft == receipt.SocketsUnknown && !known.ConcedesSockets {
		return nil, fmt.Errorf("%w: the receipt of exec %s does not know how many sockets the command left, and its runtime does not concede that", errNoBoundary, in.ExecID)
	}
	out := &proven{envelope: envelope, predicate: p}
	if out.stdout, err = receipt.ReadKept(dir, &p, receipt.Stdout); err != nil {
		return nil, bad(err)
	}
	if out.stderr, err = receipt.ReadKept(dir, &p, receipt.Stderr); err != nil {
		return nil, bad(err)
	}
	return out, nil
}

// bad keeps a missing output file from looking like a missing receipt.
func bad(err error) error { return fmt.Errorf("%v: %w", err, receipt.ErrOutput) }

// keyOf is what verifies the receipts of one sandbox of this session, now or earlier.
func (s *session) keyOf(sandboxID string) (*keyRecord, error) {
	if sb := s.sandboxRecord(); sb != nil && sb.ID == sandboxID && len(sb.PublicKey) == ed25519.PublicKeySize {
		return sb.key(s.id), nil
	}
	return s.keyRecordOf(sandboxID)
}

func (s *sandboxRecord) key(session string) *keyRecord {
	return &keyRecord{
		Session: session, Generation: s.Generation, PublicKey: s.PublicKey, Provenance: s.Identity.Provenance,
		ConcedesSockets: concedesSockets(s.Concessions),
	}
}

func concedesSockets(all []runtime.Concession) bool {
	return slices.ContainsFunc(all, func(c runtime.Concession) bool { return c.Promise == "P3" && c.What == runtime.ConcedesSockets })
}

// signedProvenance is a provenance as receipts have it.
func signedProvenance(p runtime.Provenance) receipt.Provenance {
	return receipt.Provenance{
		Rootfs: p.Rootfs, RootfsKind: string(p.RootfsKind), RootfsDigest: p.RootfsDigest, ReceiptdSHA256: p.ReceiptdSHA256, Pid1SHA256: p.Pid1SHA256,
	}
}

// toldProvenance is a provenance as receiptd is told it; nil when it is not known.
func toldProvenance(p runtime.Provenance) *receiptdv1.Provenance {
	if p == (runtime.Provenance{}) {
		return nil
	}
	return &receiptdv1.Provenance{
		Rootfs: p.Rootfs, RootfsKind: string(p.RootfsKind), RootfsDigest: p.RootfsDigest, ReceiptdSha256: p.ReceiptdSHA256, Pid1Sha256: p.Pid1SHA256,
	}
}

// keyRecordOf is what the journal keeps of a sandbox that may be gone.
func (s *session) keyRecordOf(sandboxID string) (*keyRecord, error) {
	b, err := s.agent.journal.Get(sandboxKey(sandboxID))
	if errors.Is(err, journal.ErrNotFound) {
		return nil, fmt.Errorf("%w: no public key of sandbox %s is recorded", ErrDataLoss, sandboxID)
	}
	if err != nil {
		return nil, fmt.Errorf("looking up the public key of sandbox %s: %w", sandboxID, err)
	}
	k := &keyRecord{}
	if err := json.Unmarshal(b, k); err != nil || len(k.PublicKey) != ed25519.PublicKeySize {
		return nil, fmt.Errorf("%w: the recorded public key of sandbox %s can't be read (%v)", ErrDataLoss, sandboxID, err)
	}
	return k, nil
}

// gone records with a sandbox's key that it was seen to be gone: its receipts, and the answers that were uncertain until
// then, outlive the session's own record of it.
func (s *sandboxRecord) gone(session string, e *runtime.Evidence) []journal.Op {
	if len(s.PublicKey) == 0 {
		return nil // no command ever ran in it
	}
	k := s.key(session)
	k.Evidence = e
	return []journal.Op{journal.Set(sandboxKey(s.ID), encode(k))}
}
