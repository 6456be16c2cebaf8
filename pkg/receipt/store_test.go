package receipt

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A predicate as receiptd fills one in.
func predicate(execID string, stdout, stderr []byte) *Predicate {
	whole := func(b []byte) Output {
		return Output{Bytes: uint64(len(b)), SHA256: hexSHA256(b), OmittedFrom: uint64(len(b))}
	}
	start := time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.FixedZone("", 3600))
	return &Predicate{
		SessionID: "s1", SandboxID: "sb-0123456789abcdef", Generation: 3, ExecID: execID,
		Nonce:         strings.Repeat("ab", 32),
		RequestDigest: Request{SessionID: "s1", Command: "true"}.Digest(),
		StartedAt:     start, EndedAt: start.Add(time.Second),
		Status: Exited, Labels: map[string]string{"turn": "7"},
		Stdout: whole(stdout), Stderr: whole(stderr),
		Boundary: Boundary{PIDNamespace: 4026532000, Method: "wait4", Pid1: "exited 0", Cgroup: "empty"}, SealsIntact: true,
	}
}

func signer(t testing.TB) *Signer {
	t.Helper()
	s, err := NewSigner()
	require.NoError(t, err)
	return s
}

func openStore(t testing.TB, dir string, outputBytes uint64) *Store {
	t.Helper()
	s, err := OpenStore(dir, outputBytes)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func commitExec(s *Store, id string, stdout, stderr []byte, k *Signer) (string, error) {
	return s.Commit(id, predicate(id, stdout, stderr), stdout, stderr, k)
}

// bothOrders runs a test with the durable order of a file system with one journal and with POSIX's.
func bothOrders(t *testing.T, test func(t *testing.T, dir string, open func(outputBytes uint64) *Store)) {
	for _, one := range []bool{true, false} {
		t.Run(fmt.Sprintf("one journal %v", one), func(t *testing.T) {
			dir := t.TempDir()
			test(t, dir, func(outputBytes uint64) *Store {
				s := openStore(t, dir, outputBytes)
				s.oneJournal = one
				return s
			})
		})
	}
}

func TestACommitWritesTheReceiptAndWhatWasKept(t *testing.T) {
	bothOrders(t, func(t *testing.T, dir string, open func(uint64) *Store) {
		s, k := open(256<<10), signer(t)
		for i, out := range [][]byte{nil, []byte("hello\n"), bytes.Repeat([]byte("x"), smallBytes), bytes.Repeat([]byte("long "), 20000)} {
			require.NoError(t, s.Reserve())
			id := fmt.Sprintf("exec-%d", i)
			sha, err := commitExec(s, id, out, []byte("warning"), k)
			require.NoError(t, err)

			b, err := Read(dir, id)
			require.NoError(t, err)
			require.Equal(t, sha, hexSHA256(b))
			e, err := Parse(b)
			require.NoError(t, err)
			require.Equal(t, uint64(i+1), e.Predicate.Sequence)
			got, err := ReadKept(dir, &e.Predicate, Stdout)
			require.NoError(t, err)
			require.Equal(t, string(out), string(got))
			got, err = ReadKept(dir, &e.Predicate, Stderr)
			require.NoError(t, err)
			require.Equal(t, "warning", string(got))
			_, err = os.Stat(filepath.Join(dir, StdoutName(id)))
			require.Equal(t, len(out) == 0, os.IsNotExist(err), "an empty stream has no file")
		}
	})
}
