package gitjail

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const uid = 1234

func jailOf(t *testing.T) Jail {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.MountAPI)
	testkit.Leaks(t)
	c := filepath.Join(testkit.Repo(t, uid), ".git")
	return Jail{
		Owner: hostfs.Owner{UID: uid, GID: uid}, Dir: c, Mounts: []Mount{Same(c)}, Env: []string{"GIT_DIR=" + c},
	}
}

func started(t *testing.T, j Jail) *Session {
	t.Helper()
	s, err := j.Start(t.Context())
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

func TestASessionRunsOneCallAfterTheOther(t *testing.T) {
	s := started(t, jailOf(t))
	id, err := s.Run(t.Context(), "rev-parse", "HEAD")
	require.NoError(t, err)
	r, err := s.Do(t.Context(), Call{Args: []string{"rev-parse", "--verify", "-q", "none"}})
	require.NoError(t, err)
	require.Equal(t, 1, r.ExitCode)
	_, err = s.Run(t.Context(), "no-such-command")
	require.ErrorIs(t, err, ErrGit)
	require.ErrorContains(t, err, "no-such-command")
	out, err := s.RunCall(t.Context(), Call{Args: []string{"cat-file", "--batch-check"}, Stdin: strings.NewReader(id), Env: []string{"X=\xff y"}})
	require.NoError(t, err)
	require.Contains(t, out, " commit ")
}

func TestTwoSessionsAreJoinedByAPipe(t *testing.T) {
	from, to := started(t, jailOf(t)), started(t, jailOf(t))
	big := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16)
	id, err := from.RunCall(t.Context(), Call{Args: []string{"hash-object", "-w", "--stdin"}, Stdin: bytes.NewReader(big)})
	require.NoError(t, err)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	sent := make(chan error, 1)
	go func() {
		_, err := from.RunCall(t.Context(), Call{Args: []string{"cat-file", "blob", strings.TrimSpace(id)}, Stdout: w})
		sent <- err
	}()
	got, err := to.RunCall(t.Context(), Call{Args: []string{"hash-object", "--stdin"}, Stdin: r})
	require.NoError(t, err)
	require.NoError(t, <-sent)
	require.Equal(t, id, got)
}

func TestP12ASessionsGitHasTheOwnersIdsAndNoPrivilege(t *testing.T) {
	for _, owner := range []uint32{uid, 0} {
		j := jailOf(t)
		if owner == 0 {
			j.Owner = hostfs.Owner{}
			require.NoError(t, exec.Command("chown", "-R", "0:0", filepath.Dir(j.Dir)).Run())
		}
		s := started(t, j)
		out, err := s.Run(t.Context(), "-c", "alias.x=!grep -E '^(Uid|CapEff|CapPrm|CapBnd|NoNewPrivs):' /proc/self/status; cat /proc/1/environ", "x")
		// The first process is closed to Git, root's too: the last command fails.
		require.Error(t, err, out)
		out, err = s.Run(t.Context(), "-c", "alias.x=!grep -E '^(Uid|CapEff|CapPrm|CapBnd|NoNewPrivs):' /proc/self/status", "x")
		require.NoError(t, err)
		for _, want := range []string{"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"} {
			require.Contains(t, out, want)
		}
	}
}

func TestASessionEndsWithItsTimeItsContextAndItsClose(t *testing.T) {
	j := jailOf(t)
	s := started(t, j)
	_, err := s.RunCall(t.Context(), Call{Args: []string{"-c", "alias.x=!sleep 100 & sleep 100", "x"}, Timeout: 100 * time.Millisecond})
	require.ErrorIs(t, err, ErrGit)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.True(t, s.Ended())
	_, err = s.Run(t.Context(), "version")
	require.ErrorIs(t, err, ErrGit)

	ctx, cancel := context.WithCancel(t.Context())
	s, err = j.Start(ctx)
	require.NoError(t, err)
	defer s.Close()
	cancel()
	_, err = s.Run(t.Context(), "version")
	require.Error(t, err)
}

