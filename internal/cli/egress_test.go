package cli

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestAProbeHoldsOnlyForTheRightReason(t *testing.T) {
	exited := func(code int32, refused ...string) *sandboxv1.ExecResult {
		return &sandboxv1.ExecResult{Status: sandboxv1.ExecResult_EXITED, ExitCode: code, RefusedDestinations: refused}
	}
	for name, c := range map[string]struct {
		p     probe
		r     *sandboxv1.ExecResult
		holds bool
	}{
		"a listed host answers":                 {probe{Answers: true}, exited(0), true},
		"a listed host is down":                 {probe{Answers: true}, exited(1), false},
		"another host answers":                  {probe{told: true}, exited(0, "h"), false},
		"another name is refused":               {probe{told: true}, exited(1, "h"), true},
		"another name is refused with a reason": {probe{told: true}, exited(1, "h (10.0.0.1 is private)"), true},
		"an address is refused":                 {probe{told: true}, exited(1, "h:1/tcp"), true},
		"another host is down and not refused":  {probe{told: true}, exited(1), false},
		"another one with this one's beginning": {probe{told: true}, exited(1, "hh", "h:11/tcp"), false},
		"metadata is refused by the listeners":  {probe{}, exited(1), true},
		"metadata hangs":                        {probe{}, exited(124), false},
		"the command was killed":                {probe{}, &sandboxv1.ExecResult{Status: sandboxv1.ExecResult_KILLED}, false},
	} {
		c.p.Target = "h:1"
		c.p.judge(c.r, "h")
		require.Equal(t, c.holds, c.p.Holds, "%s: %s", name, c.p.Detail)
		require.NotEmpty(t, c.p.Detail, name)
	}
	for detail, r := range map[string]*sandboxv1.ExecResult{
		"refused: h (10.0.0.1 is private)":              exited(1, "h (10.0.0.1 is private)"),
		"it does not answer within 10 s":                exited(124),
		`it does not answer: "bash: \x1b no such name"`: {Status: sandboxv1.ExecResult_EXITED, ExitCode: 1, StderrText: "bash: \x1b no such name\nbash: more"},
	} {
		p := probe{Answers: true, Target: "h:1"}
		p.judge(r, "h")
		require.False(t, p.Holds)
		require.Equal(t, detail, p.Detail)
	}
	require.Equal(t, 0, probeCode([]probe{{Holds: true, Code: 11}}))
	require.Equal(t, exitProbeMetadata, probeCode([]probe{{Holds: true, Code: 11}, {Code: 14}, {Code: 14}}))
	require.Equal(t, exitProbeSeveral, probeCode([]probe{{Code: 11}, {Code: 14}}))
}

func TestTheFirstListedHostIsTried(t *testing.T) {
	entry := func(d string) *sandboxv1.EgressEntry { return &sandboxv1.EgressEntry{Destination: d, Reason: "x"} }
	require.Equal(t, "a.example:80", firstListed([]*sandboxv1.EgressEntry{
		entry("*.b.example:443/tcp"), entry("198.51.100.1:443/tcp"), entry("c.example:123/udp"), entry("a.example:80,443/tcp"),
	}))
	require.Empty(t, firstListed(nil))
}
