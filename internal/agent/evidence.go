package agent

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// readProven reads an exec's receipt from the receipts folder, never from what anyone said of it, and checks it
// against the intent (P2): signature, nonce, exec id, session, sandbox, generation, request digest, kept output.
// wantSHA, if not empty, is what receiptd said that the envelope's SHA-256 is. An error that wraps
// receipt.ErrNotFound: there is no receipt; every other error: there is one that must not be believed.
func readProven(dir string, in *intentRecord, key ed25519.PublicKey, wantSHA string) (*proven, error) {
	envelope, err := receipt.Read(dir, in.ExecID)
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(envelope); wantSHA != "" && hex.EncodeToString(sum[:]) != wantSHA {
		return nil, fmt.Errorf("%w: the receipt of exec %s is not the one that receiptd wrote", verify.ErrMismatch, in.ExecID)
	}
	p, err := verify.Envelope(envelope, key)
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

// keyOf is the public key of one sandbox of this session, now or earlier.
func (s *session) keyOf(sandboxID string) (ed25519.PublicKey, error) {
	if sb := s.sandboxRecord(); sb != nil && sb.ID == sandboxID && len(sb.PublicKey) == ed25519.PublicKeySize {
		return sb.PublicKey, nil
	}
	k, err := s.keyRecordOf(sandboxID)
	if err != nil {
		return nil, err
	}
	return k.PublicKey, nil
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
	return []journal.Op{journal.Set(sandboxKey(s.ID), encode(keyRecord{Session: session, Generation: s.Generation, PublicKey: s.PublicKey, Evidence: e}))}
}
