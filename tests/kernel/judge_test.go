package kernel

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm"
	"github.com/sandbox-agent/sandbox-agent/tests/kernel/seen"
)

func older(release, version string) bool {
	return nodecheck.Feature{Since: "Linux " + version}.OlderThan(release)
}

// on is the expectation of a variation on a kernel.
func (v variation) on(release string) expectation {
	if older(release, tooOld.before) {
		return tooOld
	}
	for _, e := range v.expect {
		if e.before == "" || older(release, e.before) {
			return e
		}
	}
	return expectation{}
}

// of is the expectation of a variation on a kernel. One of somebody's own may have what Debian's lack.
func (v variation) of(k vm.Kernel, check *sandboxv1.CheckNodeResponse) expectation {
	e := v.on(k.Version)
	if k.Own && e.debians && check.GetVerdict() <= sandboxv1.CheckVerdict_CHECK_NOTE {
		return expectation{outcome: works}
	}
	return e
}

// judge compares what was seen with what is expected. It says in a few words what became of the node, and what is wrong with
// that: nothing where check and agent agree, and no promise is weaker than they say.
func judge(k vm.Kernel, v variation, r seen.Result) (verdict string, problems []string) {
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if r.NotRun != "" {
		return "not run: " + r.NotRun, nil
	}
	if r.Failed != "" {
		wrong("looking failed: %s", r.Failed)
	}
	check := &sandboxv1.CheckNodeResponse{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.Check, check); err != nil {
		wrong("the check gave no answer (exit code %d): %v", r.CheckCode, err)
	}
	e := v.of(k, check)
	if code := nodecheck.ExitCode(check.GetVerdict()); code != r.CheckCode {
		wrong("the check's exit code is %d, and its verdict %s", r.CheckCode, check.GetVerdict())
	}
	verdict = string(e.outcome)
	if e.feature != "" {
		verdict += " (" + string(e.feature) + ")"
	}
	for name, what := range r.Control {
		if what != "reached" {
			wrong("the control case: %s: %s", name, what)
		}
	}
	switch e.outcome {
	case refused:
		refusedProblems(e, check, r, wrong)
	case weaker:
		lineProblems(e, check, sandboxv1.CheckVerdict_CHECK_DEGRADED, wrong)
		workProblems(r, wrong)
	case works:
		if v := check.GetVerdict(); v > sandboxv1.CheckVerdict_CHECK_NOTE {
			wrong("the check's verdict is %s: %s", v, worst(check))
		}
		if e.feature != "" {
			lineProblems(e, check, sandboxv1.CheckVerdict_CHECK_NOTE, wrong)
		}
		workProblems(r, wrong)
	default:
		wrong("nothing is expected of it on this kernel")
	}
	if len(r.Left) > 0 {
		wrong("left behind: %s", strings.Join(r.Left, ", "))
	}
	if len(problems) > 0 {
		verdict = "FAILED: expected " + verdict
	}
	return verdict, problems
}

// refusedProblems: no session was made, and check and agent say the same feature and remedy.
func refusedProblems(e expectation, check *sandboxv1.CheckNodeResponse, r seen.Result, wrong func(string, ...any)) {
	lineProblems(e, check, sandboxv1.CheckVerdict_CHECK_MISSING, wrong)
	if r.Attacks != nil || r.Started && r.Session == "" {
		wrong("a session was made: %v", r.Attacks)
	}
	said := r.Said
	if r.Started {
		said = r.Session
	}
	if !says(said, e.says) {
		wrong("the agent does not say %q: %s", e.says, said)
	}
}

// lineProblems: the check has a line of the feature with the verdict, and the remedy in it.
func lineProblems(e expectation, check *sandboxv1.CheckNodeResponse, verdict sandboxv1.CheckVerdict, wrong func(string, ...any)) {
	said := ""
	for _, l := range check.GetChecks() {
		if l.GetFeature() != string(e.feature) {
			continue
		}
		if l.GetVerdict() == verdict && says(l.GetDetail()+"\n"+l.GetRemedy()+"\n"+l.GetInstead(), e.says) {
			return
		}
		said += fmt.Sprintf("%s: %s; %s; ", l.GetVerdict(), l.GetDetail(), l.GetRemedy())
	}
	wrong("the check does not say %s about %s with %q: %s", verdict, e.feature, e.says, said)
}

// says ignores the case: a module's name is also that of its option.
func says(text, what string) bool {
	return strings.Contains(strings.ToLower(text), strings.ToLower(what))
}

// workProblems: a command ran, every attack was made and reached nothing, and its receipts verify.
func workProblems(r seen.Result, wrong func(string, ...any)) {
	switch {
	case !r.Started:
		wrong("the agent did not start: %s", r.Said)
		return
	case r.Session != "":
		wrong("no session was made: %s", r.Session)
		return
	}
	if made, control := slices.Sorted(maps.Keys(r.Attacks)), slices.Sorted(maps.Keys(r.Control)); !slices.Equal(made, control) {
		wrong("the attacks were %q, and those of the control case %q", made, control)
	}
	for name, what := range r.Attacks {
		if what != "held" {
			wrong("%s: %s", name, what)
		}
	}
	if r.Receipts != "" {
		wrong("receipts: %s", r.Receipts)
	}
}

