package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const (
	shortHistories = 300
	longHistories  = 10000
	// shortBound ends the short run's histories: a slow machine runs fewer of them, but at least leastHistories.
	shortBound     = 20 * time.Second
	leastHistories = 50
	// toEnd is what the last histories and the cleaning up may take before the test binary's -timeout.
	toEnd = 2 * time.Minute
	// progressEvery is after how many histories the counts are told.
	progressEvery = 250
	// players are agents beside each other, each with histories of its own.
	players  = 3
	maxSteps = 12
)

// step is one thing that some client, or misfortune, does. which picks among the execs that there are.
type step struct {
	kind  string
	which int
	fence int // 0: none; 1: the current epoch; 2: the current generation; 3: an old epoch; 4: an old generation
}

func (s step) String() string { return fmt.Sprintf("%s(%d,%d)", s.kind, s.which, s.fence) }

// kinds as often as they are to come.
var kinds = func() (list []string) {
	for kind, weight := range map[string]int{
		"exec": 24, "begin": 10, "open": 16, "again": 16, "other": 8, "cancel": 3, "claim": 6, "get": 6, "list": 4,
		"retire": 1, "delete": 1, "kill agent": 2, "kill receiptd": 1, "kill pid1": 1,
	} {
		for range weight {
			list = append(list, kind)
		}
	}
	slices.Sort(list)
	return list
}()

func steps() *rapid.Generator[[]step] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) step {
		return step{
			kind: pick(t, "kind", kinds), which: rapid.IntRange(0, 5).Draw(t, "which"),
			fence: pick(t, "fence", []int{0, 0, 0, 0, 1, 1, 2, 2, 3, 4}),
		}
	}), 1, maxSteps)
}

// pick draws evenly: rapid itself prefers small numbers.
func pick[T any](t *rapid.T, label string, from []T) T {
	n := rapid.Uint32().Draw(t, label)
	return from[n*2654435761>>12%uint32(len(from))]
}

// The reference model: what may have happened to an exec, as far as its client and whoever broke things knows.
type tracked struct {
	request *sandboxv1.ExecRequest
	stale   bool // it can't start
	// outdated: the session was claimed while it waited.
	outdated bool
	gated    bool // it ends by itself only once its gate is open
	opened   bool
	answer   chan reply // of the call that is under way; nil when none is
	settled  bool
	never    bool // it was refused: nothing of it is recorded

	cancelled, agentKilled, receiptdKilled, pid1Killed, retired, deleted bool
}

type reply struct {
	result *sandboxv1.ExecResult
	err    error
}

// allows says whether an answer is one that the history explains.
func (x *tracked) allows(r *sandboxv1.ExecResult) error {
	ok := false
	switch r.GetStatus() {
	case sandboxv1.ExecResult_EXITED:
		ok = !x.gated || x.opened
	case sandboxv1.ExecResult_CANCELLED:
		ok = x.cancelled || x.retired || x.deleted
	case sandboxv1.ExecResult_NOT_STARTED:
		ok = x.cancelled || x.retired || x.deleted || x.agentKilled || x.receiptdKilled || x.pid1Killed
	case sandboxv1.ExecResult_KILLED:
		ok = x.pid1Killed
	case sandboxv1.ExecResult_UNCERTAIN:
		ok = x.receiptdKilled
	default:
	}
	if x.stale {
		return fmt.Errorf("P8: exec %s had an old epoch or generation, and is %s", x.request.GetExecId(), r.GetStatus())
	}
	if !ok {
		return fmt.Errorf("nothing that happened explains that exec %s is %s (%s)", x.request.GetExecId(), r.GetStatus(), r.GetReason())
	}
	return nil
}

// refused says whether a refusal is one that the history explains; nothing may have run then.
func (x *tracked) refused(s *session, err error) error {
	code, ok := codeOf(err), false
	switch code {
	case connect.CodeFailedPrecondition:
		ok = x.stale || x.outdated || x.request.GetGeneration() != 0
	case connect.CodeNotFound:
		ok = x.deleted
	case connect.CodeUnavailable:
		ok = x.receiptdKilled
	default:
	}
	if !ok {
		return fmt.Errorf("nothing that happened explains that exec %s was refused: %w", x.request.GetExecId(), err)
	}
	if n := s.ran(x.request.GetExecId()); n != 0 && !x.deleted {
		return fmt.Errorf("P8: exec %s was refused (%w) and ran %d times", x.request.GetExecId(), err, n)
	}
	return nil
}

