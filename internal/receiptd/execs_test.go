package receiptd

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

func TestEveryEndHasItsStatusAndAReasonOfClauses(t *testing.T) {
	for name, x := range map[string]struct {
		res    nsexec.Result
		oom    bool
		status receipt.Status
		reason string
	}{
		"a plain end":                     {nsexec.Result{Report: &wire.Report{Ended: true, Code: 3}}, false, receipt.Exited, ""},
		"a signal":                        {nsexec.Result{Report: &wire.Report{Ended: true, Signal: 9}}, true, receipt.Signaled, receipt.ReasonOOM},
		"a timeout":                       {nsexec.Result{Report: &wire.Report{Ended: true, TimedOut: true}}, false, receipt.TimedOut, "its time was up"},
		"one with OOM":                    {nsexec.Result{Report: &wire.Report{TimedOut: true}}, true, receipt.TimedOut, "its time was up; it outlived SIGTERM and the grace period and was ended with its namespace; " + receipt.ReasonOOM},
		"a cancel":                        {nsexec.Result{Report: &wire.Report{Cancelled: true}}, false, receipt.Killed, "it outlived SIGTERM and the grace period and was ended with its namespace"},
		"no report":                       {nsexec.Result{Pid1: "signal: killed"}, true, receipt.Killed, "pid1 ended without a report (signal: killed), so how the command ended is not known; nothing of it is left; " + receipt.ReasonOOM},
		"a cancel that pid1 did not hear": {nsexec.Result{SecondLine: true, Cancelled: true}, false, receipt.Killed, "pid1 did not end it: receiptd ended the namespace"},
		"pid1 killed while it cancelled":  {nsexec.Result{Cancelled: true, Pid1: "killed by signal 9"}, false, receipt.Killed, "pid1 ended without a report (killed by signal 9), so how the command ended is not known; nothing of it is left"},
		"the second line":                 {nsexec.Result{SecondLine: true}, false, receipt.TimedOut, "pid1 did not keep the time: receiptd ended the namespace"},
	} {
		p := receipt.Predicate{OOM: x.oom}
		conclude(&p, x.res)
		require.Equal(t, x.status, p.Status, name)
		require.Equal(t, x.reason, p.Reason, name)
		cancelled := x.res.Report != nil && x.res.Report.Cancelled || x.res.SecondLine && x.res.Cancelled
		require.Equal(t, cancelled, p.Cancelled, name)
	}
}
