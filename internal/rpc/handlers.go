package rpc

import (
	"context"

	"connectrpc.com/connect/v2"
	"connectrpc.com/grpcreflect/v2"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
	"github.com/sandbox-agent/sandbox-agent/internal/agent"
)

// register puts the four services and reflection on a server.
func register(server *connect.Server, a *agent.Agent) {
	sandboxv1connect.RegisterSessionServiceHandler(server, &sessions{agent: a})
	sandboxv1connect.RegisterExecServiceHandler(server, &execs{agent: a})
	sandboxv1connect.RegisterGitServiceHandler(server, &git{agent: a})
	sandboxv1connect.RegisterNodeServiceHandler(server, &node{agent: a})
	grpcreflect.Register(server)
}

type sessions struct{ agent *agent.Agent }

func (h *sessions) CreateSession(ctx context.Context, r *sandboxv1.CreateSessionRequest) (*sandboxv1.CreateSessionResponse, error) {
	s, err := h.agent.CreateSession(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.CreateSessionResponse{Session: s}, nil
}

func (h *sessions) ClaimSession(ctx context.Context, r *sandboxv1.ClaimSessionRequest) (*sandboxv1.ClaimSessionResponse, error) {
	s, err := h.agent.ClaimSession(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ClaimSessionResponse{Session: s}, nil
}

func (h *sessions) GetSession(ctx context.Context, r *sandboxv1.GetSessionRequest) (*sandboxv1.GetSessionResponse, error) {
	s, err := h.agent.GetSession(ctx, r)
	if err != nil {
		return nil, err
	}
	key, err := h.agent.SandboxKey(r.GetSessionId(), r.GetSandboxId())
	if err != nil {
		return nil, err
	}
	return &sandboxv1.GetSessionResponse{Session: s, SandboxKey: key}, nil
}

func (h *sessions) ListSessions(ctx context.Context, r *sandboxv1.ListSessionsRequest) (*sandboxv1.ListSessionsResponse, error) {
	page, next, err := h.agent.ListSessions(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSessionsResponse{Sessions: page, NextPageToken: next}, nil
}

func (h *sessions) UpdateGrants(ctx context.Context, r *sandboxv1.UpdateGrantsRequest) (*sandboxv1.UpdateGrantsResponse, error) {
	s, err := h.agent.UpdateGrants(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.UpdateGrantsResponse{Session: s}, nil
}

func (h *sessions) GetEgress(_ context.Context, r *sandboxv1.GetEgressRequest) (*sandboxv1.GetEgressResponse, error) {
	return h.agent.GetEgress(r)
}

func (h *sessions) ReportEgressProbe(_ context.Context, r *sandboxv1.ReportEgressProbeRequest) (*sandboxv1.ReportEgressProbeResponse, error) {
	return &sandboxv1.ReportEgressProbeResponse{}, h.agent.ReportEgressProbe(r)
}

func (h *sessions) RetireSandbox(ctx context.Context, r *sandboxv1.RetireSandboxRequest) (*sandboxv1.RetireSandboxResponse, error) {
	s, evidence, err := h.agent.RetireSandbox(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.RetireSandboxResponse{Session: s, Evidence: evidence}, nil
}

func (h *sessions) DeleteSession(ctx context.Context, r *sandboxv1.DeleteSessionRequest) (*sandboxv1.DeleteSessionResponse, error) {
	evidence, err := h.agent.DeleteSession(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.DeleteSessionResponse{Evidence: evidence}, nil
}

func (h *sessions) DeleteWorkspace(ctx context.Context, r *sandboxv1.DeleteWorkspaceRequest) (*sandboxv1.DeleteWorkspaceResponse, error) {
	return h.agent.DeleteWorkspace(ctx, r)
}

func (h *sessions) WatchEvents(ctx context.Context, r *sandboxv1.WatchEventsRequest, stream sandboxv1connect.SessionServiceWatchEventsServerStream) error {
	return h.agent.WatchEvents(ctx, r, stream.Send)
}

type git struct{ agent *agent.Agent }

func (h *git) Git(ctx context.Context, r *sandboxv1.GitRequest) (*sandboxv1.GitResponse, error) {
	return h.agent.Git(ctx, r)
}

func (h *git) Harvest(ctx context.Context, r *sandboxv1.HarvestRequest) (*sandboxv1.HarvestResponse, error) {
	harvest, err := h.agent.Harvest(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.HarvestResponse{Harvest: harvest}, nil
}

type execs struct {
	agent *agent.Agent
}

func (h *execs) Exec(ctx context.Context, r *sandboxv1.ExecRequest) (*sandboxv1.ExecResponse, error) {
	result, err := h.agent.Exec(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ExecResponse{Result: result}, nil
}

func (h *execs) StreamExec(ctx context.Context, r *sandboxv1.StreamExecRequest, stream sandboxv1connect.ExecServiceStreamExecServerStream) error {
	return h.agent.StreamExec(ctx, r, stream.Send)
}

func (h *execs) GetExec(ctx context.Context, r *sandboxv1.GetExecRequest) (*sandboxv1.GetExecResponse, error) {
	return h.agent.GetExec(ctx, r)
}

func (h *execs) ListExecs(ctx context.Context, r *sandboxv1.ListExecsRequest) (*sandboxv1.ListExecsResponse, error) {
	page, next, err := h.agent.ListExecs(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListExecsResponse{Execs: page, NextPageToken: next}, nil
}

func (h *execs) CancelExec(ctx context.Context, r *sandboxv1.CancelExecRequest) (*sandboxv1.CancelExecResponse, error) {
	result, err := h.agent.CancelExec(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.CancelExecResponse{Result: result}, nil
}

type node struct{ agent *agent.Agent }

func (h *node) CheckNode(ctx context.Context, r *sandboxv1.CheckNodeRequest) (*sandboxv1.CheckNodeResponse, error) {
	return h.agent.CheckNode(ctx, r)
}

func (h *node) GetNodeInfo(ctx context.Context, _ *sandboxv1.GetNodeInfoRequest) (*sandboxv1.GetNodeInfoResponse, error) {
	info := h.agent.NodeInfo(ctx)
	if p, ok := peerOf(ctx); ok {
		info.PeerUid = p.uid
	}
	return info, nil
}

func (h *node) DrainNode(ctx context.Context, r *sandboxv1.DrainNodeRequest) (*sandboxv1.DrainNodeResponse, error) {
	list, err := h.agent.DrainNode(ctx, r)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.DrainNodeResponse{Sessions: list}, nil
}