// player has an agent and a session on which histories are played, one after the other.
type player struct {
	*agent
	repo string
	s    *session

	epoch, generation uint64
	execs             []*tracked
	// nextMeets is what the next exec may meet of what was killed, nil for nothing.
	nextMeets func(*tracked)
}

// counts are of all players.
type counts struct{ histories, steps, crashes, execs atomic.Int64 }

var played counts

func (c *counts) String() string {
	return fmt.Sprintf("%d histories, %d steps, %d execs, %d crashes injected",
		c.histories.Load(), c.steps.Load(), c.execs.Load(), c.crashes.Load())
}

// lastCall is done when no further history is to begin: the binary's -timeout is near, or somebody interrupted the test. So a
// run that does not come to its end still cleans up, and tells its counts.
func lastCall(t *testing.T) context.Context {
	t.Helper()
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt)
	t.Cleanup(stop)
	if end, ok := t.Deadline(); ok {
		ctx, stop = context.WithDeadline(ctx, end.Add(-toEnd))
		t.Cleanup(stop)
	}
	return ctx
}

// TestP6RandomHistories plays random histories of calls by several clients with crashes of the agent, receiptd and pid1 in
// between against the reference model. A failure prints the shortest history that rapid finds.
func TestP6RandomHistories(t *testing.T) {
	t.Parallel()
	needAgent(t)
	total, bound := shortHistories, shortBound
	if long() {
		total, bound = longHistories, 0
	}
	if n, err := strconv.Atoi(os.Getenv("SANDBOX_TEST_HISTORIES")); err == nil {
		total, bound = n, 0
	}
	require.NoError(t, flag.Set("rapid.checks", strconv.Itoa((total+players-1)/players)))
	require.NoError(t, flag.Set("rapid.nofailfile", "true"))
	end := lastCall(t)
	t.Run("players", func(t *testing.T) {
		for n := range players {
			t.Run(strconv.Itoa(n), func(t *testing.T) {
				t.Parallel()
				p := &player{agent: newAgent(t, ""), repo: testkit.Repo(t, owner)}
				begun, failed := time.Now(), false
				rapid.Check(t, func(rt *rapid.T) {
					list := steps().Draw(rt, "history")
					over := bound > 0 && time.Since(begun) > bound && enough(total)
					if !failed && (over || end.Err() != nil) {
						return
					}
					if err := p.play(list, rt.Logf); err != nil {
						failed = true
						p.s = nil // the next history begins on a session of its own
						rt.Fatalf("%v", err)
					}
				})
			})
		}
	})
	violations := 0
	if t.Failed() {
		violations = 1 // rapid ends at the first
	}
	t.Logf("%v, %d violations", &played, violations)
	if done := played.histories.Load(); bound == 0 && done < int64(total) && violations == 0 {
		t.Logf("ended before its time: %d of %d histories", done, total)
	}
	if violations == 0 {
		require.True(t, enough(total), "too little was played to say anything: give the test more time (go test -timeout)")
	}
}

// enough says whether so much was played that it says something.
func enough(total int) bool {
	return played.histories.Load() >= min(leastHistories, int64(total)) && played.crashes.Load() > 0
}

// play plays one history to its end, and judges everything that was answered.
func (p *player) play(list []step, logf func(string, ...any)) error {
	if n := played.histories.Add(1); n%progressEvery == 0 {
		p.T.Logf("%v", &played)
	}
	p.begin()
	var err error
	for _, st := range list {
		logf("%v", st)
		played.steps.Add(1)
		if err = p.do(st); err != nil {
			err = fmt.Errorf("at %v: %w", st, err)
			break
		}
	}
	return errors.Join(err, p.finish())
}

