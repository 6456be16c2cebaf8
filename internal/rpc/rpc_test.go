package rpc

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/grpcreflect/v2"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
	"github.com/sandbox-agent/sandbox-agent/internal/agent"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const (
	bound = 60 * time.Second
	owner = 1234
)

func TestMain(m *testing.M) {
	embedded.Init()
	code := m.Run()
	testkit.Clean()
	os.Exit(code)
}

// served is an agent on the embedded runtime behind a real socket.
type served struct {
	t        testing.TB
	socket   string
	agent    *agent.Agent
	log      *bytes.Buffer
	stop     func() error
	newAgent func() (*agent.Agent, error)
}

func serve(t testing.TB, change ...func(*config.Config)) *served {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.UserNamespaces, testkit.CgroupV1orV2, testkit.Git, testkit.Bash)
	state := testkit.StateDir(t)
	mem, err := config.NodeMemory()
	require.NoError(t, err)
	cfg := config.Default(mem)
	cfg.StateDir, cfg.Workspace.Roots, cfg.Limits.MemoryBytes = state, []string{"/var/tmp"}, 512<<20
	cfg.Socket.Path = filepath.Join(state, "run", "exec.sock")
	for _, f := range change {
		f(&cfg)
	}
	require.NoError(t, os.Mkdir(filepath.Join(state, "runtime"), 0o711))
	rt, err := embedded.New(embedded.Options{StateDir: filepath.Join(state, "runtime"), CgroupParent: testkit.CgroupParent(t)})
	require.NoError(t, err)
	receiptd, pid1 := testkit.Binaries(t)
	s := &served{t: t, socket: cfg.Socket.Path, log: &bytes.Buffer{}, newAgent: func() (*agent.Agent, error) {
		return agent.New(agent.Options{Config: cfg, Runtimes: map[string]runtime.Runtime{"embedded": rt}, Receiptd: receiptd, Pid1: pid1, Version: "test"})
	}}
	s.agent, err = s.newAgent()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	log := slog.New(slog.NewTextHandler(s.log, nil))
	go func() {
		done <- Serve(ctx, Options{Agent: s.agent, Socket: cfg.Socket, Log: log, Ready: func() { close(ready) }})
	}()
	select {
	case <-ready:
	case err := <-done:
		require.NoError(t, err)
	}
	stopped := false
	s.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-done
	}
	t.Cleanup(func() {
		require.NoError(t, s.stop())
		// Sandboxes go on: the next agent finds them.
		var err error
		s.agent, err = s.newAgent()
		require.NoError(t, err)
		s.deleteAll()
		require.NoError(t, s.agent.Close())
	})
	return s
}

func (s *served) deleteAll() {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	list, _, err := s.agent.ListSessions(ctx, &sandboxv1.ListSessionsRequest{})
	require.NoError(s.t, err)
	for _, x := range list {
		_, err := s.agent.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: x.GetSessionId()})
		require.NoError(s.t, err)
	}
}

func (s *served) ctx() context.Context {
	ctx, cancel := context.WithTimeout(s.t.Context(), bound)
	s.t.Cleanup(cancel)
	return ctx
}

func (s *served) httpClient(http2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!http2)
	p.SetUnencryptedHTTP2(http2)
	return &http.Client{Transport: &http.Transport{
		Protocols: p,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", s.socket)
		},
	}}
}

func (s *served) connect(options ...connecthttp.Option) *connect.Client {
	return connect.NewClient(connecthttp.NewTransport(s.httpClient(true), "http://agent", options...))
}

func createRequest(t testing.TB, id string) *sandboxv1.CreateSessionRequest {
	repo := testkit.Repo(t, owner)
	return &sandboxv1.CreateSessionRequest{SessionId: id, Workspace: &sandboxv1.Workspace{
		Repository: repo, Worktree: filepath.Join(filepath.Dir(repo), "wt"), Branch: "b"}}
}

func (s *served) create(id string) {
	s.t.Helper()
	_, err := sandboxv1connect.NewSessionServiceClient(s.connect()).CreateSession(s.ctx(), createRequest(s.t, id))
	require.NoError(s.t, err)
}

