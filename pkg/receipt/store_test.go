package receipt

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
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

func TestP9AReceiptIsNeverWrittenTwice(t *testing.T) {
	bothOrders(t, func(t *testing.T, dir string, open func(uint64) *Store) {
		s, k := open(1000), signer(t)
		_, err := commitExec(s, "e1", []byte("first"), nil, k)
		require.NoError(t, err)
		before, err := Read(dir, "e1")
		require.NoError(t, err)
		_, err = commitExec(s, "e1", []byte("second"), nil, k)
		require.ErrorIs(t, err, ErrExists)
		after, err := Read(dir, "e1")
		require.NoError(t, err)
		require.Equal(t, before, after)
		require.FileExists(t, filepath.Join(dir, "e1.stdout"))
		require.True(t, s.Has("e1"))
		require.False(t, s.Has("e2"))
		sequence, _ := s.Last()
		require.Equal(t, uint64(1), sequence, "a refused one leaves no gap")
	})
}

func TestACommitThatContradictsItselfIsRefused(t *testing.T) {
	s, k := openStore(t, t.TempDir(), 10), signer(t)
	_, err := s.Commit("e2", predicate("e1", nil, nil), nil, nil, k)
	require.ErrorIs(t, err, ErrInconsistent)
	_, err = s.Commit("e1", predicate("e1", nil, nil), []byte("x"), nil, k)
	require.ErrorIs(t, err, ErrInconsistent, "output that is not accounted for")
	_, err = commitExec(s, "e1", make([]byte, 11), nil, k)
	require.ErrorIs(t, err, ErrTooLarge)
	_, err = commitExec(s, "../e1", nil, nil, k)
	require.ErrorIs(t, err, ErrExecID)
	p := predicate("e1", nil, nil)
	p.Status = "CANCELLED"
	_, err = s.Commit("e1", p, nil, nil, k)
	require.ErrorIs(t, err, ErrMalformed)
	_, err = commitExec(s, "e1", []byte("ten bytes!"), nil, k)
	require.NoError(t, err)
}

func TestTheChainGoesOnWhereAnEarlierStoreLeftIt(t *testing.T) {
	dir, k := t.TempDir(), signer(t)
	s := openStore(t, dir, 100)
	for _, id := range []string{"z", "a", "m"} {
		require.NoError(t, s.Reserve())
		_, err := commitExec(s, id, nil, nil, k)
		require.NoError(t, err)
	}
	sequence, last := s.Last()
	require.Equal(t, uint64(3), sequence)
	require.NoError(t, s.Close())

	again := openStore(t, dir, 100)
	sequenceAgain, lastAgain := again.Last()
	require.Equal(t, sequence, sequenceAgain)
	require.Equal(t, last, lastAgain)
	p := predicate("next", nil, nil)
	_, err := again.Commit("next", p, nil, nil, k)
	require.NoError(t, err)
	require.Equal(t, uint64(4), p.Sequence)
	require.Equal(t, last, p.Previous)
}

func TestOpeningSweepsTheDebrisOfAnInterruptedCommitAndNothingElse(t *testing.T) {
	dir, k := t.TempDir(), signer(t)
	s := openStore(t, dir, 100)
	require.NoError(t, s.Reserve())
	_, err := commitExec(s, "kept", []byte("out"), []byte("err"), k)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	for _, name := range []string{"~.json", "~.stdout", "~anything", "cut.stdout", "cut.stderr", "other.txt"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600))
	}
	openStore(t, dir, 100)
	require.ElementsMatch(t, []string{"kept.json", "kept.stdout", "kept.stderr", "other.txt"}, namesIn(t, dir))
}

func namesIn(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestAChainWithAnUnreadableReceiptIsNotContinued(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "e1.json"), make([]byte, 300), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "~.json"), nil, 0o600))
	_, err := OpenStore(dir, 100)
	require.ErrorIs(t, err, ErrMalformed)
	require.ErrorContains(t, err, "e1.json")
	require.ErrorContains(t, err, dir)
	require.FileExists(t, filepath.Join(dir, "~.json"), "nothing was changed")
}

