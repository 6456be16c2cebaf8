package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

// severed is the real runtime behind a daemon that, while down is set, does not answer. Its sandboxes go on meanwhile.
type severed struct {
	runtime.Runtime
	down *atomic.Bool
}

func (r severed) answer(what string) error {
	if r.down.Load() {
		return fmt.Errorf("%s: %w: its socket refuses connections: start the daemon", what, runtime.ErrUnreachable)
	}
	return nil
}

func (r severed) Reachable(ctx context.Context) error {
	return cmpErr(r.answer("asking for a sign of life"), r.Runtime.Reachable(ctx))
}

func (r severed) Check(ctx context.Context) error {
	if err := r.answer("checking"); err != nil {
		return err
	}
	return r.Runtime.Check(ctx)
}

func (r severed) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	if err := r.answer("creating"); err != nil {
		return nil, err
	}
	return r.Runtime.Create(ctx, spec)
}

func (r severed) Load(ctx context.Context, id runtime.Identity) (runtime.Sandbox, error) {
	if err := r.answer("loading"); err != nil {
		return nil, err
	}
	return r.Runtime.Load(ctx, id)
}

func (r severed) Remove(ctx context.Context, id runtime.Identity) (runtime.Evidence, error) {
	if err := r.answer("removing"); err != nil {
		return runtime.Evidence{}, fmt.Errorf("%w: %w", runtime.ErrNoEvidence, err)
	}
	return r.Runtime.Remove(ctx, id)
}

func (r severed) List(ctx context.Context) ([]string, error) {
	if err := r.answer("listing"); err != nil {
		return nil, err
	}
	return r.Runtime.List(ctx)
}

// classed is the real runtime under another class of isolation.
type classed struct {
	runtime.Runtime
	class    runtime.Isolation
	conceded []runtime.Concession
}

func (r classed) Isolation() runtime.Isolation      { return r.class }
func (r classed) Concessions() []runtime.Concession { return r.conceded }

// bothAllowed is a node with two runtimes.
func bothAllowed(c *config.Config) { c.Runtime.Allowed = []string{"embedded", "runc"} }

// on makes a session, as the request is changed.
func (n *node) on(id string, change func(*sandboxv1.CreateSessionRequest)) (*sandboxv1.Session, error) {
	n.t.Helper()
	repo := testkit.Repo(n.t, owner)
	r := &sandboxv1.CreateSessionRequest{
		SessionId: id,
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt-"+id), Branch: "work"},
	}
	change(r)
	return n.agent.CreateSession(n.ctx(), r)
}

func onRunc(r *sandboxv1.CreateSessionRequest) { r.Runtime = "runc" }

func (n *node) mustOn(id string, change func(*sandboxv1.CreateSessionRequest)) *sandboxv1.Session {
	n.t.Helper()
	s, err := n.on(id, change)
	require.NoError(n.t, err)
	return s
}

// restart is another agent on the same state; between may change what it starts with.
func (n *node) restart(between func()) {
	n.t.Helper()
	require.NoError(n.t, n.agent.Close())
	between()
	n.start()
}

func TestSessionsOfTwoRuntimesLiveBesideEachOtherAndAreFoundAgain(t *testing.T) {
	n := newNode(t, bothAllowed)
	first, second := n.session("first"), n.mustOn("second", onRunc)
	require.Equal(t, "embedded", first.GetSandbox().GetRuntime())
	require.Equal(t, "runc", second.GetSandbox().GetRuntime())
	require.Equal(t, "runc", second.GetRuntime())
	require.Equal(t, sandboxv1.Isolation_NAMESPACES, second.GetSandbox().GetIsolation())
	n.restart(func() {})
	for _, s := range []*sandboxv1.Session{first, second} {
		require.Equal(t, "hi\n", n.exec(s.GetSessionId(), "e1", "echo hi").GetStdoutText())
		again := n.get(s.GetSessionId())
		require.Equal(t, s.GetSandbox().GetId(), again.GetSandbox().GetId(), "the same sandbox")
		_, evidence, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: s.GetSessionId()})
		require.NoError(t, err)
		require.True(t, evidence.GetComplete())
		require.Equal(t, s.GetRuntime(), evidence.GetRuntime(), "the evidence is that of the runtime that had it")
	}
}