func (p *player) begin() {
	p.T.Helper()
	if p.s == nil {
		p.s = p.session(p.repo)
		// So that there is an old epoch, and an old generation, in each history.
		_, err := p.Client.Sessions.ClaimSession(context.Background(), &sandboxv1.ClaimSessionRequest{SessionId: p.s.id})
		require.NoError(p.T, err)
		require.NoError(p.T, p.retire())
		p.s.works()
	}
	p.execs, p.nextMeets, p.s.answers = nil, nil, map[string]*answered{}
	_ = os.RemoveAll(filepath.Join(p.s.worktree, "runs"))
	now := p.s.get()
	p.epoch, p.generation = now.GetOwnerEpoch(), now.GetGeneration()
}

func (p *player) do(st step) error {
	switch st.kind {
	case "exec":
		return p.exec(st, false)
	case "begin":
		return p.exec(st, true)
	case "claim":
		return p.claim()
	case "get":
		return p.look()
	case "list":
		return p.listed()
	case "retire":
		return p.retire()
	case "delete":
		return p.delete()
	case "kill agent":
		return p.killAgent()
	case "kill receiptd":
		return p.killIn("receiptd", func(x *tracked) { x.receiptdKilled = true })
	case "kill pid1":
		return p.killIn("pid1", func(x *tracked) { x.pid1Killed = true })
	}
	if len(p.execs) == 0 {
		return nil
	}
	x := p.execs[st.which%len(p.execs)]
	switch st.kind {
	case "open":
		return p.openGate(x)
	case "again":
		return p.again(x)
	case "other":
		return p.other(x)
	case "cancel":
		return p.cancel(x)
	}
	return fmt.Errorf("no step %q", st.kind)
}

// blocked says whether a command waits for its gate: what comes after it waits too.
func (p *player) blocked() bool {
	return slices.ContainsFunc(p.execs, func(x *tracked) bool { return x.gated && !x.opened && !x.settled })
}

func (p *player) exec(st step, gate bool) error {
	played.execs.Add(1)
	x := &tracked{request: p.s.request(""), gated: gate}
	if gate {
		x.request.Command += "; " + gated(x.request.GetExecId())
	}
	switch st.fence {
	case 1:
		x.request.OwnerEpoch = p.epoch
	case 2:
		x.request.Generation = p.generation
	case 3:
		x.request.OwnerEpoch, x.stale = p.epoch-1, p.epoch > 1
	case 4:
		x.request.Generation, x.stale = p.generation-1, p.generation > 1
	}
	if p.nextMeets != nil && !x.stale { // a stale one does not come as far as to a pid1
		p.nextMeets(x)
		p.nextMeets = nil
	}
	free := !p.blocked()
	p.execs = append(p.execs, x)
	p.ask(x)
	if !free || gate && !x.stale {
		return p.untilBegun(x, free)
	}
	return p.settle(x)
}

// untilBegun waits until a gated command that nothing keeps waiting runs, or was answered.
func (p *player) untilBegun(x *tracked, free bool) error {
	if !free {
		return nil
	}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(poll) {
		if p.s.ran(x.request.GetExecId()) > 0 {
			return nil
		}
		select {
		case r := <-x.answer:
			x.answer <- r
			return p.settle(x)
		default:
		}
	}
	return fmt.Errorf("exec %s neither runs nor is it answered", x.request.GetExecId())
}

// ask makes the call in the background.
func (p *player) ask(x *tracked) {
	answer, c, r := make(chan reply, 1), p.Client, proto.CloneOf(x.request)
	x.answer = answer
	go func() {
		res, err := c.Execs.Exec(context.Background(), r)
		answer <- reply{res.GetResult(), err}
	}()
}

// settle waits for the answer, and judges it. A call whose connection was lost is made again, as a client does.
func (p *player) settle(x *tracked) error {
	for range 3 {
		if x.answer == nil {
			p.ask(x)
		}
		var r reply
		select {
		case r = <-x.answer:
		case <-time.After(patience):
			return fmt.Errorf("exec %s is not answered", x.request.GetExecId())
		}
		x.answer = nil
		switch {
		case r.err == nil:
			x.settled = true
			return errors.Join(p.s.judge(x.request, r.result), x.allows(r.result))
		case lost(r.err) && x.agentKilled:
			if err := p.unknownNeverRan(x); err != nil {
				return err
			}
		default:
			x.settled, x.never = true, true
			return x.refused(p.s, r.err)
		}
	}
	return fmt.Errorf("exec %s: the connection was lost three times", x.request.GetExecId())
}

