package demo

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

func TestOutputOfACommandCannotSteerTheTerminal(t *testing.T) {
	require.Equal(t, "a·[31mb c�·", harmless([]byte("a\x1b[31mb\tc\xff\u202e")))
	require.Equal(t, "ok\nnext", harmless([]byte("ok\nnext")))
}

func TestLongOutputShowsItsBeginningAndItsEnd(t *testing.T) {
	var b bytes.Buffer
	s := &screen{w: &b}
	var lines []string
	for i := range 30 {
		lines = append(lines, strings.Repeat("x", i))
	}
	text := []byte(strings.Join(lines, "\n"))
	s.output(text, uint64(len(text)))
	require.Equal(t, maxLines, strings.Count(b.String(), "\n"))
	require.Contains(t, b.String(), "… 23 lines")
	require.Contains(t, b.String(), strings.Repeat("x", 29))
	b.Reset()
	s.output(text, 1<<30)
	require.Contains(t, b.String(), "(1073.7 MB in all)")
	b.Reset()
	s.output([]byte("\n"), 1)
	require.Empty(t, b.String())
	require.NotContains(t, b.String(), "\x1b")
}

func TestColoursAreForTerminalsOnly(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	require.False(t, UseColour(f))
	plain, colour := &screen{}, &screen{colour: true}
	require.Equal(t, "x", plain.paint(red, "x"))
	require.Equal(t, "\x1b[31mx\x1b[0m", colour.paint(red, "x"))
}

func TestTextIsWrappedAtSpacesAndClipped(t *testing.T) {
	require.Equal(t, []string{"one two", "three"}, wrap("one two three", 8))
	require.Equal(t, []string{"alongword", "x"}, wrap("alongword x", 4))
	require.Equal(t, []string{""}, wrap("", 4))
	require.Equal(t, "abc…", clip("abcdef", 4))
	require.Equal(t, "abcd", clip("abcd", 4))
}

func TestTheExpectedFloodIsWhatSeqPrints(t *testing.T) {
	n, sum := sequence(100000)
	out, err := exec.Command("bash", "-c", "seq 100000 | sha256sum; seq 100000 | wc -c").Output()
	require.NoError(t, err)
	require.Equal(t, sum+"  -\n588895\n", string(out))
	require.EqualValues(t, 588895, n)
}

func TestAChangedReceiptIsReallyChangedAndRefused(t *testing.T) {
	signer, err := receipt.NewSigner()
	require.NoError(t, err)
	now := time.Now()
	b, err := signer.Sign(receipt.Predicate{ExecID: "e", SessionID: "s", Status: receipt.Exited, ExitCode: 3, StartedAt: now, EndedAt: now, Sequence: 1})
	require.NoError(t, err)
	_, err = verify.Envelope(b, signer.Public())
	require.NoError(t, err)
	changed, err := exitCodeZero(b)
	require.NoError(t, err)
	e, err := receipt.Parse(changed)
	require.NoError(t, err)
	require.Zero(t, e.Predicate.ExitCode)
	_, err = verify.Envelope(changed, signer.Public())
	require.ErrorIs(t, err, verify.ErrSignature)

	_, err = exitCodeZero(changed)
	require.ErrorContains(t, err, "nothing of exit code 3")
}

func TestMarkedCountsAProcessByItsEnvironment(t *testing.T) {
	mark := "SANDBOX_DEMO_TEST=" + randomHex(8)
	require.Zero(t, marked(mark))
	cmd := exec.Command("sleep", "600")
	cmd.Env = []string{mark}
	require.NoError(t, cmd.Start())
	require.Equal(t, 1, marked(mark))
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Zero(t, marked(mark))
}

