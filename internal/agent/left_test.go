package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/hostkernel"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

func TestP3WhatACommandLeftBehindStopsTheSandbox(t *testing.T) {
	good := receipt.Predicate{SealsIntact: true, Boundary: receipt.Boundary{Cgroup: "empty"}}
	require.Empty(t, leftBehind(nil))
	require.Empty(t, leftBehind(&proven{predicate: good}))
	for want, spoil := range map[string]func(*receipt.Predicate){
		"broken seals": func(p *receipt.Predicate) { p.SealsIntact = false },
		"processes in its cgroup that were not in its PID namespace": func(p *receipt.Predicate) { p.Boundary.Cgroup = "populated" },
		"2 sockets that could not be destroyed":                      func(p *receipt.Predicate) { p.Boundary.SocketsLeft = 2 },
	} {
		p := good
		spoil(&p)
		require.Equal(t, want, leftBehind(&proven{predicate: p}))
	}
}

// TestP3AReceiptThatDoesNotKnowTheSocketsIsNoProofUnlessItsRuntimeConcedesThat: receiptd writes such a one wherever the kernel
// refuses to list sockets.
func TestP3AReceiptThatDoesNotKnowTheSocketsIsNoProofUnlessItsRuntimeConcedesThat(t *testing.T) {
	conceded := []runtime.Concession{{Promise: "P3", What: runtime.ConcedesSockets, Why: "its kernel does not say"}}
	for name, c := range map[string]struct {
		left     int
		concedes []runtime.Concession
		status   sandboxv1.ExecResult_Status
	}{
		"none":                            {0, nil, sandboxv1.ExecResult_EXITED},
		"unknown":                         {receipt.SocketsUnknown, nil, sandboxv1.ExecResult_UNCERTAIN},
		"unknown, and conceded":           {receipt.SocketsUnknown, conceded, sandboxv1.ExecResult_EXITED},
		"unknown, and another concession": {receipt.SocketsUnknown, []runtime.Concession{{Promise: "P16", What: runtime.ConcedesSockets}}, sandboxv1.ExecResult_UNCERTAIN},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSession(&Agent{cfg: &config.Config{StateDir: t.TempDir()}, log: testLog()}, sessionRecord{ID: "s", Sandbox: &sandboxRecord{ID: "sb-1", Generation: 1, Concessions: c.concedes}})
			e := &execution{session: s, intent: intentRecord{ExecID: "e1", SessionID: "s", SandboxID: "sb-1", Generation: 1, Nonce: strings.Repeat("ab", 32), RequestDigest: "d"}}
			s.rec.Sandbox.PublicKey = leaveReceipt(t, s.agent.receiptsDir("sb-1"), &e.intent, c.left)

			v := s.fromFolder(e, "")
			require.Equal(t, c.status, outcome(e, v, false, nil).GetStatus(), v.reason)
			finding, p, err := s.look(e)
			event, wait := Decide(finding, Gone)
			require.False(t, wait)
			require.Equal(t, c.status, outcome(e, verdict{event: event, proven: p}, false, nil).GetStatus(), "after a restart too: %v", err)
			_, err = s.unrecorded(&e.intent)
			require.Equal(t, c.status == sandboxv1.ExecResult_EXITED, err == nil, "nor is it answered from the receipt alone: %v", err)

			kept := s.rec.Sandbox.key("s")
			_, err = readProven(s.agent.receiptsDir("sb-1"), &e.intent, kept, "")
			require.Equal(t, c.status == sandboxv1.ExecResult_EXITED, err == nil, "what is kept of an earlier sandbox says it too: %v", err)
		})
	}
}

