package rpc

import (
	"context"
	"errors"

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
// message; what no kind fits is internal.
func toConnect(err error) error {
	if err == nil {
		return nil
	}
	var already *connect.Error
	if errors.As(err, &already) {
		return err
	}
	for _, c := range codeTable {
		if errors.Is(err, c.kind) {
			return connect.NewError(c.code, err.Error()).WithCause(err)
		}
	}
	return connect.NewError(connect.CodeInternal, err.Error()).WithCause(err)
}
