package rpc

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect/v2"

	"github.com/sandbox-agent/sandbox-agent/internal/agent"
)

// codeTable is the whole mapping, first match first: an error that carries a kind of the agent's is that kind, even if a
// context's end is its cause.
var codeTable = []struct {
	kind error
	code connect.Code
}{
	{errPeer, connect.CodePermissionDenied},
	{agent.ErrUnimplemented, connect.CodeUnimplemented},
	{agent.ErrInvalid, connect.CodeInvalidArgument},
	{agent.ErrNotFound, connect.CodeNotFound},
	{agent.ErrPrecondition, connect.CodeFailedPrecondition},
	{agent.ErrExists, connect.CodeAlreadyExists},
	{agent.ErrExhausted, connect.CodeResourceExhausted},
	{agent.ErrUnavailable, connect.CodeUnavailable},
	{agent.ErrDataLoss, connect.CodeDataLoss},
	{context.Canceled, connect.CodeCanceled},
	{context.DeadlineExceeded, connect.CodeDeadlineExceeded},
}

// toConnect gives the error that the caller gets. Peers are the node's own trusted callers, so they see the whole
// message, less the name of its kind, which the code says; what no kind fits is internal.
func toConnect(err error) error {
	if err == nil {
		return nil
	}
	var already *connect.Error
	if errors.As(err, &already) {
		return explain(already, err)
	}
	for _, c := range codeTable {
		if errors.Is(err, c.kind) {
			return connect.NewError(c.code, withoutKind(err.Error(), c.kind)).WithCause(err)
		}
	}
	return connect.NewError(connect.CodeInternal, err.Error()).WithCause(err)
}

// withoutKind cuts a kind's name from the front, however often it was wrapped: clients print the code before the message.
func withoutKind(message string, kind error) string {
	for {
		rest, ok := strings.CutPrefix(message, kind.Error()+": ")
		if !ok {
			return message
		}
		message = rest
	}
}

// explain says more of an error of the transport's own. It is the only one that calls a resource exhausted before a
// handler runs, and then the message was too large.
func explain(e *connect.Error, err error) error {
	if e.Code() != connect.CodeResourceExhausted {
		return err
	}
	return connect.Errorf(connect.CodeResourceExhausted,
		"the request is larger than %d bytes, the most that one may have: put what is long into a file in the worktree (a command is bounded by limits.command_bytes)",
		maxRequest).WithCause(err)
}
