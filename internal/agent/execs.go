package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
)

// streamChunk is the most that one message of a re-attached stream carries.
const streamChunk = 64 << 10

// Exec runs a command, or answers from the record of one. When ctx ends the command goes on; asking again with the
// same exec_id gives its outcome.
func (a *Agent) Exec(ctx context.Context, r *sandboxv1.ExecRequest) (*sandboxv1.ExecResult, error) {
	s, live, record, err := a.submit(r)
	if err != nil {
		return nil, err
	}
	result, err := s.outcomeOf(ctx, live, record)
	if err != nil {
		return nil, err
	}
	return withText(result, r.GetText()), nil
}

func (a *Agent) submit(r *sandboxv1.ExecRequest) (*session, *execution, *execRecord, error) {
	if err := checkExec(r, a.cfg.Limits); err != nil {
		return nil, nil, nil, err
	}
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, nil, nil, err
	}
	if r.GetExecId() == "" {
		r.ExecId = "x-" + randomHex(8)
	}
	live, record, err := s.submit(r)
	if err == nil && live != nil {
		s.announce(live)
	}
	return s, live, record, err
}

func (s *session) outcomeOf(ctx context.Context, live *execution, record *execRecord) (*sandboxv1.ExecResult, error) {
	if live != nil {
		return live.wait(ctx)
	}
	return s.answerOf(record)
}

// StreamExec is Exec with the output as it comes. send may be slow: what it misses is marked as lost, the command
// never waits for it (P13). Of an exec that has ended, the kept output is given.
func (a *Agent) StreamExec(ctx context.Context, r *sandboxv1.StreamExecRequest, send func(*sandboxv1.StreamExecResponse) error) error {
	if r.GetExec() == nil {
		return invalid("exec is missing")
	}
	s, live, record, err := a.submit(r.GetExec())
	if err != nil {
		return err
	}
	next := map[sandboxv1.Stream]uint64{sandboxv1.Stream_STDOUT: r.GetStdoutOffset(), sandboxv1.Stream_STDERR: r.GetStderrOffset()}
	if live != nil {
		if next, err = streamLive(ctx, live, r, send); err != nil {
			return err
		}
	}
	result, err := s.outcomeOf(ctx, live, record)
	if err != nil {
		return err
	}
	if live == nil && result.GetStatus() != sandboxv1.ExecResult_NOT_STARTED {
		if err := send(startedEvent(result.GetExecId(), result.GetGeneration())); err != nil {
			return err
		}
	}
	if err := streamKept(result, next, send); err != nil {
		return err
	}
	result = withText(result, r.GetExec().GetText())
	return send(&sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Result{Result: result}})
}

// streamLive gives the output of a running exec until it ends, and answers how far it came in each stream.
func streamLive(ctx context.Context, e *execution, r *sandboxv1.StreamExecRequest, send func(*sandboxv1.StreamExecResponse) error) (next map[sandboxv1.Stream]uint64, err error) {
	sub := e.output.subscribe(r.GetStdoutOffset(), r.GetStderrOffset())
	defer e.output.unsubscribe(sub)
	select {
	case <-e.started:
	case <-e.done: // it was refused or withdrawn
		return sub.next, e.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := send(startedEvent(e.intent.ExecID, e.intent.Generation)); err != nil {
		return nil, err
	}
	for {
		c, err := sub.receive(ctx)
		if err != nil || c == nil {
			return sub.next, err
		}
		if err := send(outputEvent(c)); err != nil {
			return nil, err
		}
	}
}

// streamKept gives what is kept of an exec's output from the given offsets on. Of one that ran under a lost connection
// (the agent was restarted) that is what nobody streamed; usually nothing is left.
func streamKept(res *sandboxv1.ExecResult, next map[sandboxv1.Stream]uint64, send func(*sandboxv1.StreamExecResponse) error) error {
	chunks := keptChunks(sandboxv1.Stream_STDOUT, res.GetStdout(), res.GetStdoutInfo(), next[sandboxv1.Stream_STDOUT], streamChunk)
	chunks = append(chunks, keptChunks(sandboxv1.Stream_STDERR, res.GetStderr(), res.GetStderrInfo(), next[sandboxv1.Stream_STDERR], streamChunk)...)
	for _, c := range chunks {
		if err := send(outputEvent(c)); err != nil {
			return err
		}
	}
	return nil
}

func startedEvent(id string, generation uint64) *sandboxv1.StreamExecResponse {
	return &sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Started{
		Started: &sandboxv1.ExecStarted{ExecId: id, Generation: generation},
	}}
}

func outputEvent(c *sandboxv1.OutputChunk) *sandboxv1.StreamExecResponse {
	return &sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Output{Output: c}}
}

