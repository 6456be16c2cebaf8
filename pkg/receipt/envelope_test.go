package receipt

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func signed(t testing.TB, k *Signer, p *Predicate) []byte {
	t.Helper()
	p.Sequence = 1
	p.Stdout.KeptBytes, p.Stderr.KeptBytes = p.Stdout.Bytes, p.Stderr.Bytes
	b, err := k.Sign(*p)
	require.NoError(t, err)
	return b
}

func TestAnEnvelopeSaysWhatWasSigned(t *testing.T) {
	p := predicate("e1", []byte("out"), nil)
	k := signer(t)
	e, err := Parse(signed(t, k, p))
	require.NoError(t, err)
	require.Equal(t, KeyID(k.Public()), e.KeyID)
	require.Len(t, e.Signature, 64)

	require.True(t, p.StartedAt.Equal(e.Predicate.StartedAt))
	require.Equal(t, time.UTC, e.Predicate.StartedAt.Location())
	p.StartedAt, p.EndedAt = e.Predicate.StartedAt, e.Predicate.EndedAt
	require.Equal(t, *p, e.Predicate)
}

func TestAReceiptOfBeforeThereWasProvenanceVerifiesAndOneWithItSaysIt(t *testing.T) {
	k := signer(t)
	old, err := Parse(signed(t, k, predicate("e1", nil, nil)))
	require.NoError(t, err)
	require.NotContains(t, string(old.Payload), "provenance", "in the very form in which it was signed")
	require.Zero(t, old.Predicate.Provenance)

	p := predicate("e1", nil, nil)
	p.Provenance = Provenance{Rootfs: "docker.io/library/debian", RootfsKind: "image", RootfsDigest: "sha256:0a", ReceiptdSHA256: "0b", Pid1SHA256: "0c"}
	e, err := Parse(signed(t, k, p))
	require.NoError(t, err)
	require.Equal(t, p.Provenance, e.Predicate.Provenance)
}

// The example of https://github.com/secure-systems-lab/dsse/blob/v1.0.2/protocol.md.
func TestTheEncodingToBeSignedIsDSSEs(t *testing.T) {
	require.Equal(t, "DSSEv1 29 http://example.com/HelloWorld 11 hello world", string(PAE("http://example.com/HelloWorld", []byte("hello world"))))
}

func TestTheStatementIsInTotosWithTheExecAsItsSubject(t *testing.T) {
	p := predicate("e1", nil, nil)
	e, err := Parse(signed(t, signer(t), p))
	require.NoError(t, err)
	var st map[string]any
	require.NoError(t, json.Unmarshal(e.Payload, &st))
	require.Equal(t, "https://in-toto.io/Statement/v1", st["_type"])
	require.Equal(t, PredicateType, st["predicateType"])
	require.Equal(t, []any{map[string]any{"name": "e1", "digest": map[string]any{"sha256": p.RequestDigest}}}, st["subject"])
}

func TestP16ACommandCannotMakeItsReceiptTooLargeOrUnreadable(t *testing.T) {
	p := predicate("e1", nil, nil)
	for range 10000 {
		p.StaleLocks = append(p.StaleLocks, strings.Repeat("<\xff\x01", 1365))
		p.SealsBroken = append(p.SealsBroken, strings.Repeat("\xe2\x80", 2000))
	}
	p.Reason = strings.Repeat("é", 5000)
	p.Provenance = Provenance{Rootfs: strings.Repeat("<", 1024), RootfsKind: "image", RootfsDigest: "sha256:" + strings.Repeat("0", 64)}
	p.Labels = map[string]string{}
	for i := range 32 {
		p.Labels[strings.Repeat("<", 62)+string(rune('a'+i))] = strings.Repeat("\x01", 256)
	}
	b := signed(t, signer(t), p)
	require.Less(t, len(b), receiptBytes)
	e, err := Parse(b)
	require.NoError(t, err)
	require.Len(t, e.Predicate.StaleLocks, maxListed+1)
	require.Contains(t, e.Predicate.StaleLocks[maxListed], "9968 more")
	require.Contains(t, e.Predicate.Reason, "10000 bytes in all")
	require.NotContains(t, e.Predicate.Reason, "\uFFFD", "the cut is between characters")
}