func TestAConnectClientRunsAndStreamsACommand(t *testing.T) {
	for name, options := range map[string][]connecthttp.Option{
		"connect": nil, "connect with JSON": {connecthttp.WithProtoJSON()}, "gRPC": {connecthttp.WithGRPC()}, "gRPC-Web": {connecthttp.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t)
			s.create("c")
			client := sandboxv1connect.NewExecServiceClient(s.connect(options...))
			r, err := client.Exec(s.ctx(), &sandboxv1.ExecRequest{SessionId: "c", ExecId: "e1", Command: "echo hi; exit 5", Text: true})
			require.NoError(t, err)
			require.EqualValues(t, 5, r.GetResult().GetExitCode())
			require.Equal(t, "hi\n", r.GetResult().GetStdoutText())
			stream, err := client.StreamExec(s.ctx(), &sandboxv1.StreamExecRequest{Exec: &sandboxv1.ExecRequest{SessionId: "c", ExecId: "e2", Command: "echo a; echo b"}})
			require.NoError(t, err)
			var out strings.Builder
			var result *sandboxv1.ExecResult
			for {
				m, err := stream.Receive()
				if errors.Is(err, io.EOF) {
					break
				}
				require.NoError(t, err)
				out.Write(m.GetOutput().GetData())
				if m.GetResult() != nil {
					result = m.GetResult()
				}
			}
			require.Equal(t, "a\nb\n", out.String())
			require.Equal(t, "a\nb\n", string(result.GetStdout()))
		})
	}
}

func TestAGoogleGRPCClientRunsACommand(t *testing.T) {
	s := serve(t)
	conn, err := grpc.NewClient("unix://"+s.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	created := &sandboxv1.CreateSessionResponse{}
	require.NoError(t, conn.Invoke(s.ctx(), sandboxv1connect.SessionServiceCreateSessionProcedure, createRequest(t, "g"), created))
	require.Equal(t, sandboxv1.Session_READY, created.GetSession().GetState())
	r := &sandboxv1.ExecResponse{}
	require.NoError(t, conn.Invoke(s.ctx(), sandboxv1connect.ExecServiceExecProcedure, &sandboxv1.ExecRequest{SessionId: "g", Command: "echo grpc"}, r))
	require.Equal(t, "grpc\n", string(r.GetResult().GetStdout()))
	stream, err := conn.NewStream(s.ctx(), &grpc.StreamDesc{ServerStreams: true}, sandboxv1connect.ExecServiceStreamExecProcedure)
	require.NoError(t, err)
	require.NoError(t, stream.SendMsg(&sandboxv1.StreamExecRequest{Exec: &sandboxv1.ExecRequest{SessionId: "g", Command: "echo s"}}))
	require.NoError(t, stream.CloseSend())
	var last *sandboxv1.StreamExecResponse
	for {
		m := &sandboxv1.StreamExecResponse{}
		if err := stream.RecvMsg(m); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		last = m
	}
	require.Equal(t, "s\n", string(last.GetResult().GetStdout()))
	err = conn.Invoke(s.ctx(), sandboxv1connect.ExecServiceExecProcedure, &sandboxv1.ExecRequest{SessionId: "none", Command: "x"}, r)
	require.Equal(t, codes.NotFound, status.Code(err))
}

func TestCurlWithJSONRunsACommand(t *testing.T) {
	testkit.Need(t, testkit.Program("curl"))
	s := serve(t)
	s.create("j")
	curl := func(procedure, body string) map[string]any {
		out, err := exec.CommandContext(s.ctx(), "curl", "-sS", "--unix-socket", s.socket, "-H", "Content-Type: application/json",
			"-d", body, "http://agent"+procedure).Output()
		require.NoError(t, err)
		var v map[string]any
		require.NoError(t, json.Unmarshal(out, &v), string(out))
		return v
	}
	v := curl(sandboxv1connect.ExecServiceExecProcedure, `{"sessionId":"j","command":"echo json; exit 1","text":true,"timeoutSeconds":5}`)
	result := v["result"].(map[string]any)
	require.Equal(t, "EXITED", result["status"])
	require.EqualValues(t, 1, result["exitCode"])
	require.Equal(t, "json\n", result["stdoutText"])
	require.Equal(t, base64.StdEncoding.EncodeToString([]byte("json\n")), result["stdout"])
	v = curl(sandboxv1connect.NodeServiceGetNodeInfoProcedure, `{}`)
	require.Equal(t, "test", v["version"])
	v = curl(sandboxv1connect.ExecServiceExecProcedure, `{"sessionId":"j","command":""}`)
	require.Equal(t, "invalid_argument", v["code"])
	require.Contains(t, v["message"], "command is empty")
	v = curl(sandboxv1connect.GitServiceGitProcedure, `{"sessionId":"j","args":["status","--short"]}`)
	require.NotContains(t, v, "code", v["message"])
	v = curl(sandboxv1connect.GitServiceGitProcedure, `{"sessionId":"j","args":["-c","core.pager=sh","log"]}`)
	require.Equal(t, "invalid_argument", v["code"])
	v = curl(sandboxv1connect.NodeServiceCheckNodeProcedure, `{}`)
	hosts := v["runtimes"].([]any)
	require.Len(t, hosts, 1)
	require.Equal(t, "embedded", hosts[0].(map[string]any)["name"])
	require.Equal(t, "NAMESPACES", hosts[0].(map[string]any)["isolation"])
	require.Equal(t, true, hosts[0].(map[string]any)["available"], hosts[0])
	v = curl(sandboxv1connect.ExecServiceExecProcedure, `{"sessionId":"j","command":"true","timeout":5}`)
	require.Equal(t, "invalid_argument", v["code"], "a limit that nobody understood must not be dropped")
	require.Contains(t, v["message"], `unknown field "timeout"`)
	execs, err := sandboxv1connect.NewExecServiceClient(s.connect()).ListExecs(s.ctx(), &sandboxv1.ListExecsRequest{SessionId: "j"})
	require.NoError(t, err)
	require.Len(t, execs.GetExecs(), 1, "it did not run")
}

func TestReflectionNamesTheServices(t *testing.T) {
	s := serve(t)
	stream := grpcreflect.NewClient(s.connect(connecthttp.WithGRPC()))
	cs := stream.NewStream(s.ctx())
	names, err := cs.ListServices()
	require.NoError(t, err)
	for _, want := range []string{sandboxv1connect.SessionServiceName, sandboxv1connect.ExecServiceName, sandboxv1connect.GitServiceName, sandboxv1connect.NodeServiceName} {
		found := false
		for _, n := range names {
			found = found || string(n) == want
		}
		require.True(t, found, want)
	}
	err = cs.Close()
	require.NoError(t, err)
}

func TestAPeerThatIsNotAllowedIsRefusedAndLogged(t *testing.T) {
	testkit.Need(t, testkit.Program("curl"))
	s := serve(t, func(c *config.Config) { c.Socket.Mode = "0666" })
	cmd := exec.CommandContext(s.ctx(), "curl", "-sS", "--unix-socket", s.socket, "-H", "Content-Type: application/json", "-d", "{}",
		"http://agent"+sandboxv1connect.NodeServiceGetNodeInfoProcedure)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4321, Gid: 4321}}
	out, err := cmd.Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "permission_denied")
	require.Contains(t, string(out), "uid 4321")
	require.NoError(t, s.stop())
	require.Contains(t, s.log.String(), "peer refused")
	require.Contains(t, s.log.String(), "uid=4321")
}

