package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"iter"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
)

// DefaultRetryFor is how long a lost connection is asked again.
const DefaultRetryFor = time.Minute

// Options are what a Client can be told; the zero value is good.
type Options struct {
	// RetryFor is for how long a call is asked again after its connection was lost, counted from the loss and anew
	// whenever output came. 0: DefaultRetryFor; below 0: never. The call's context bounds it as well.
	RetryFor time.Duration
	// Keys are the pinned keys of sandboxes. nil: a new Keyring, for this Client alone.
	Keys *Keyring
	// SkipVerify gives answers as the agent gives them, Result.Verified nil: for a caller on the agent's own node that
	// takes root's word, and has no record of which sandbox it asked.
	SkipVerify bool
}

// API are the generated clients, for what this package has no method for. Nothing is asked again and nothing verified.
type API struct {
	Sessions sandboxv1connect.SessionServiceClient
	Execs    sandboxv1connect.ExecServiceClient
	Git      sandboxv1connect.GitServiceClient
	Node     sandboxv1connect.NodeServiceClient
}

// Client speaks to the agent at one unix socket.
type Client struct {
	api        API
	transport  *http.Transport
	retryFor   time.Duration
	keys       *Keyring
	skipVerify bool
}

// New makes a client of the agent at a unix socket, a path of at most 107 bytes (unix(7)). It dials at the first call.
func New(socket string, o Options) *Client {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		// The peer is on this machine: compressing costs more than it saves.
		DisableCompression: true,
	}
	conn := connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: t}, "http://sandbox-agent"))
	c := &Client{
		api: API{
			Sessions: sandboxv1connect.NewSessionServiceClient(conn),
			Execs:    sandboxv1connect.NewExecServiceClient(conn),
			Git:      sandboxv1connect.NewGitServiceClient(conn),
			Node:     sandboxv1connect.NewNodeServiceClient(conn),
		},
		transport: t, retryFor: o.RetryFor, keys: o.Keys, skipVerify: o.SkipVerify,
	}
	if c.retryFor == 0 {
		c.retryFor = DefaultRetryFor
	}
	if c.keys == nil {
		c.keys = &Keyring{}
	}
	return c
}

// API gives the generated clients.
func (c *Client) API() API { return c.api }

// Keys gives the pinned keys.
func (c *Client) Keys() *Keyring { return c.keys }

// Close closes the connections that wait for the next call. The Client can still be used.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// NewExecID makes an exec id that nobody else makes, and that sorts by time.
func NewExecID() string {
	return "x-" + time.Now().UTC().Format("20060102T150405") + "-" + randomHex(6)
}

// NewSessionID makes a session id that nobody else makes.
func NewSessionID() string { return "s-" + randomHex(8) }

// randomHex: crypto/rand.Read never fails (Go 1.24).
func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// CreateSession makes a session, a worktree and a sandbox, or gives the session that the same request made before: an id
// means one session, for ever. Without an id it makes one first, so that a lost answer can be asked for again.
//
// It fails with ErrAlreadyExists when the id belongs, or belonged, to another request, and with the agent's errors
// otherwise; then there is no session of that id, unless the message says so.
func (c *Client) CreateSession(ctx context.Context, r *sandboxv1.CreateSessionRequest) (*sandboxv1.Session, error) {
	r = proto.CloneOf(r)
	if r.GetSessionId() == "" {
		r.SessionId = NewSessionID()
	}
	p := c.newPatience()
	for {
		res, err := c.api.Sessions.CreateSession(ctx, r)
		if err == nil {
			return c.seen(res.GetSession())
		}
		err = failed(ctx, "creating session "+r.GetSessionId(), err)
		// A call whose connection was lost may still be at work there, and keeps the id.
		again := errors.Is(err, ErrConnectionLost)
		if p.asked {
			again = lost(err) || errors.Is(err, ErrAlreadyExists) || errors.Is(err, ErrUnavailable)
		}
		if !again || !p.wait(ctx) {
			return nil, err
		}
	}
}

// GetSession gives a session's record.
func (c *Client) GetSession(ctx context.Context, id string) (*sandboxv1.Session, error) {
	res, err := c.api.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: id})
	if err != nil {
		return nil, failed(ctx, "reading session "+id, err)
	}
	return c.seen(res.GetSession())
}

// Sessions gives all sessions of the node, in the order of their ids. An error ends it.
func (c *Client) Sessions(ctx context.Context) iter.Seq2[*sandboxv1.Session, error] {
	return func(yield func(*sandboxv1.Session, error) bool) {
		for token := ""; ; {
			res, err := c.api.Sessions.ListSessions(ctx, &sandboxv1.ListSessionsRequest{PageToken: token})
			if err != nil {
				yield(nil, failed(ctx, "listing sessions", err))
				return
			}
			for _, s := range res.GetSessions() {
				if !yield(c.seen(s)) {
					return
				}
			}
			if token = res.GetNextPageToken(); token == "" {
				return
			}
		}
	}
}

