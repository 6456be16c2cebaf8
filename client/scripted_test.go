package client

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
)

// scripted is the other end of the socket: each call takes the next step. It stands for an agent whose connection breaks
// at a chosen byte, or that lies, which a real one can't be made to do.
type scripted struct {
	sandboxv1connect.UnimplementedExecServiceHandler
	sandboxv1connect.UnimplementedSessionServiceHandler
	mu    sync.Mutex
	steps []turn
	// What was asked, in order.
	execs    []*sandboxv1.StreamExecRequest
	creates  []*sandboxv1.CreateSessionRequest
	watches  []*sandboxv1.WatchEventsRequest
	lookUps  int
	session  *sandboxv1.Session
	earlier  map[string]*sandboxv1.SandboxKey
	recorded bool // GetExec knows the exec
	expired  bool // … but no more than that
}

// turn is one answer.
type turn struct {
	chunks []*sandboxv1.OutputChunk
	events []string // cursors
	result *sandboxv1.ExecResult
	err    error
	// cut breaks the connection after the chunks.
	cut bool
}

func (s *scripted) next() turn {
	if len(s.steps) == 0 {
		return turn{err: connect.NewError(connect.CodeInternal, "one call too many")}
	}
	st := s.steps[0]
	s.steps = s.steps[1:]
	if st.cut && st.chunks == nil && st.events == nil {
		panic(http.ErrAbortHandler)
	}
	return st
}

func (s *scripted) StreamExec(_ context.Context, r *sandboxv1.StreamExecRequest, stream sandboxv1connect.ExecServiceStreamExecServerStream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.execs = append(s.execs, r)
	st := s.next()
	for _, c := range st.chunks {
		if err := stream.Send(&sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Output{Output: c}}); err != nil {
			return err
		}
	}
	switch {
	case st.cut:
		panic(http.ErrAbortHandler)
	case st.err != nil:
		return st.err
	case st.result == nil:
		return nil
	}
	return stream.Send(&sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Result{Result: st.result}})
}

func (s *scripted) Exec(_ context.Context, r *sandboxv1.ExecRequest) (*sandboxv1.ExecResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.execs = append(s.execs, &sandboxv1.StreamExecRequest{Exec: r})
	st := s.next()
	return &sandboxv1.ExecResponse{Result: st.result}, st.err
}

func (s *scripted) CancelExec(context.Context, *sandboxv1.CancelExecRequest) (*sandboxv1.CancelExecResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.next()
	return &sandboxv1.CancelExecResponse{Result: st.result}, st.err
}

func (s *scripted) GetExec(context.Context, *sandboxv1.GetExecRequest) (*sandboxv1.GetExecResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lookUps++
	switch {
	case s.expired:
		return nil, connect.NewError(connect.CodeFailedPrecondition, "its record has expired")
	case s.recorded:
		return &sandboxv1.GetExecResponse{State: sandboxv1.ExecState_EXEC_RUNNING}, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, "no exec of that id")
}

func (s *scripted) GetSession(_ context.Context, r *sandboxv1.GetSessionRequest) (*sandboxv1.GetSessionResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &sandboxv1.GetSessionResponse{Session: s.session, SandboxKey: s.earlier[r.GetSandboxId()]}, nil
}

func (s *scripted) CreateSession(_ context.Context, r *sandboxv1.CreateSessionRequest) (*sandboxv1.CreateSessionResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creates = append(s.creates, r)
	st := s.next()
	return &sandboxv1.CreateSessionResponse{Session: &sandboxv1.Session{SessionId: r.GetSessionId()}}, st.err
}

func (s *scripted) WatchEvents(_ context.Context, r *sandboxv1.WatchEventsRequest, stream sandboxv1connect.SessionServiceWatchEventsServerStream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches = append(s.watches, r)
	st := s.next()
	for _, cursor := range st.events {
		if err := stream.Send(&sandboxv1.WatchEventsResponse{Event: &sandboxv1.Event{Cursor: cursor}}); err != nil {
			return err
		}
	}
	if st.cut {
		panic(http.ErrAbortHandler)
	}
	return st.err
}

// serveScript gives a client of a scripted agent.
func serveScript(t *testing.T, o Options, steps ...turn) (*scripted, *Client) {
	t.Helper()
	s := &scripted{steps: steps}
	server := connect.NewServer()
	sandboxv1connect.RegisterExecServiceHandler(server, s)
	sandboxv1connect.RegisterSessionServiceHandler(server, s)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server)
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	hs := &http.Server{Handler: mux}
	go func() { _ = hs.Serve(l) }()
	t.Cleanup(func() { hs.Close() })
	return s, New(socket, o)
}

func refuse(code connect.Code, message string) turn {
	return turn{err: connect.NewError(code, message)}
}
