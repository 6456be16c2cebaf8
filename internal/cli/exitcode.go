package cli

import (
	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// Exit codes of this program. "exec" uses 120 to 125 for what isn't the command's own code; a command can return
// these too, so a caller that must know asks for --json or --result-file, where the status stands beside the code.
const (
	// ExitError: any other command than exec, git and check failed.
	ExitError = 1
	// ExitUsage: any other command than exec, git and check was called wrongly.
	ExitUsage = 2

	// ExitUncertain: the command may have run, wholly, partly or not at all.
	ExitUncertain = 120
	// ExitCancelled: it was ended on request.
	ExitCancelled = 121
	// ExitNotStarted: it certainly never ran.
	ExitNotStarted = 122
	// ExitKilled: the sandbox ended it, for example at its memory limit.
	ExitKilled = 123
	// ExitTimedOut: its time was up.
	ExitTimedOut = 124
	// ExitRefused: the agent refused, failed or could not be reached before anything was sent; or exec was called
	// wrongly. Nothing ran. The same for git, whose other codes are Git's own, and for check, whose others are the node's
	// (nodecheck.ExitCode).
	ExitRefused = 125
	// exitSignalBase plus n: the command died of signal n.
	exitSignalBase = 128
)

// execExitCode is the exit code of "exec" for a result.
func execExitCode(r *sandboxv1.ExecResult) int {
	switch r.GetStatus() {
	case sandboxv1.ExecResult_EXITED:
		return int(r.GetExitCode())
	case sandboxv1.ExecResult_SIGNALED:
		return exitSignalBase + int(r.GetSignal())
	case sandboxv1.ExecResult_TIMED_OUT:
		return ExitTimedOut
	case sandboxv1.ExecResult_KILLED:
		return ExitKilled
	case sandboxv1.ExecResult_CANCELLED:
		return ExitCancelled
	case sandboxv1.ExecResult_NOT_STARTED:
		return ExitNotStarted
	default:
		// UNCERTAIN, and every status that this version doesn't know: nothing may be concluded from it.
		return ExitUncertain
	}
}
