package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/provenance"
)

const (
	// reachTimeout bounds the wait for a sign of life from a runtime, and reachAge how long what came of it counts: with a
	// daemon that hangs, hundreds of sessions don't wait one after the other.
	reachTimeout = 5 * time.Second
	reachAge     = time.Second
	// lookTimeout bounds a look at what a runtime can do, and statusAge how old the answer of GetNodeInfo may be.
	lookTimeout = 10 * time.Second
	statusAge   = time.Minute
)

// hosts are the runtimes that this agent was built with, allowed or not, and what was seen of them last.
type hosts struct {
	all     map[string]runtime.Runtime
	allowed []string // in the operator's order
	first   string   // runtime.default

	mu   sync.Mutex
	seen map[string]*seen
}

// seen is what is known of one runtime. Whoever asks holds its mutex meanwhile, so that the others get that answer.
type seen struct {
	reach  sync.Mutex
	asked  time.Time
	answer error

	// A sandbox that could not be attached to because of its runtime, and why.
	lost time.Time
	why  error

	check   sync.Mutex
	checked time.Time
	verdict error
}

func newHosts(all map[string]runtime.Runtime, c config.Runtime) *hosts {
	return &hosts{all: all, allowed: c.Allowed, first: c.Default, seen: map[string]*seen{}}
}

func (h *hosts) of(name string) *seen {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seen[name] == nil {
		h.seen[name] = &seen{}
	}
	return h.seen[name]
}

// reachable says whether a runtime answers now, or did a moment ago.
func (h *hosts) reachable(ctx context.Context, rt runtime.Runtime) error {
	s := h.of(rt.Name())
	s.reach.Lock()
	defer s.reach.Unlock()
	if time.Since(s.asked) < reachAge {
		return s.answer
	}
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	s.answer = rt.Reachable(ctx)
	s.asked = time.Now()
	return s.answer
}

// lately is why a sandbox of this runtime could not be attached to a moment ago. Whether one can be is not a question of
// reachable alone: some sandboxes are reached without what started them.
func (h *hosts) lately(rt runtime.Runtime) error {
	s := h.of(rt.Name())
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(s.lost) < reachTimeout {
		return s.why
	}
	return nil
}

// note remembers that a sandbox could not be attached to, if its runtime is why.
func (h *hosts) note(rt runtime.Runtime, err error) {
	s := h.of(rt.Name())
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err == nil:
		s.lost = time.Time{}
	case errors.Is(err, runtime.ErrUnreachable):
		s.lost, s.why = time.Now(), err
	}
}

// status is what one runtime can do, seen at most maxAge ago.
func (h *hosts) status(ctx context.Context, rt runtime.Runtime, maxAge time.Duration) *sandboxv1.RuntimeStatus {
	s := h.of(rt.Name())
	s.check.Lock()
	defer s.check.Unlock()
	if s.checked.IsZero() || time.Since(s.checked) > maxAge {
		ctx, cancel := context.WithTimeout(ctx, lookTimeout)
		defer cancel()
		s.verdict = rt.Check(ctx)
		s.checked = time.Now()
	}
	p := &sandboxv1.RuntimeStatus{
		Name: rt.Name(), Isolation: sandboxv1.Isolation(rt.Isolation()), Allowed: slices.Contains(h.allowed, rt.Name()),
		Available: s.verdict == nil, Concessions: concessionsProto(rt.Concessions()), CheckedAt: timestamppb.New(s.checked),
	}
	if s.verdict != nil {
		p.Reason = s.verdict.Error()
	}
	return p
}

// classes are the allowed runtimes' classes of isolation.
func (h *hosts) classes() []hostClass {
	var out []hostClass
	for _, name := range h.allowed {
		out = append(out, hostClass{name, h.all[name].Isolation()})
	}
	return out
}

// hostClass is an allowed runtime and its class.
type hostClass struct {
	name  string
	class runtime.Isolation
}

// chooseRuntime is which runtime a session gets: the one that it names, if that is allowed and isolates enough; without a
// name the default, if that does, else the first that does. Never one that isolates less than the floor. It is pure.
func chooseRuntime(want string, floor runtime.Isolation, first string, allowed []hostClass) (string, error) {
	var names, enough []string
	for _, h := range allowed {
		names = append(names, h.name)
		if h.class.Suffices(floor) {
			enough = append(enough, h.name)
		}
	}
	switch {
	case want != "" && !slices.Contains(names, want):
		return "", invalid("runtime %q is not allowed on this node: use one of %v (runtime.allowed)", want, names)
	case len(enough) == 0:
		return "", fmt.Errorf("%w: min_isolation asks for %s at least, and of this node's runtimes %v (runtime.allowed) none has that: use another node, or have the operator allow one that does",
			ErrPrecondition, floor, describe(allowed))
	case want != "" && !slices.Contains(enough, want):
		return "", fmt.Errorf("%w: runtime %q has less isolation than the %s that min_isolation asks for: use one of %v, or name none", ErrPrecondition, want, floor, enough)
	case want != "":
		return want, nil
	case slices.Contains(enough, first):
		return first, nil
	}
	return enough[0], nil
}

