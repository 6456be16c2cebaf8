package journal

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// roleEnv makes the test binary play a part in a process of its own; the folder follows the colon.
const roleEnv = "JOURNAL_TEST_ROLE"

func TestMain(m *testing.M) {
	role, dir, _ := strings.Cut(os.Getenv(roleEnv), ":")
	switch role {
	case "":
		os.Exit(m.Run())
	case "writer":
		playWriter(dir)
	case "limited":
		playLimited(dir)
	}
}

func play(t *testing.T, role, dir string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), roleEnv+"="+role+":"+dir)
	cmd.Stderr = os.Stderr
	return cmd
}

func die(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(3)
}

// playWriter makes durable updates from four sides until it is killed, and prints each one's key once it returned.
func playWriter(dir string) {
	j, err := Open(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		die(err)
	}
	for w := range 4 {
		go func() {
			for i := 0; ; i++ {
				key := fmt.Sprintf("%d/%d/%06d", os.Getpid(), w, i)
				if err := j.Update(ctx, true, Set(key, []byte(strings.Repeat(key, 30)))); err != nil {
					die(err)
				}
				if _, err := os.Stdout.WriteString(key + "\n"); err != nil {
					die(err)
				}
			}
		}()
	}
	select {}
}

func TestP1EveryUpdateThatReturnedIsThereAfterKill9(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	var promised []string
	for range 4 {
		promised = append(promised, writeUntilKilled(t, dir, 200)...)
		j := mustOpen(t, dir)
		got := contents(t, j)
		for _, key := range promised {
			require.Equal(t, strings.Repeat(key, 30), got[key], "%s had returned", key)
		}
		require.NoError(t, j.Close())
	}
	require.GreaterOrEqual(t, len(promised), 800)
}

// writeUntilKilled gives all keys that a writer had printed when it was killed after at least n of them.
func writeUntilKilled(t *testing.T, dir string, n int) []string {
	t.Helper()
	cmd := play(t, "writer", dir)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewReader(out)
	var keys []string
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		if keys = append(keys, strings.TrimSuffix(line, "\n")); len(keys) == n {
			require.NoError(t, cmd.Process.Kill())
		}
	}
	require.ErrorContains(t, cmd.Wait(), "killed")
	return keys
}

// playLimited makes updates until the kernel refuses to let the log grow (RLIMIT_FSIZE), which is a real failed write.
func playLimited(dir string) {
	signal.Ignore(unix.SIGXFSZ)
	j, err := Open(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		die(err)
	}
	if err := j.Update(ctx, true, Set("before", nil)); err != nil {
		die(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 64 << 10, Max: unix.RLIM_INFINITY}); err != nil {
		die(err)
	}
	for i := 0; err == nil; i++ {
		err = j.Update(ctx, true, Set(fmt.Sprintf("filler/%d", i), make([]byte, 8<<10)))
	}
	fmt.Println(err)
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}); err != nil {
		die(err)
	}
	fmt.Println(j.Update(ctx, true, Set("after", nil)))
	fmt.Println(j.Update(ctx, false, Set("after", nil)))
	_, err = j.Get("before")
	fmt.Println("get:", err)
	fmt.Println("close:", j.Close())
}

func TestAFailedWritePoisonsTheJournalUntilItIsOpenedAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	out, err := play(t, "limited", dir).Output()
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	require.Len(t, lines, 5, "%s", out)
	for _, l := range lines[:3] {
		require.Contains(t, l, ErrPoisoned.Error())
		require.Contains(t, l, "file too large", "the cause is named")
		require.Contains(t, l, "restart the agent", "and the remedy")
	}
	require.Equal(t, "get: <nil>", lines[3], "reads go on")
	require.Equal(t, "close: <nil>", lines[4])

	got := contents(t, openForTest(t, dir))
	require.Contains(t, got, "before")
	require.NotContains(t, got, "after")
}

// ---- damage ----

// filled makes a journal that has tables as well as a log, and gives its folder.
func filled(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, dir)
	for i := range 300 {
		require.NoError(t, j.Update(ctx, i%50 == 0, Set(fmt.Sprintf("exec/%04d", i), []byte(strings.Repeat(fmt.Sprint(i), 200)))))
		if i == 150 {
			require.NoError(t, j.db.Flush())
		}
	}
	require.NoError(t, j.Update(ctx, true, Set("last", []byte("the last promise"))))
	// As a kill leaves it: the log is not closed.
	abandon(t, j)
	return dir
}

// abandon copies the folder while the journal is open, then closes the journal and puts the copy in its place.
func abandon(t *testing.T, j *Journal) {
	t.Helper()
	saved := j.dir + ".saved"
	require.NoError(t, os.CopyFS(saved, os.DirFS(j.dir)))
	require.NoError(t, j.Close())
	require.NoError(t, os.RemoveAll(j.dir))
	require.NoError(t, os.Rename(saved, j.dir))
}

func filesOf(t *testing.T, dir, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, storeName, pattern))
	require.NoError(t, err)
	require.NotEmpty(t, files, pattern)
	slices.Sort(files)
	return files
}

func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	b := make([]byte, 1)
	_, err = f.ReadAt(b, at)
	require.NoError(t, err)
	b[0] ^= 0x10
	_, err = f.WriteAt(b, at)
	require.NoError(t, err)
}

