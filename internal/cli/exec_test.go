package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
	public "github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/interrupt"
)

// scripted is the other end of the socket: each call of StreamExec or Exec takes the next step. It stands for an
// agent whose connection breaks at a chosen byte, which a real one can't be made to do.
type scripted struct {
	sandboxv1connect.UnimplementedExecServiceHandler
	mu      sync.Mutex
	steps   []step
	seen    []*sandboxv1.StreamExecRequest
	cancels []string
}

type step struct {
	chunks []*sandboxv1.OutputChunk
	result *sandboxv1.ExecResult
	err    error
	// cut breaks the connection after the chunks; hang waits for the caller to go.
	cut, hang bool
}

func (s *scripted) next(r *sandboxv1.StreamExecRequest) step {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, r)
	if len(s.steps) == 0 {
		return step{err: connect.NewError(connect.CodeInternal, "one call too many")}
	}
	st := s.steps[0]
	s.steps = s.steps[1:]
	return st
}

func (s *scripted) StreamExec(ctx context.Context, r *sandboxv1.StreamExecRequest, stream sandboxv1connect.ExecServiceStreamExecServerStream) error {
	st := s.next(r)
	for _, c := range st.chunks {
		if err := stream.Send(&sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Output{Output: c}}); err != nil {
			return err
		}
	}
	if st.hang {
		<-ctx.Done()
	}
	if st.cut {
		panic(http.ErrAbortHandler)
	}
	if st.err != nil {
		return st.err
	}
	if st.result == nil {
		return nil
	}
	return stream.Send(&sandboxv1.StreamExecResponse{Event: &sandboxv1.StreamExecResponse_Result{Result: st.result}})
}

func (s *scripted) Exec(ctx context.Context, r *sandboxv1.ExecRequest) (*sandboxv1.ExecResponse, error) {
	st := s.next(&sandboxv1.StreamExecRequest{Exec: r})
	if st.cut {
		panic(http.ErrAbortHandler)
	}
	if st.err != nil {
		return nil, st.err
	}
	return &sandboxv1.ExecResponse{Result: st.result}, nil
}

// GetExec knows of no exec: what was refused has no record.
func (s *scripted) GetExec(_ context.Context, r *sandboxv1.GetExecRequest) (*sandboxv1.GetExecResponse, error) {
	return nil, connect.NewError(connect.CodeNotFound, "no exec "+r.ExecId)
}

func (s *scripted) CancelExec(_ context.Context, r *sandboxv1.CancelExecRequest) (*sandboxv1.CancelExecResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancels = append(s.cancels, r.ExecId)
	return &sandboxv1.CancelExecResponse{Result: &sandboxv1.ExecResult{ExecId: r.ExecId, Status: sandboxv1.ExecResult_CANCELLED}}, nil
}

// serveScript gives the socket's path.
func serveScript(t *testing.T, steps ...step) (*scripted, string) {
	t.Helper()
	s := &scripted{steps: steps}
	server := connect.NewServer()
	sandboxv1connect.RegisterExecServiceHandler(server, s)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server)
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	hs := &http.Server{Handler: mux}
	go hs.Serve(l)
	t.Cleanup(func() { hs.Close() })
	return s, socket
}

func runCLI(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = Run(ctx, append([]string{program}, args...), &out, &errs)
	return code, out.String(), errs.String()
}

func outChunk(offset uint64, data string) *sandboxv1.OutputChunk {
	return &sandboxv1.OutputChunk{Stream: sandboxv1.Stream_STDOUT, Offset: offset, Data: []byte(data)}
}

func exited(code int32, stdout uint64) *sandboxv1.ExecResult {
	return &sandboxv1.ExecResult{Status: sandboxv1.ExecResult_EXITED, ExitCode: code, StdoutInfo: &sandboxv1.OutputInfo{Bytes: stdout}}
}

