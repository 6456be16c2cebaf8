package client

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// signer is a sandbox that signs what it is told.
type signer struct {
	t     *testing.T
	key   *receipt.Signer
	dir   string
	store *receipt.Store
}

func newSigner(t *testing.T) *signer {
	t.Helper()
	key, err := receipt.NewSigner()
	require.NoError(t, err)
	dir := t.TempDir()
	store, err := receipt.OpenStore(dir, 1000)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	return &signer{t, key, dir, store}
}

// session is the record that names the sandbox.
func (s *signer) session() *sandboxv1.Session {
	return &sandboxv1.Session{SessionId: "s1", Generation: 3, Sandbox: &sandboxv1.Sandbox{Id: "sb-1", Generation: 3, PublicKey: s.key.Public()}}
}

func (s *signer) pin() Pin { return Pin{"s1", 3, s.key.Public()} }

// result is a true answer to a request; change changes what is signed.
func (s *signer) result(r *sandboxv1.ExecRequest, stdout string, change ...func(*receipt.Predicate)) *sandboxv1.ExecResult {
	s.t.Helper()
	sum := sha256.Sum256([]byte(stdout))
	empty := sha256.Sum256(nil)
	p := &receipt.Predicate{
		SessionID: "s1", SandboxID: "sb-1", Generation: 3, ExecID: r.GetExecId(), Nonce: strings.Repeat("ab", 32),
		RequestDigest: RequestDigest(r), StartedAt: time.Unix(1, 5).UTC(), EndedAt: time.Unix(2, 0).UTC(), Status: receipt.Exited,
		ExitCode: 4, Labels: r.GetLabels(), SealsIntact: true, Boundary: receipt.Boundary{Method: "wait4", Pid1: "exited 0", Cgroup: "empty"},
		Stdout: receipt.Output{Bytes: uint64(len(stdout)), SHA256: hex.EncodeToString(sum[:]), OmittedFrom: uint64(len(stdout))},
		Stderr: receipt.Output{SHA256: hex.EncodeToString(empty[:])},
		Usage:  receipt.Usage{UserCPU: time.Millisecond, MaxRSS: 4096},
	}
	for _, f := range change {
		f(p)
	}
	_, err := s.store.Commit(r.GetExecId(), p, []byte(stdout), nil, s.key)
	require.NoError(s.t, err)
	envelope, err := receipt.Read(s.dir, r.GetExecId())
	require.NoError(s.t, err)
	return &sandboxv1.ExecResult{
		ExecId: r.GetExecId(), SessionId: "s1", SandboxId: "sb-1", Generation: 3, Status: sandboxv1.ExecResult_EXITED, ExitCode: 4,
		Labels: r.GetLabels(), Stdout: []byte(stdout), StdoutText: stdout,
		StdoutInfo: &sandboxv1.OutputInfo{Bytes: p.Stdout.Bytes, Sha256: p.Stdout.SHA256, OmittedFrom: p.Stdout.OmittedFrom},
		StderrInfo: &sandboxv1.OutputInfo{Sha256: p.Stderr.SHA256},
		StartedAt:  timestamppb.New(p.StartedAt), Duration: durationpb.New(p.EndedAt.Sub(p.StartedAt)),
		Usage:   &sandboxv1.Usage{UserCpu: durationpb.New(time.Millisecond), SystemCpu: durationpb.New(0), MaxRssBytes: 4096},
		Receipt: envelope,
	}
}

func TestP2ATrueAnswerVerifiesAndSaysWhatWasSigned(t *testing.T) {
	s := newSigner(t)
	req := request()
	req.ExecId = "e1"
	script, c := serveScript(t, Options{}, turn{result: s.result(req, "hello\n")})
	script.session = s.session()
	res, err := c.Exec(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, RequestDigest(req), res.Verified.RequestDigest)
	require.Equal(t, "wait4", res.Verified.Boundary.Method)
	require.Equal(t, map[string]Pin{"sb-1": s.pin()}, c.Keys().All(), "pinned from the session's record")
}