func TestReserveIsIdempotentAndACommitTakesWhatItNeeds(t *testing.T) {
	dir := t.TempDir()
	s, k := openStore(t, dir, 100<<10), signer(t)
	require.NoError(t, s.Reserve())
	before := namesIn(t, dir)
	require.Len(t, before, len(s.spares()))
	require.NoError(t, s.Reserve())
	require.Equal(t, before, namesIn(t, dir))
	for _, sp := range s.spares() {
		var st unix.Stat_t
		require.NoError(t, unix.Stat(filepath.Join(dir, sp.name), &st))
		require.GreaterOrEqual(t, uint64(st.Blocks)*512, sp.bytes, "%s is really allocated", sp.name)
	}
	_, err := commitExec(s, "e1", []byte("x"), nil, k)
	require.NoError(t, err)
	require.NotContains(t, namesIn(t, dir), "~.json")
	require.NotContains(t, namesIn(t, dir), "~.stdout")
	require.Contains(t, namesIn(t, dir), "~.stderr")
	require.NoError(t, s.Reserve())
	require.Subset(t, namesIn(t, dir), before)
}

func TestWhatAnInterruptedCommitLeftInASpareDoesNotShow(t *testing.T) {
	bothOrders(t, func(t *testing.T, dir string, open func(uint64) *Store) {
		s, k := open(100<<10), signer(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "~.stdout"), bytes.Repeat([]byte("old"), 20000), 0o600))
		_, err := commitExec(s, "e1", []byte("new"), nil, k)
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(dir, "e1.stdout"))
		require.NoError(t, err)
		require.Equal(t, "new", string(b))
	})
}

func TestAClosedStoreTakesNothing(t *testing.T) {
	s := openStore(t, t.TempDir(), 100)
	require.NoError(t, s.Close())
	_, err := commitExec(s, "e1", nil, nil, signer(t))
	require.ErrorIs(t, err, ErrFailed)
	require.ErrorIs(t, s.Reserve(), ErrFailed)
}

func TestAFolderThatIsNoneIsNamed(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(dir, link))
	for _, path := range []string{filepath.Join(dir, "absent"), link} {
		_, err := OpenStore(path, 1)
		require.ErrorContains(t, err, path)
		_, err = Read(path, "e1")
		require.ErrorContains(t, err, path)
	}
	_, err := OpenStore(dir, MaxKept+1)
	require.ErrorIs(t, err, ErrTooLarge)
}

// ---- the reader ----

func TestTheReaderTakesRegularFilesOnlyAndNeverWaits(t *testing.T) {
	dir := t.TempDir()
	path := func(id string) string { return filepath.Join(dir, FileName(id)) }
	require.NoError(t, os.WriteFile(filepath.Join(dir, "secret"), []byte("secret"), 0o600))
	require.NoError(t, os.Symlink("secret", path("link")))
	require.NoError(t, unix.Mkfifo(path("fifo"), 0o600))
	require.NoError(t, os.Mkdir(path("folder"), 0o700))
	require.NoError(t, os.WriteFile(path("large"), make([]byte, MaxEnvelope+1), 0o600))
	for id, want := range map[string]error{"link": ErrMalformed, "fifo": ErrMalformed, "folder": ErrMalformed, "large": ErrTooLarge, "absent": ErrNotFound, "../x": ErrExecID} {
		_, err := Read(dir, id)
		require.ErrorIs(t, err, want, id)
	}
}