func TestOutputGoesToItsOwnStreamAndTheExitCodeIsTheCommands(t *testing.T) {
	s, socket := serveScript(t, step{
		chunks: []*sandboxv1.OutputChunk{outChunk(0, "out"), {Stream: sandboxv1.Stream_STDERR, Data: []byte("err")}},
		result: exited(3, 3),
	})
	code, stdout, stderr := runCLI(t.Context(), "exec", "--socket", socket, "--label", "turn=4", "--timeout", "1500ms", "s1", "--", "echo out")
	require.Equal(t, 3, code)
	require.Equal(t, "out", stdout)
	require.Equal(t, "err", stderr)
	req := s.seen[0].Exec
	require.Equal(t, "s1", req.SessionId)
	require.Equal(t, "echo out", req.Command)
	require.Equal(t, map[string]string{"turn": "4"}, req.Labels)
	require.InDelta(t, 1.5, req.GetTimeoutSeconds(), 0)
	require.Regexp(t, `^x-\d{8}T\d{6}-[0-9a-f]{12}$`, req.ExecId, "the id is made before the request is sent")
}

func TestP7ALostConnectionIsAskedAgainWithTheSameIdAndNothingIsShownTwice(t *testing.T) {
	s, socket := serveScript(t,
		step{chunks: []*sandboxv1.OutputChunk{outChunk(0, "one ")}, cut: true},
		step{chunks: []*sandboxv1.OutputChunk{outChunk(2, "e two ")}, cut: true},
		step{chunks: []*sandboxv1.OutputChunk{outChunk(8, "three")}, result: exited(0, 13)},
	)
	code, stdout, stderr := runCLI(t.Context(), "exec", "--socket", socket, "-v", "s1", "--", "x")
	require.Equal(t, 0, code, stderr)
	require.Equal(t, "one two three", stdout)
	require.Len(t, s.seen, 3)
	require.Equal(t, s.seen[0].Exec.ExecId, s.seen[2].Exec.ExecId)
	require.Contains(t, stderr, "exec id: "+s.seen[0].Exec.ExecId)
	require.Equal(t, uint64(4), s.seen[1].StdoutOffset)
	require.Equal(t, uint64(8), s.seen[2].StdoutOffset)
}

func TestP7TheUnaryCallIsAskedAgainToo(t *testing.T) {
	s, socket := serveScript(t, step{cut: true}, step{result: exited(0, 0)})
	code, stdout, stderr := runCLI(t.Context(), "exec", "--socket", socket, "--json", "s1", "--", "x")
	require.Equal(t, 0, code, stderr)
	require.Equal(t, s.seen[0].Exec.ExecId, s.seen[1].Exec.ExecId)
	require.True(t, s.seen[0].Exec.Text, "--json gives readable output too")
	var res map[string]any
	require.NoError(t, json.Unmarshal([]byte(stdout), &res))
	require.Equal(t, "EXITED", res["status"])
	require.EqualValues(t, 0, res["exitCode"], "a zero is written out")
}

func TestAConnectionThatStaysLostIsUncertainAndSaysHowToAskAgain(t *testing.T) {
	_, socket := serveScript(t, step{chunks: []*sandboxv1.OutputChunk{outChunk(0, "x")}, cut: true}, step{cut: true})
	code, _, stderr := runCLI(t.Context(), "exec", "--socket", socket, "--retry-for", "1ns", "--exec-id", "e7", "s1", "--", "x")
	require.Equal(t, ExitUncertain, code)
	require.Contains(t, stderr, "the command may have run. Ask again with --exec-id e7")
}

func TestAStreamWithoutAResultIsNoResult(t *testing.T) {
	s, socket := serveScript(t, step{}, step{result: exited(5, 0)})
	code, _, _ := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "x")
	require.Equal(t, 5, code)
	require.Len(t, s.seen, 2)
}

func TestARefusalIsNotRetried(t *testing.T) {
	s, socket := serveScript(t, step{err: connect.NewError(connect.CodeFailedPrecondition, "generation 3 is current, not 2")})
	code, _, stderr := runCLI(t.Context(), "exec", "--socket", socket, "--generation", "2", "s1", "--", "x")
	require.Equal(t, ExitRefused, code)
	require.Contains(t, stderr, "failed_precondition: generation 3 is current, not 2")
	require.Len(t, s.seen, 1)
	require.Equal(t, uint64(2), s.seen[0].Exec.Generation)
}

func TestAnAgentThatIsNotThereIsARefusalNotUncertain(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none")
	code, _, stderr := runCLI(t.Context(), "exec", "--socket", missing, "s1", "--", "x")
	require.Equal(t, ExitRefused, code)
	require.Contains(t, stderr, "no agent listens at "+missing)
	require.Contains(t, stderr, "sandbox-agent serve")
}

