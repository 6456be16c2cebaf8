package attack

import (
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// Attack is a row of the table.
type Attack struct {
	// Promise is the one that is attacked, "P3"; Name says in a few words how.
	Promise, Name string
	// Command is what bash runs in the worktree. Words in braces are replaced, see Runner.words.
	Command string
	// Then is run as the next command, after Command was answered; what both print counts.
	Then string
	// Git are trusted Git commands that the agent runs after that.
	Git [][]string
	// Needs are programs that Command takes, besides bash, Git and what bash has from coreutils.
	Needs []string
	// Timeout of Command, by which it is ended; 0: a time that only something that hangs takes.
	Timeout time.Duration
	// AtOnce is how many are asked for at the same time; 0 is 1.
	AtOnce int
	// Stays: Command starts processes that have {word} among their arguments, and ends once the runner has seen them.
	Stays bool
	// Shared: it says something only where commands run on the node's own kernel.
	Shared bool
	// Concession is what a runtime may say that it does not keep of this (Concession.what), which this attack would show.
	Concession string
	// Needless says why no control case shows the attack without the defence; empty: one does.
	Needless string

	Must Must
}

// Must is what must be seen of an attack, besides what must always: that the answers are verified, that the sandbox is the same
// afterwards and works, that nobody says that he got something, that nothing of the node was reached or changed, and that
// nothing is alive.
type Must struct {
	// End are the ways in which Command may end; none: by itself (EXITED).
	End []sandboxv1.ExecResult_Status
	// Unsaid: Command may be ended before it says that it came to its end.
	Unsaid bool
	// OOM: the answer says that it was for the memory.
	OOM bool
	// Bytes is what the answer says that Command wrote to its standard output, 0 for any number; SHA256 is its hash.
	Bytes  uint64
	SHA256 string
}

// anyEnd are all ends that are proved.
var anyEnd = []sandboxv1.ExecResult_Status{
	sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_TIMED_OUT, sandboxv1.ExecResult_KILLED,
}

// Answer is what is known of one command.
type Answer struct {
	Status sandboxv1.ExecResult_Status
	// Reason is the agent's, for a status that is not plain.
	Reason string
	// Verified: a receipt says the same.
	Verified       bool
	OOM            bool
	Stdout, Stderr string
	Bytes          uint64
	SHA256         string
}

// Seen is what was seen of an attack.
type Seen struct {
	// Unable is why it could not be run, or not be looked at; empty: it was.
	Unable string
	// Answers are Command's, and then Then's.
	Answers []Answer
	// Hung are trusted Git commands that did not come back in their time.
	Hung []string
	// Alive are processes that were there after the answer.
	Alive []string
	// Reached are listeners of the node that somebody came to.
	Reached []string
	// Changed are files of the node that are not what they were.
	Changed []string
	// Sandbox says what became of the sandbox; empty: it is the same, and works.
	Sandbox string
}

// Verdict is what a row came to.
type Verdict string

// The verdicts.
const (
	// Held: the attack was made, and nothing came of it.
	Held Verdict = "held"
	// Broken: it broke the promise.
	Broken Verdict = "broken"
	// Conceded: the runtime says that it can't keep this.
	Conceded Verdict = "conceded"
	// NotRun: it could not be run, or not be looked at. It says nothing of the promise.
	NotRun Verdict = "not run"
)