func TestP13KeptOutputThatIsNotWhatTheReceiptSaysIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 100)
	p := predicate("e1", []byte("output"), nil)
	_, err := s.Commit("e1", p, []byte("output"), nil, signer(t))
	require.NoError(t, err)
	path := filepath.Join(dir, "e1.stdout")

	for _, other := range []string{"outpuT", "outpu", "output!", ""} {
		require.NoError(t, os.WriteFile(path, []byte(other), 0o600))
		_, err := ReadKept(dir, p, Stdout)
		require.ErrorIs(t, err, ErrOutput, other)
		require.ErrorContains(t, err, "e1.stdout")
	}
	require.NoError(t, os.Remove(path))
	_, err = ReadKept(dir, p, Stdout)
	require.ErrorIs(t, err, ErrOutput)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "e1.stderr"), nil, 0o600))
	_, err = ReadKept(dir, p, Stderr)
	require.ErrorIs(t, err, ErrOutput, "a file where nothing was kept")
	p.Stdout.KeptBytes = MaxKept + 1
	_, err = ReadKept(dir, p, Stdout)
	require.ErrorIs(t, err, ErrTooLarge)
}

func TestSyncTakesWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 100)
	_, err := commitExec(s, "e1", []byte("x"), nil, signer(t))
	require.NoError(t, err)
	require.NoError(t, Sync(dir, "e1"))
	require.ErrorIs(t, Sync(dir, "a/b"), ErrExecID)
	ids, err := List(dir)
	require.NoError(t, err)
	require.Equal(t, []string{"e1"}, ids)
}

func TestAKilledWriterLeavesAWholeReceiptOrNone(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), writerEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var promised []string
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if promised = append(promised, lines.Text()); len(promised) == 100 {
			require.NoError(t, cmd.Process.Kill())
		}
	}
	require.ErrorContains(t, cmd.Wait(), "killed")

	s := openStore(t, dir, 8<<10)
	ids, err := List(dir)
	require.NoError(t, err)
	require.Subset(t, ids, promised, "what was answered is there")
	sequence, _ := s.Last()
	require.Equal(t, uint64(len(ids)), sequence)
	for _, id := range ids {
		b, err := Read(dir, id)
		require.NoError(t, err)
		e, err := Parse(b)
		require.NoError(t, err)
		for _, stream := range []Stream{Stdout, Stderr} {
			kept, err := ReadKept(dir, &e.Predicate, stream)
			require.NoError(t, err)
			require.Equal(t, strings.Repeat(id, 500), string(kept))
		}
	}
}

// writerEnv makes the test binary commit receipts into that folder until it is killed.
const writerEnv = "RECEIPT_TEST_WRITER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(writerEnv); dir != "" {
		fmt.Fprintln(os.Stderr, playWriter(dir))
		os.Exit(3)
	}
	os.Exit(m.Run())
}

func playWriter(dir string) error {
	s, err := OpenStore(dir, 8<<10)
	if err != nil {
		return err
	}
	k, err := NewSigner()
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		id := fmt.Sprintf("exec-%04d", i)
		kept := []byte(strings.Repeat(id, 500))
		if err := s.Reserve(); err != nil {
			return err
		}
		if _, err := commitExec(s, id, kept, kept, k); err != nil {
			return err
		}
		fmt.Println(id)
	}
}

func TestTheSpareSpaceOfAStoreThatIsGoneIsGivenBackAndNoReceiptWithIt(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 1<<10)
	_, err := commitExec(s, "e1", []byte("out"), []byte("err"), signer(t))
	require.NoError(t, err)
	require.NoError(t, s.Reserve())
	require.NoError(t, s.Close())
	victim := filepath.Join(t.TempDir(), "victim")
	require.NoError(t, os.WriteFile(victim, nil, 0o600))
	require.NoError(t, os.Symlink(victim, filepath.Join(dir, "~link")))
	require.Greater(t, len(namesIn(t, dir)), 3+1)
	for range 2 {
		require.NoError(t, RemoveSpares(dir))
		require.Equal(t, []string{"e1.json", "e1.stderr", "e1.stdout"}, namesIn(t, dir))
	}
	require.FileExists(t, victim)
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	require.ErrorContains(t, RemoveSpares(link), link, "not through a link")
	require.NoError(t, RemoveSpares(filepath.Join(dir, "none")))
}