// ClaimSession makes the caller the session's owner: owner_epoch rises, durably, and calls that fence on the old one
// start nothing any more. epoch is the one that the caller believes current, 0 for any; with another one it fails with
// ErrFailedPrecondition.
func (c *Client) ClaimSession(ctx context.Context, id string, epoch uint64) (*sandboxv1.Session, error) {
	res, err := c.api.Sessions.ClaimSession(ctx, &sandboxv1.ClaimSessionRequest{SessionId: id, OwnerEpoch: epoch})
	if err != nil {
		return nil, failed(ctx, "claiming session "+id, err)
	}
	return c.seen(res.GetSession())
}

// UpdateGrants replaces all grants of a session: what runs with the old ones is ended, and the next generation started.
// The set that the session has already changes nothing, so the call may be repeated.
func (c *Client) UpdateGrants(ctx context.Context, r *sandboxv1.UpdateGrantsRequest) (*sandboxv1.Session, error) {
	res, err := c.api.Sessions.UpdateGrants(ctx, r)
	if err != nil {
		return nil, failed(ctx, "replacing the grants of session "+r.GetSessionId(), err)
	}
	return c.seen(res.GetSession())
}

// RetireSandbox stops the session's sandbox and waits for the evidence that it is gone. The workspace stays, and the next
// command gets the next generation.
func (c *Client) RetireSandbox(ctx context.Context, r *sandboxv1.RetireSandboxRequest) (*sandboxv1.Session, *sandboxv1.Evidence, error) {
	res, err := c.api.Sessions.RetireSandbox(ctx, r)
	if err != nil {
		return nil, nil, failed(ctx, "retiring the sandbox of session "+r.GetSessionId(), err)
	}
	s, err := c.seen(res.GetSession())
	return s, res.GetEvidence(), err
}

// DeleteSession stops the sandbox with evidence and forgets the session, its records and its pinned keys. The worktree
// stays on disk. epoch is the owner's, 0 for any.
func (c *Client) DeleteSession(ctx context.Context, id string, epoch uint64) (*sandboxv1.Evidence, error) {
	res, err := c.api.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: id, OwnerEpoch: epoch})
	if err != nil {
		return nil, failed(ctx, "deleting session "+id, err)
	}
	c.keys.forget(id)
	return res.GetEvidence(), nil
}

// DeleteWorkspace removes a worktree with all that is kept for it, and the session that has it. Without Force it keeps
// work that is neither committed nor harvested, and says what (ErrFailedPrecondition).
func (c *Client) DeleteWorkspace(ctx context.Context, r *sandboxv1.DeleteWorkspaceRequest) (*sandboxv1.DeleteWorkspaceResponse, error) {
	res, err := c.api.Sessions.DeleteWorkspace(ctx, r)
	if err != nil {
		return nil, failed(ctx, "deleting the workspace of session "+r.GetSessionId()+r.GetWorktree(), err)
	}
	c.keys.forget(r.GetSessionId())
	return res, nil
}

// Git runs a trusted Git command in the session's jail. Its exit code, 0 to 255, is Git's and no error; its output is
// untrusted data.
func (c *Client) Git(ctx context.Context, r *sandboxv1.GitRequest) (*sandboxv1.GitResponse, error) {
	res, err := c.api.Git.Git(ctx, r)
	if err != nil {
		return nil, failed(ctx, "running git in session "+r.GetSessionId(), err)
	}
	return res, nil
}

// Harvest brings the session's Git work to the base clone now, for example after a conflict was resolved. A conflict or a
// failure is in the answer and no error. epoch is the owner's, 0 for any.
func (c *Client) Harvest(ctx context.Context, id string, epoch uint64) (*sandboxv1.Harvest, error) {
	res, err := c.api.Git.Harvest(ctx, &sandboxv1.HarvestRequest{SessionId: id, OwnerEpoch: epoch})
	if err != nil {
		return nil, failed(ctx, "harvesting session "+id, err)
	}
	return res.GetHarvest(), nil
}

// NodeInfo says what agent this is. It is the cheapest call, and serves as a health check.
func (c *Client) NodeInfo(ctx context.Context) (*sandboxv1.GetNodeInfoResponse, error) {
	res, err := c.api.Node.GetNodeInfo(ctx, &sandboxv1.GetNodeInfoRequest{})
	if err != nil {
		return nil, failed(ctx, "reading the node's info", err)
	}
	return res, nil
}
