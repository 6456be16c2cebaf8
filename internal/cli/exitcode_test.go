package cli

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestEachStatusHasTheExitCodeThatTheDesignNames(t *testing.T) {
	for name, c := range map[string]struct {
		res  *sandboxv1.ExecResult
		want int
	}{
		"exited 0":    {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_EXITED}, 0},
		"exited 3":    {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_EXITED, ExitCode: 3}, 3},
		"exited 255":  {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_EXITED, ExitCode: 255}, 255},
		"SIGTERM":     {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_SIGNALED, Signal: 15}, 143},
		"timed out":   {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_TIMED_OUT, ExitCode: 3}, 124},
		"killed":      {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_KILLED}, 123},
		"not started": {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_NOT_STARTED}, 122},
		"cancelled":   {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_CANCELLED}, 121},
		"uncertain":   {&sandboxv1.ExecResult{Status: sandboxv1.ExecResult_UNCERTAIN}, 120},
		"no status":   {&sandboxv1.ExecResult{}, 120},
		"a new one":   {&sandboxv1.ExecResult{Status: 99}, 120},
		"no result":   {nil, 120},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, execExitCode(c.res)) })
	}
}

func TestEveryKnownStatusIsInTheTableAbove(t *testing.T) {
	require.Len(t, sandboxv1.ExecResult_Status_name, 8, "a new status needs an exit code and a line in the table")
}