func TestOutputThatIsNotShownIsSaid(t *testing.T) {
	_, socket := serveScript(t, step{chunks: []*sandboxv1.OutputChunk{outChunk(0, "head"), outChunk(90, "tail")}, result: exited(0, 100)})
	code, stdout, stderr := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "x")
	require.Equal(t, 0, code)
	require.Equal(t, "headtail", stdout)
	require.Contains(t, stderr, "92 of 100 bytes of stdout are not shown")
}

func TestWhatTheStreamDidNotBringIsTakenFromTheResult(t *testing.T) {
	res := exited(0, 100)
	res.Stdout = []byte("headtail")
	res.StdoutInfo = &sandboxv1.OutputInfo{Bytes: 100, Truncated: true, OmittedFrom: 4, OmittedBytes: 92}
	res.Stderr, res.StderrInfo = []byte("all"), &sandboxv1.OutputInfo{Bytes: 3}
	for name, c := range map[string]struct {
		chunks []*sandboxv1.OutputChunk
		want   string
		lost   string
	}{
		"nothing came":              {nil, "headtail", "92 of 100"},
		"a part of the head came":   {[]*sandboxv1.OutputChunk{outChunk(0, "he")}, "headtail", "92 of 100"},
		"more than the head came":   {[]*sandboxv1.OutputChunk{outChunk(0, "head, and on")}, "head, and ontail", "84 of 100"},
		"it ends within the tail":   {[]*sandboxv1.OutputChunk{outChunk(0, "head"), outChunk(96, "ta")}, "headtail", "92 of 100"},
		"everything came, in a row": {[]*sandboxv1.OutputChunk{outChunk(0, strings.Repeat("x", 100))}, strings.Repeat("x", 100), ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, socket := serveScript(t, step{chunks: c.chunks, result: res})
			code, stdout, stderr := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "x")
			require.Zero(t, code)
			require.Equal(t, c.want, stdout)
			require.Contains(t, stderr, "all")
			if c.lost == "" {
				require.NotContains(t, stderr, "not shown")
			} else {
				require.Contains(t, stderr, c.lost+" bytes of stdout are not shown")
			}
		})
	}
}

func TestAStatusThatIsNotPlainIsExplained(t *testing.T) {
	_, socket := serveScript(t, step{result: &sandboxv1.ExecResult{ExecId: "e1", Status: sandboxv1.ExecResult_KILLED, Oom: true, Reason: "the memory limit of 1 GiB was reached"}})
	code, _, stderr := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "x")
	require.Equal(t, ExitKilled, code)
	require.Contains(t, stderr, "exec e1: KILLED, out of memory: the memory limit of 1 GiB was reached")
}

func TestAReasonOrTheMemoryLimitIsSaidWhateverTheStatusIs(t *testing.T) {
	for _, res := range []*sandboxv1.ExecResult{
		{ExecId: "e1", Status: sandboxv1.ExecResult_SIGNALED, Signal: 9, Oom: true, Reason: "the memory limit killed a process of it"},
		{ExecId: "e1", Status: sandboxv1.ExecResult_EXITED, Oom: true},
		{ExecId: "e1", Status: sandboxv1.ExecResult_EXITED, Reason: "a sealed path was changed"},
	} {
		_, socket := serveScript(t, step{result: res})
		_, _, stderr := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "x")
		require.Contains(t, stderr, "exec e1: "+res.Status.String())
		require.Contains(t, stderr, res.Reason)
		require.Equal(t, res.Oom, strings.Contains(stderr, "out of memory"))
	}
	_, socket := serveScript(t, step{result: exited(0, 0)})
	_, _, stderr := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "x")
	require.Empty(t, stderr)
}