func TestTheAnswerSaysWhichUidWasSeen(t *testing.T) {
	s := serve(t)
	info, err := sandboxv1connect.NewNodeServiceClient(s.connect()).GetNodeInfo(s.ctx(), &sandboxv1.GetNodeInfoRequest{})
	require.NoError(t, err)
	require.EqualValues(t, os.Getuid(), info.GetPeerUid())
	require.NotEmpty(t, info.GetBootId())
}

func TestARequestThatIsTooLargeIsRefused(t *testing.T) {
	s := serve(t)
	for name, options := range map[string][]connecthttp.Option{"connect": nil, "JSON": {connecthttp.WithProtoJSON()}, "gRPC": {connecthttp.WithGRPC()}} {
		client := sandboxv1connect.NewExecServiceClient(s.connect(options...))
		_, err := client.Exec(s.ctx(), &sandboxv1.ExecRequest{SessionId: "x", Command: strings.Repeat("x", 2<<20)})
		require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, "command has 2097152 bytes", name)
		require.ErrorContains(t, err, "limits.command_bytes", name)
		_, err = client.Exec(s.ctx(), &sandboxv1.ExecRequest{SessionId: "x", Command: strings.Repeat("x", maxRequest+1)})
		require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, "the request is larger than 8388608 bytes", name)
	}
}

func TestAnErrorDoesNotRepeatTheNameOfItsCode(t *testing.T) {
	err := toConnect(fmt.Errorf("%w: %w", agent.ErrUnavailable, fmt.Errorf("%w: starting a sandbox: no pid1", agent.ErrUnavailable)))
	require.Equal(t, "unavailable: starting a sandbox: no pid1", err.Error())
	require.ErrorIs(t, err, agent.ErrUnavailable)
}