func TestP14ARuntimeThatIsDownStopsNobodyElseAndItsSessionsSayWhy(t *testing.T) {
	n := newNode(t, bothAllowed)
	down := &atomic.Bool{}
	n.wrap = func(all map[string]runtime.Runtime) { all["runc"] = severed{all["runc"], down} }
	n.restart(func() { down.Store(true) })

	_, err := n.on("refused", onRunc)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, runtime.ErrUnreachable)
	require.ErrorContains(t, err, "start the daemon")
	_, err = n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "refused"})
	require.ErrorIs(t, err, ErrNotFound, "nothing was asked for, so nothing is left to be sure of")
	n.session("other")
	require.Equal(t, "hi\n", n.exec("other", "e1", "echo hi").GetStdoutText())

	status := map[string]*sandboxv1.RuntimeStatus{}
	checks := map[string]sandboxv1.CheckOutcome{}
	resp, err := n.agent.CheckNode(n.ctx(), &sandboxv1.CheckNodeRequest{})
	require.NoError(t, err)
	for _, r := range resp.GetRuntimes() {
		status[r.GetName()] = r
	}
	for _, c := range resp.GetChecks() {
		if strings.HasPrefix(c.GetFeature(), "runtime ") {
			checks[c.GetFeature()] = c.GetOutcome()
		}
	}
	require.Equal(t, sandboxv1.CheckVerdict_CHECK_MISSING, resp.GetVerdict())
	_, err = n.agent.CheckNode(n.ctx(), &sandboxv1.CheckNodeRequest{Runtimes: []string{"docker"}})
	require.ErrorContains(t, err, "embedded, runc, gvisor, kata")
	require.True(t, status["embedded"].GetAvailable(), status["embedded"].GetReason())
	require.False(t, status["runc"].GetAvailable())
	require.True(t, status["runc"].GetAllowed())
	require.Contains(t, status["runc"].GetReason(), "start the daemon")
	require.Equal(t, map[string]sandboxv1.CheckOutcome{"runtime embedded": sandboxv1.CheckOutcome_CHECK_YES, "runtime runc": sandboxv1.CheckOutcome_CHECK_NO}, checks)

	down.Store(false)
	require.Eventually(t, func() bool {
		_, err := n.on("served", onRunc)
		return err == nil
	}, bound, reachAge)
	require.Equal(t, "hi\n", n.exec("served", "e1", "echo hi").GetStdoutText())
	resp, err = n.agent.CheckNode(n.ctx(), &sandboxv1.CheckNodeRequest{})
	require.NoError(t, err)
	require.True(t, resp.GetRuntimes()[1].GetAvailable())
}

func TestP5ASandboxWhoseRuntimeIsDownIsNotDeclaredGoneAndIsFoundAgain(t *testing.T) {
	n := newNode(t, bothAllowed)
	down := &atomic.Bool{}
	n.wrap = func(all map[string]runtime.Runtime) { all["runc"] = severed{all["runc"], down} }
	n.restart(func() {})
	s := n.mustOn("away", onRunc)
	n.exec("away", "e1", "echo kept >/tmp/mark")
	n.restart(func() { down.Store(true) })

	require.Equal(t, "earlier\n", n.exec(n.session("here").GetSessionId(), "e1", "echo earlier").GetStdoutText(), "the other runtime's sessions don't wait")
	away := n.get("away")
	require.Equal(t, sandboxv1.Session_READY, away.GetState())
	require.Contains(t, away.GetReason(), "start the daemon")
	_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "away", ExecId: "e2", Command: "cat /tmp/mark"})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "start the daemon")
	require.EqualValues(t, sandboxv1.ExecResult_EXITED, n.exec("away", "e1", "echo kept >/tmp/mark").GetStatus(), "what is known is answered")

	down.Store(false)
	require.Eventually(t, func() bool {
		r, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "away", ExecId: "e2", Command: "cat /tmp/mark", Text: true})
		if err != nil {
			require.ErrorIs(t, err, ErrUnavailable)
			return false
		}
		require.Equal(t, "kept\n", r.GetStdoutText())
		return true
	}, bound, 100*time.Millisecond)
	again := n.get("away")
	require.Equal(t, s.GetSandbox().GetId(), again.GetSandbox().GetId())
	require.Empty(t, again.GetReason())
}

