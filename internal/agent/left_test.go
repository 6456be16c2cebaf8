package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
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
