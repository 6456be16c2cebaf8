package verify

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/stretchr/testify/require"
)

const sandboxID = "sb-0123456789abcdef"

func whole(b []byte) receipt.Output {
	sum := sha256.Sum256(b)
	return receipt.Output{Bytes: uint64(len(b)), SHA256: hex.EncodeToString(sum[:]), OmittedFrom: uint64(len(b))}
}

func predicate(id string, stdout []byte) *receipt.Predicate {
	return &receipt.Predicate{
		SessionID: "s1", SandboxID: sandboxID, Generation: 3, ExecID: id, Nonce: strings.Repeat("ab", 32),
		RequestDigest: receipt.Request{SessionID: "s1", Command: id}.Digest(),
		StartedAt:     time.Unix(1, 0), EndedAt: time.Unix(2, 0), Status: receipt.Exited,
		Stdout: whole(stdout), Stderr: whole(nil), SealsIntact: true,
		Boundary: receipt.Boundary{Method: "wait4", Pid1: "exited 0", Cgroup: "empty"},
	}
}

func newSigner(t testing.TB) *receipt.Signer {
	t.Helper()
	k, err := receipt.NewSigner()
	require.NoError(t, err)
	return k
}

// sandbox writes the receipts of some execs, each with its id as its output, and gives their folder.
func sandbox(t testing.TB, k *receipt.Signer, ids ...string) string {
	t.Helper()
	dir := t.TempDir()
	s, err := receipt.OpenStore(dir, 1000)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	for _, id := range ids {
		_, err := s.Commit(id, predicate(id, []byte(id)), []byte(id), nil, k)
		require.NoError(t, err)
	}
	return dir
}

func read(t testing.TB, dir, id string) []byte {
	t.Helper()
	b, err := receipt.Read(dir, id)
	require.NoError(t, err)
	return b
}

func TestAGenuineReceiptVerifiesAndSaysWhatWasSigned(t *testing.T) {
	k := newSigner(t)
	dir := sandbox(t, k, "e1")
	p, err := Envelope(read(t, dir, "e1"), k.Public())
	require.NoError(t, err)
	require.Equal(t, "e1", p.ExecID)
	require.Equal(t, receipt.Exited, p.Status)
	fromFile, err := File(filepath.Join(dir, "e1.json"), k.Public())
	require.NoError(t, err)
	require.Equal(t, p, fromFile)
}

// Any DSSE tool can check a receipt: here the library alone, with none of this project's parsing.
func TestTheDSSELibraryTakesAReceiptAsItLies(t *testing.T) {
	k := newSigner(t)
	var e dsse.Envelope
	require.NoError(t, json.Unmarshal(read(t, sandbox(t, k, "e1"), "e1"), &e))
	v, err := dsse.NewEnvelopeVerifier(key{k.Public()})
	require.NoError(t, err)
	accepted, err := v.Verify(context.Background(), &e)
	require.NoError(t, err)
	require.Len(t, accepted, 1)
	require.Equal(t, receipt.KeyID(k.Public()), accepted[0].KeyID)

	payload, err := e.DecodeB64Payload()
	require.NoError(t, err)
	require.Equal(t, dsse.PAE(e.PayloadType, payload), receipt.PAE(e.PayloadType, payload))
}

func TestP9AReceiptWithAnyBitFlippedIsRefused(t *testing.T) {
	k := newSigner(t)
	good := read(t, sandbox(t, k, "e1"), "e1")
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			p, err := Envelope(bad, k.Public())
			require.Error(t, err, "bit %d of byte %d (%q)", bit, i, good[i])
			require.Equal(t, receipt.Predicate{}, p)
		}
	}
	for n := range good {
		_, err := Envelope(good[:n], k.Public())
		require.Error(t, err, "cut to %d bytes", n)
	}
}

func TestP9AReceiptOfAnotherKeyIsRefused(t *testing.T) {
	k, other := newSigner(t), newSigner(t)
	b := read(t, sandbox(t, other, "e1"), "e1")
	_, err := Envelope(b, k.Public())
	require.ErrorIs(t, err, ErrSignature)

	// The key's id is not signed: naming the right one helps nobody.
	renamed := bytes.Replace(b, []byte(receipt.KeyID(other.Public())), []byte(receipt.KeyID(k.Public())), 1)
	_, err = Envelope(renamed, k.Public())
	require.ErrorIs(t, err, ErrSignature)
	_, err = Envelope(b, nil)
	require.ErrorIs(t, err, ErrKey)
}