// GetExec says how far an exec is, and waits for nothing.
func (a *Agent) GetExec(_ context.Context, r *sandboxv1.GetExecRequest) (*sandboxv1.GetExecResponse, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	if err := checkExecID(r.GetExecId()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	live, record, err := s.lookup(r.GetExecId())
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if live != nil {
		if result := s.answeredBefore(live); result != nil {
			return &sandboxv1.GetExecResponse{State: sandboxv1.ExecState_EXEC_DONE, Result: withText(result, r.GetText())}, nil
		}
		return &sandboxv1.GetExecResponse{State: live.state()}, nil
	}
	result, err := s.answerOf(record)
	if err != nil && record.Outcome == nil && record.expired == nil {
		return &sandboxv1.GetExecResponse{State: sandboxv1.ExecState_EXEC_RUNNING}, nil
	}
	if err != nil {
		return nil, err
	}
	return &sandboxv1.GetExecResponse{State: sandboxv1.ExecState_EXEC_DONE, Result: withText(result, r.GetText())}, nil
}

// answeredBefore is the answer of an exec that an earlier agent may have given from its receipt alone, whose record a crash
// took with it: until this agent has recorded it again it is in the receipts folder. nil for one that was never answered.
func (s *session) answeredBefore(e *execution) *sandboxv1.ExecResult {
	if !e.recovered {
		return nil
	}
	finding, p, _ := s.look(e)
	if finding != ReceiptGood || receiptVerdict(p).event != ExReceipt || outlived(p) {
		return nil // an answer that rests on more than its receipt was durable before it was given
	}
	return resultOf(&e.intent, p)
}

func (e *execution) state() sandboxv1.ExecState {
	select {
	case <-e.started:
		return sandboxv1.ExecState_EXEC_RUNNING
	default:
		return sandboxv1.ExecState_EXEC_QUEUED
	}
}

// ListExecs gives one page of a session's recorded execs, in the order of their ids, and the token of the next one.
// Execs that wait in the queue are in Session.queued_exec_ids.
func (a *Agent) ListExecs(_ context.Context, r *sandboxv1.ListExecsRequest) ([]*sandboxv1.ExecSummary, string, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, "", err
	}
	size, err := pageSize(r.GetPageSize())
	if err != nil {
		return nil, "", err
	}
	after := ""
	if r.GetPageToken() != "" {
		if err := checkExecID(r.GetPageToken()); err != nil {
			return nil, "", invalid("page_token is not one that ListExecs gave")
		}
		after = execKey(s.id, r.GetPageToken())
	}
	var page, open []*sandboxv1.ExecSummary
	next := ""
	err = a.journal.Scan(execKey(s.id, ""), after, func(key string, value []byte) error {
		if len(page) == size {
			next = page[size-1].GetExecId()
			return journal.ErrStop
		}
		summary, err := summaryOf(strings.TrimPrefix(key, execKey(s.id, "")), value)
		if page = append(page, summary); summary.GetState() != sandboxv1.ExecState_EXEC_DONE {
			open = append(open, summary)
		}
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing the execs of session %s: %w", s.id, err)
	}
	for _, summary := range open {
		s.lookAt(summary)
	}
	return page, next, nil
}

// lookAt completes the summary of an exec whose record has no outcome: it runs, or is answered by GetExec all the same.
func (s *session) lookAt(summary *sandboxv1.ExecSummary) {
	res, err := s.agent.GetExec(context.Background(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: summary.GetExecId()})
	if err != nil {
		return // it has expired since, or its session was deleted: when the list was made it ran
	}
	summary.State, summary.Status, summary.ExitCode = res.GetState(), res.GetResult().GetStatus(), res.GetResult().GetExitCode()
}

func summaryOf(id string, value []byte) (*sandboxv1.ExecSummary, error) {
	var rec execRecord
	if err := json.Unmarshal(value, &rec); err != nil {
		return nil, fmt.Errorf("%w: the record of exec %q can't be read: %w", ErrDataLoss, id, err)
	}
	out := &sandboxv1.ExecSummary{
		ExecId: id, State: sandboxv1.ExecState_EXEC_RUNNING, Generation: rec.Intent.Generation,
		RequestedAt: timestamppb.New(rec.Intent.RequestedAt),
	}
	if rec.Outcome == nil {
		return out, nil
	}
	r, err := decodeOutcome(rec.Outcome)
	if err != nil {
		return nil, err
	}
	out.State, out.Status, out.ExitCode = sandboxv1.ExecState_EXEC_DONE, r.GetStatus(), r.GetExitCode()
	return out, nil
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
