package client

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

// Client speaks the public API to one agent: Client.Client asks again where that is safe, the generated clients beside it
// ask once.
type Client struct {
	*client.Client
	Socket   string
	Sessions sandboxv1connect.SessionServiceClient
	Execs    sandboxv1connect.ExecServiceClient
	Git      sandboxv1connect.GitServiceClient
	Node     sandboxv1connect.NodeServiceClient
}

// New makes a client of the agent at a unix socket. It dials at the first call.
func New(socket string) *Client { return NewRetrying(socket, client.DefaultRetryFor) }

// NewRetrying is New with the time for which a lost connection is asked again; 0: not at all. What an agent on this node
// answers is believed: it has verified each receipt, and "receipt verify" does it again.
func NewRetrying(socket string, retryFor time.Duration) *Client {
	if retryFor == 0 {
		retryFor = -1
	}
	c := client.New(socket, client.Options{RetryFor: retryFor, SkipVerify: true})
	api := c.API()
	return &Client{Client: c, Socket: socket, Sessions: api.Sessions, Execs: api.Execs, Git: api.Git, Node: api.Node}
}

// Explain turns a call's error into a sentence with a remedy; what is being done stands first.
func (c *Client) Explain(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case len(c.Socket) > config.MaxSocketPath: // the kernel says "invalid argument"
		return fmt.Errorf("%s: the socket's path %s has %d bytes, a unix socket's at most %d (unix(7)): name a shorter one with --socket or SANDBOX_AGENT_SOCKET, for example a link to its folder",
			what, c.Socket, len(c.Socket), config.MaxSocketPath)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%s: no agent listens at %s: start one with \"sandbox-agent serve\" or name its socket with --socket or SANDBOX_AGENT_SOCKET", what, c.Socket)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: no permission to open %s as uid %d: run this as a user that the agent's socket.allow_uids lists", what, c.Socket, os.Geteuid())
	}
	e, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return fmt.Errorf("%s: %w", what, err)
	}
	if e.Code() == connect.CodeUnimplemented {
		return fmt.Errorf("%s: this agent doesn't implement it: %s", what, e.Message())
	}
	return fmt.Errorf("%s: %s: %s", what, e.Code(), e.Message())
}

// NeverSent says that the error came before anything reached an agent.
func NeverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// ConnectionLost says that the error is the connection's and not an answer of the agent.
func ConnectionLost(err error) bool {
	e, ok := errors.AsType[*connect.Error](err)
	return !ok || !e.IsRemote()
}