func TestP2AReceiptOfAnotherExecUnderThisNameIsRefused(t *testing.T) {
	k := newSigner(t)
	dir := sandbox(t, k, "e1", "e2")
	require.NoError(t, os.Rename(filepath.Join(dir, "e1.json"), filepath.Join(dir, "e2.json")))
	_, err := File(filepath.Join(dir, "e2.json"), k.Public())
	require.ErrorIs(t, err, ErrMismatch)
	require.ErrorContains(t, err, `"e1"`)
}

func TestP2EachFieldOfTheExpectationMustMatch(t *testing.T) {
	p := *predicate("e1", nil)
	want := Expect{SessionID: p.SessionID, SandboxID: p.SandboxID, ExecID: p.ExecID, Nonce: p.Nonce, RequestDigest: p.RequestDigest, Generation: p.Generation}
	require.NoError(t, want.Match(p))
	for field, change := range map[string]func(*Expect){
		"session":        func(e *Expect) { e.SessionID = "s2" },
		"sandbox":        func(e *Expect) { e.SandboxID = "" },
		"exec id":        func(e *Expect) { e.ExecID = "e2" },
		"nonce":          func(e *Expect) { e.Nonce = strings.Repeat("00", 32) },
		"request digest": func(e *Expect) { e.RequestDigest = "" },
		"generation":     func(e *Expect) { e.Generation = 0 },
	} {
		other := want
		change(&other)
		err := other.Match(p)
		require.ErrorIs(t, err, ErrMismatch, field)
		require.ErrorContains(t, err, field)
	}
}

func TestAFileOfAnotherNameIsNoReceipt(t *testing.T) {
	k := newSigner(t)
	dir := sandbox(t, k, "e1")
	for _, name := range []string{"e1", "e1.stdout", "e~1.json", ".json"} {
		_, err := File(filepath.Join(dir, name), k.Public())
		require.ErrorIs(t, err, receipt.ErrMalformed, name)
	}
	_, err := File(filepath.Join(dir, "e2.json"), k.Public())
	require.ErrorIs(t, err, receipt.ErrNotFound)
}

func TestP13AChangedOrMissingOutputIsRefused(t *testing.T) {
	k := newSigner(t)
	dir := sandbox(t, k, "e1")
	path := filepath.Join(dir, "e1.stdout")
	require.NoError(t, os.WriteFile(path, []byte("E1"), 0o600))
	_, err := File(filepath.Join(dir, "e1.json"), k.Public())
	require.ErrorIs(t, err, receipt.ErrOutput)
	require.NoError(t, os.Remove(path))
	_, err = File(filepath.Join(dir, "e1.json"), k.Public())
	require.ErrorIs(t, err, receipt.ErrOutput)
	require.ErrorContains(t, err, "e1.stdout")
}

func TestAWholeChainVerifies(t *testing.T) {
	k := newSigner(t)
	// In an order that is not the names'.
	dir := sandbox(t, k, "c", "a", "b")
	r, err := Chain(dir, k.Public())
	require.NoError(t, err)
	require.True(t, r.OK(), r.Problems)
	require.Len(t, r.Receipts, 3)
	require.Equal(t, []string{"c", "a", "b"}, []string{r.Receipts[0].ExecID, r.Receipts[1].ExecID, r.Receipts[2].ExecID})
	sum := sha256.Sum256(read(t, dir, "b"))
	require.Equal(t, hex.EncodeToString(sum[:]), r.LastSHA256)
}

func TestAnEmptyChainIsWhole(t *testing.T) {
	r, err := Chain(t.TempDir(), newSigner(t).Public())
	require.NoError(t, err)
	require.True(t, r.OK())
	require.Empty(t, r.Receipts)
	_, err = Chain(filepath.Join(t.TempDir(), "absent"), newSigner(t).Public())
	require.ErrorContains(t, err, "absent")
}