func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		// The locks hold no state.
		if name := filepath.Base(path); name != lockName && name != "LOCK" {
			got[path] = string(b)
		}
		return err
	}))
	return got
}

func requireCorrupt(t *testing.T, dir, what string) {
	t.Helper()
	before := snapshot(t, dir)
	_, err := Open(dir, slog.New(slog.DiscardHandler))
	require.ErrorIs(t, err, ErrCorrupt, what)
	require.ErrorContains(t, err, dir, what)
	require.ErrorContains(t, err, "nothing was changed", what)
	require.Equal(t, before, snapshot(t, dir), "%s: nothing was changed", what)
}

func lengthOf(t *testing.T, path string) int64 {
	t.Helper()
	st, err := os.Stat(path)
	require.NoError(t, err)
	return st.Size()
}

// written is how far a log was written: Pebble makes the file longer beforehand.
func written(t *testing.T, path string) int64 {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return int64(len(strings.TrimRight(string(b), "\x00")))
}

func TestAnUnharmedJournalThatWasNotClosedOpens(t *testing.T) {
	j := openForTest(t, filled(t))
	require.Len(t, contents(t, j), 301)
}

func TestP6AByteFlippedAnywhereInTheLogIsNoticed(t *testing.T) {
	for part := range 10 {
		dir := filled(t)
		logs := filesOf(t, dir, "*.log")
		log := logs[len(logs)-1]
		at := written(t, log)*int64(part)/10 + 8
		flip(t, log, at)
		requireCorrupt(t, dir, fmt.Sprintf("byte %d of %d of the log", at, written(t, log)))
	}
}

func TestP6AByteFlippedInTheLastPromiseIsNoticed(t *testing.T) {
	dir := filled(t)
	logs := filesOf(t, dir, "*.log")
	log := logs[len(logs)-1]
	b, err := os.ReadFile(log)
	require.NoError(t, err)
	flip(t, log, int64(strings.LastIndex(string(b), "the last promise")))
	requireCorrupt(t, dir, "the last record")
}

func TestP6APromisedEndThatIsCutOffIsNoticed(t *testing.T) {
	dir := filled(t)
	logs := filesOf(t, dir, "*.log")
	log := logs[len(logs)-1]
	require.NoError(t, os.Truncate(log, written(t, log)/2))
	requireCorrupt(t, dir, "half of the log")
}

func TestP6ALogThatIsGoneIsNoticed(t *testing.T) {
	dir := filled(t)
	for _, log := range filesOf(t, dir, "*.log") {
		require.NoError(t, os.Remove(log))
	}
	requireCorrupt(t, dir, "no log")
}

func TestP6AByteFlippedInATableIsNoticed(t *testing.T) {
	for _, part := range []int64{0, 3, 6} {
		dir := filled(t)
		table := filesOf(t, dir, "*.sst")[0]
		flip(t, table, lengthOf(t, table)*part/10+20)
		requireCorrupt(t, dir, fmt.Sprintf("%d tenths into the table", part))
	}
}

func TestP6ATableThatIsGoneIsNoticed(t *testing.T) {
	dir := filled(t)
	require.NoError(t, os.Remove(filesOf(t, dir, "*.sst")[0]))
	requireCorrupt(t, dir, "no table")
}

// Pebble takes a broken record of its MANIFEST for the file's end: the tables named after it would be forgotten.
func TestP6AByteFlippedInTheManifestIsNoticed(t *testing.T) {
	dir := filled(t)
	manifests := filesOf(t, dir, "MANIFEST-*")
	manifest := manifests[len(manifests)-1]
	for at := int64(0); at < lengthOf(t, manifest); at += 7 {
		copied := dir + ".copy"
		require.NoError(t, os.CopyFS(copied, os.DirFS(dir)))
		flip(t, filepath.Join(copied, storeName, filepath.Base(manifest)), at)
		j, err := Open(copied, slog.New(slog.DiscardHandler))
		if err == nil {
			// What was flipped may have been of no account. Then everything is there.
			require.Len(t, contents(t, j), 301, "byte %d", at)
			require.NoError(t, j.Close())
		} else {
			require.ErrorIs(t, err, ErrCorrupt, "byte %d", at)
		}
		require.NoError(t, os.RemoveAll(copied))
	}
}

func TestP6AStoreThatIsGoneIsNoticed(t *testing.T) {
	dir := filled(t)
	require.NoError(t, os.RemoveAll(filepath.Join(dir, storeName)))
	requireCorrupt(t, dir, "no store")
}

func TestADamagedHighWaterIsNoticed(t *testing.T) {
	dir := filled(t)
	flip(t, filepath.Join(dir, highWaterName), 3)
	requireCorrupt(t, dir, "high water")
}

func TestATornEndThatWasNeverPromisedIsDroppedSilently(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, dir)
	require.NoError(t, j.Update(ctx, true, Set("promised", nil)))
	promised := written(t, filesOf(t, dir, "*.log")[0])
	for i := range 20 {
		require.NoError(t, j.Update(ctx, false, Set(fmt.Sprintf("unpromised/%d", i), make([]byte, 500))))
	}
	require.NoError(t, j.db.LogData(nil, nil))
	abandon(t, j)

	log := filesOf(t, dir, "*.log")[0]
	require.NoError(t, os.Truncate(log, promised+700))
	got := contents(t, openForTest(t, dir))
	require.Contains(t, got, "promised")
	require.Less(t, len(got), 21)
}
