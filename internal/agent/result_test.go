package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

func TestAReasonIsMadeOfClausesAndSaysNothingTwice(t *testing.T) {
	in := &intentRecord{TimeoutMS: 1500}
	for want, p := range map[string]receipt.Predicate{
		"": {Status: receipt.Exited, SealsIntact: true},
		"signal 9 (killed) ended the command; the memory limit killed a process of it": {
			Status: receipt.Signaled, Signal: 9, OOM: true, Reason: receipt.ReasonOOM, SealsIntact: true},
		"the memory limit killed a process of it": {Status: receipt.Exited, OOM: true, SealsIntact: true},
		"its time was up; it outlived SIGTERM":    {Status: receipt.TimedOut, Reason: "its time was up; it outlived SIGTERM", SealsIntact: true},
		"its time of 1.5s was up":                 {Status: receipt.TimedOut, SealsIntact: true},
		"pid1 ended without a report (signal: killed); nothing of it is left; whether its seals held is not known, so the sandbox is stopped": {
			Status: receipt.Killed, Reason: "pid1 ended without a report (signal: killed); nothing of it is left", SealsBroken: []string{receipt.SealsUnknown}},
		"seals are broken (/w/.git, /r/.git/config), so the sandbox is stopped":              {Status: receipt.Exited, SealsBroken: []string{"/w/.git", "/r/.git/config"}},
		"it was ended on request and may have run partly":                                    {Status: receipt.Signaled, Signal: 15, Cancelled: true, SealsIntact: true},
		"it was ended on request and may have run partly; it outlived SIGTERM and the grace": {Status: receipt.Killed, Cancelled: true, Reason: "it outlived SIGTERM and the grace", SealsIntact: true},
	} {
		require.Equal(t, want, reasonOf(statusOf(&p), &p, in))
	}
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, statusOf(&receipt.Predicate{Cancelled: true, Status: receipt.Killed}))
}