// An agent, or what stands between it and the caller, that changes one thing of a true answer.
func TestP2AnAnswerThatIsNotItsReceiptsIsRefused(t *testing.T) {
	s := newSigner(t)
	req := request()
	req.ExecId = "e1"
	other := proto.CloneOf(req)
	other.ExecId = "e2"
	good, otherResult := s.result(req, "hello\n"), s.result(other, "hello\n")
	_, err := VerifyResult(good, s.pin(), RequestDigest(req))
	require.NoError(t, err, "the control case")
	for name, change := range map[string]func(*sandboxv1.ExecResult){
		"session":               func(r *sandboxv1.ExecResult) { r.SessionId = "s2" },
		"exec":                  func(r *sandboxv1.ExecResult) { r.ExecId = "e2" },
		"generation":            func(r *sandboxv1.ExecResult) { r.Generation = 4 },
		"sandbox":               func(r *sandboxv1.ExecResult) { r.SandboxId = "sb-2" },
		"status":                func(r *sandboxv1.ExecResult) { r.Status = sandboxv1.ExecResult_SIGNALED },
		"cancelled":             func(r *sandboxv1.ExecResult) { r.Status = sandboxv1.ExecResult_CANCELLED },
		"exit code":             func(r *sandboxv1.ExecResult) { r.ExitCode = 0 },
		"signal":                func(r *sandboxv1.ExecResult) { r.Signal = 9 },
		"oom":                   func(r *sandboxv1.ExecResult) { r.Oom = true },
		"labels":                func(r *sandboxv1.ExecResult) { r.Labels = nil },
		"start":                 func(r *sandboxv1.ExecResult) { r.StartedAt = timestamppb.New(time.Unix(1, 6)) },
		"duration":              func(r *sandboxv1.ExecResult) { r.Duration = durationpb.New(1) },
		"usage":                 func(r *sandboxv1.ExecResult) { r.Usage = nil },
		"output":                func(r *sandboxv1.ExecResult) { r.Stdout = []byte("hellO\n") },
		"output cut short":      func(r *sandboxv1.ExecResult) { r.Stdout = r.Stdout[:2] },
		"text":                  func(r *sandboxv1.ExecResult) { r.StdoutText = "all tests pass" },
		"more output":           func(r *sandboxv1.ExecResult) { r.Stderr = []byte("x") },
		"totals":                func(r *sandboxv1.ExecResult) { r.StdoutInfo.Bytes++ },
		"the hash of all":       func(r *sandboxv1.ExecResult) { r.StdoutInfo.Sha256 = r.StderrInfo.Sha256 },
		"said to be cut":        func(r *sandboxv1.ExecResult) { r.StdoutInfo.Truncated = true },
		"another's receipt":     func(r *sandboxv1.ExecResult) { r.Receipt = otherResult.Receipt },
		"a flipped bit of it":   func(r *sandboxv1.ExecResult) { r.Receipt[len(r.Receipt)/2] ^= 1 },
		"no receipt":            func(r *sandboxv1.ExecResult) { r.Receipt = nil },
		"cancelled, no receipt": func(r *sandboxv1.ExecResult) { r.Receipt, r.Status = nil, sandboxv1.ExecResult_CANCELLED },
		"uncertain with output": func(r *sandboxv1.ExecResult) { r.Receipt, r.Status = nil, sandboxv1.ExecResult_UNCERTAIN },
	} {
		t.Run(name, func(t *testing.T) {
			bad := proto.CloneOf(good)
			change(bad)
			script, c := serveScript(t, Options{}, turn{result: bad})
			script.session = s.session()
			res, err := c.Exec(t.Context(), req)
			require.ErrorIs(t, err, ErrUnverified)
			require.ErrorIs(t, err, ErrUncertain, "something may have run all the same")
			require.Nil(t, res, "what isn't proved is not given")
		})
	}
}

func TestP2AReceiptOfAnotherRequestKeyOrGenerationIsRefused(t *testing.T) {
	s, stranger := newSigner(t), newSigner(t)
	req := request()
	req.ExecId = "e1"
	good := s.result(req, "x")
	for name, change := range map[string]func(*sandboxv1.ExecRequest){
		"command": func(r *sandboxv1.ExecRequest) { r.Command = "make clean" },
		"timeout": func(r *sandboxv1.ExecRequest) { r.TimeoutSeconds = proto.Float64(1.5) },
		"labels":  func(r *sandboxv1.ExecRequest) { r.Labels = map[string]string{"turn": "5"} },
	} {
		asked := proto.CloneOf(req)
		change(asked)
		_, err := VerifyResult(good, s.pin(), RequestDigest(asked))
		require.ErrorIs(t, err, verify.ErrMismatch, name)
	}
	_, err := VerifyResult(stranger.result(req, "x"), s.pin(), "")
	require.ErrorIs(t, err, verify.ErrSignature)
	_, err = VerifyResult(good, Pin{"s1", 4, s.key.Public()}, "")
	require.ErrorIs(t, err, verify.ErrMismatch)
	_, err = VerifyResult(good, Pin{"s2", 3, s.key.Public()}, "")
	require.ErrorIs(t, err, verify.ErrMismatch)
	req.ExecId = "e2"
	_, err = VerifyResult(s.result(req, "x", func(p *receipt.Predicate) { p.Nonce = "" }), s.pin(), "")
	require.ErrorContains(t, err, "nonce")
}

func TestP9AKeyThatWasPinnedStaysWhateverTheAgentSays(t *testing.T) {
	s, forger := newSigner(t), newSigner(t)
	req := request()
	req.ExecId = "e1"
	script, c := serveScript(t, Options{}, turn{result: forger.result(req, "all tests pass")}, turn{result: s.result(req, "1 test fails")})
	script.session = s.session()
	_, err := c.GetSession(t.Context(), "s1")
	require.NoError(t, err)
	script.session = forger.session()
	_, err = c.GetSession(t.Context(), "s1")
	require.ErrorIs(t, err, ErrKeyChanged)
	_, err = c.Exec(t.Context(), req)
	require.ErrorIs(t, err, verify.ErrSignature)
	_, err = c.Exec(t.Context(), req)
	require.NoError(t, err, "the control case")

	again := s.session()
	again.Sandbox.Generation++
	script.session = again
	_, err = c.GetSession(t.Context(), "s1")
	require.ErrorIs(t, err, ErrKeyChanged, "a sandbox has one generation")
}

