package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
)

func answer(code connect.Code) error { return connect.NewError(code, "why").WithRemote() }

func dialled(errno syscall.Errno) error {
	return connect.NewError(connect.CodeUnavailable, "x").WithCause(&net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", errno)})
}

func TestAnErrorIsTheSentinelOfItsCodeAndOfNoOther(t *testing.T) {
	all := map[connect.Code]error{
		connect.CodeInvalidArgument: ErrInvalidArgument, connect.CodeNotFound: ErrNotFound, connect.CodeFailedPrecondition: ErrFailedPrecondition,
		connect.CodeAlreadyExists: ErrAlreadyExists, connect.CodeResourceExhausted: ErrResourceExhausted, connect.CodePermissionDenied: ErrPermissionDenied,
		connect.CodeUnavailable: ErrUnavailable, connect.CodeUnimplemented: ErrUnimplemented, connect.CodeDataLoss: ErrDataLoss, connect.CodeInternal: ErrInternal,
	}
	for code, want := range all {
		err := fmt.Errorf("outer: %w", failed(t.Context(), "doing it", answer(code)))
		for other, sentinel := range all {
			require.Equal(t, other == code, errors.Is(err, sentinel), "%s is %v", code, sentinel)
		}
		require.NotErrorIs(t, err, ErrConnectionLost)
		require.NotErrorIs(t, err, ErrNoAgent)
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, code, e.Code)
		require.Equal(t, "doing it: "+want.Error()+": why", e.Error())
		require.Equal(t, code, connect.CodeOf(err), "the transport's error is still there")
	}
}

func TestWithoutAnAnswerAnErrorHasNoCode(t *testing.T) {
	cut := failed(t.Context(), "x", connect.NewError(connect.CodeUnavailable, "reset"))
	require.ErrorIs(t, cut, ErrConnectionLost)
	require.NotErrorIs(t, cut, ErrUnavailable, "only an agent says that")
	absent := failed(t.Context(), "x", dialled(syscall.ENOENT))
	require.ErrorIs(t, absent, ErrNoAgent)
	require.ErrorIs(t, absent, os.ErrNotExist)
	require.NotErrorIs(t, absent, ErrConnectionLost)

	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	over := failed(ctx, "x", connect.NewError(connect.CodeCanceled, "canceled"))
	require.EqualError(t, over, "x: enough", "once, and not what the transport made of it as well")
	require.ErrorIs(t, over, context.Cause(ctx))
	require.False(t, lost(over))
}

func TestWhatFollowsFromAFailedAttempt(t *testing.T) {
	for _, c := range []struct {
		err         error
		first, then step
	}{
		{dialled(syscall.ECONNREFUSED), refused, askAgain},
		{connect.NewError(connect.CodeUnavailable, "reset"), askAgain, askAgain},
		{errors.New("EOF"), askAgain, askAgain},
		{answer(connect.CodeInvalidArgument), refused, unknown},
		{answer(connect.CodeNotFound), refused, unknown},
		{answer(connect.CodePermissionDenied), refused, unknown},
		{answer(connect.CodeUnimplemented), refused, unknown},
		{answer(connect.CodeUnauthenticated), refused, unknown},
		{answer(connect.CodeAlreadyExists), refused, refused},
		{answer(connect.CodeFailedPrecondition), lookUp, lookUp},
		{answer(connect.CodeUnavailable), lookUp, askAgain},
		{answer(connect.CodeResourceExhausted), refused, askAgain},
		{answer(connect.CodeInternal), unknown, unknown},
		{answer(connect.CodeDataLoss), unknown, unknown},
		{answer(connect.CodeCanceled), unknown, unknown},
		{answer(connect.CodeDeadlineExceeded), unknown, unknown},
		{answer(connect.CodeUnknown), unknown, unknown},
		{answer(connect.CodeAborted), unknown, unknown},
	} {
		err := failed(t.Context(), "x", c.err)
		require.Equal(t, c.first, afterError(err, false, false), "first: %v", err)
		require.Equal(t, c.then, afterError(err, true, false), "after a lost one: %v", err)
		require.NotEqual(t, askAgain, afterError(err, true, true), "the caller's time is over: %v", err)
	}
	require.Equal(t, unknown, afterError(failed(t.Context(), "x", errors.New("EOF")), false, true))
	require.Equal(t, unknown, afterError(failed(t.Context(), "x", dialled(syscall.ENOENT)), true, true))
}