func TestP6ACommandThatRunsWhileItsRuntimeIsDownIsAnsweredOnceItIsBack(t *testing.T) {
	n := newNode(t, bothAllowed)
	down := &atomic.Bool{}
	n.wrap = func(all map[string]runtime.Runtime) { all["runc"] = severed{all["runc"], down} }
	n.restart(func() {})
	s := n.mustOn("busy", onRunc)
	const command = "touch begun; echo begun; while [ ! -e go ]; do sleep 0.05; done; echo done"
	request := &sandboxv1.ExecRequest{SessionId: "busy", ExecId: "e1", Command: command, Text: true}
	go func() { _, _ = n.agent.Exec(n.ctx(), request) }()
	awaitBegun(t, s)
	n.restart(func() { down.Store(true) })

	require.Equal(t, sandboxv1.Session_EXECUTING, n.get("busy").GetState(), "it may run")
	_, err := n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "busy", Args: []string{"status"}})
	require.ErrorIs(t, err, ErrPrecondition, "no trusted Git beside a command that may run")
	answer := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, err := n.agent.Exec(n.ctx(), request)
		if err == nil {
			answer <- r
		}
		close(answer)
	}()
	require.NoError(t, os.WriteFile(filepath.Join(s.GetWorkspace().GetWorktree(), "go"), nil, 0o644))
	down.Store(false)
	r := <-answer
	require.NotNil(t, r, "the same request waited for its answer")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	require.Equal(t, "begun\ndone\n", r.GetStdoutText())
	require.Equal(t, "next\n", n.exec("busy", "e2", "echo next").GetStdoutText())
	require.Equal(t, s.GetSandbox().GetId(), n.get("busy").GetSandbox().GetId(), "the command was not lost, nor its sandbox")
}

func TestP5RetiringWhileTheRuntimeIsDownKeepsTheWorkspaceUntilThereIsEvidence(t *testing.T) {
	n := newNode(t, bothAllowed)
	down := &atomic.Bool{}
	n.wrap = func(all map[string]runtime.Runtime) { all["runc"] = severed{all["runc"], down} }
	n.restart(func() {})
	s := n.mustOn("reserved", onRunc)
	request := &sandboxv1.ExecRequest{SessionId: "reserved", ExecId: "e1", Command: "touch begun; sleep 600"}
	go func() { _, _ = n.agent.Exec(n.ctx(), request) }()
	awaitBegun(t, s)
	n.restart(func() { down.Store(true) })

	_, _, err := n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "reserved"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.Equal(t, sandboxv1.Session_UNCERTAIN, n.get("reserved").GetState())
	r, err := n.agent.Exec(n.ctx(), request)
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_UNCERTAIN, r.GetStatus(), "the command that may run is not waited for any more")
	require.Nil(t, r.GetEvidence())

	down.Store(false)
	require.Eventually(t, func() bool { return n.get("reserved").GetState() == sandboxv1.Session_IDLE }, bound, pollEvery)
	require.True(t, n.get("reserved").GetSandbox().GetEvidence().GetComplete())
}

func TestARuntimeThatIsNotAllowedAnyMoreOnlyEndsWhatItHas(t *testing.T) {
	n := newNode(t, bothAllowed)
	n.mustOn("old", onRunc)
	n.exec("old", "e1", "true")
	n.restart(func() { n.cfg.Runtime.Allowed = []string{"embedded"} })
	require.Eventually(t, func() bool { return n.get("old").GetState() == sandboxv1.Session_IDLE }, bound, pollEvery)
	sb := n.get("old").GetSandbox()
	require.True(t, sb.GetEvidence().GetComplete())
	require.Equal(t, "runc", sb.GetEvidence().GetRuntime())
	require.Equal(t, sandboxv1.ExecResult_EXITED, n.exec("old", "e1", "true").GetStatus(), "what is known is answered")
	_, err := n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "old", ExecId: "e2", Command: "true"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "runtime.allowed")
	_, err = n.on("new", onRunc)
	require.ErrorContains(t, err, "runtime.allowed")
	_, err = n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "old"})
	require.NoError(t, err)
}