// A hostile envelope that encoding/json, and the DSSE libraries over it, would let pass.
func TestP9OnlyTheFormThatASignerWritesIsTaken(t *testing.T) {
	k := signer(t)
	good := string(signed(t, k, predicate("e1", nil, nil)))
	_, err := Parse([]byte(good))
	require.NoError(t, err)
	var e envelopeJSON
	require.NoError(t, json.Unmarshal([]byte(good), &e))
	reseal := func(payload string) string {
		b, err := k.seal([]byte(payload))
		require.NoError(t, err)
		return string(b)
	}
	payload, err := base64.StdEncoding.DecodeString(e.Payload)
	require.NoError(t, err)
	replaced := func(old, new string) string {
		require.Contains(t, string(payload), old)
		return reseal(strings.Replace(string(payload), old, new, 1))
	}
	for name, bad := range map[string]string{
		"nothing":                 "",
		"null":                    "null",
		"another type":            "[]",
		"data after it":           good + "{}",
		"a newline after it":      good + "\n",
		"white space":             " " + good,
		"an unknown key":          strings.Replace(good, `{"payloadType"`, `{"x":1,"payloadType"`, 1),
		"a doubled key":           strings.Replace(good, `{"payloadType"`, `{"payloadType":"x","payloadType"`, 1),
		"a key in another case":   strings.Replace(good, `"payloadType"`, `"PayloadType"`, 1),
		"another payload type":    strings.Replace(good, PayloadType, "application/x", 1),
		"no signature":            strings.Replace(good, `"signatures":[`, `"signatures":[],"x":[`, 1),
		"an escaped character":    strings.Replace(good, `"keyid":"`, `"keyid":"\u0061`, 1),
		"payload not base64":      strings.Replace(good, e.Payload, "%%", 1),
		"URL base64":              strings.Replace(good, e.Signatures[0].Sig, "-_"+e.Signatures[0].Sig[2:], 1),
		"unknown in the payload":  replaced(`{"_type"`, `{"x":1,"_type"`),
		"doubled in the payload":  replaced(`"execId"`, `"execId":"e1","execId"`),
		"another subject":         replaced(`"name":"e1"`, `"name":"e2"`),
		"another subject's hash":  replaced(`"digest":{"sha256":"`, `"digest":{"sha256":"00`),
		"another statement type":  replaced(StatementType, "x"),
		"another predicate type":  replaced(PredicateType, "x"),
		"a status of the API":     replaced(`"EXITED"`, `"CANCELLED"`),
		"sequence zero":           replaced(`"sequence":1`, `"sequence":0`),
		"a first with a previous": replaced(`"previous":""`, `"previous":"00"`),
		"more kept than there is": replaced(`"keptBytes":0`, `"keptBytes":1`),
		"an impossible omission":  replaced(`"omittedBytes":0`, `"omittedBytes":18446744073709551615`),
		"data after the payload":  reseal(string(payload) + "{}"),
		"a deep nesting":          strings.Repeat("[", 100000),
	} {
		require.NotEqual(t, good, bad, name)
		_, err := Parse([]byte(bad))
		require.ErrorIs(t, err, ErrMalformed, name)
	}
	_, err = Parse(bytes.Repeat([]byte(" "), MaxEnvelope+1))
	require.ErrorIs(t, err, ErrTooLarge)
}

func FuzzParseEnvelope(f *testing.F) {
	k := signer(f)
	f.Add(signed(f, k, predicate("e1", []byte("x"), []byte("y"))))
	f.Add([]byte(`{"payloadType":"` + PayloadType + `","payload":"e30=","signatures":[{"keyid":"","sig":""}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := Parse(b)
		if err != nil {
			require.Zero(t, e.Predicate.Sequence, "nothing of a refused envelope is given")
			return
		}
		require.LessOrEqual(t, len(b), MaxEnvelope)
		require.NoError(t, CheckExecID(e.Predicate.ExecID))
		again, err := json.Marshal(envelopeJSON{
			PayloadType: PayloadType,
			Payload:     base64.StdEncoding.EncodeToString(e.Payload),
			Signatures:  []signatureJSON{{KeyID: e.KeyID, Sig: base64.StdEncoding.EncodeToString(e.Signature)}},
		})
		require.NoError(t, err)
		require.Equal(t, string(b), string(again), "an envelope has one form")
	})
}
