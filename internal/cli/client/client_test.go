package client

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestErrorsNameTheSocketAndTheRemedy(t *testing.T) {
	c := New("/the/socket")
	dial := func(errno syscall.Errno) error {
		return &net.OpError{Op: "dial", Net: "unix", Err: os.NewSyscallError("connect", errno)}
	}
	require.NoError(t, c.Explain("x", nil))
	for _, errno := range []syscall.Errno{syscall.ENOENT, syscall.ECONNREFUSED} {
		err := c.Explain("listing sessions", dial(errno))
		require.ErrorContains(t, err, "listing sessions: no agent listens at /the/socket")
		require.ErrorContains(t, err, "sandbox-agent serve")
	}
	require.ErrorContains(t, c.Explain("x", dial(syscall.EACCES)), "socket.allow_uids")
	require.ErrorContains(t, c.Explain("x", connect.NewError(connect.CodeUnimplemented, "grants come later")), "this agent doesn't implement it: grants come later")
	require.ErrorContains(t, c.Explain("x", connect.NewError(connect.CodeNotFound, "no session s1")), "x: not_found: no session s1")
	require.ErrorContains(t, c.Explain("x", errors.New("odd")), "x: odd")
}

func TestASocketPathThatNoKernelTakesIsNamed(t *testing.T) {
	c := New("/" + strings.Repeat("x", 107))
	_, err := c.Node.GetNodeInfo(t.Context(), &sandboxv1.GetNodeInfoRequest{})
	require.True(t, NeverSent(err), "the command can't have run")
	err = c.Explain("listing sessions", err)
	require.ErrorContains(t, err, "has 108 bytes, a unix socket's at most 107")
	require.ErrorContains(t, err, "--socket")
	require.ErrorContains(t, err, c.Socket)
}

func TestOnlyAnAnswerOfTheAgentIsNoLostConnection(t *testing.T) {
	require.False(t, ConnectionLost(connect.NewError(connect.CodeUnavailable, "no sandbox").WithRemote()))
	require.True(t, ConnectionLost(connect.NewError(connect.CodeUnavailable, "connection reset")))
	require.True(t, ConnectionLost(errors.New("EOF")))
}

func TestADialThatFailedSentNothing(t *testing.T) {
	require.True(t, NeverSent(connect.NewError(connect.CodeUnavailable, "x").WithCause(&net.OpError{Op: "dial", Err: errors.New("x")})))
	require.False(t, NeverSent(&net.OpError{Op: "read", Err: errors.New("x")}))
	require.False(t, NeverSent(errors.New("x")))
}