func TestP14ASessionKeepsItsFloorWhenItsRuntimeComesToIsolateLess(t *testing.T) {
	n := newNode(t, bothAllowed)
	class := runtime.SeparateKernel
	conceded := []runtime.Concession{{Promise: "P16", What: "the peak of a command's memory is known", Why: "its kernel does not count it"}}
	n.wrap = func(all map[string]runtime.Runtime) { all["runc"] = classed{all["runc"], class, conceded} }
	n.restart(func() {})
	s := n.mustOn("floored", func(r *sandboxv1.CreateSessionRequest) { r.MinIsolation = sandboxv1.Isolation_SEPARATE_KERNEL })
	require.Equal(t, "runc", s.GetRuntime(), "the default, embedded, has less")
	require.Equal(t, sandboxv1.Isolation_SEPARATE_KERNEL, s.GetMinIsolation())
	require.Equal(t, sandboxv1.Isolation_SEPARATE_KERNEL, s.GetSandbox().GetIsolation())
	require.Len(t, s.GetSandbox().GetConcessions(), 1)
	require.Equal(t, "its kernel does not count it", s.GetSandbox().GetConcessions()[0].GetWhy())
	_, err := n.on("less", func(r *sandboxv1.CreateSessionRequest) {
		r.Runtime, r.MinIsolation = "embedded", sandboxv1.Isolation_SEPARATE_KERNEL
	})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "[runc]")

	n.exec("floored", "e1", "true")
	n.restart(func() { class = runtime.Namespaces })
	require.Eventually(t, func() bool { return n.get("floored").GetState() == sandboxv1.Session_IDLE }, bound, pollEvery)
	_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "floored", ExecId: "e2", Command: "true"})
	require.ErrorIs(t, err, ErrPrecondition)
	require.ErrorContains(t, err, "separate-kernel")
	require.Equal(t, sandboxv1.Isolation_SEPARATE_KERNEL, n.get("floored").GetSandbox().GetIsolation(), "what the last one had")
}

func sha256Of(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func TestP2TheSessionAndEachReceiptSayWhatTheSandboxWasMadeOf(t *testing.T) {
	n := newNode(t)
	s := n.session("made")
	p := s.GetSandbox().GetProvenance()
	require.Equal(t, "host", p.GetRootfs())
	require.Equal(t, "host", p.GetRootfsKind())
	require.Empty(t, p.GetRootfsDigest(), "nobody hashed the node's files")
	require.Equal(t, sha256Of(t, n.agent.opts.Receiptd), p.GetReceiptdSha256())
	require.Equal(t, sha256Of(t, n.agent.opts.Pid1), p.GetPid1Sha256())
	want := receipt.Provenance{Rootfs: "host", RootfsKind: "host", ReceiptdSHA256: p.GetReceiptdSha256(), Pid1SHA256: p.GetPid1Sha256()}

	n.exec("made", "e1", "true")
	n.restart(func() {})
	r := n.exec("made", "e2", "true")
	read, err := verify.Envelope(r.GetReceipt(), s.GetSandbox().GetPublicKey())
	require.NoError(t, err)
	require.Equal(t, want, read.Provenance, "also after the agent's restart")
	require.Equal(t, p.GetPid1Sha256(), n.get("made").GetSandbox().GetProvenance().GetPid1Sha256())

	known := n.agent.sessions["made"].sandboxRecord().key("made")
	in := intentOf(t, n, "made", "e1")
	_, err = readProven(n.agent.receiptsDir(s.GetSandbox().GetId()), in, known, "")
	require.NoError(t, err)
	for name, change := range map[string]func(*runtime.Provenance){
		"of another pid1":                func(p *runtime.Provenance) { p.Pid1SHA256 = "00" },
		"of before there was provenance": func(p *runtime.Provenance) { *p = runtime.Provenance{} },
	} {
		other := *known
		change(&other.Provenance)
		_, err = readProven(n.agent.receiptsDir(s.GetSandbox().GetId()), in, &other, "")
		require.ErrorIs(t, err, verify.ErrMismatch, name)
	}
	_, _, err = n.agent.RetireSandbox(n.ctx(), &sandboxv1.RetireSandboxRequest{SessionId: "made"})
	require.NoError(t, err)
	n.exec("made", "e3", "true")
	require.Equal(t, sandboxv1.ExecResult_EXITED, n.exec("made", "e1", "true").GetStatus(), "an earlier sandbox's receipt is compared with what is recorded of that one")
}

func TestP9AReceiptdThatWasSwappedUnderTheAgentStartsNoSandbox(t *testing.T) {
	n := newNode(t)
	dir := testkit.StateDir(t)
	receiptd := filepath.Join(dir, "receiptd")
	copyProgram(t, n.agent.opts.Receiptd, receiptd)
	require.NoError(t, n.agent.Close())
	var err error
	n.agent, err = newAgent(n.cfg, n.parent, receiptd, n.agent.opts.Pid1)
	require.NoError(t, err)
	n.session("control")

	whole, err := os.ReadFile(receiptd)
	require.NoError(t, err)
	// It would still run: what is behind an ELF file's last section is nobody's.
	require.NoError(t, os.WriteFile(receiptd+".new", append(whole, "swapped"...), 0o755))
	require.NoError(t, os.Rename(receiptd+".new", receiptd))
	_, err = n.on("swapped", func(*sandboxv1.CreateSessionRequest) {})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, runtime.ErrSwapped)
	for _, says := range []string{"receiptd", receiptd, "restart the agent"} {
		require.ErrorContains(t, err, says)
	}
	_, err = n.agent.GetSession(n.ctx(), &sandboxv1.GetSessionRequest{SessionId: "swapped"})
	require.ErrorIs(t, err, ErrNotFound)
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, b, 0o755))
}