// unknownNeverRan: of what ran there is an intent (P1).
func (p *player) unknownNeverRan(x *tracked) error {
	ran := p.s.ran(x.request.GetExecId())
	_, err := p.Client.Execs.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: x.request.GetSessionId(), ExecId: x.request.GetExecId()})
	if codeOf(err) == connect.CodeNotFound && ran > 0 && !x.deleted {
		return fmt.Errorf("P1: exec %s ran, and the agent does not know it", x.request.GetExecId())
	}
	return nil
}

func (p *player) openGate(x *tracked) error {
	if !x.gated || x.opened {
		return nil
	}
	x.opened = true
	p.s.open(x.request.GetExecId())
	if !p.blocked() {
		return p.settle(x)
	}
	return nil
}

// again asks for an exec that was answered; one that runs is waited for by its first call, and by this one.
func (p *player) again(x *tracked) error {
	if x.never || x.deleted || !x.settled {
		return nil
	}
	return p.settle(x)
}

func (p *player) other(x *tracked) error {
	if !x.settled || x.never || x.deleted {
		return nil
	}
	r := proto.CloneOf(x.request)
	r.Command += " "
	if _, err := p.s.exec(r); codeOf(err) != connect.CodeAlreadyExists {
		return fmt.Errorf("P7: another request under the id %s: %v", r.GetExecId(), err)
	}
	return nil
}

func (p *player) cancel(x *tracked) error {
	if x.stale || x.never || x.deleted {
		return nil
	}
	if !x.settled {
		x.cancelled = true
	}
	res, err := p.Client.Execs.CancelExec(context.Background(), &sandboxv1.CancelExecRequest{SessionId: x.request.GetSessionId(), ExecId: x.request.GetExecId()})
	if codeOf(err) == connect.CodeNotFound && !x.settled && p.s.ran(x.request.GetExecId()) == 0 {
		return nil // it has not come there yet, or a crash took it with it while it waited
	}
	if err != nil {
		return fmt.Errorf("cancelling exec %s: %w", x.request.GetExecId(), err)
	}
	if err := errors.Join(p.s.judge(x.request, res.GetResult()), x.allows(res.GetResult())); err != nil || x.settled {
		return err
	}
	return p.settle(x) // the call that waits gets the same
}

func (p *player) claim() error {
	res, err := p.Client.Sessions.ClaimSession(context.Background(), &sandboxv1.ClaimSessionRequest{SessionId: p.s.id, OwnerEpoch: p.epoch})
	if err != nil {
		return fmt.Errorf("claiming: %w", err)
	}
	if got := res.GetSession().GetOwnerEpoch(); got != p.epoch+1 {
		return fmt.Errorf("P8: the epoch after %d is %d", p.epoch, got)
	}
	// What waits with the older epoch will not start any more.
	p.mark(func(x *tracked) {
		if x.request.GetOwnerEpoch() == p.epoch && p.s.ran(x.request.GetExecId()) == 0 {
			x.outdated = true
		}
	})
	p.epoch++
	return nil
}

// look compares the session with the model.
func (p *player) look() error {
	res, err := p.Client.Sessions.GetSession(context.Background(), &sandboxv1.GetSessionRequest{SessionId: p.s.id})
	if err != nil {
		return err
	}
	now := res.GetSession()
	if now.GetOwnerEpoch() != p.epoch {
		return fmt.Errorf("P8: the epoch is %d, and %d was told", now.GetOwnerEpoch(), p.epoch)
	}
	if now.GetGeneration() < p.generation {
		return fmt.Errorf("P8: the generation is %d, and was %d", now.GetGeneration(), p.generation)
	}
	p.generation = now.GetGeneration()
	return nil
}