func describe(allowed []hostClass) []string {
	var out []string
	for _, h := range allowed {
		out = append(out, h.name+": "+h.class.String())
	}
	return out
}

// floorOf is the class that a caller asks for.
func floorOf(i sandboxv1.Isolation) (runtime.Isolation, error) {
	if _, known := sandboxv1.Isolation_name[int32(i)]; !known {
		return 0, invalid("min_isolation is %d: use NAMESPACES, SEPARATE_KERNEL or VIRTUAL_MACHINE, or leave it out", i)
	}
	return runtime.Isolation(i), nil // the same numbers: TestTheClassesOfTheAPIAreTheRuntimes
}

// programs are the digests of what goes into each sandbox beside the workspace, as the agent was started with it.
type programs struct{ receiptd, pid1 string }

func digestPrograms(o *Options) (p programs, err error) {
	if p.receiptd, err = provenance.ProgramAt("receiptd", o.Receiptd, ""); err == nil {
		p.pid1, err = provenance.ProgramAt("pid1", o.Pid1, "")
	}
	if err != nil {
		return programs{}, fmt.Errorf("starting the agent: %w", err)
	}
	return p, nil
}

// checkProvenance wants what a runtime says that it made a sandbox of to be what it was told to make it of.
func checkProvenance(p runtime.Provenance, spec *runtime.Spec) error {
	kind := runtime.KindOfRootfs(spec.Rootfs)
	_, pinned, _ := strings.Cut(spec.Rootfs, "@")
	var what, got, want string
	switch {
	case p.Rootfs != spec.Rootfs:
		what, got, want = "root file system", p.Rootfs, spec.Rootfs
	case p.RootfsKind != kind:
		what, got, want = "kind of root file system", string(p.RootfsKind), string(kind)
	case p.ReceiptdSHA256 != spec.ReceiptdSHA256:
		what, got, want = "receiptd", p.ReceiptdSHA256, spec.ReceiptdSHA256
	case p.Pid1SHA256 != spec.Pid1SHA256:
		what, got, want = "pid1", p.Pid1SHA256, spec.Pid1SHA256
	case kind == runtime.RootfsImage && !isDigest(p.RootfsDigest):
		what, got, want = "image's digest", p.RootfsDigest, "sha256:…"
	case kind == runtime.RootfsImage && pinned != "" && p.RootfsDigest != pinned:
		what, got, want = "image's digest", p.RootfsDigest, pinned
	default:
		return nil
	}
	return fmt.Errorf("sandbox %s was made of something else than it was to be: its %s is %q, not %q", spec.SandboxID, what, got, want)
}

// isDigest says whether s is an image's digest: "sha256:" and 64 lower-case hex digits.
func isDigest(s string) bool {
	hex, ok := strings.CutPrefix(s, "sha256:")
	return ok && len(hex) == 64 && madeOf(hex, digits+"abcdef", len(hex))
}

// host is the runtime that has a session's sandbox, or had it: the one that its identity names, allowed or not.
func (s *session) host() (runtime.Runtime, error) {
	s.mu.Lock()
	name := s.rec.Runtime
	if sb := s.rec.Sandbox; sb != nil && sb.Identity.Runtime != "" {
		name = sb.Identity.Runtime
	}
	s.mu.Unlock()
	rt := s.agent.hosts.all[name]
	if rt == nil {
		return nil, fmt.Errorf("runtime %q of session %s is not part of this agent: start the version that had it", name, s.id)
	}
	return rt, nil
}

// nextHost is the runtime that the session's next sandbox is made by, if it still may be: nothing is made by another one,
// nor by one that isolates less than the session was promised (P14).
func (s *session) nextHost() (runtime.Runtime, error) {
	s.mu.Lock()
	name, floor := s.rec.Runtime, s.rec.MinIsolation
	s.mu.Unlock()
	h := s.agent.hosts
	rt := h.all[name]
	switch {
	case rt == nil || !slices.Contains(h.allowed, name):
		return nil, fmt.Errorf("%w: runtime %q of session %s is not one of %v any more (runtime.allowed): have it allowed again, or delete the session and create another one on its worktree",
			ErrPrecondition, name, s.id, h.allowed)
	case !rt.Isolation().Suffices(floor):
		return nil, fmt.Errorf("%w: runtime %q has %s, and session %s was promised %s at least", ErrPrecondition, name, rt.Isolation(), s.id, floor)
	}
	return rt, nil
}

