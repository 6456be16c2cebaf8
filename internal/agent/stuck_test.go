package agent

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// clogged is the real runtime with connections of which one, when it is next written to, takes nothing until it is closed: as
// the streams of a process in a guest that hangs, once they are full.
type clogged struct {
	runtime.Runtime
	next *atomic.Bool
}

type cloggedSandbox struct {
	runtime.Sandbox
	next *atomic.Bool
}

type cloggedConn struct {
	net.Conn
	next   *atomic.Bool
	once   sync.Once
	closed chan struct{}
}

func (r clogged) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	s, err := r.Runtime.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return cloggedSandbox{s, r.next}, nil
}

func (s cloggedSandbox) Dial(ctx context.Context) (net.Conn, error) {
	c, err := s.Sandbox.Dial(ctx)
	if err != nil {
		return nil, err
	}
	return &cloggedConn{Conn: c, next: s.next, closed: make(chan struct{})}, nil
}

func (c *cloggedConn) Write(b []byte) (int, error) {
	if c.next.CompareAndSwap(true, false) {
		<-c.closed
		return 0, net.ErrClosed
	}
	return c.Conn.Write(b)
}

func (c *cloggedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// While a command is handed over nobody can claim or delete its session: that ends also where receiptd's end takes nothing.
func TestP8AConnectionThatTakesNothingDoesNotKeepOwnersAway(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Runtime.StartTimeout = config.Duration(30 * time.Second) }) // the handing over has a third of it
	next := &atomic.Bool{}
	n.agent.hosts.all["embedded"] = clogged{n.agent.hosts.all["embedded"], next}
	s := n.session("s")
	next.Store(true)
	r := n.exec("s", "e1", "touch never")
	require.Equal(t, sandboxv1.ExecResult_NOT_STARTED, r.GetStatus(), r.GetReason())
	require.NoFileExists(t, s.GetWorkspace().GetWorktree()+"/never")
	claimed, err := n.agent.ClaimSession(n.ctx(), &sandboxv1.ClaimSessionRequest{SessionId: "s"})
	require.NoError(t, err)
	require.Equal(t, s.GetOwnerEpoch()+1, claimed.GetOwnerEpoch())
	require.Equal(t, sandboxv1.ExecResult_EXITED, n.exec("s", "e2", "true").GetStatus())
}