// TestP3WhatOutlivedItsCommandIsSeenToEndBeforeItsReceiptIsAnAnswer: a process of the sandbox's PID
// namespace, which nothing inside may kill, stands in for one that got out of its command's.
func TestP3WhatOutlivedItsCommandIsSeenToEndBeforeItsReceiptIsAnAnswer(t *testing.T) {
	testkit.Need(t, testkit.Program("nsenter"))
	for name, c := range map[string]struct {
		evidence bool
		status   sandboxv1.ExecResult_Status
		state    sandboxv1.Session_State
	}{
		"with evidence":    {true, sandboxv1.ExecResult_EXITED, sandboxv1.Session_IDLE},
		"without evidence": {false, sandboxv1.ExecResult_UNCERTAIN, sandboxv1.Session_UNCERTAIN},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			set := &atomic.Bool{}
			n.agent.hosts.all["embedded"] = stubborn{n.agent.hosts.all["embedded"], set}
			w := n.session("s").GetWorkspace().GetWorktree()
			running := n.holding("s", "e1", w)
			id := n.agent.sessions["s"].sandboxRecord().Identity
			other := exec.Command("nsenter", "--target", strconv.Itoa(id.Pid), "--pid", "sleep", "600")
			require.NoError(t, other.Start())
			var child int
			require.Eventually(t, func() bool {
				b, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", other.Process.Pid))
				_, scanErr := fmt.Sscan(string(b), &child)
				return err == nil && scanErr == nil
			}, bound, pollEvery)
			intoCgroupsOf(t, child, id.Cgroups, w)
			set.Store(!c.evidence)
			require.NoError(t, os.WriteFile(filepath.Join(w, "go"), nil, 0o644))
			r, err := running.wait()
			require.NoError(t, err)
			require.Equal(t, c.status, r.GetStatus(), r.GetReason())
			x := n.get("s")
			require.Equal(t, c.state, x.GetState())
			require.Contains(t, x.GetReason(), "left processes in its cgroup")
			if !c.evidence {
				require.Contains(t, r.GetReason(), "left processes in its cgroup")
				require.NoError(t, syscall.Kill(child, 0), "it lives: nobody has seen it end")
			}
			set.Store(false)
			require.Eventually(t, func() bool { return n.get("s").GetState() == sandboxv1.Session_IDLE }, bound, pollEvery)
			require.Error(t, other.Wait(), "it was killed")
			again, err := n.agent.Exec(n.ctx(), running.request)
			require.NoError(t, err)
			require.Equal(t, c.status, again.GetStatus(), "the answer stays")
		})
	}
}

// intoCgroupsOf moves a process into the cgroups of the command that runs in a worktree.
func intoCgroupsOf(t *testing.T, pid int, dirs []string, worktree string) {
	t.Helper()
	var inside []int
	for _, p := range (hostkernel.Tree{Dirs: dirs}).Pids() {
		if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p)); err == nil && cwd == worktree {
			inside = append(inside, p)
		}
	}
	require.NotEmpty(t, inside)
	command := strconv.Itoa(slices.Min(inside)) // its children come and go
	moved := 0
	for _, dir := range dirs {
		require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Base(path) != "cgroup.procs" {
				return err
			}
			b, err := os.ReadFile(path)
			if err == nil && slices.Contains(strings.Fields(string(b)), command) {
				moved++
				err = os.WriteFile(path, []byte(strconv.Itoa(pid)), 0)
			}
			return err
		}))
	}
	require.NotZero(t, moved)
}

// leaveReceipt writes an exec's receipt into the folder, and answers with the key that verifies it.
func leaveReceipt(t *testing.T, dir string, in *intentRecord, socketsLeft int) []byte {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o700))
	signer, err := receipt.NewSigner()
	require.NoError(t, err)
	store, err := receipt.OpenStore(dir, 1<<20)
	require.NoError(t, err)
	empty := sha256.Sum256(nil)
	nothing := receipt.Output{SHA256: hex.EncodeToString(empty[:])}
	_, err = store.Commit(in.ExecID, &receipt.Predicate{
		SessionID: in.SessionID, SandboxID: in.SandboxID, Generation: in.Generation, ExecID: in.ExecID, Nonce: in.Nonce, RequestDigest: in.RequestDigest,
		Status: receipt.Exited, Stdout: nothing, Stderr: nothing, SealsIntact: true,
		Boundary: receipt.Boundary{PIDNamespace: 1, Method: "wait4", Pid1: "exited 0", Cgroup: "empty", SocketsLeft: socketsLeft},
	}, nil, nil, signer)
	require.NoError(t, err)
	require.NoError(t, store.Close())
	return signer.Public()
}
