package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// stateWithReceipts is a state folder as the agent leaves it: one sandbox, two receipts, its key.
func stateWithReceipts(t *testing.T) (dir string) {
	t.Helper()
	state := t.TempDir()
	dir = filepath.Join(state, "receipts", "sb-0123456789abcdef")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(state, "keys"), 0o700))
	signer, err := receipt.NewSigner()
	require.NoError(t, err)
	require.NoError(t, verify.SaveKey(filepath.Join(state, "keys", "sb-0123456789abcdef.pub"), signer.Public()))
	store, err := receipt.OpenStore(dir, 1<<16)
	require.NoError(t, err)
	for _, id := range []string{"e1", "e2"} {
		require.NoError(t, store.Reserve())
		now := time.Now().UTC()
		p := &receipt.Predicate{
			SessionID: "s1", SandboxID: "sb-0123456789abcdef", Generation: 1, ExecID: id,
			Nonce: strings.Repeat("ab", 32), RequestDigest: receipt.Request{SessionID: "s1", Command: "echo hi"}.Digest(),
			StartedAt: now, EndedAt: now.Add(time.Millisecond), Status: receipt.Exited, ExitCode: 3,
			Labels: map[string]string{"turn": "4"}, SealsIntact: true,
			Boundary: receipt.Boundary{PIDNamespace: 4026532999, Method: "wait4", Pid1: "exited 0", Cgroup: "empty"},
		}
		p.Stdout, p.Stderr = whole("hi\n"), whole("")
		_, err := store.Commit(id, p, []byte("hi\n"), nil, signer)
		require.NoError(t, err)
	}
	return dir
}

// whole describes a stream of which everything is kept.
func whole(text string) receipt.Output {
	sum := sha256.Sum256([]byte(text))
	n, h := uint64(len(text)), hex.EncodeToString(sum[:])
	return receipt.Output{Bytes: n, SHA256: h, KeptBytes: n, KeptSHA256: h, OmittedFrom: n}
}

func TestReceiptVerifyFindsTheKeyByTheReceiptsPlace(t *testing.T) {
	dir := stateWithReceipts(t)
	code, out, stderr := runCLI(t.Context(), "receipt", "verify", filepath.Join(dir, "e1.json"))
	require.Zero(t, code, stderr)
	require.Contains(t, out, "EXITED with code 3")
	require.Contains(t, out, "wait4 of PID namespace 4026532999")
	require.Contains(t, out, "verified: signature and kept output hold")
}

func TestReceiptVerifyRefusesAChangedReceiptAndChangedOutput(t *testing.T) {
	dir := stateWithReceipts(t)
	kept := filepath.Join(dir, receipt.StdoutName("e1"))
	require.NoError(t, os.WriteFile(kept, []byte("ho\n"), 0o600))
	code, out, stderr := runCLI(t.Context(), "receipt", "verify", filepath.Join(dir, "e1.json"))
	require.Equal(t, ExitError, code)
	require.NotContains(t, out, "verified:")
	require.Contains(t, stderr, "kept output does not match")

	code, out, stderr = runCLI(t.Context(), "receipt", "verify", "--envelope-only", filepath.Join(dir, "e1.json"))
	require.Zero(t, code, stderr)
	require.Contains(t, out, "the kept output was not looked at")

	file := filepath.Join(dir, "e2.json")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	i := strings.Index(string(b), `"sig":"`) + len(`"sig":"`)
	b[i] = "AB"[(1+strings.IndexByte("AB", b[i]))%2] // another letter, whichever it was
	require.NoError(t, os.WriteFile(file, b, 0o600))
	code, _, stderr = runCLI(t.Context(), "receipt", "verify", file)
	require.Equal(t, ExitError, code)
	require.Contains(t, stderr, file)
}

func TestReceiptVerifyAllChecksTheChain(t *testing.T) {
	dir := stateWithReceipts(t)
	for _, d := range []string{dir, filepath.Dir(dir)} {
		code, out, stderr := runCLI(t.Context(), "receipt", "verify", "--all", d)
		require.Zero(t, code, stderr)
		require.Contains(t, out, "2 receipts, verified")
	}
	whole := t.TempDir()
	require.NoError(t, os.CopyFS(filepath.Join(whole, "receipts", filepath.Base(dir)), os.DirFS(dir)))
	require.NoError(t, os.Remove(filepath.Join(dir, "e1.json")))
	code, out, stderr := runCLI(t.Context(), "receipt", "verify", "--all", dir)
	require.Equal(t, ExitError, code)
	require.Contains(t, out, "NOT verified")
	require.Contains(t, stderr, "1 of 1 receipts folders do not verify")

	code, out, _ = runCLI(t.Context(), "receipt", "verify", "--json", "--all", dir)
	require.Equal(t, ExitError, code)
	var report struct {
		OK       bool
		Problems []string
	}
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	require.False(t, report.OK)
	require.NotEmpty(t, report.Problems)

	// Removed by retention, it is not missing: of that there is a note.
	retained, key := filepath.Join(whole, "receipts", filepath.Base(dir)), filepath.Join(filepath.Dir(filepath.Dir(dir)), "keys", filepath.Base(dir)+".pub")
	for i, id := range []string{"e1", "e2"} {
		require.NoError(t, receipt.Remove(retained, []string{id}, time.Unix(0, 0)))
		code, out, stderr = runCLI(t.Context(), "receipt", "verify", "--key", key, "--all", retained)
		require.Zero(t, code, stderr)
		require.Contains(t, out, fmt.Sprintf("%d receipts, verified (those up to number %d were removed on purpose", 1-i, i+1))
	}
}

