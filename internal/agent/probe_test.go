package agent

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestAReportOfAProbeIsBounded(t *testing.T) {
	check := func(name, text string) []*sandboxv1.EgressProbeCheck {
		return []*sandboxv1.EgressProbeCheck{{Check: name, Target: text, Detail: text}}
	}
	require.NoError(t, checkProbe(check("metadata", strings.Repeat("x", maxProbeText))))
	require.ErrorIs(t, checkProbe(nil), ErrInvalid)
	require.ErrorContains(t, checkProbe(check("session-1", "")), "none of [allowed other address metadata management]")
	require.ErrorContains(t, checkProbe(check("metadata", strings.Repeat("x", maxProbeText+1))), "more than 300 bytes")
	require.ErrorContains(t, checkProbe(make([]*sandboxv1.EgressProbeCheck, maxProbeChecks+1)), "1 to 64")
}
