package client

import (
	"context"
	"errors"
	"fmt"
	"net"

	"connectrpc.com/connect/v2"
)

// What an agent's answer can be, by its Connect code. An *Error is (errors.Is) the one of its code.
var (
	ErrInvalidArgument    error = codeError(connect.CodeInvalidArgument)    // the message names the field and the remedy
	ErrNotFound           error = codeError(connect.CodeNotFound)           // no such session or exec
	ErrFailedPrecondition error = codeError(connect.CodeFailedPrecondition) // a stale owner epoch or generation, a reserved workspace, an expired record
	ErrAlreadyExists      error = codeError(connect.CodeAlreadyExists)      // the id was used for another request
	ErrResourceExhausted  error = codeError(connect.CodeResourceExhausted)  // a limit is reached; the message names its key
	ErrPermissionDenied   error = codeError(connect.CodePermissionDenied)   // this uid is not in socket.allow_uids
	ErrUnavailable        error = codeError(connect.CodeUnavailable)        // no sandbox could be had, or the agent is shutting down or drained
	ErrUnimplemented      error = codeError(connect.CodeUnimplemented)      // this agent is older than this client
	ErrDataLoss           error = codeError(connect.CodeDataLoss)           // something that was durable is gone or does not verify any more
	ErrInternal           error = codeError(connect.CodeInternal)           // the agent failed; its log says why
)

// What else a call can fail with.
var (
	// ErrNoAgent: the socket can't be dialled, and nothing was sent. The cause is the kernel's (fs.ErrNotExist,
	// fs.ErrPermission, syscall.ECONNREFUSED).
	ErrNoAgent = errors.New("no agent can be reached")
	// ErrConnectionLost: there was no answer. Whether the agent did what it was asked for is not known.
	ErrConnectionLost = errors.New("connection lost")

	// ErrNotStarted: the command certainly did not run, neither by this call nor by an earlier one with this id; of a
	// session that was deleted nobody knows the latter. With ExecError.Result the agent has recorded that, and the exec id
	// is used up. Without one the agent refused, or was never reached, and the same id may be used again; not so with
	// ErrAlreadyExists: the id is another request's, which may have run.
	ErrNotStarted = errors.New("not started")
	// ErrUncertain: the command may have run, wholly, partly or not at all, and may still run. The same request with the
	// same exec id may find out, and is safe; repeating it under another id is not: look at the workspace first.
	ErrUncertain = errors.New("uncertain")
	// ErrUnverified: the agent answered, and the answer was refused because nothing proves it. From Exec and Stream it is
	// ErrUncertain as well.
	ErrUnverified = errors.New("answer does not verify")
	// ErrKeyChanged: a session's record gives another key, session or generation for a sandbox than was pinned.
	ErrKeyChanged = errors.New("a sandbox's key, session or generation is not what was pinned")
)

// codeError is one Connect code as a sentinel.
type codeError connect.Code

func (c codeError) Error() string { return connect.Code(c).String() }

// Error is a call that failed.
type Error struct {
	// Op is what was being done: "creating session s1".
	Op string
	// Code is the agent's; 0 when there was no answer.
	Code connect.Code
	// Message is the agent's, without the code.
	Message string
	cause   error
	kind    error
}

func (e *Error) Error() string {
	switch {
	case e.kind != nil:
		return fmt.Sprintf("%s: %v: %v", e.Op, e.kind, e.cause)
	case e.Code != 0:
		return fmt.Sprintf("%s: %s: %s", e.Op, e.Code, e.Message)
	}
	return fmt.Sprintf("%s: %v", e.Op, e.cause)
}

// Unwrap gives the transport's error: a *connect.Error, a *net.OpError, a context's.
func (e *Error) Unwrap() error { return e.cause }

// Is makes an Error the sentinel of its code, and ErrNoAgent or ErrConnectionLost.
func (e *Error) Is(target error) bool {
	if c, ok := target.(codeError); ok {
		return e.Code != 0 && connect.Code(c) == e.Code
	}
	return e.kind != nil && target == e.kind
}

// failed makes an *Error of what a generated client gave.
func failed(ctx context.Context, op string, err error) error {
	if err == nil {
		return nil
	}
	out := &Error{Op: op, cause: err}
	switch e, ok := errors.AsType[*connect.Error](err); {
	case neverSent(err):
		out.kind = ErrNoAgent
	case ctx.Err() != nil:
		out.cause = &over{context.Cause(ctx), err}
	case !ok || !e.IsRemote():
		out.kind = ErrConnectionLost
	default:
		out.Code, out.Message = e.Code(), e.Message()
	}
	return out
}

// over is a call whose context ended. What the transport made of that is a cause too, and would only say it again.
type over struct{ why, transport error }

func (e *over) Error() string   { return e.why.Error() }
func (e *over) Unwrap() []error { return []error{e.why, e.transport} }

// neverSent says that the error came before anything reached an agent.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// lost says that the error is the connection's and not an answer of the agent.
func lost(err error) bool {
	return errors.Is(err, ErrConnectionLost) || errors.Is(err, ErrNoAgent)
}

// ExecError is a command whose end is not known to the caller as a fact: it is exactly one of ErrNotStarted and
// ErrUncertain.
type ExecError struct {
	SessionID, ExecID string
	// Result is the agent's answer NOT_STARTED or UNCERTAIN; nil when there was none, or when it does not verify.
	Result *Result
	kind   error
	cause  error
}

func (e *ExecError) Error() string {
	what := "it certainly did not run"
	if errors.Is(e.kind, ErrUncertain) {
		what = "it may have run: look before you repeat it, or ask again with the same exec id and request"
	}
	return fmt.Sprintf("exec %s of session %s: %v (%s)", e.ExecID, e.SessionID, e.cause, what)
}

// Unwrap gives ErrNotStarted or ErrUncertain, and the cause.
func (e *ExecError) Unwrap() []error { return []error{e.kind, e.cause} }