// inUse are the runtimes that have to do with this node: the allowed ones, and those that may have a sandbox of a session.
func (a *Agent) inUse() []runtime.Runtime {
	names := map[string]bool{}
	for _, name := range a.hosts.allowed {
		names[name] = true
	}
	a.mu.Lock()
	sessions := a.all()
	a.mu.Unlock()
	for _, s := range sessions {
		if !s.state().HasSandbox() {
			continue
		}
		if rt, err := s.host(); err == nil {
			names[rt.Name()] = true
		}
	}
	var out []runtime.Runtime
	for _, name := range slices.Sorted(maps.Keys(names)) {
		out = append(out, a.hosts.all[name])
	}
	return out
}

// runtimes are the states of the runtimes in use, each seen at most maxAge ago, the default first.
func (a *Agent) runtimes(ctx context.Context, maxAge time.Duration) []*sandboxv1.RuntimeStatus {
	list := a.inUse()
	slices.SortStableFunc(list, func(x, y runtime.Runtime) int { return a.hosts.rank(x.Name()) - a.hosts.rank(y.Name()) })
	out := make([]*sandboxv1.RuntimeStatus, len(list))
	var wg sync.WaitGroup
	for i, rt := range list {
		wg.Go(func() { out[i] = a.hosts.status(ctx, rt, maxAge) })
	}
	wg.Wait()
	return out
}

// rank orders runtimes as an operator thinks of them: the default, the other allowed ones, the rest.
func (h *hosts) rank(name string) int {
	if name == h.first {
		return -1
	}
	if i := slices.Index(h.allowed, name); i >= 0 {
		return i
	}
	return len(h.allowed)
}

// CheckNode says what this node has of what the promises stand on, and of each runtime in use whether it can host a sandbox
// now; of what is missing, what an operator can do. It makes no sandbox.
func (a *Agent) CheckNode(ctx context.Context, r *sandboxv1.CheckNodeRequest) (*sandboxv1.CheckNodeResponse, error) {
	needs, err := nodecheck.NeedsOf(a.cfg, r.GetRuntimes())
	if err != nil {
		return nil, invalid("%v", err)
	}
	resp := nodecheck.Check(ctx, needs, nodecheck.Everything).Proto()
	resp.Runtimes = a.runtimes(ctx, 0)
	for _, r := range resp.GetRuntimes() {
		if r.GetAllowed() {
			nodecheck.Add(resp, checkOf(r))
		}
	}
	for _, c := range a.networkChecks(ctx) {
		nodecheck.Add(resp, c)
	}
	return resp, nil
}

func checkOf(r *sandboxv1.RuntimeStatus) *sandboxv1.NodeCheck {
	c := &sandboxv1.NodeCheck{
		Feature: "runtime " + r.GetName(), Outcome: sandboxv1.CheckOutcome_CHECK_YES, Verdict: sandboxv1.CheckVerdict_CHECK_OK,
		Purpose: "hosts sandboxes, isolation: " + runtime.Isolation(r.GetIsolation()).String(),
	}
	c.Detail = c.Purpose
	if !r.GetAvailable() {
		c.Outcome, c.Verdict = sandboxv1.CheckOutcome_CHECK_NO, sandboxv1.CheckVerdict_CHECK_MISSING
		c.Detail, c.Remedy = "it can't host a sandbox now", r.GetReason()
	}
	return c
}

func concessionsProto(list []runtime.Concession) []*sandboxv1.Concession {
	var out []*sandboxv1.Concession
	for _, c := range list {
		out = append(out, &sandboxv1.Concession{Promise: c.Promise, What: c.What, Why: c.Why})
	}
	return out
}

func provenanceProto(p runtime.Provenance) *sandboxv1.Provenance {
	if p == (runtime.Provenance{}) {
		return nil
	}
	return &sandboxv1.Provenance{
		Rootfs: p.Rootfs, RootfsKind: string(p.RootfsKind), RootfsDigest: p.RootfsDigest, ReceiptdSha256: p.ReceiptdSHA256, Pid1Sha256: p.Pid1SHA256,
	}
}