func worst(check *sandboxv1.CheckNodeResponse) string {
	var b strings.Builder
	for _, l := range check.GetChecks() {
		if l.GetVerdict() == check.GetVerdict() {
			b.WriteString(nodecheck.Text(l))
		}
	}
	return b.String()
}

func TestNoNodeIsCalledGoodThatIsWeakerInSilence(t *testing.T) {
	answer := func(lines ...*sandboxv1.NodeCheck) json.RawMessage {
		res := &sandboxv1.CheckNodeResponse{Verdict: sandboxv1.CheckVerdict_CHECK_OK}
		for _, l := range lines {
			nodecheck.Add(res, l)
		}
		b, err := protojson.Marshal(res)
		require.NoError(t, err)
		return b
	}
	line := func(f nodecheck.ID, v sandboxv1.CheckVerdict, remedy string) *sandboxv1.NodeCheck {
		return &sandboxv1.NodeCheck{Feature: string(f), Verdict: v, Remedy: remedy}
	}
	held, control := map[string]string{"P9": "held"}, map[string]string{"P9": "reached"}
	sockets := line(nodecheck.SockDestroy, sandboxv1.CheckVerdict_CHECK_DEGRADED, "load tcp_diag")
	userns := line(nodecheck.UserNS, sandboxv1.CheckVerdict_CHECK_MISSING, "sysctl -w user.max_user_namespaces=15000")
	good := seen.Result{Check: answer(), Started: true, Attacks: held, Control: control}
	with := func(r seen.Result, change func(*seen.Result)) seen.Result { change(&r); return r }
	refusedWell := seen.Result{Check: answer(userns), CheckCode: 2, Said: "sysctl user.max_user_namespaces", Control: control}
	for _, c := range []struct {
		name, variation, release string
		seen                     seen.Result
		bad                      bool
		own                      bool
	}{
		{"it works", "as it is", "6.12.1", good, false, false},
		{"the check is not content", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Check, r.CheckCode = answer(sockets), 1 }), true, false},
		{"an attack reaches", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Attacks = control }), true, false},
		{"no attack was made", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Attacks = nil }), true, false},
		{"the control reaches nothing", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Control = held }), true, false},
		{"the agent is down", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Started = false }), true, false},
		{"something stays", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Left = []string{"mount /x"} }), true, false},
		{"the exit code is another", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.CheckCode = 1 }), true, false},
		{"a receipt does not verify", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Receipts = "bad" }), true, false},
		{"weaker, and said", "no tcp_diag, no udp_diag", "6.12.1", with(good, func(r *seen.Result) { r.Check, r.CheckCode = answer(sockets), 1 }), false, false},
		{"weaker in silence", "no tcp_diag, no udp_diag", "6.12.1", good, true, false},
		{"refused, and said", "user.max_user_namespaces = 0", "6.12.1", refusedWell, false, false},
		{"refused, and another remedy", "user.max_user_namespaces = 0", "6.12.1", with(refusedWell, func(r *seen.Result) { r.Said = "try again" }), true, false},
		{"refused, and a session all the same", "user.max_user_namespaces = 0", "6.12.1", with(refusedWell, func(r *seen.Result) { r.Started, r.Attacks = true, held }), true, false},
		{"an old kernel works", "as it is", "5.10.0", good, true, false},
		{"there is no answer", "as it is", "6.12.1", with(good, func(r *seen.Result) { r.Check = nil }), true, false},
		{"what Debian's kernels lack is there", "network mode bridge", "6.12.1", good, false, true},
		{"it is there on one of Debian's", "network mode bridge", "6.12.1", good, true, false},
		{"somebody's own is weaker in silence", "no tcp_diag, no udp_diag", "6.12.1", good, true, true},
	} {
		_, problems := judge(vm.Kernel{Version: c.release, Own: c.own}, find(c.variation), c.seen)
		require.Equal(t, c.bad, len(problems) > 0, "%s: %q", c.name, problems)
	}
}

func TestATestIsSkippedInAGuestOnlyForWhatGuestsLack(t *testing.T) {
	require.Regexp(t, guestLacksRE, "b_test.go:7: this test needs gcc: install it")
	require.NotRegexp(t, guestLacksRE, "a_test.go:1: this test needs user namespaces: set the sysctl", "a hole in the matrix is none that may be skipped")
}

func TestEveryVariationIsExpectedToComeToSomethingOnEveryKernel(t *testing.T) {
	for _, v := range variations {
		require.Empty(t, v.expect[len(v.expect)-1].before, "%s: the last expectation holds for all later kernels", v.Name)
		for _, e := range v.expect {
			require.NotEmpty(t, e.outcome, v.Name)
			if e.outcome != works {
				require.NotEmpty(t, e.says, "%s: what is weaker or refused has a remedy", v.Name)
			}
			if e.feature != "" {
				_, ok := nodecheck.Find(e.feature)
				require.True(t, ok, "%s: %s", v.Name, e.feature)
			}
		}
	}
}
