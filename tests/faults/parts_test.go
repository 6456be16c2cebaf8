package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func kill(pids []int, sig unix.Signal) {
	for _, pid := range pids {
		_ = unix.Kill(pid, sig)
	}
}

// begin starts a gated exec on a session and gives its answer later.
func (s *session) begin() (*sandboxv1.ExecRequest, <-chan *sandboxv1.ExecResult) {
	s.T.Helper()
	r := s.request("")
	r.Command += "; " + gated(r.GetExecId())
	answer := s.start(r)
	s.awaitRun(r.GetExecId())
	s.noteSandbox()
	return r, answer
}

// awaitAnswer fails when a call is not answered.
func (s *session) awaitAnswer(answer <-chan *sandboxv1.ExecResult) *sandboxv1.ExecResult {
	s.T.Helper()
	select {
	case r := <-answer:
		require.NotNil(s.T, r, "an error instead of an answer\n%s", s.LogText())
		return r
	case <-time.After(patience):
		s.T.Fatalf("no answer\n%s", s.LogText())
		return nil
	}
}

func TestP6WhatIsKilledUnderACommandIsSaid(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	s := a.session(testkit.Repo(t, owner))
	for _, c := range []struct {
		what   string
		pids   func() []int
		status sandboxv1.ExecResult_Status
	}{
		{"receiptd", func() []int { return named(s.lastSandbox(), "receiptd") }, sandboxv1.ExecResult_UNCERTAIN},
		{"the whole container", func() []int { return processesOf(s.lastSandbox()) }, sandboxv1.ExecResult_UNCERTAIN},
		{"each pid1", func() []int { return named(s.lastSandbox(), "pid1") }, sandboxv1.ExecResult_KILLED},
	} {
		t.Run(c.what, func(t *testing.T) {
			r, answer := s.begin()
			generation := s.get().GetGeneration()
			pids := c.pids()
			require.NotEmpty(t, pids)
			kill(pids, unix.SIGKILL)
			got := s.awaitAnswer(answer)
			require.Equal(t, c.status, got.GetStatus(), got.GetReason())
			require.NoError(t, s.judge(r, got))
			require.Equal(t, 1, s.ran(r.GetExecId()))
			if c.status == sandboxv1.ExecResult_UNCERTAIN {
				require.True(t, got.GetEvidence().GetComplete(), "P5: %v", got.GetEvidence())
				require.Empty(t, processesOf(s.lastSandbox()), "P5")
				s.works()
				require.Greater(t, s.get().GetGeneration(), generation)
			}
			s.Restart()
			s.same()
			s.works()
		})
	}
}

// A receiptd that answers nothing holds up its own session and no other, and nothing is made up meanwhile.
func TestP6AStuckPeerHoldsUpItsOwnSessionOnly(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	s, other := a.session(testkit.Repo(t, owner)), a.session(testkit.Repo(t, owner))
	s.noteSandbox()
	receiptd := named(s.lastSandbox(), "receiptd")
	require.NotEmpty(t, receiptd)
	kill(receiptd, unix.SIGSTOP)
	t.Cleanup(func() { kill(receiptd, unix.SIGCONT) })
	r := s.request("")
	answer := s.start(r)
	s.Until("the intent is there", func() bool { return s.get().GetRunningExecId() == r.GetExecId() && s.known(r.GetExecId()) })
	other.works()
	require.Zero(t, s.ran(r.GetExecId()))
	select {
	case got := <-answer:
		require.Fail(t, "answered while receiptd stood still", "%v", got)
	default:
	}
	kill(receiptd, unix.SIGCONT)
	got := s.awaitAnswer(answer)
	require.Equal(t, sandboxv1.ExecResult_EXITED, got.GetStatus(), got.GetReason())
	require.NoError(t, s.judge(r, got))
	if !long() {
		return
	}
	// Cancelled while it stands still: receiptd can't be asked, so the sandbox ends.
	kill(receiptd, unix.SIGSTOP)
	r = s.request("")
	s.start(r)
	s.Until("the intent is there", func() bool { return s.known(r.GetExecId()) })
	res, err := s.Client.Execs.CancelExec(context.Background(), &sandboxv1.CancelExecRequest{SessionId: s.id, ExecId: r.GetExecId()})
	require.NoError(t, err)
	require.NoError(t, s.judge(r, res.GetResult()))
	require.Empty(t, processesOf(s.lastSandbox()), "P5")
}

