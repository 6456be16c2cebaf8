package verify

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
)

// Envelope checks that b is a receipt signed with pub, and gives what it says. It fails with receipt.ErrMalformed,
// receipt.ErrTooLarge, ErrKey or ErrSignature; what it gives on an error is empty.
func Envelope(b []byte, pub ed25519.PublicKey) (receipt.Predicate, error) {
	if len(pub) != ed25519.PublicKeySize {
		return receipt.Predicate{}, fmt.Errorf("%w: %d bytes, not %d", ErrKey, len(pub), ed25519.PublicKeySize)
	}
	e, err := receipt.Parse(b)
	if err != nil {
		return receipt.Predicate{}, err
	}
	if id := receipt.KeyID(pub); e.KeyID != id {
		return receipt.Predicate{}, fmt.Errorf("%w: it names key %q, the key given is %s", ErrSignature, e.KeyID, id)
	}
	if err := checkSignature(e, pub); err != nil {
		return receipt.Predicate{}, err
	}
	return e.Predicate, nil
}

func checkSignature(e receipt.Envelope, pub ed25519.PublicKey) error {
	v, err := dsse.NewEnvelopeVerifier(key{pub})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSignature, err)
	}
	if _, err := v.Verify(context.Background(), libraryEnvelope(e)); err != nil {
		return fmt.Errorf("%w: %w", ErrSignature, err)
	}
	return nil
}

// libraryEnvelope is e in the DSSE library's type. It is encoded from what was parsed, so that the library checks the
// very bytes that the predicate came from.
func libraryEnvelope(e receipt.Envelope) *dsse.Envelope {
	return &dsse.Envelope{
		PayloadType: receipt.PayloadType,
		Payload:     base64.StdEncoding.EncodeToString(e.Payload),
		Signatures:  []dsse.Signature{{KeyID: e.KeyID, Sig: base64.StdEncoding.EncodeToString(e.Signature)}},
	}
}

// key is one public key for the DSSE library.
type key struct{ pub ed25519.PublicKey }

var _ dsse.Verifier = key{}

func (k key) Verify(_ context.Context, data, sig []byte) error {
	if !ed25519.Verify(k.pub, data, sig) {
		return ErrSignature
	}
	return nil
}

func (k key) KeyID() (string, error)   { return receipt.KeyID(k.pub), nil }
func (k key) Public() crypto.PublicKey { return k.pub }

// Expect is what a receipt must be of. Every field is compared; an empty one expects emptiness.
type Expect struct {
	SessionID     string
	SandboxID     string
	ExecID        string
	Nonce         string
	RequestDigest string
	Generation    uint64
}

// Match says whether p answers what was asked; it fails with ErrMismatch, naming the first field that differs
// (promise P2).
func (e Expect) Match(p receipt.Predicate) error {
	for _, f := range []struct{ name, want, got string }{
		{"session", e.SessionID, p.SessionID},
		{"sandbox", e.SandboxID, p.SandboxID},
		{"exec id", e.ExecID, p.ExecID},
		{"nonce", e.Nonce, p.Nonce},
		{"request digest", e.RequestDigest, p.RequestDigest},
	} {
		if f.want != f.got {
			return fmt.Errorf("%w: its %s is %q, not %q", ErrMismatch, f.name, f.got, f.want)
		}
	}
	if e.Generation != p.Generation {
		return fmt.Errorf("%w: its generation is %d, not %d", ErrMismatch, p.Generation, e.Generation)
	}
	return nil
}

// File checks one receipt file: its signature, that it lies under the name of the exec that it is of, and that the
// kept output beside it is what it says. path ends in <exec-id>.json.
func File(path string, pub ed25519.PublicKey) (receipt.Predicate, error) {
	dir, name := filepath.Split(path)
	id, ok := receipt.ExecIDOf(name)
	if !ok {
		return receipt.Predicate{}, fmt.Errorf("verifying %s: %w: a receipt's file is named <exec-id>.json", path, receipt.ErrMalformed)
	}
	p, _, err := one(filepath.Clean(dir), id, pub)
	if err != nil {
		return receipt.Predicate{}, fmt.Errorf("verifying %s: %w", path, err)
	}
	if err := keptOutput(filepath.Clean(dir), &p); err != nil {
		return receipt.Predicate{}, fmt.Errorf("verifying %s: %w", path, err)
	}
	return p, nil
}

// one reads and checks a receipt, without its output, and gives its envelope too.
func one(dir, id string, pub ed25519.PublicKey) (receipt.Predicate, []byte, error) {
	b, err := receipt.Read(dir, id)
	if err != nil {
		return receipt.Predicate{}, nil, err
	}
	p, err := Envelope(b, pub)
	if err != nil {
		return receipt.Predicate{}, nil, err
	}
	if p.ExecID != id {
		return receipt.Predicate{}, nil, fmt.Errorf("%w: it is of exec %q, not %q", ErrMismatch, p.ExecID, id)
	}
	return p, b, nil
}

func keptOutput(dir string, p *receipt.Predicate) error {
	var errs []error
	for _, s := range []receipt.Stream{receipt.Stdout, receipt.Stderr} {
		if _, err := receipt.ReadKept(dir, p, s); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
