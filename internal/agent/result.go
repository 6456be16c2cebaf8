package agent

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// proven is a receipt that verified, with its kept output.
type proven struct {
	envelope       []byte
	predicate      receipt.Predicate
	stdout, stderr []byte
}

// resultOf translates a verified receipt into the answer. It depends on nothing else than its arguments, so that the
// answer after a crash is the one that would have been given before.
func resultOf(in *intentRecord, p *proven) *sandboxv1.ExecResult {
	pr := &p.predicate
	r := &sandboxv1.ExecResult{
		ExecId: in.ExecID, SessionId: in.SessionID, OwnerEpoch: in.OwnerEpoch, Generation: in.Generation,
		SandboxId: in.SandboxID, Labels: in.Labels,
		Status: statusOf(pr), ExitCode: int32(pr.ExitCode), Signal: int32(pr.Signal), Oom: pr.OOM,
		Stdout: p.stdout, Stderr: p.stderr, StdoutInfo: outputInfo(pr.Stdout), StderrInfo: outputInfo(pr.Stderr),
		StartedAt: timestamppb.New(pr.StartedAt), Duration: durationpb.New(max(pr.EndedAt.Sub(pr.StartedAt), 0)),
		Usage: &sandboxv1.Usage{
			UserCpu: durationpb.New(pr.Usage.UserCPU), SystemCpu: durationpb.New(pr.Usage.SystemCPU),
			MaxRssBytes: pr.Usage.MaxRSS, PeakMemoryBytes: pr.Usage.PeakMemory,
			NetworkSentBytes: pr.Usage.Network.SentBytes, NetworkReceivedBytes: pr.Usage.Network.ReceivedBytes,
		},
		Receipt: p.envelope, Nonce: in.Nonce,
	}
	r.Reason = reasonOf(r.GetStatus(), pr, in)
	return r
}

// statusOf: a command that had ended by itself before the cancel reached it keeps its own status.
func statusOf(p *receipt.Predicate) sandboxv1.ExecResult_Status {
	if p.Cancelled {
		return sandboxv1.ExecResult_CANCELLED
	}
	return sandboxv1.ExecResult_Status(sandboxv1.ExecResult_Status_value[string(p.Status)])
}

// reasonOf is receiptd's reason, which explains every status but a plain end, a signal and a cancel, with what it leaves
// out: lower-case clauses, joined by "; " like receiptd's own.
func reasonOf(s sandboxv1.ExecResult_Status, p *receipt.Predicate, in *intentRecord) string {
	var clauses []string
	add := func(format string, args ...any) { clauses = append(clauses, fmt.Sprintf(format, args...)) }
	switch {
	case s == sandboxv1.ExecResult_SIGNALED:
		add("signal %d (%s) ended the command", p.Signal, syscall.Signal(p.Signal))
	case s == sandboxv1.ExecResult_CANCELLED:
		add("it was ended on request and may have run partly")
	case p.Reason != "":
	case s == sandboxv1.ExecResult_TIMED_OUT:
		add("its time of %s was up", time.Duration(in.TimeoutMS)*time.Millisecond)
	case s == sandboxv1.ExecResult_KILLED:
		add("pid1 ended without a report (%s)", p.Boundary.Pid1)
	}
	if p.Reason != "" {
		add("%s", p.Reason)
	}
	if p.OOM && !strings.Contains(p.Reason, receipt.ReasonOOM) {
		add("%s", receipt.ReasonOOM)
	}
	switch {
	case p.SealsIntact:
	case slices.Equal(p.SealsBroken, []string{receipt.SealsUnknown}):
		add("whether its seals held is not known, so the sandbox is stopped")
	default:
		add("seals are broken (%s), so the sandbox is stopped", strings.Join(p.SealsBroken, ", "))
	}
	return strings.Join(clauses, "; ")
}

func outputInfo(o receipt.Output) *sandboxv1.OutputInfo {
	return &sandboxv1.OutputInfo{
		Bytes: o.Bytes, Sha256: o.SHA256, Truncated: o.Truncated(), OmittedFrom: o.OmittedFrom, OmittedBytes: o.OmittedBytes,
	}
}