func TestReceiptVerifyAllNamesAFolderWithoutAKeyAndChecksTheOthers(t *testing.T) {
	dir := stateWithReceipts(t)
	all := filepath.Dir(dir)
	keyless := filepath.Join(all, "sb-0000000000000000") // before the good one
	require.NoError(t, os.CopyFS(keyless, os.DirFS(dir)))
	last := filepath.Join(all, "sb-ffffffffffffffff") // a key that is there, and is none
	require.NoError(t, os.Mkdir(last, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(all), "keys", "sb-ffffffffffffffff.pub"), nil, 0o600))

	code, out, stderr := runCLI(t.Context(), "receipt", "verify", "--all", all)
	require.Equal(t, ExitError, code)
	require.Contains(t, out, keyless+": 0 receipts, NOT verified")
	require.Contains(t, out, "sb-0000000000000000.pub")
	require.Contains(t, out, dir+": 2 receipts, verified")
	require.Contains(t, out, last+": 0 receipts, NOT verified")
	require.Contains(t, stderr, "2 of 3 receipts folders do not verify")
}

func TestReceiptVerifyAllCountsFoldersThatNeverHadAReceipt(t *testing.T) {
	dir := stateWithReceipts(t)
	all := filepath.Dir(dir)
	empty, spares := filepath.Join(all, "sb-0000000000000000"), filepath.Join(all, "sb-ffffffffffffffff")
	require.NoError(t, os.Mkdir(empty, 0o700))
	require.NoError(t, os.Mkdir(spares, 0o700))
	store, err := receipt.OpenStore(spares, 1<<16)
	require.NoError(t, err)
	require.NoError(t, store.Reserve())
	require.NoError(t, store.Close())
	left, err := os.ReadDir(spares)
	require.NoError(t, err)
	require.NotEmpty(t, left)

	code, out, stderr := runCLI(t.Context(), "receipt", "verify", "--all", all)
	require.Zero(t, code, stderr)
	require.Contains(t, out, dir+": 2 receipts, verified")
	require.Contains(t, out, empty+": no receipts, and no key")
	require.Contains(t, out, spares+": no receipts, and no key")
	require.Contains(t, out, "2 folders without receipts")
	code, out, stderr = runCLI(t.Context(), "receipt", "verify", "--json", "--all", all)
	require.Zero(t, code, stderr)
	require.Equal(t, 2, strings.Count(out, `"neverUsed": true`))

	// Each of these shows that there was a receipt.
	for _, name := range []string{"e1.json", receipt.StdoutName("e1"), receipt.RemovedName} {
		trace := filepath.Join(empty, name)
		require.NoError(t, os.WriteFile(trace, nil, 0o600))
		code, out, stderr = runCLI(t.Context(), "receipt", "verify", "--all", all)
		require.Equal(t, ExitError, code, name)
		require.Contains(t, out, empty+": 0 receipts, NOT verified")
		require.Contains(t, stderr, "1 of 3 receipts folders do not verify")
		require.NoError(t, os.Remove(trace))
	}
}

func TestReceiptVerifyElsewhereNeedsTheKeyNamed(t *testing.T) {
	dir := stateWithReceipts(t)
	b, err := os.ReadFile(filepath.Join(dir, "e1.json"))
	require.NoError(t, err)
	elsewhere := filepath.Join(t.TempDir(), "saved.json")
	require.NoError(t, os.WriteFile(elsewhere, b, 0o600))
	code, _, stderr := runCLI(t.Context(), "receipt", "verify", "--envelope-only", elsewhere)
	require.Equal(t, ExitError, code)
	require.Contains(t, stderr, "name the key with --key")

	key := filepath.Join(dir, "..", "..", "keys", "sb-0123456789abcdef.pub")
	code, out, stderr := runCLI(t.Context(), "receipt", "verify", "--envelope-only", "--key", key, elsewhere)
	require.Zero(t, code, stderr)
	require.Contains(t, out, "verified: the signature holds")

	require.NoError(t, os.WriteFile(key, []byte("not a key"), 0o600))
	code, _, stderr = runCLI(t.Context(), "receipt", "verify", "--envelope-only", "--key", key, elsewhere)
	require.Equal(t, ExitError, code)
	require.Contains(t, stderr, "PEM")
}

func TestReceiptShowSaysThatItCheckedNothing(t *testing.T) {
	dir := stateWithReceipts(t)
	code, out, _ := runCLI(t.Context(), "receipt", "show", filepath.Join(dir, "e1.json"))
	require.Zero(t, code)
	require.Contains(t, out, "turn=4")
	require.Contains(t, out, "NOT checked")

	code, out, _ = runCLI(t.Context(), "receipt", "show", "--json", filepath.Join(dir, "e1.json"))
	require.Zero(t, code)
	var p receipt.Predicate
	require.NoError(t, json.Unmarshal([]byte(out), &p))
	require.Equal(t, "e1", p.ExecID)

	bad := filepath.Join(dir, "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte("{}"), 0o600))
	code, _, stderr := runCLI(t.Context(), "receipt", "show", bad)
	require.Equal(t, ExitError, code)
	require.Contains(t, stderr, "malformed receipt")

	code, _, stderr = runCLI(t.Context(), "receipt", "show", filepath.Join(dir, "none.json"))
	require.Equal(t, ExitError, code)
	require.Contains(t, stderr, "none.json")
}