// The request of an agent that was killed waits on the old connection while receiptd stands still; the next agent attaches
// under a newer epoch. Whether the old request still starts is a race that receiptd decides; the answer tells which.
func TestP6AStaleAttachThatDeliversLateIsNeverWrong(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	s := a.session(testkit.Repo(t, owner))
	rounds := 3
	if long() {
		rounds = 50
	}
	started := 0
	for range rounds {
		s.works()
		s.noteSandbox()
		receiptd := named(s.lastSandbox(), "receiptd")
		kill(receiptd, unix.SIGSTOP)
		r := s.request("")
		s.start(r)
		s.Until("the intent is there", func() bool { return s.known(r.GetExecId()) })
		s.Kill()
		s.Launch()
		s.Until("the next agent recovers", func() bool { return bytes.Count(read(s.points), []byte("attach.connected\n")) > 0 })
		kill(receiptd, unix.SIGCONT)
		s.Until("it answers", s.agent.Answers)
		got := s.settle(r)
		started += s.ran(r.GetExecId())
		require.Contains(t, []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_NOT_STARTED}, got.GetStatus(), got.GetReason())
		s.same()
		s.passed()
	}
	t.Logf("%d late requests, %d of them still started, 0 violations", rounds, started)
}

func read(path string) []byte {
	b, _ := os.ReadFile(path)
	return b
}

// tmpfs mounts a file system of its own at a folder of the state, before the agent starts.
func tmpfs(t *testing.T, folder, size string) func(state string) {
	return func(state string) {
		dir := filepath.Join(state, folder)
		require.NoError(t, os.MkdirAll(dir, 0o711))
		require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0711,size="+size))
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
}

// filler takes all but some bytes of the file system that a folder is on.
func filler(t *testing.T, dir string, but uint64) string {
	t.Helper()
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	if free := st.Bavail * uint64(st.Bsize); free > but {
		require.NoError(t, unix.Fallocate(int(f.Fd()), 0, 0, int64(free-but)))
	}
	return path
}

// With its disk full the journal takes no intent, so nothing starts; what runs already is answered from its receipt.
func TestP1WithoutRoomForItsIntentNothingStarts(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "", tmpfs(t, "journal", "128m"))
	s := a.session(testkit.Repo(t, owner))
	s.works()
	running, answer := s.begin()
	full := filler(t, filepath.Join(a.State, "journal"), 0)

	s.open(running.GetExecId())
	got := s.awaitAnswer(answer)
	require.Equal(t, sandboxv1.ExecResult_EXITED, got.GetStatus(), got.GetReason())
	require.NoError(t, s.judge(running, got))
	s.same()

	refused := s.request("")
	_, err := s.exec(refused)
	require.Equal(t, connect.CodeUnavailable, codeOf(err), "%v", err)
	require.ErrorContains(t, err, "MiB")
	require.Zero(t, s.ran(refused.GetExecId()), "P1")
	_, err = s.Client.Sessions.ClaimSession(context.Background(), &sandboxv1.ClaimSessionRequest{SessionId: s.id})
	require.Error(t, err, "an epoch that is not on disk is not told")

	require.NoError(t, os.Remove(full))
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.settle(refused).GetStatus(), "the same id may be used: nothing of it was recorded")
	a.Restart()
	s.same()
	s.works()
}

// fsync fails with EIO from the moment on that strace is told; it is the kernel's answer to the real calls of the agent.
func TestP1AFailedSyncStartsNothingAndIsFinal(t *testing.T) {
	t.Parallel()
	testkit.Need(t, testkit.Program("strace"))
	a := newAgent(t, "")
	s := a.session(testkit.Repo(t, owner))
	s.works()
	trace := exec.Command("strace", "-f", "-qq", "-o", "/dev/null", "-p", fmt.Sprint(a.Cmd.Process.Pid),
		"-e", "trace=fsync,fdatasync,sync_file_range", "-e", "inject=fsync,fdatasync,sync_file_range:error=EIO")
	require.NoError(t, trace.Start())
	ended := false
	detach := func() {
		if !ended {
			ended = true
			_ = trace.Process.Signal(unix.SIGTERM)
			_ = trace.Wait()
		}
	}
	t.Cleanup(detach)
	a.Until("strace has every thread", func() bool { return everyThreadTraced(a.Cmd.Process.Pid) })

	refused := s.request("")
	_, err := s.exec(refused)
	require.Error(t, err)
	require.Equal(t, connect.CodeUnavailable, codeOf(err), "%v", err)
	require.Zero(t, s.ran(refused.GetExecId()), "P1")
	detach()
	// What the kernel forgot it does not tell a second time: the journal stays shut although syncs succeed again.
	again := s.request("")
	_, err = s.exec(again)
	require.Equal(t, connect.CodeUnavailable, codeOf(err), "%v", err)
	require.ErrorContains(t, err, "restart the agent")
	require.Zero(t, s.ran(again.GetExecId()), "P1")
	s.same() // reads go on

	a.Restart()
	s.same()
	// The intent may have come to the disk: then nobody knows it any better than that it never ran.
	require.Contains(t, []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_NOT_STARTED}, s.settle(refused).GetStatus())
	s.works()
}

