package client

import (
	"context"
	"errors"
	"fmt"
	"io"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// Result is an answer about one command.
type Result struct {
	*sandboxv1.ExecResult
	// Verified is the content of the receipt, whose signature and whose agreement with the answer were checked. nil for an
	// answer without a receipt, and with Options.SkipVerify.
	Verified *receipt.Predicate
}

// Success says whether the command ran to its end and returned 0. ExitCode alone doesn't: it is 0, too, for a command
// that never ran.
func (r *Result) Success() bool {
	return r.GetStatus() == sandboxv1.ExecResult_EXITED && r.GetExitCode() == 0
}

// Exec runs a command and waits until nothing of it is left, or gives the answer of the exec that has this id. It never
// runs anything twice: an empty exec id is filled in before anything is sent, and a lost connection is asked again with
// the same id and request.
//
// Without an error the command ran, or was cancelled on request (Status: EXITED, SIGNALED, TIMED_OUT, KILLED,
// CANCELLED), and the answer is verified; a non-zero exit code is no error. Otherwise the error is an *ExecError: either
// ErrNotStarted or ErrUncertain. With the answers NOT_STARTED and UNCERTAIN the Result is given beside the error.
//
// When ctx ends the command goes on: CancelExec ends it.
func (c *Client) Exec(ctx context.Context, r *sandboxv1.ExecRequest) (*Result, error) {
	r = withID(r)
	return c.run(ctx, r, func() (*sandboxv1.ExecResult, bool, error) {
		res, err := c.api.Execs.Exec(ctx, r)
		return res.GetResult(), false, err
	})
}

func withID(r *sandboxv1.ExecRequest) *sandboxv1.ExecRequest {
	r = proto.CloneOf(r)
	if r.GetExecId() == "" {
		r.ExecId = NewExecID()
	}
	return r
}

// Chunk is a piece of a running command's output.
type Chunk struct {
	Stream sandboxv1.Stream
	// Offset is that of the first byte of Data in the stream.
	Offset uint64
	// Lost counts the bytes directly before Offset that nobody can give any more, because this reader was too slow or
	// too late: the hole is [Offset-Lost, Offset). They are counted and hashed in the receipt all the same.
	Lost uint64
	// Data may be empty in the last chunk of a stream, when its end is lost.
	Data []byte
}

// Stream is Exec with the output as it comes. output gets each stream's bytes in their order and exactly once, over as
// many connections as it takes; holes are said. When the command has ended, it gets what the answer holds and the stream
// did not bring. It is called from one goroutine, and may be slow: the command never waits for it.
//
// StdoutOffset and StderrOffset say where to begin, for a caller that has a part already. What output gets comes before
// it can be verified: at the end the hash of a stream that was given whole is compared with the receipt's. An error of
// output ends the call as ErrUncertain, with that error as its cause; the command goes on.
func (c *Client) Stream(ctx context.Context, r *sandboxv1.StreamExecRequest, output func(Chunk) error) (*Result, error) {
	f := newFlow(r, output)
	exec := withID(r.GetExec())
	res, err := c.run(ctx, exec, func() (*sandboxv1.ExecResult, bool, error) { return c.streamOnce(ctx, exec, f) })
	if res == nil {
		return nil, err
	}
	if flowErr := f.finish(res.ExecResult, !c.skipVerify); flowErr != nil {
		return nil, &ExecError{SessionID: exec.GetSessionId(), ExecID: exec.GetExecId(), kind: ErrUncertain, cause: flowErr}
	}
	return res, err
}

// streamOnce is one connection. moved: something came.
func (c *Client) streamOnce(ctx context.Context, exec *sandboxv1.ExecRequest, f *flow) (res *sandboxv1.ExecResult, moved bool, err error) {
	stream, err := c.api.Execs.StreamExec(ctx, &sandboxv1.StreamExecRequest{
		Exec: exec, StdoutOffset: f.stdout.next, StderrOffset: f.stderr.next,
	})
	if err != nil {
		return nil, false, err
	}
	defer stream.Close()
	for {
		m, err := stream.Receive()
		switch {
		case errors.Is(err, io.EOF): // a stream without a result is a cut stream
			return nil, moved, io.ErrUnexpectedEOF
		case err != nil:
			return nil, moved, err
		case m.GetResult() != nil:
			return m.GetResult(), true, nil
		case m.GetOutput() != nil:
			moved = true
			if err := f.take(m.GetOutput()); err != nil {
				return nil, moved, err
			}
		}
	}
}

// run asks until there is an answer, and verifies it.
func (c *Client) run(ctx context.Context, r *sandboxv1.ExecRequest, once func() (*sandboxv1.ExecResult, bool, error)) (*Result, error) {
	give := func(kind, cause error) error {
		return &ExecError{SessionID: r.GetSessionId(), ExecID: r.GetExecId(), kind: kind, cause: cause}
	}
	if ctx.Err() != nil {
		return nil, give(ErrNotStarted, context.Cause(ctx))
	}
	p := c.newPatience()
	for {
		raw, moved, err := once()
		if err == nil {
			return c.answered(ctx, r, RequestDigest(r), raw)
		}
		if own, ok := errors.AsType[*outputError](err); ok {
			return nil, give(ErrUncertain, own.err)
		}
		if moved {
			p.progress()
		}
		err = failed(ctx, "running exec "+r.GetExecId(), err)
		step := afterError(err, p.asked, ctx.Err() != nil)
		if step == lookUp {
			step = c.lookUp(ctx, r)
		}
		switch step {
		case refused:
			return nil, give(ErrNotStarted, err)
		case unknown:
			return nil, give(ErrUncertain, err)
		}
		if !p.wait(ctx) {
			if _, said := errors.AsType[*over](err); ctx.Err() != nil && !said {
				err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
			}
			return nil, give(ErrUncertain, err)
		}
	}
}

// step is what follows from a failed attempt to run a command.
type step int

const (
	askAgain step = iota
	refused       // nothing of this exec has run or will
	unknown
	lookUp // the agent's record decides between the others
)

// afterError decides. asked: an earlier attempt was lost, and may have started the command. over: the caller's context
// has ended.
//
// A first attempt that the agent refuses started nothing: it records the intent only after all checks. After a lost one
// only two answers say that: the id belongs to another request, so it was never this one's; and a fence with no record of
// the exec behind it, for epochs and generations never go back. Everything else may be said of a command that ran.
func afterError(err error, asked, over bool) step {
	noAgent := errors.Is(err, ErrNoAgent)
	switch {
	case noAgent && !asked:
		return refused
	case over:
		return unknown
	case lost(err):
		return askAgain
	}
	e, _ := errors.AsType[*Error](err)
	switch e.Code {
	case connect.CodeAlreadyExists:
		return refused
	case connect.CodeUnavailable:
		// Shutting down with the intent recorded, or no sandbox to be had: the record tells them apart.
		if asked {
			return askAgain
		}
		return lookUp
	case connect.CodeFailedPrecondition:
		// A fence, grants that are missing; or the record of an exec that ran has expired.
		return lookUp
	case connect.CodeResourceExhausted:
		if asked {
			return askAgain
		}
		return refused
	case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodePermissionDenied, connect.CodeUnimplemented, connect.CodeUnauthenticated:
		if asked {
			return unknown
		}
		return refused
	}
	return unknown
}

// lookUp asks for the record of an exec that was refused. An agent that is shutting down may not be able to tell any more.
func (c *Client) lookUp(ctx context.Context, r *sandboxv1.ExecRequest) step {
	_, err := c.api.Execs.GetExec(ctx, &sandboxv1.GetExecRequest{SessionId: r.GetSessionId(), ExecId: r.GetExecId()})
	err = failed(ctx, "looking up exec "+r.GetExecId(), err)
	switch {
	case errors.Is(err, ErrNotFound):
		return refused
	case errors.Is(err, ErrFailedPrecondition), errors.Is(err, ErrDataLoss): // it ran, and its record has expired or is damaged
		return unknown
	}
	return askAgain
}

// answered verifies an answer and turns it into what Exec gives. digest is the request's, "" where it is not known.
func (c *Client) answered(ctx context.Context, r *sandboxv1.ExecRequest, digest string, raw *sandboxv1.ExecResult) (*Result, error) {
	give := func(res *Result, kind, cause error) (*Result, error) {
		return res, &ExecError{SessionID: r.GetSessionId(), ExecID: r.GetExecId(), Result: res, kind: kind, cause: cause}
	}
	res := &Result{ExecResult: raw}
	if raw == nil {
		return give(nil, ErrUncertain, fmt.Errorf("%w: the agent answered without a result", ErrUnverified))
	}
	if !c.skipVerify {
		var err error
		if res.Verified, err = c.verify(ctx, r.GetSessionId(), r.GetExecId(), digest, raw); err != nil {
			return give(nil, ErrUncertain, err)
		}
	}
	switch raw.GetStatus() {
	case sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_TIMED_OUT,
		sandboxv1.ExecResult_KILLED, sandboxv1.ExecResult_CANCELLED:
		return res, nil
	case sandboxv1.ExecResult_NOT_STARTED:
		return give(res, ErrNotStarted, reasonOf(raw))
	default: // UNCERTAIN, and every status that this version doesn't know
		return give(res, ErrUncertain, reasonOf(raw))
	}
}

func reasonOf(r *sandboxv1.ExecResult) error {
	return fmt.Errorf("the agent answered %s: %s", r.GetStatus(), r.GetReason())
}

// CancelExec ends a command, or takes it out of the queue, and waits for what became of it: CANCELLED with evidence, the
// answer of one that had ended by itself, or NOT_STARTED and UNCERTAIN as Exec gives them. It may be repeated, and a lost
// connection is asked again. Fails with ErrNotFound when there is no such exec, ErrFailedPrecondition when OwnerEpoch is
// stale.
func (c *Client) CancelExec(ctx context.Context, r *sandboxv1.CancelExecRequest) (*Result, error) {
	p := c.newPatience()
	for {
		raw, err := c.api.Execs.CancelExec(ctx, r)
		if err == nil {
			return c.answered(ctx, &sandboxv1.ExecRequest{SessionId: r.GetSessionId(), ExecId: r.GetExecId()}, "", raw.GetResult())
		}
		err = failed(ctx, "cancelling exec "+r.GetExecId(), err)
		again := lost(err) && (p.asked || !errors.Is(err, ErrNoAgent)) || errors.Is(err, ErrUnavailable)
		if !again || !p.wait(ctx) {
			return nil, err
		}
	}
}

// GetExec answers from the record, and waits for nothing: how far the exec is, and with EXEC_DONE its result, verified.
// It fails with ErrNotFound, and with ErrFailedPrecondition when the record has expired.
func (c *Client) GetExec(ctx context.Context, session, exec string) (sandboxv1.ExecState, *Result, error) {
	res, err := c.api.Execs.GetExec(ctx, &sandboxv1.GetExecRequest{SessionId: session, ExecId: exec})
	if err != nil {
		return 0, nil, failed(ctx, "reading exec "+exec, err)
	}
	if res.GetState() != sandboxv1.ExecState_EXEC_DONE {
		return res.GetState(), nil, nil
	}
	r, err := c.answered(ctx, &sandboxv1.ExecRequest{SessionId: session, ExecId: exec}, "", res.GetResult())
	return res.GetState(), r, err
}