func TestASandboxWhoseKeyWasNeverSeenIsNotBelieved(t *testing.T) {
	old, now := newSigner(t), newSigner(t)
	req := request()
	req.ExecId = "e1"
	answer := old.result(req, "x")
	script, c := serveScript(t, Options{}, turn{result: answer}, turn{result: answer})
	script.session = now.session()
	script.session.Sandbox.Id = "sb-2"
	_, err := c.Exec(t.Context(), req)
	require.ErrorIs(t, err, ErrUnverified)
	require.ErrorContains(t, err, "sb-1 is not pinned")
	require.NoError(t, c.Keys().Pin("sb-1", old.pin()), "from where the caller had stored it")
	_, err = c.Exec(t.Context(), req)
	require.NoError(t, err)

	require.ErrorIs(t, c.Keys().Pin("sb-3", Pin{"s1", 1, nil}), verify.ErrKey)
	c.keys.forget("s1")
	require.Empty(t, c.Keys().All())
}

func TestTheKeyOfAnEarlierSandboxIsAskedForAndThenPinned(t *testing.T) {
	old, now, forger := newSigner(t), newSigner(t), newSigner(t)
	req := request()
	req.ExecId = "e1"
	answer := old.result(req, "x")
	script, c := serveScript(t, Options{}, turn{result: answer}, turn{result: forger.result(req, "y")}, turn{result: answer})
	script.session = now.session()
	script.session.Sandbox.Id, script.session.Sandbox.Generation = "sb-2", 4
	script.earlier = map[string]*sandboxv1.SandboxKey{"sb-1": {SandboxId: "sb-1", Generation: 3, PublicKey: old.key.Public()}}
	_, err := c.Exec(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, old.pin(), c.Keys().All()["sb-1"])
	script.earlier["sb-1"].PublicKey = forger.key.Public()
	_, err = c.Exec(t.Context(), req)
	require.ErrorIs(t, err, verify.ErrSignature, "it is not asked for again")
	_, err = c.Exec(t.Context(), req)
	require.NoError(t, err)
}

// A receipt of the same request under the same id, which another start had signed, for example of a copy of the node's state.
func TestP2AReceiptOfAnotherStartIsRefused(t *testing.T) {
	s := newSigner(t)
	req := request()
	req.ExecId = "e1"
	res := s.result(req, "x")
	res.Nonce = strings.Repeat("ab", 32)
	_, err := VerifyResult(res, s.pin(), RequestDigest(req))
	require.NoError(t, err, "the control case")
	res.Nonce = strings.Repeat("cd", 32)
	_, err = VerifyResult(res, s.pin(), RequestDigest(req))
	require.ErrorIs(t, err, verify.ErrMismatch)
	require.ErrorContains(t, err, "nonce")
	res.Nonce = ""
	_, err = VerifyResult(res, s.pin(), RequestDigest(req))
	require.NoError(t, err, "an agent that does not say it")
}

func TestP13AStreamThatIsNotWhatWasHashedIsRefused(t *testing.T) {
	s := newSigner(t)
	for i, c := range []struct {
		came string
		ok   bool
	}{{"hello\n", true}, {"hel", true}, {"hellO\n", false}, {"hello\n and more", false}} {
		req := request()
		req.ExecId = "e" + string(rune('0'+i))
		script, cl := serveScript(t, Options{}, turn{chunks: []*sandboxv1.OutputChunk{out(0, c.came)}, result: s.result(req, "hello\n")})
		script.session = s.session()
		var got collect
		res, err := cl.Stream(t.Context(), &sandboxv1.StreamExecRequest{Exec: req}, got.take)
		if c.ok {
			require.NoError(t, err)
			require.Equal(t, "hello\n", got.stdout)
			continue
		}
		require.ErrorIs(t, err, ErrUnverified)
		require.Nil(t, res)
	}
}

func TestACancelledCommandsReceiptIsTakenForCancelledOrUncertain(t *testing.T) {
	s := newSigner(t)
	req := request()
	req.ExecId = "e1"
	res := s.result(req, "x", func(p *receipt.Predicate) { p.Cancelled = true })
	for status, ok := range map[sandboxv1.ExecResult_Status]bool{
		sandboxv1.ExecResult_CANCELLED: true, sandboxv1.ExecResult_UNCERTAIN: true, sandboxv1.ExecResult_EXITED: false, sandboxv1.ExecResult_NOT_STARTED: false,
	} {
		res.Status = status
		_, err := VerifyResult(res, s.pin(), "")
		require.Equal(t, ok, err == nil, "%s: %v", status, err)
	}
}