func TestTheRepositoryIsLeftAsItWas(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	repo := testkit.Repo(t, 1234)
	r, err := openRepository(t.Context(), repo)
	require.NoError(t, err)
	require.EqualValues(t, 1234, r.uid)

	before, err := r.git(t.Context(), "for-each-ref")
	require.NoError(t, err)
	worktree := filepath.Join(filepath.Dir(repo), "wt")
	_, err = r.git(t.Context(), "worktree", "add", "-b", "sandbox-demo/x", worktree)
	require.NoError(t, err)
	st, err := os.Stat(worktree)
	require.NoError(t, err)
	require.EqualValues(t, 1234, st.Sys().(*syscall.Stat_t).Uid, "Git ran as the clone's owner")
	require.NoError(t, os.WriteFile(filepath.Join(worktree, "untracked"), nil, 0o644))

	fromWorktree, err := openRepository(t.Context(), worktree)
	require.NoError(t, err)
	require.Equal(t, repo, fromWorktree.path, "a path in a worktree leads to its clone")

	require.NoError(t, r.forget(t.Context(), worktree, "sandbox-demo/x"))
	require.NoDirExists(t, worktree)
	after, err := r.git(t.Context(), "for-each-ref")
	require.NoError(t, err)
	require.Equal(t, before, after)
	list, err := r.git(t.Context(), "worktree", "list", "--porcelain")
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(list, "worktree "))
	require.NoError(t, r.forget(t.Context(), worktree, "sandbox-demo/x"), "a second time is fine")
}

func TestTheLinesForWhoDoesNotWaitRemoveWhatIsLeft(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	for _, uid := range []int{0, 1234} {
		repo := testkit.Repo(t, uid)
		before := testkit.GitAs(t, uid, repo, "for-each-ref")
		r, err := openRepository(t.Context(), repo)
		require.NoError(t, err)
		p, err := newPlace(r)
		require.NoError(t, err)
		t.Cleanup(func() { os.RemoveAll(p.dir) })
		tr := &tour{repo: r, place: p, worktree: filepath.Join(p.work, "x"), branch: "sandbox-demo/x"}
		_, err = r.git(t.Context(), "worktree", "add", "-b", tr.branch, tr.worktree)
		require.NoError(t, err)

		for _, line := range tr.left()() {
			if command, ok := strings.CutPrefix(line, "  "); ok {
				cmd := exec.Command("bash", "-c", command)
				cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1"}
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s: %s", command, out)
			}
		}
		require.NoDirExists(t, p.dir)
		require.Equal(t, before, testkit.GitAs(t, uid, repo, "for-each-ref"))
		require.Equal(t, 1, strings.Count(testkit.GitAs(t, uid, repo, "worktree", "list", "--porcelain"), "worktree "))
	}
}

func TestWhatIsNoUsableRepositoryIsSaid(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	dir := testkit.StateDir(t)
	_, err := openRepository(t.Context(), dir)
	require.ErrorContains(t, err, "it is no Git clone: give one with REPO=/path")
	_, err = openRepository(t.Context(), filepath.Join(dir, "none"))
	require.ErrorContains(t, err, "no such file")

	empty := filepath.Join(dir, "empty")
	require.NoError(t, exec.Command("git", "init", "-q", empty).Run())
	_, err = openRepository(t.Context(), empty)
	require.ErrorContains(t, err, "it has no commit yet")

	bare := filepath.Join(dir, "bare")
	require.NoError(t, exec.Command("git", "init", "-q", "--bare", bare).Run())
	_, err = openRepository(t.Context(), bare)
	require.ErrorContains(t, err, "ordinary clone")

	system, err := os.MkdirTemp("/usr/local/src", "sandbox-demo-test-")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(system) })
	require.NoError(t, exec.Command("git", "clone", "-q", testkit.Repo(t, 0), system).Run())
	_, err = openRepository(t.Context(), system)
	require.ErrorContains(t, err, system+": it lies under /usr")
	require.ErrorContains(t, err, "move the clone")
}

func TestAnAgentThatDoesNotComeUpIsSaidWithItsLog(t *testing.T) {
	testkit.Need(t, testkit.Root, testkit.Git)
	r, err := openRepository(t.Context(), testkit.Repo(t, 0))
	require.NoError(t, err)
	p, err := newPlace(r)
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(p.dir) })
	script := filepath.Join(p.dir, "agent")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\necho the reason is this >&2\nexit 7\n"), 0o755))
	_, err = startAgent(context.Background(), Options{Program: script}, p, r)
	require.ErrorContains(t, err, "exit status 7")
	require.ErrorContains(t, err, "the reason is this")
}