func TestP12NoWordOfACallBecomesAPartOfItsEnvironment(t *testing.T) {
	s := started(t, jailOf(t))
	show := []string{"-c", "alias.x=!env; :", "x"}
	control, err := s.RunCall(t.Context(), Call{Args: show, Env: []string{"PLANTED=1"}})
	require.NoError(t, err)
	require.Contains(t, control, "PLANTED=1")
	_, err = s.RunCall(t.Context(), Call{Args: append(show, "word\x00PLANTED=1")})
	require.ErrorIs(t, err, ErrGit)
	require.ErrorContains(t, err, "NUL byte")
}

func TestACallCanHaveAnotherFolderAndKeepMore(t *testing.T) {
	j := jailOf(t)
	j.Output = 10
	s := started(t, j)
	_, err := s.Run(t.Context(), "rev-parse", "HEAD")
	require.ErrorContains(t, err, "printed more than is kept")
	for dir, want := range map[string]string{"": j.Dir, j.Dir + "/objects": j.Dir + "/objects"} {
		c := Call{Args: []string{"-c", "alias.x=!pwd", "x"}, Dir: dir, Output: 1000}
		out, err := s.RunCall(t.Context(), c)
		require.NoError(t, err)
		require.Equal(t, want+"\n", out)
		// A jail for one run knows both too.
		out, err = j.RunCall(t.Context(), c)
		require.NoError(t, err)
		require.Equal(t, want+"\n", out)
	}
}

func TestAKeptJailIsMadeOnceAndAgainWhenARunEndedIt(t *testing.T) {
	jails, runs := Made()
	k := jailOf(t).Keep(t.Context())
	defer k.Close()
	for range 3 {
		_, err := k.Run(t.Context(), "rev-parse", "HEAD")
		require.NoError(t, err)
	}
	is, ran := Made()
	require.Equal(t, int64(1), is-jails)
	require.Equal(t, int64(3), ran-runs)
	_, err := k.RunCall(t.Context(), Call{Args: []string{"-c", "alias.x=!sleep 100", "x"}, Timeout: 100 * time.Millisecond})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = k.Run(t.Context(), "rev-parse", "HEAD")
	require.NoError(t, err)
	is, _ = Made()
	require.Equal(t, int64(2), is-jails)
}

func TestP12ARunLeavesNoProcessToTheNext(t *testing.T) {
	s := started(t, jailOf(t))
	const tails = `cat /proc/[0-9]*/comm 2>/dev/null | grep -c tail`
	control, err := s.Run(t.Context(), "-c", "alias.x=!(setsid tail -f /dev/null & setsid tail -f /dev/null &) >/dev/null 2>&1; until [ $("+tails+") = 2 ]; do sleep 0.05; done; "+tails+"; :", "x")
	require.NoError(t, err)
	require.Equal(t, "2\n", control, "the control case: what was left was there while the first ran")
	alone, err := s.Run(t.Context(), "-c", "alias.x=!"+tails+"; :", "x")
	require.NoError(t, err)
	require.Equal(t, "0\n", alone)
	require.False(t, s.Ended())
}

// full refuses what is more than its size, as a check does that must see all of a list.
type full struct{ room int }

func (f *full) Write(p []byte) (int, error) {
	if f.room -= len(p); f.room < 0 {
		return 0, errors.New("too long")
	}
	return len(p), nil
}

func TestP12OutputThatItsReaderDidNotTakeIsNoAnswer(t *testing.T) {
	j := jailOf(t)
	const size = 640 << 10
	s := started(t, j)
	id, err := s.RunCall(t.Context(), Call{Args: []string{"hash-object", "-w", "--stdin"}, Stdin: strings.NewReader(strings.Repeat("0123456789abcde\n", size/16))})
	require.NoError(t, err)
	show := func(room int) error {
		_, err := s.Do(t.Context(), Call{Args: []string{"cat-file", "blob", strings.TrimSpace(id)}, Stdout: &full{room}})
		return err
	}
	require.NoError(t, show(size))
	// What is left then fits into the pipe, so Git itself ends well.
	err = show(size - 32<<10)
	require.ErrorIs(t, err, ErrGit)
	require.ErrorContains(t, err, "too long")
	require.True(t, s.Ended())
}