// resultWithout is the answer where there is no receipt: NOT_STARTED or UNCERTAIN.
func resultWithout(in *intentRecord, s sandboxv1.ExecResult_Status, reason string) *sandboxv1.ExecResult {
	return &sandboxv1.ExecResult{
		ExecId: in.ExecID, SessionId: in.SessionID, OwnerEpoch: in.OwnerEpoch, Generation: in.Generation,
		SandboxId: in.SandboxID, Labels: in.Labels, Status: s, Reason: reason,
	}
}

// cancelledResult is the answer from a receipt that says that the command was ended on request. Without the evidence of
// its sandbox's end it is UNCERTAIN: CANCELLED promises that. because is a clause, "" when a caller wanted it.
func cancelledResult(in *intentRecord, p *proven, because string, evidence *runtime.Evidence) *sandboxv1.ExecResult {
	r := resultOf(in, p)
	if because != "" {
		r.Reason += "; " + because
	}
	r.Evidence = evidenceProto(evidence)
	if evidence == nil {
		r.Status = sandboxv1.ExecResult_UNCERTAIN
		r.Reason += "; its sandbox could not be seen to be gone, so the workspace stays reserved: the session's reason says what to do"
	}
	return r
}

// reasonWithout explains an answer without a receipt.
func reasonWithout(s sandboxv1.ExecResult_Status, why string) string {
	switch s {
	case sandboxv1.ExecResult_NOT_STARTED:
		return "it certainly never ran: " + why
	case sandboxv1.ExecResult_CANCELLED:
		return "it was ended with its sandbox on request and may have run, wholly or partly: " + why
	default:
		return "it may have run, wholly, partly or not at all: " + why + "; look at the workspace before you repeat it"
	}
}

// restsOnReceipt says whether a recorded answer has a receipt, which is not recorded with it.
func restsOnReceipt(r *sandboxv1.ExecResult) bool { return r.GetStdoutInfo() != nil }

// withoutBytes is the answer without output and receipt. The parts are shared, not copied.
func withoutBytes(r *sandboxv1.ExecResult) *sandboxv1.ExecResult {
	return &sandboxv1.ExecResult{
		ExecId: r.GetExecId(), SessionId: r.GetSessionId(), OwnerEpoch: r.GetOwnerEpoch(), Generation: r.GetGeneration(),
		Status: r.GetStatus(), ExitCode: r.GetExitCode(), Signal: r.GetSignal(), Oom: r.GetOom(),
		StdoutInfo: r.GetStdoutInfo(), StderrInfo: r.GetStderrInfo(), StartedAt: r.GetStartedAt(), Duration: r.GetDuration(),
		Usage: r.GetUsage(), Harvest: r.GetHarvest(), RefusedDestinations: r.GetRefusedDestinations(), Reason: r.GetReason(),
		Labels: r.GetLabels(), SandboxId: r.GetSandboxId(), Evidence: r.GetEvidence(), Nonce: r.GetNonce(),
		Network: r.GetNetwork(),
	}
}

// withText adds what only some callers want; the shared answer is left alone.
func withText(r *sandboxv1.ExecResult, text bool) *sandboxv1.ExecResult {
	if !text {
		return r
	}
	c := proto.CloneOf(r)
	c.StdoutText = strings.ToValidUTF8(string(r.GetStdout()), "\uFFFD")
	c.StderrText = strings.ToValidUTF8(string(r.GetStderr()), "\uFFFD")
	return c
}

// keptChunks cuts kept output into what a stream of the running command would have given from offset on.
func keptChunks(stream sandboxv1.Stream, kept []byte, info *sandboxv1.OutputInfo, offset uint64, size int) []*sandboxv1.OutputChunk {
	head := uint64(len(kept))
	if info.GetTruncated() {
		head = min(info.GetOmittedFrom(), head)
	}
	s := &subscriber{next: map[sandboxv1.Stream]uint64{stream: offset}}
	var out []*sandboxv1.OutputChunk
	emit := func(at uint64, data []byte) {
		for len(data) > 0 {
			n := min(len(data), size)
			if c := s.trim(chunk{stream: stream, offset: at, data: data[:n]}); c != nil {
				out = append(out, c)
			}
			at, data = at+uint64(n), data[n:]
		}
	}
	emit(0, kept[:head])
	emit(head+info.GetOmittedBytes(), kept[head:])
	return out
}
