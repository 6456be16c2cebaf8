package receipt

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
)

// MaxEnvelope bounds an envelope file, bytes: what is larger is refused unread.
const MaxEnvelope = 1 << 20

// Envelope is a parsed, NOT verified, receipt: package verify checks the signature.
type Envelope struct {
	Predicate Predicate
	// Payload is the signed Statement, JSON.
	Payload []byte
	// KeyID is the SHA-256 (lower-case hex) of the raw public key that is said to have signed. DSSE does not sign it.
	KeyID string
	// Signature is 64 bytes, Ed25519 over PAE(PayloadType, Payload).
	Signature []byte
}

type envelopeJSON struct {
	PayloadType string          `json:"payloadType"`
	Payload     string          `json:"payload"`
	Signatures  []signatureJSON `json:"signatures"`
}

type signatureJSON struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

type statementJSON struct {
	Type          string        `json:"_type"`
	Subject       []subjectJSON `json:"subject"`
	PredicateType string        `json:"predicateType"`
	Predicate     Predicate     `json:"predicate"`
}

type subjectJSON struct {
	Name   string     `json:"name"`
	Digest digestJSON `json:"digest"`
}

type digestJSON struct {
	SHA256 string `json:"sha256"`
}

// PAE is DSSE's pre-authentication encoding, the bytes that are signed
// (https://github.com/secure-systems-lab/dsse/blob/v1.0.2/protocol.md).
func PAE(payloadType string, payload []byte) []byte {
	b := make([]byte, 0, len("DSSEv1 ")+len(payloadType)+len(payload)+24)
	b = append(b, "DSSEv1 "...)
	b = strconv.AppendInt(b, int64(len(payloadType)), 10)
	b = append(b, ' ')
	b = append(b, payloadType...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(len(payload)), 10)
	b = append(b, ' ')
	return append(b, payload...)
}

// Parse reads an envelope and does not check its signature.
//
// It takes exactly the bytes that a Signer writes for the same content, and nothing else: it encodes what it read
// again and compares. So an unknown, doubled or differently spelled key, white space, trailing data, or a base64
// text with other padding bits, all of which encoding/json and DSSE libraries let pass, is refused, and an envelope
// has one form and one SHA-256. It fails with ErrMalformed or ErrTooLarge.
func Parse(b []byte) (Envelope, error) {
	if len(b) > MaxEnvelope {
		return Envelope{}, fmt.Errorf("reading a receipt of %d bytes: %w: at most %d", len(b), ErrTooLarge, MaxEnvelope)
	}
	var e envelopeJSON
	if err := decodeStrict(b, &e); err != nil {
		return Envelope{}, fmt.Errorf("reading the envelope: %w", err)
	}
	return e.open()
}

func (e envelopeJSON) open() (Envelope, error) {
	if e.PayloadType != PayloadType {
		return Envelope{}, fmt.Errorf("%w: payload type %q, not %q", ErrMalformed, e.PayloadType, PayloadType)
	}
	if len(e.Signatures) != 1 {
		return Envelope{}, fmt.Errorf("%w: %d signatures, not 1", ErrMalformed, len(e.Signatures))
	}
	sig, err := base64.StdEncoding.Strict().DecodeString(e.Signatures[0].Sig)
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: signature: %w", ErrMalformed, err)
	}
	payload, err := base64.StdEncoding.Strict().DecodeString(e.Payload)
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: payload: %w", ErrMalformed, err)
	}
	p, err := parseStatement(payload)
	if err != nil {
		return Envelope{}, err
	}
	return Envelope{Predicate: p, Payload: payload, KeyID: e.Signatures[0].KeyID, Signature: sig}, nil
}

func parseStatement(payload []byte) (Predicate, error) {
	var st statementJSON
	if err := decodeStrict(payload, &st); err != nil {
		return Predicate{}, fmt.Errorf("reading the statement: %w", err)
	}
	p := st.Predicate
	switch {
	case st.Type != StatementType:
		return Predicate{}, fmt.Errorf("%w: statement type %q, not %q", ErrMalformed, st.Type, StatementType)
	case st.PredicateType != PredicateType:
		return Predicate{}, fmt.Errorf("%w: predicate type %q, not %q", ErrMalformed, st.PredicateType, PredicateType)
	case len(st.Subject) != 1:
		return Predicate{}, fmt.Errorf("%w: %d subjects, not 1", ErrMalformed, len(st.Subject))
	case st.Subject[0].Name != p.ExecID:
		return Predicate{}, fmt.Errorf("%w: its subject is exec %q, its predicate is of %q", ErrMalformed, st.Subject[0].Name, p.ExecID)
	case st.Subject[0].Digest.SHA256 != p.RequestDigest:
		return Predicate{}, fmt.Errorf("%w: the subject's digest is not the request digest", ErrMalformed)
	}
	return p, p.check()
}

// check refuses what no receipt can say, whoever signed it.
func (p *Predicate) check() error {
	if err := CheckExecID(p.ExecID); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	switch p.Status {
	case Exited, Signaled, TimedOut, Killed:
	default:
		return fmt.Errorf("%w: status %q is none of a receipt's", ErrMalformed, p.Status)
	}
	if p.Sequence == 0 || (p.Sequence == 1) != (p.Previous == "") {
		return fmt.Errorf("%w: sequence %d with previous %q", ErrMalformed, p.Sequence, p.Previous)
	}
	for name, o := range map[string]Output{"stdout": p.Stdout, "stderr": p.Stderr} {
		if err := o.check(); err != nil {
			return fmt.Errorf("%w: %s: %w", ErrMalformed, name, err)
		}
	}
	return nil
}

// check wants the numbers to describe one stream: a head up to OmittedFrom, a left-out range, a tail.
func (o Output) check() error {
	if o.OmittedFrom > o.Bytes || o.OmittedBytes > o.Bytes-o.OmittedFrom || o.KeptBytes != o.Bytes-o.OmittedBytes {
		return fmt.Errorf("%w: %d bytes, of which %d from %d on are left out, and %d kept", ErrInconsistent, o.Bytes, o.OmittedBytes, o.OmittedFrom, o.KeptBytes)
	}
	return nil
}

// decodeStrict decodes b into v and fails unless encoding v again gives b.
func decodeStrict(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return fmt.Errorf("%w: data after its end", ErrMalformed)
	}
	again, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if !bytes.Equal(again, b) {
		return fmt.Errorf("%w: not in the form in which a signer writes it (a doubled or misspelled key, white space, another escape)", ErrMalformed)
	}
	return nil
}