func everyThreadTraced(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, path := range threads {
		if b := read(path); len(b) > 0 && bytes.Contains(b, []byte("TracerPid:\t0\n")) {
			return false
		}
	}
	return len(threads) > 0
}

// Without its receipts folder the agent believes nobody: UNCERTAIN, the sandbox ends, and the next one is refused as long
// as the folder is missing (P14: nothing else runs the command).
func TestP2WithoutTheReceiptsFolderNothingIsAnsweredAsEnded(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "", tmpfs(t, "receipts", "64m"))
	s := a.session(testkit.Repo(t, owner))
	s.works()
	r, answer := s.begin()
	receipts := filepath.Join(a.State, "receipts")
	require.NoError(t, unix.Unmount(receipts, unix.MNT_DETACH))
	s.open(r.GetExecId())
	got := s.awaitAnswer(answer)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, got.GetStatus(), got.GetReason())
	require.NoError(t, s.judge(r, got))
	require.Empty(t, processesOf(s.lastSandbox()), "P5")
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, s.settle(r).GetStatus())

	require.NoError(t, unix.Mount("tmpfs", receipts, "tmpfs", unix.MS_RDONLY, ""))
	t.Cleanup(func() { _ = unix.Unmount(receipts, unix.MNT_DETACH) })
	refused := s.request("")
	_, err := s.exec(refused)
	require.Equal(t, connect.CodeUnavailable, codeOf(err), "P14: %v", err)
	require.ErrorContains(t, err, "read-only")
	require.Zero(t, s.ran(refused.GetExecId()), "P14")
	require.NoError(t, unix.Unmount(receipts, unix.MNT_DETACH))
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.settle(refused).GetStatus())
}

// After a reboot nothing of a sandbox is alive and the boot id is another one. The boot is made another one in the records
// of the agent and of the runtime, while both are dead.
func TestP5AfterARebootTheBootIDIsTheEvidence(t *testing.T) {
	t.Parallel()
	a := newAgent(t, "")
	s := a.session(testkit.Repo(t, owner))
	s.works()
	r, _ := s.begin()
	a.Kill()
	kill(processesOf(s.lastSandbox()), unix.SIGKILL)
	a.Until("all of it is gone", func() bool { return len(processesOf(s.lastSandbox())) == 0 })
	boot := strings.TrimSpace(string(read("/proc/sys/kernel/random/boot_id")))
	const before = "11111111-2222-3333-4444-555555555555"
	earlier := func(b []byte) []byte {
		require.Contains(t, string(b), boot)
		require.True(t, json.Valid(b))
		return bytes.ReplaceAll(b, []byte(boot), []byte(before))
	}
	a.edit("session/"+s.id, earlier)
	edited := 0
	require.NoError(t, filepath.WalkDir(a.State, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || !strings.HasSuffix(path, ".json") || !bytes.Contains(read(path), []byte(boot)) {
			return nil
		}
		edited++
		return os.WriteFile(path, earlier(read(path)), 0o600)
	}))
	require.NotZero(t, edited, "the runtime's own record")
	a.Serve()
	got := s.settle(r)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, got.GetStatus(), got.GetReason())
	evidence := s.get().GetSandbox().GetEvidence()
	require.True(t, evidence.GetComplete(), "%v", evidence)
	require.Equal(t, "boot_id", evidence.GetItems()[0].GetSource(), "%v", evidence)
	s.works()
	s.same()
}
