package receipt

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Bounds of what a command can influence in its receipt, so that no command makes its own receipt too large to write
// (promise P16): entries of a list, and bytes of a sentence or path.
const (
	maxListed = 32
	maxText   = 512
)

// Signer holds the key of one sandbox's receipts. The private half has no accessor.
type Signer struct {
	key   ed25519.PrivateKey
	keyID string
}

// NewSigner makes a new key from the kernel's random numbers.
func NewSigner() (*Signer, error) {
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, fmt.Errorf("making the receipt key: %w", err)
	}
	return &Signer{key: key, keyID: KeyID(pub)}, nil
}

// Public is the half that the agent keeps.
func (s *Signer) Public() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }

// KeyID is the SHA-256 (lower-case hex) of the raw 32 bytes of a public key.
func KeyID(pub ed25519.PublicKey) string { return hexSHA256(pub) }

// Sign gives the envelope of p: the bytes of the receipt's file. Times are written in UTC; texts and lists that a
// command can influence are cut to their bounds, the cut being visible in the text.
func (s *Signer) Sign(p Predicate) ([]byte, error) {
	p = p.bounded()
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("signing the receipt of exec %s: %w", p.ExecID, err)
	}
	payload, err := json.Marshal(statementJSON{
		Type:          StatementType,
		Subject:       []subjectJSON{{Name: p.ExecID, Digest: digestJSON{SHA256: p.RequestDigest}}},
		PredicateType: PredicateType,
		Predicate:     p,
	})
	if err != nil {
		return nil, fmt.Errorf("encoding the receipt of exec %s: %w", p.ExecID, err)
	}
	return s.seal(payload)
}

func (s *Signer) seal(payload []byte) ([]byte, error) {
	sig := ed25519.Sign(s.key, PAE(PayloadType, payload))
	return json.Marshal(envelopeJSON{
		PayloadType: PayloadType,
		Payload:     base64.StdEncoding.EncodeToString(payload),
		Signatures:  []signatureJSON{{KeyID: s.keyID, Sig: base64.StdEncoding.EncodeToString(sig)}},
	})
}

func (p Predicate) bounded() Predicate {
	p.StartedAt, p.EndedAt = utc(p.StartedAt), utc(p.EndedAt)
	p.Labels = validLabels(p.Labels)
	p.Reason = boundedText(p.Reason)
	p.Boundary.Pid1 = boundedText(p.Boundary.Pid1)
	p.SealsBroken = boundedList(p.SealsBroken)
	p.StaleLocks = boundedList(p.StaleLocks)
	return p
}

// utc also drops the monotonic reading, which has no encoding.
func utc(t time.Time) time.Time { return t.Round(0).UTC() }

// boundedText also makes s valid UTF-8: file names need not be, and JSON can't carry what is not (Parse would find
// another text than was signed).
func boundedText(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxText {
		return s
	}
	cut := maxText
	for cut > maxText-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return fmt.Sprintf("%s… (%d bytes in all)", s[:cut], len(s))
}

func validLabels(labels map[string]string) map[string]string {
	if len(labels) == 0 {
		return nil
	}
	out := make(map[string]string, len(labels))
	for k, v := range labels {
		out[strings.ToValidUTF8(k, "\uFFFD")] = strings.ToValidUTF8(v, "\uFFFD")
	}
	return out
}

func boundedList(l []string) []string {
	if len(l) == 0 {
		return nil
	}
	out := make([]string, 0, min(len(l), maxListed)+1)
	for _, s := range l[:min(len(l), maxListed)] {
		out = append(out, boundedText(s))
	}
	if more := len(l) - maxListed; more > 0 {
		out = append(out, fmt.Sprintf("… and %d more", more))
	}
	return out
}