func TestP9WhateverIsDoneToAChainShows(t *testing.T) {
	k := newSigner(t)
	remove := func(names ...string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			for _, n := range names {
				require.NoError(t, os.Remove(filepath.Join(dir, n)))
			}
		}
	}
	for name, c := range map[string]struct {
		do  func(t *testing.T, dir string)
		say string
	}{
		"one in the middle removed": {remove("e3.json", "e3.stdout"), "receipt 3 is missing"},
		"the first removed":         {remove("e1.json", "e1.stdout"), "receipt 1 is missing"},
		"two removed":               {remove("e2.json", "e3.json"), "receipts 2 to 3 are missing"},
		"output removed":            {remove("e2.stdout"), "e2.stdout"},
		"a receipt emptied":         {func(t *testing.T, dir string) { truncate(t, dir, "e2.json") }, "exec e2"},
		"a receipt copied": {func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "e9.json"), read(t, dir, "e2"), 0o600))
		}, `it is of exec "e2", not "e9"`},
		"one of the same key from another chain": {func(t *testing.T, dir string) {
			other := sandbox(t, k, "x1", "e2")
			require.NoError(t, os.WriteFile(filepath.Join(dir, "e2.json"), read(t, other, "e2"), 0o600))
		}, "receipt 2 (exec e2) follows"},
		"one added with a number that is there": {func(t *testing.T, dir string) {
			other := sandbox(t, k, "x1")
			require.NoError(t, os.WriteFile(filepath.Join(dir, "x1.json"), read(t, other, "x1"), 0o600))
		}, "receipt 1 is there twice: execs e1 and x1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := sandbox(t, k, "e1", "e2", "e3", "e4")
			c.do(t, dir)
			r, err := Chain(dir, k.Public())
			require.NoError(t, err)
			require.False(t, r.OK())
			require.Contains(t, strings.Join(r.Problems, "\n"), c.say)
		})
	}
}

// Nothing in the folder can tell that its end is missing; the journal's note of the newest receipt can.
func TestAChainCutAtItsEndIsTold(t *testing.T) {
	k := newSigner(t)
	dir := sandbox(t, k, "e1", "e2")
	before, err := Chain(dir, k.Public())
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(dir, "e2.json")))
	after, err := Chain(dir, k.Public())
	require.NoError(t, err)
	require.NotEqual(t, before.LastSHA256, after.LastSHA256)
}

func truncate(t *testing.T, dir, name string) {
	t.Helper()
	require.NoError(t, os.Truncate(filepath.Join(dir, name), 0))
}

func TestAKeyComesBackAsItWasSaved(t *testing.T) {
	k := newSigner(t)
	path := filepath.Join(t.TempDir(), "sb.pub")
	require.NoError(t, SaveKey(path, k.Public()))
	require.NoError(t, SaveKey(path, k.Public()), "again")
	got, err := LoadKey(path)
	require.NoError(t, err)
	require.Equal(t, k.Public(), got)
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing is left beside it")
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o644), st.Mode())
}

func TestWhatIsNoEd25519PublicKeyIsRefused(t *testing.T) {
	dir := t.TempDir()
	const p256 = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEF25dHxSwtMyCNNW6bXqnDF59qfiX\nHdJRRSTkJ5D6wAmF3XCQnxVlVSDAdfQXlnpF3nN33eYhLXyYNXdMkbnZcg==\n-----END PUBLIC KEY-----\n"
	k := newSigner(t)
	good := filepath.Join(dir, "good")
	require.NoError(t, SaveKey(good, k.Public()))
	pem, err := os.ReadFile(good)
	require.NoError(t, err)
	for i, bad := range []string{"", "x", p256, string(pem) + "x", strings.Replace(string(pem), "PUBLIC", "PRIVATE", 2), strings.Repeat(" ", maxKeyFile) + string(pem)} {
		path := filepath.Join(dir, fmt.Sprint("bad", i))
		require.NoError(t, os.WriteFile(path, []byte(bad), 0o600))
		_, err := LoadKey(path)
		require.ErrorIs(t, err, ErrKey, "%d", i)
		require.ErrorContains(t, err, path)
	}
	require.ErrorIs(t, SaveKey(good, ed25519.PublicKey{1, 2}), ErrKey)
	_, err = LoadKey(filepath.Join(dir, "absent"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, SaveKey(filepath.Join(dir, "absent", "k"), k.Public()), "absent")
}
