package client

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// Pin is what must not change of a sandbox.
type Pin struct {
	SessionID  string
	Generation uint64
	// Key is the sandbox's Ed25519 public key, 32 bytes.
	Key ed25519.PublicKey
}

func (p Pin) equal(o Pin) bool {
	return p.SessionID == o.SessionID && p.Generation == o.Generation && p.Key.Equal(o.Key)
}

// Keyring holds the pinned keys of sandboxes, by the sandbox's id. The zero value is empty and ready; several Clients
// may share one. The agent gives the key of an older sandbox too, as long as it has it on record; a control plane that wants to
// verify older answers with what it saw before its own restart stores what All gives and puts it back with Pin.
type Keyring struct {
	mu   sync.Mutex
	pins map[string]Pin
}

// Pin takes a sandbox's key in. It fails with ErrKeyChanged when another one is pinned for this sandbox, and keeps that.
func (k *Keyring) Pin(sandboxID string, p Pin) error {
	if sandboxID == "" || p.SessionID == "" || len(p.Key) != ed25519.PublicKeySize {
		return fmt.Errorf("pinning the key of sandbox %q of session %q: %w: %d bytes, not %d", sandboxID, p.SessionID, verify.ErrKey, len(p.Key), ed25519.PublicKeySize)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if old, ok := k.pins[sandboxID]; ok {
		if !old.equal(p) {
			return fmt.Errorf("%w: sandbox %s", ErrKeyChanged, sandboxID)
		}
		return nil
	}
	if k.pins == nil {
		k.pins = map[string]Pin{}
	}
	p.Key = bytes.Clone(p.Key)
	k.pins[sandboxID] = p
	return nil
}

// All gives a copy of what is pinned.
func (k *Keyring) All() map[string]Pin {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.pins)
}

func (k *Keyring) get(sandboxID string) (Pin, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p, ok := k.pins[sandboxID]
	return p, ok
}

// forget drops the keys of a deleted session: its id is never used again, and nothing of it can be asked for.
func (k *Keyring) forget(session string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.pins, func(_ string, p Pin) bool { return p.SessionID == session })
}

// seen pins the key of the sandbox that a session's record names, once it has one.
func (c *Client) seen(s *sandboxv1.Session) (*sandboxv1.Session, error) {
	if sb := s.GetSandbox(); !c.skipVerify && len(sb.GetPublicKey()) > 0 {
		if err := c.keys.Pin(sb.GetId(), Pin{s.GetSessionId(), sb.GetGeneration(), sb.GetPublicKey()}); err != nil {
			return nil, fmt.Errorf("session %s: %w", s.GetSessionId(), err)
		}
	}
	return s, nil
}

// RequestDigest is the digest of a request as receipts hold it: of session, command, timeout (in whole milliseconds) and
// labels.
func RequestDigest(r *sandboxv1.ExecRequest) string {
	q := receipt.Request{SessionID: r.GetSessionId(), Command: r.GetCommand(), Labels: r.GetLabels()}
	if r.TimeoutSeconds != nil {
		q.TimeoutMS = uint64(math.Round(r.GetTimeoutSeconds() * 1000))
	}
	return q.Digest()
}

// verify checks an answer. Without a receipt it gives nil for the answers that need none. It fails with ErrUnverified.
func (c *Client) verify(ctx context.Context, session, exec, digest string, r *sandboxv1.ExecResult) (*receipt.Predicate, error) {
	if r.GetSessionId() != session || r.GetExecId() != exec {
		return nil, fmt.Errorf("%w: it is about exec %q of session %q", ErrUnverified, r.GetExecId(), r.GetSessionId())
	}
	if len(r.GetReceipt()) == 0 {
		return nil, withoutReceipt(r)
	}
	pin, err := c.pinOf(ctx, session, r.GetSandboxId())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnverified, err)
	}
	p, err := VerifyResult(r, pin, digest)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// pinOf gives the pinned key of a sandbox. One that nobody has seen yet was started for this very command, or is an earlier
// one whose key this program has not stored: the agent is asked.
func (c *Client) pinOf(ctx context.Context, session, sandbox string) (Pin, error) {
	if pin, ok := c.keys.get(sandbox); ok {
		return pin, nil
	}
	p := c.newPatience()
	for {
		err := c.learnKey(ctx, session, sandbox)
		if err == nil {
			break
		}
		if !lost(err) && !errors.Is(err, ErrUnavailable) || !p.wait(ctx) {
			return Pin{}, fmt.Errorf("the key of sandbox %s is not pinned: %w", sandbox, err)
		}
	}
	pin, ok := c.keys.get(sandbox)
	if !ok {
		return Pin{}, fmt.Errorf("the key of sandbox %s is not pinned, and the agent has it no more: keep what is pinned (Keyring)", sandbox)
	}
	return pin, nil
}

// learnKey pins the keys of the session's newest sandbox and of the one that is asked for, as far as the agent has it on
// record.
func (c *Client) learnKey(ctx context.Context, session, sandbox string) error {
	res, err := c.api.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: session, SandboxId: sandbox})
	if err != nil {
		return failed(ctx, "reading session "+session, err)
	}
	if _, err := c.seen(res.GetSession()); err != nil {
		return err
	}
	k := res.GetSandboxKey()
	if k == nil {
		return nil
	}
	return c.keys.Pin(k.GetSandboxId(), Pin{session, k.GetGeneration(), k.GetPublicKey()})
}