func TestShuttingDownAnswersThoseWhoWait(t *testing.T) {
	s := serve(t)
	s.create("w")
	client := sandboxv1connect.NewExecServiceClient(s.connect())
	_, err := client.Exec(s.ctx(), &sandboxv1.ExecRequest{SessionId: "w", Command: "mkfifo go"})
	require.NoError(t, err)
	sess, err := s.agent.GetSession(s.ctx(), &sandboxv1.GetSessionRequest{SessionId: "w"})
	require.NoError(t, err)
	waiting := make(chan error, 1)
	go func() {
		_, err := client.Exec(s.ctx(), &sandboxv1.ExecRequest{SessionId: "w", ExecId: "e", Command: "cat go"})
		waiting <- err
	}()
	w, err := os.OpenFile(filepath.Join(sess.GetWorkspace().GetWorktree(), "go"), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer w.Close()
	require.NoError(t, s.stop())
	err = <-waiting
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "same exec_id")
}

func TestThePanicOfOneCallEndsThatCallOnly(t *testing.T) {
	var log bytes.Buffer
	f := guard(slog.New(slog.NewTextHandler(&log, nil)))(func(context.Context, connect.Spec, connect.ServerStream) error { panic("boom") })
	err := f(t.Context(), connect.Spec{Procedure: "/x/Y"}, nil)
	require.Equal(t, connect.CodeInternal, connect.CodeOf(err))
	require.NotContains(t, err.Error(), "boom")
	require.Contains(t, log.String(), "boom")
}

func TestEveryKindOfErrorHasItsCode(t *testing.T) {
	for kind, want := range map[error]connect.Code{
		agent.ErrInvalid: connect.CodeInvalidArgument, agent.ErrNotFound: connect.CodeNotFound,
		agent.ErrPrecondition: connect.CodeFailedPrecondition, agent.ErrExists: connect.CodeAlreadyExists,
		agent.ErrExhausted: connect.CodeResourceExhausted, agent.ErrUnavailable: connect.CodeUnavailable,
		agent.ErrUnimplemented: connect.CodeUnimplemented, agent.ErrDataLoss: connect.CodeDataLoss,
		errPeer: connect.CodePermissionDenied, context.Canceled: connect.CodeCanceled,
		context.DeadlineExceeded: connect.CodeDeadlineExceeded, errors.New("other"): connect.CodeInternal,
	} {
		err := toConnect(fmt.Errorf("doing something: %w", kind))
		require.Equal(t, want, connect.CodeOf(err), kind.Error())
		require.ErrorContains(t, err, "doing something")
	}
	require.NoError(t, toConnect(nil))
	both := toConnect(fmt.Errorf("%w: %w", agent.ErrUnavailable, context.DeadlineExceeded))
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(both))
}

func TestTheSocketIsMadeWithItsModeAndAStaleOneIsReplaced(t *testing.T) {
	dir := testkit.StateDir(t)
	sock := config.Socket{Path: filepath.Join(dir, "run", "x.sock"), Mode: "0600", AllowUIDs: []uint32{0}}
	l, err := Listen(sock)
	require.NoError(t, err)
	st, err := os.Stat(sock.Path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode().Perm())
	_, err = Listen(sock)
	require.ErrorIs(t, err, ErrSocket)
	require.ErrorContains(t, err, "another program answers")
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	require.FileExists(t, sock.Path)
	l, err = Listen(sock)
	require.NoError(t, err, "nobody answers on it any more")
	require.NoError(t, l.Close())
}

func TestASocketThatCannotBeMadeIsNamed(t *testing.T) {
	dir := testkit.StateDir(t)
	long := config.Socket{Path: filepath.Join(dir, strings.Repeat("x", 108)), Mode: "0600"}
	_, err := Listen(long)
	require.ErrorIs(t, err, ErrSocket)
	require.ErrorContains(t, err, "at most 107")
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("keep"), 0o600))
	_, err = Listen(config.Socket{Path: file, Mode: "0600"})
	require.ErrorContains(t, err, "no socket")
	require.FileExists(t, file)
	_, err = Listen(config.Socket{Path: filepath.Join(file, "x.sock"), Mode: "0600"})
	require.ErrorContains(t, err, file)
}
