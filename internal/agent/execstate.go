package agent

import (
	"fmt"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// ExecPhase is how far an exec is.
type ExecPhase string

// The phases of an exec. Only Intended and Ended are in the journal; a queued exec that an agent's crash took with it
// never ran, and its caller asks again.
const (
	Queued     ExecPhase = "QUEUED"
	Intended   ExecPhase = "INTENDED"   // the intent is durable, or just being made so: the command may run
	Cancelling ExecPhase = "CANCELLING" // the same, and receiptd is asked to end it
	Ended      ExecPhase = "ENDED"
)

// ExecEvent is what happens to an exec.
type ExecEvent string

// The events of an exec.
const (
	ExTurn       ExecEvent = "turn"                   // first in the queue, fencing checked, sandbox ready
	ExRefused    ExecEvent = "refused"                // it can't start, and nothing of it was made durable
	ExCancel     ExecEvent = "cancel"                 // CancelExec, or the sandbox is retired under it
	ExUnrecorded ExecEvent = "intent not recorded"    // the journal refused it: it was not handed over
	ExReceipt    ExecEvent = "receipt verifies"       // and so does the kept output; it ended by itself
	ExCancelled  ExecEvent = "receipt of a cancelled" // the same, and receiptd ended it on request
	ExNotStarted ExecEvent = "refused by receiptd"    // it certainly never ran, and the sandbox can't run the next one either
	ExNeverSeen  ExecEvent = "never arrived"          // receiptd does not know it: it certainly never ran
	ExBad        ExecEvent = "receipt doesn't verify" // or another request's, or its output is not what it hashes
	ExLost       ExecEvent = "no receipt"             // and there will be none
	ExShutdown   ExecEvent = "agent shuts down"
)

// ExecEffects are what must come with a change of phase.
type ExecEffects struct {
	// Journal writes the record. Durable: the caller waits for the sync. A receipt is durable itself, so an outcome
	// that rests on one needs no second sync.
	Journal, Durable bool
	// Start hands the command to receiptd: only ever together with a durable intent (P1).
	Start bool
	// Cancel asks receiptd to end the command at its boundary.
	Cancel bool
	// StopSandbox: what is left may still run; it is stopped with evidence before anything else starts.
	StopSandbox bool
	// Answer gives the outcome to everyone who waits. Error gives them an error instead.
	Answer, Error bool
}

type execTransition struct {
	to      ExecPhase
	effects ExecEffects
}

// withdrawn is what an exec that has no intent yet gets by a cancel: it certainly never ran, and its id says so ever after.
var withdrawn = ExecEffects{Journal: true, Durable: true, Answer: true}

var execTable = map[ExecPhase]map[ExecEvent]execTransition{
	Queued: {
		ExTurn:     {Intended, ExecEffects{Journal: true, Durable: true, Start: true}},
		ExRefused:  {Ended, ExecEffects{Error: true}},
		ExCancel:   {Ended, withdrawn},
		ExShutdown: {Ended, ExecEffects{Error: true}},
	},
	Intended:   running(Intended, ExecEffects{Cancel: true}),
	Cancelling: running(Cancelling, ExecEffects{}),
	Ended: {
		// It came too late: what is known already is the answer.
		ExCancel: {Ended, ExecEffects{}},
	},
}

// running is the row of a phase in which the command may run; by a cancel it comes to be Cancelling.
func running(p ExecPhase, onCancel ExecEffects) map[ExecEvent]execTransition {
	lost := ExecEffects{Journal: true, Durable: true, StopSandbox: true, Answer: true}
	return map[ExecEvent]execTransition{
		ExCancel:     {Cancelling, onCancel},
		ExUnrecorded: {Ended, ExecEffects{Error: true}},
		ExReceipt:    {Ended, ExecEffects{Journal: true, Answer: true}},
		// The answer carries the evidence of the sandbox's end, which the receipt doesn't: it is made durable.
		ExCancelled:  {Ended, lost},
		ExNotStarted: {Ended, lost},
		ExNeverSeen:  {Ended, ExecEffects{Journal: true, Durable: true, Answer: true}},
		ExBad:        {Ended, lost},
		ExLost:       {Ended, lost},
		// The intent stays open: the next start finds out.
		ExShutdown: {p, ExecEffects{Error: true}},
	}
}

// Next says where an event leads, or that it can't happen in this phase.
func (p ExecPhase) Next(e ExecEvent) (ExecPhase, ExecEffects, error) {
	t, ok := execTable[p][e]
	if !ok {
		return p, ExecEffects{}, fmt.Errorf("%w: an exec in phase %s can't take %q", ErrPrecondition, p, e)
	}
	return t.to, t.effects, nil
}

// ReceiptFinding is what the receipts folder holds of an exec.
type ReceiptFinding int

// The findings.
const (
	ReceiptAbsent ReceiptFinding = iota
	ReceiptGood
	ReceiptBad
)

// Knowledge is what receiptd says of an exec, when it can be asked.
type Knowledge int

// What receiptd can say. Unreachable: the sandbox lives but nobody could ask; Gone: the sandbox is seen to be dead.
const (
	KnowsNothing Knowledge = iota // NEVER_SEEN
	KnowsRunning
	KnowsReceipt
	KnowsReceiptLost
	Unreachable
	Gone
	// NotNow: there is no connection, and the runtime that would make one can't be reached.
	NotNow
)

// String says it in words that go into an answer's reason.
func (k Knowledge) String() string {
	switch k {
	case KnowsNothing:
		return "receiptd never saw it"
	case KnowsRunning:
		return "receiptd says that it runs"
	case KnowsReceipt:
		return "receiptd says that its receipt is there, but it isn't"
	case KnowsReceiptLost:
		return "it ended, and its receipt could not be written"
	case NotNow:
		return "receiptd can't be asked as long as the runtime can't be reached"
	case Gone:
		return "its sandbox is gone, and there is no receipt"
	default:
		return "receiptd could not be asked, and there is no receipt"
	}
}

// Decide says what becomes of an intent without an outcome. wait means: look again later. The folder is looked at
// after receiptd was asked, so an absent receipt is a late observation, and a good receipt wins over everything.
func Decide(r ReceiptFinding, k Knowledge) (event ExecEvent, wait bool) {
	switch {
	case r == ReceiptGood:
		return ExReceipt, false
	case r == ReceiptBad:
		return ExBad, false
	case k == KnowsNothing:
		return ExNeverSeen, false
	case k == KnowsRunning, k == NotNow:
		return "", true
	default:
		return ExLost, false
	}
}

// Answer says which status an exec with an intent gets. cancelling: a cancel was asked for before the event. evidence: the
// sandbox was seen to be gone, with the whole set. With plain the receipt's own status is the answer: a receipt of a
// command that ended by itself wins over everything.
func Answer(e ExecEvent, cancelling, evidence bool) (status sandboxv1.ExecResult_Status, plain bool) {
	switch e {
	case ExReceipt:
		return 0, true
	case ExNotStarted, ExNeverSeen:
		return sandboxv1.ExecResult_NOT_STARTED, false
	case ExCancelled:
		if evidence {
			return sandboxv1.ExecResult_CANCELLED, false
		}
	case ExLost:
		if cancelling && evidence {
			return sandboxv1.ExecResult_CANCELLED, false
		}
	}
	return sandboxv1.ExecResult_UNCERTAIN, false
}