func TestCtrlCCancelsAndAnyOtherSignalLeavesTheCommandRunning(t *testing.T) {
	for sig, want := range map[os.Signal]struct {
		code    int
		cancels int
		says    string
	}{
		syscall.SIGINT:  {ExitCancelled, 1, "cancelling exec e1"},
		syscall.SIGTERM: {ExitUncertain, 0, "ask for its result with --exec-id e1"},
	} {
		s, socket := serveScript(t, step{chunks: []*sandboxv1.OutputChunk{outChunk(0, "x")}, hang: true})
		ctx, cancel := context.WithCancelCause(t.Context())
		w := writerFunc(func(b []byte) (int, error) {
			cancel(interrupt.Cause{Signal: sig}) // the command has begun
			return len(b), nil
		})
		var stderr bytes.Buffer
		code := Run(ctx, []string{program, "exec", "--socket", socket, "--exec-id", "e1", "s1", "--", "x"}, w, &stderr)
		require.Equal(t, want.code, code, stderr.String())
		require.Len(t, s.cancels, want.cancels)
		require.Contains(t, stderr.String(), want.says)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestOutputThatCannotBeWrittenIsUncertainAndNotRetried(t *testing.T) {
	s, socket := serveScript(t, step{chunks: []*sandboxv1.OutputChunk{outChunk(0, "x")}, result: exited(0, 1)})
	var stderr bytes.Buffer
	full := writerFunc(func([]byte) (int, error) { return 0, syscall.ENOSPC })
	code := Run(t.Context(), []string{program, "exec", "--socket", socket, "s1", "--", "x"}, full, &stderr)
	require.Equal(t, ExitUncertain, code)
	require.Contains(t, stderr.String(), "no space left")
	require.Len(t, s.seen, 1)
}

func TestTheResultFileHoldsTheWholeResult(t *testing.T) {
	_, socket := serveScript(t, step{result: exited(124, 0)})
	file := filepath.Join(t.TempDir(), "r.json")
	code, _, _ := runCLI(t.Context(), "exec", "--socket", socket, "--result-file", file, "s1", "--", "x")
	require.Equal(t, 124, code)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(b), `"status": "EXITED"`, "124 was the command's own")
	left, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, left, 1, "no temporary file stays")
}

func TestAnOldResultFileIsGoneWhenThereIsNoNewOne(t *testing.T) {
	_, socket := serveScript(t, step{err: connect.NewError(connect.CodeNotFound, "no session s1")})
	dir := t.TempDir()
	file := filepath.Join(dir, "r.json")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	code, _, _ := runCLI(t.Context(), "exec", "--socket", socket, "--result-file", file, "s1", "--", "x")
	require.Equal(t, ExitRefused, code)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestAResultFileThatCannotBeMadeIsSaidBeforeAnythingRuns(t *testing.T) {
	s, socket := serveScript(t)
	code, _, stderr := runCLI(t.Context(), "exec", "--socket", socket, "--result-file", "/nowhere/at/all/r.json", "s1", "--", "x")
	require.Equal(t, ExitRefused, code)
	require.Contains(t, stderr, "/nowhere/at/all")
	require.Empty(t, s.seen)
}

func TestNothingIsReadFromStandardInput(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	old := os.Stdin
	os.Stdin = r
	defer func() { os.Stdin = old }()
	_, err = w.WriteString("still here")
	require.NoError(t, err)
	w.Close()

	_, socket := serveScript(t, step{result: exited(0, 0)})
	code, _, _ := runCLI(t.Context(), "exec", "--socket", socket, "s1", "--", "cat")
	require.Equal(t, 0, code)
	rest, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "still here", string(rest))
}

func TestExecIdsDoNotRepeat(t *testing.T) {
	require.NotEqual(t, public.NewExecID(), public.NewExecID())
}

func TestSizesAreReadWithTheirUnits(t *testing.T) {
	for in, want := range map[string]int64{"": 0, "1": 1, "1073741824": 1 << 30, "4KiB": 4096, "512MiB": 512 << 20, "2GiB": 2 << 30, "1TiB": 1 << 40} {
		got, err := parseBytes(in)
		require.NoError(t, err, in)
		require.Equal(t, want, got, in)
	}
	for _, in := range []string{"0", "-1", "1.5GiB", "GiB", "1GB", "1 GiB", "9999999TiB", "x"} {
		_, err := parseBytes(in)
		require.ErrorContains(t, err, "is no size", in)
	}
}

func TestCancelPrintsWhatBecameOfTheCommand(t *testing.T) {
	s, socket := serveScript(t)
	code, stdout, stderr := runCLI(t.Context(), "cancel", "--socket", socket, "s1", "e1")
	require.Zero(t, code, stderr)
	require.Equal(t, []string{"e1"}, s.cancels)
	require.Contains(t, stdout, "exec e1: CANCELLED")
	code, _, stderr = runCLI(t.Context(), "cancel", "--socket", socket, "s1")
	require.Equal(t, ExitUsage, code)
	require.Contains(t, stderr, "SESSION EXEC-ID")
}