// withoutReceipt says whether an answer may be without a receipt.
func withoutReceipt(r *sandboxv1.ExecResult) error {
	switch r.GetStatus() {
	case sandboxv1.ExecResult_NOT_STARTED, sandboxv1.ExecResult_UNCERTAIN:
	case sandboxv1.ExecResult_CANCELLED:
		if !r.GetEvidence().GetComplete() {
			return fmt.Errorf("%w: CANCELLED without a receipt and without the evidence of its sandbox's end", ErrUnverified)
		}
	default:
		return fmt.Errorf("%w: %s without a receipt", ErrUnverified, r.GetStatus())
	}
	if r.GetStdoutInfo() != nil || r.GetStderrInfo() != nil || len(r.GetStdout())+len(r.GetStderr())+len(r.GetStdoutText())+len(r.GetStderrText()) > 0 {
		return fmt.Errorf("%w: output without a receipt", ErrUnverified)
	}
	return nil
}

// VerifyResult checks a result's receipt against the pinned key of its sandbox, and the result against its receipt:
// offline, for a caller that has stored both. digest is RequestDigest of the request, "" where it is not known. It fails
// with ErrUnverified; the cause is one of package receipt/verify where the receipt itself is at fault.
func VerifyResult(r *sandboxv1.ExecResult, pin Pin, digest string) (*receipt.Predicate, error) {
	p, err := verify.Envelope(r.GetReceipt(), pin.Key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnverified, err)
	}
	if digest == "" {
		digest = p.RequestDigest
	}
	want := verify.Expect{
		SessionID: pin.SessionID, SandboxID: r.GetSandboxId(), ExecID: r.GetExecId(), Generation: pin.Generation,
		Nonce: cmp.Or(r.GetNonce(), p.Nonce), RequestDigest: digest,
	}
	if err := want.Match(p); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnverified, err)
	}
	if b, err := hex.DecodeString(p.Nonce); err != nil || len(b) != receipt.NonceSize {
		return nil, fmt.Errorf("%w: its nonce is %q", ErrUnverified, p.Nonce)
	}
	if field := differs(r, &p); field != "" {
		return nil, fmt.Errorf("%w: its %s is not what the receipt says", ErrUnverified, field)
	}
	return &p, nil
}

// differs names the first field in which a result differs from its receipt.
func differs(r *sandboxv1.ExecResult, p *receipt.Predicate) string {
	for _, f := range []struct {
		name string
		same bool
	}{
		{"session", r.GetSessionId() == p.SessionID},
		{"generation", r.GetGeneration() == p.Generation},
		{"status", sameStatus(r.GetStatus(), p)},
		{"exit code", int(r.GetExitCode()) == p.ExitCode},
		{"signal", int(r.GetSignal()) == p.Signal},
		{"oom", r.GetOom() == p.OOM},
		{"labels", maps.Equal(r.GetLabels(), p.Labels)},
		{"start", r.GetStartedAt().AsTime().Equal(timestamppb.New(p.StartedAt).AsTime())},
		{"duration", r.GetDuration().AsDuration() == durationpb.New(max(p.EndedAt.Sub(p.StartedAt), 0)).AsDuration()},
		{"usage", sameUsage(r.GetUsage(), p.Usage)},
		{"stdout's totals", sameInfo(r.GetStdoutInfo(), p.Stdout)},
		{"stderr's totals", sameInfo(r.GetStderrInfo(), p.Stderr)},
		{"stdout", sameKept(r.GetStdout(), r.GetStdoutText(), p.Stdout)},
		{"stderr", sameKept(r.GetStderr(), r.GetStderrText(), p.Stderr)},
	} {
		if !f.same {
			return f.name
		}
	}
	return ""
}

// sameStatus: a command that was ended on request is CANCELLED, or UNCERTAIN where its sandbox could not be seen to be
// gone.
func sameStatus(s sandboxv1.ExecResult_Status, p *receipt.Predicate) bool {
	if p.Cancelled {
		return s == sandboxv1.ExecResult_CANCELLED || s == sandboxv1.ExecResult_UNCERTAIN
	}
	return s.String() == string(p.Status)
}

func sameUsage(u *sandboxv1.Usage, p receipt.Usage) bool {
	return u.GetUserCpu().AsDuration() == p.UserCPU && u.GetSystemCpu().AsDuration() == p.SystemCPU &&
		u.GetMaxRssBytes() == p.MaxRSS && u.GetPeakMemoryBytes() == p.PeakMemory
}

func sameInfo(i *sandboxv1.OutputInfo, o receipt.Output) bool {
	return i.GetBytes() == o.Bytes && i.GetSha256() == o.SHA256 && i.GetTruncated() == o.Truncated() &&
		i.GetOmittedFrom() == o.OmittedFrom && i.GetOmittedBytes() == o.OmittedBytes
}

// sameKept: text is the kept output with what is not UTF-8 replaced, where it was asked for.
func sameKept(kept []byte, text string, o receipt.Output) bool {
	sum := sha256.Sum256(kept)
	return uint64(len(kept)) == o.KeptBytes && hex.EncodeToString(sum[:]) == o.KeptSHA256 &&
		(text == "" || text == strings.ToValidUTF8(string(kept), "\uFFFD"))
}