// awaitBegun waits for the file that the session's command begins with.
func awaitBegun(t *testing.T, s *sandboxv1.Session) {
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(s.GetWorkspace().GetWorktree(), "begun"))
		return err == nil
	}, bound, pollEvery)
}

// gated is a runtime that can be reached again, and takes its time to find a sandbox.
type gated struct {
	severed
	inside, gate chan struct{}
}

func (r gated) Load(ctx context.Context, id runtime.Identity) (runtime.Sandbox, error) {
	if !r.down.Load() {
		select {
		case r.inside <- struct{}{}:
		default:
		}
		<-r.gate
	}
	return r.severed.Load(ctx, id)
}

func TestP12TrustedGitNeverRunsBesideACommandThatIsTakenBackAfterItsRuntimeWasAway(t *testing.T) {
	n := newNode(t, bothAllowed)
	s := n.mustOn("busy", onRunc)
	request := &sandboxv1.ExecRequest{SessionId: "busy", ExecId: "e1", Command: "touch begun; while [ ! -e go ]; do sleep 0.05; done"}
	go func() { _, _ = n.agent.Exec(n.ctx(), request) }()
	awaitBegun(t, s)
	down := &atomic.Bool{}
	g := gated{inside: make(chan struct{}, 1), gate: make(chan struct{})}
	n.wrap = func(all map[string]runtime.Runtime) {
		g.severed = severed{all["runc"], down}
		all["runc"] = g
	}
	n.restart(func() { down.Store(true) })
	_, err := n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "busy", Args: []string{"status"}})
	require.ErrorIs(t, err, ErrPrecondition, "a command may run")
	down.Store(false)
	<-g.inside
	file := filepath.Join(s.GetWorkspace().GetWorktree(), "go")
	type answer struct{ err, beside error }
	got := make(chan answer, 1)
	go func() {
		var a answer
		_, a.err = n.agent.Git(n.ctx(), &sandboxv1.GitRequest{SessionId: "busy", Args: []string{"status"}})
		_, a.beside = os.Stat(file)
		got <- a
	}()
	ss := n.agent.sessions["busy"]
	require.Eventually(t, func() bool {
		ss.mu.Lock()
		defer ss.mu.Unlock()
		return len(ss.urgent) > 0
	}, bound, pollEvery, "Git waits for its turn")
	close(g.gate)
	require.Eventually(t, func() bool { return n.get("busy").GetRunningExecId() == "e1" || len(got) > 0 }, bound, pollEvery)
	require.Empty(t, got, "the command still runs")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	r, err := n.agent.Exec(n.ctx(), request)
	require.NoError(t, err)
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r.GetReason())
	a := <-got
	require.NoError(t, a.err)
	require.NoError(t, a.beside, "Git ran before the command could end")
}