// listed compares the list with what was answered. An answer that rests on its receipt is recorded without a sync, and is in
// the list all the same after a crash.
func (p *player) listed() error {
	res, err := p.Client.Execs.ListExecs(context.Background(), &sandboxv1.ListExecsRequest{SessionId: p.s.id, PageSize: 1000})
	if err != nil {
		return fmt.Errorf("listing: %w", err)
	}
	list := res.GetExecs()
	for id, a := range p.s.answers {
		i := slices.IndexFunc(list, func(e *sandboxv1.ExecSummary) bool { return e.GetExecId() == id })
		switch {
		case i < 0:
			return fmt.Errorf("P7: exec %s was answered, and is not in the list", id)
		case list[i].GetStatus() != a.result.GetStatus():
			return fmt.Errorf("P7: exec %s was answered %s, and the list says %s %s", id, a.result.GetStatus(), list[i].GetState(), list[i].GetStatus())
		}
	}
	return nil
}

// mark notes what happens to everything that has no answer yet.
func (p *player) mark(what func(*tracked)) {
	for _, x := range p.execs {
		if !x.settled {
			what(x)
		}
	}
}

func (p *player) retire() error {
	p.mark(func(x *tracked) { x.retired = true })
	sandbox := p.s.get().GetSandbox().GetId()
	res, err := p.Client.Sessions.RetireSandbox(context.Background(), &sandboxv1.RetireSandboxRequest{SessionId: p.s.id})
	if err != nil {
		return fmt.Errorf("retiring: %w", err)
	}
	if !res.GetEvidence().GetComplete() || len(processesOf(sandbox)) > 0 {
		return fmt.Errorf("P5: retired with %v, and of %s there are %v", res.GetEvidence(), sandbox, processesOf(sandbox))
	}
	return nil
}

// delete deletes the session; another one goes on with its worktree.
func (p *player) delete() error {
	p.mark(func(x *tracked) { x.deleted = true })
	before := p.s
	sandbox := before.get().GetSandbox().GetId()
	res, err := p.Client.Sessions.DeleteSession(context.Background(), &sandboxv1.DeleteSessionRequest{SessionId: before.id})
	if err != nil {
		return fmt.Errorf("deleting: %w", err)
	}
	if !res.GetEvidence().GetComplete() || len(processesOf(sandbox)) > 0 {
		return fmt.Errorf("P5: deleted with %v, and of %s there are %v", res.GetEvidence(), sandbox, processesOf(sandbox))
	}
	for _, x := range p.execs {
		if x.settled {
			continue
		}
		if err := p.settle(x); err != nil {
			return err
		}
	}
	for _, x := range p.execs {
		x.settled, x.deleted = true, true
	}
	after := p.unborn(p.repo)
	after.worktree, after.branch, after.create.Workspace = before.worktree, before.branch, before.create.GetWorkspace()
	after.count = before.count
	p.s = after
	made, err := p.Client.Sessions.CreateSession(context.Background(), proto.CloneOf(after.create))
	if err != nil {
		return fmt.Errorf("creating a session on a workspace that was released: %w", err)
	}
	p.epoch, p.generation = made.GetSession().GetOwnerEpoch(), made.GetSession().GetGeneration()
	return nil
}

func (p *player) killAgent() error {
	played.crashes.Add(1)
	p.mark(func(x *tracked) { x.agentKilled = true })
	p.Restart()
	return p.look()
}

func (p *player) killIn(comm string, what func(*tracked)) error {
	sandbox := p.s.get().GetSandbox().GetId()
	pids := named(sandbox, comm)
	if len(pids) == 0 {
		return nil
	}
	played.crashes.Add(1)
	p.mark(what)
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	if comm == "receiptd" {
		p.Until("the sandbox is gone with its receiptd", func() bool { return len(named(sandbox, comm)) == 0 })
	}
	// What comes next may still meet the dead one.
	p.nextMeets = what
	return nil
}

// finish opens every gate, has everything answered, and asks for it once more.
func (p *player) finish() error {
	var errs []error
	for _, x := range p.execs {
		if x.gated && !x.opened {
			x.opened = true
			p.s.open(x.request.GetExecId())
		}
	}
	for _, x := range p.execs {
		if !x.settled {
			errs = append(errs, p.settle(x))
		}
	}
	if errors.Join(errs...) == nil {
		for _, x := range p.execs {
			errs = append(errs, p.again(x), p.other(x))
		}
		errs = append(errs, p.look(), p.listed())
	}
	if p.nextMeets != nil && errors.Join(errs...) == nil {
		errs = append(errs, p.retire()) // the next history is not to meet it
	}
	return errors.Join(errs...)
}
