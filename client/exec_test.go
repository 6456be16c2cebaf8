package client

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// trusting has no receipts to look at.
var trusting = Options{SkipVerify: true}

func exited(code int32) *sandboxv1.ExecResult {
	return &sandboxv1.ExecResult{Status: sandboxv1.ExecResult_EXITED, ExitCode: code}
}

func request() *sandboxv1.ExecRequest {
	return &sandboxv1.ExecRequest{SessionId: "s1", Command: "make", Labels: map[string]string{"turn": "4"}}
}

func TestP7ALostConnectionIsAskedAgainWithTheSameIdAndRequest(t *testing.T) {
	s, c := serveScript(t, trusting, turn{cut: true}, turn{cut: true}, turn{result: exited(3)})
	req := request()
	res, err := c.Exec(t.Context(), req)
	require.NoError(t, err)
	require.EqualValues(t, 3, res.GetExitCode())
	require.False(t, res.Success())
	require.Empty(t, req.GetExecId(), "the caller's request is left alone")
	require.Len(t, s.execs, 3)
	require.Regexp(t, `^x-\d{8}T\d{6}-[0-9a-f]{12}$`, s.execs[0].GetExec().GetExecId(), "the id is made before anything is sent")
	require.True(t, proto.Equal(s.execs[0], s.execs[2]))
}

func TestP7EveryErrorIsNotStartedOrUncertainAndNeverBoth(t *testing.T) {
	for name, c := range map[string]struct {
		steps    []turn
		recorded bool
		expired  bool
		want     error
		calls    int
	}{
		"refused":                               {steps: []turn{refuse(connect.CodeInvalidArgument, "command is empty")}, want: ErrNotStarted, calls: 1},
		"fenced off":                            {steps: []turn{refuse(connect.CodeFailedPrecondition, "generation")}, want: ErrNotStarted, calls: 1},
		"it ran, and its record has expired":    {steps: []turn{refuse(connect.CodeFailedPrecondition, "has expired")}, expired: true, want: ErrUncertain, calls: 1},
		"no sandbox to be had":                  {steps: []turn{refuse(connect.CodeUnavailable, "no sandbox")}, want: ErrNotStarted, calls: 1},
		"the agent fails":                       {steps: []turn{refuse(connect.CodeInternal, "panic")}, want: ErrUncertain, calls: 1},
		"lost, then fenced off":                 {steps: []turn{{cut: true}, refuse(connect.CodeFailedPrecondition, "epoch")}, want: ErrNotStarted, calls: 2},
		"lost, then the session is gone":        {steps: []turn{{cut: true}, refuse(connect.CodeNotFound, "no session")}, want: ErrUncertain, calls: 2},
		"lost, then another's id":               {steps: []turn{{cut: true}, refuse(connect.CodeAlreadyExists, "id")}, want: ErrNotStarted, calls: 2},
		"lost, and from then on not allowed":    {steps: []turn{{cut: true}, refuse(connect.CodePermissionDenied, "uid")}, want: ErrUncertain, calls: 2},
		"answered NOT_STARTED":                  {steps: []turn{{result: &sandboxv1.ExecResult{Status: sandboxv1.ExecResult_NOT_STARTED}}}, want: ErrNotStarted, calls: 1},
		"answered UNCERTAIN":                    {steps: []turn{{result: &sandboxv1.ExecResult{Status: sandboxv1.ExecResult_UNCERTAIN}}}, want: ErrUncertain, calls: 1},
		"answered with a status nobody knows":   {steps: []turn{{result: &sandboxv1.ExecResult{Status: 99}}}, want: ErrUncertain, calls: 1},
		"answered with nothing":                 {steps: []turn{{}}, want: ErrUncertain, calls: 1},
		"shutting down, with a recorded intent": {steps: []turn{refuse(connect.CodeUnavailable, "ask again"), {result: exited(0)}}, recorded: true, calls: 2},
		"lost, then the queue is full, then ok": {steps: []turn{{cut: true}, refuse(connect.CodeResourceExhausted, "queue"), {result: exited(0)}}, calls: 3},
	} {
		t.Run(name, func(t *testing.T) {
			s, cl := serveScript(t, trusting, c.steps...)
			s.recorded, s.expired = c.recorded, c.expired
			_, err := cl.Exec(t.Context(), request())
			require.Len(t, s.execs, c.calls)
			if c.want == nil {
				require.NoError(t, err)
				return
			}
			require.Equal(t, c.want == ErrNotStarted, errors.Is(err, ErrNotStarted), "%v", err)
			require.Equal(t, c.want == ErrUncertain, errors.Is(err, ErrUncertain), "%v", err)
			var e *ExecError
			require.ErrorAs(t, err, &e)
			require.Equal(t, s.execs[0].GetExec().GetExecId(), e.ExecID, "what to ask again with")
		})
	}
}

func TestAConnectionThatStaysLostIsUncertain(t *testing.T) {
	s, c := serveScript(t, Options{SkipVerify: true, RetryFor: -1}, turn{cut: true})
	res, err := c.Exec(t.Context(), request())
	require.ErrorIs(t, err, ErrUncertain)
	require.ErrorIs(t, err, ErrConnectionLost)
	require.Nil(t, res)
	require.Len(t, s.execs, 1)
}

func TestWithoutAnAgentNothingRan(t *testing.T) {
	c := New(filepath.Join(t.TempDir(), "none"), Options{})
	_, err := c.Exec(t.Context(), request())
	require.ErrorIs(t, err, ErrNotStarted)
	require.ErrorIs(t, err, ErrNoAgent)
	_, err = c.GetSession(t.Context(), "s1")
	require.ErrorIs(t, err, ErrNoAgent)
	_, err = c.CreateSession(t.Context(), &sandboxv1.CreateSessionRequest{})
	require.ErrorIs(t, err, ErrNoAgent)
	_, err = c.CancelExec(t.Context(), &sandboxv1.CancelExecRequest{})
	require.ErrorIs(t, err, ErrNoAgent)
}

func TestACallerWhoseTimeIsOverHasStartedNothingBeforeAndMayHaveAfter(t *testing.T) {
	s, c := serveScript(t, trusting, turn{chunks: []*sandboxv1.OutputChunk{{Data: []byte("x")}}, cut: true}, turn{result: exited(0)})
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the job was stopped")
	_, err := c.Stream(ctx, &sandboxv1.StreamExecRequest{Exec: request()}, func(Chunk) error { cancel(why); return nil })
	require.ErrorIs(t, err, ErrUncertain)
	require.ErrorIs(t, err, why)
	require.Equal(t, 1, strings.Count(err.Error(), why.Error()), err.Error())
	_, err = c.Exec(ctx, request())
	require.ErrorIs(t, err, ErrNotStarted)
	require.ErrorIs(t, err, why)
	require.Len(t, s.execs, 1)
}

func out(offset uint64, data string) *sandboxv1.OutputChunk {
	return &sandboxv1.OutputChunk{Stream: sandboxv1.Stream_STDOUT, Offset: offset, Data: []byte(data)}
}

// collect is a reader of a stream.
type collect struct {
	stdout, stderr string
	holes          [][2]uint64
}

func (c *collect) take(k Chunk) error {
	if k.Lost > 0 {
		c.holes = append(c.holes, [2]uint64{k.Offset - k.Lost, k.Offset})
	}
	if k.Stream == sandboxv1.Stream_STDERR {
		c.stderr += string(k.Data)
	} else {
		c.stdout += string(k.Data)
	}
	return nil
}

func TestAStreamIsGivenOnceOverAllConnections(t *testing.T) {
	res := exited(0)
	res.Stdout, res.StdoutInfo = []byte("one two three"), &sandboxv1.OutputInfo{Bytes: 13}
	res.Stderr, res.StderrInfo = []byte("err"), &sandboxv1.OutputInfo{Bytes: 3}
	s, c := serveScript(t, trusting,
		turn{chunks: []*sandboxv1.OutputChunk{out(0, "one ")}, cut: true},
		turn{chunks: []*sandboxv1.OutputChunk{out(2, "e two ")}, cut: true},
		turn{}, // ended without a result: cut as well
		turn{chunks: []*sandboxv1.OutputChunk{out(8, "th")}, result: res},
	)
	var got collect
	_, err := c.Stream(t.Context(), &sandboxv1.StreamExecRequest{Exec: request()}, got.take)
	require.NoError(t, err)
	require.Equal(t, collect{stdout: "one two three", stderr: "err"}, got)
	require.Len(t, s.execs, 4)
	require.Equal(t, []uint64{0, 4, 8, 8}, []uint64{s.execs[0].StdoutOffset, s.execs[1].StdoutOffset, s.execs[2].StdoutOffset, s.execs[3].StdoutOffset})
	require.Equal(t, s.execs[0].GetExec().GetExecId(), s.execs[3].GetExec().GetExecId())
}

func TestWhatIsLostOfAStreamIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		from   uint64
		chunks []*sandboxv1.OutputChunk
		kept   string
		info   *sandboxv1.OutputInfo
		want   collect
	}{
		"a hole in the middle": {0, []*sandboxv1.OutputChunk{out(0, "head"), out(90, "ending")}, "headtail", &sandboxv1.OutputInfo{Bytes: 100, Truncated: true, OmittedFrom: 4, OmittedBytes: 92},
			collect{stdout: "headendingtail", holes: [][2]uint64{{4, 90}}}},
		"nothing came":     {0, nil, "headtail", &sandboxv1.OutputInfo{Bytes: 100, Truncated: true, OmittedFrom: 4, OmittedBytes: 92}, collect{stdout: "headtail", holes: [][2]uint64{{4, 96}}}},
		"the end is lost":  {0, []*sandboxv1.OutputChunk{out(0, "he")}, "", &sandboxv1.OutputInfo{Bytes: 9, Truncated: true, OmittedFrom: 0, OmittedBytes: 9}, collect{stdout: "he", holes: [][2]uint64{{2, 9}}}},
		"begun in between": {6, nil, "headtail", &sandboxv1.OutputInfo{Bytes: 8}, collect{stdout: "il"}},
	} {
		t.Run(name, func(t *testing.T) {
			res := exited(0)
			res.Stdout, res.StdoutInfo = []byte(c.kept), c.info
			_, cl := serveScript(t, trusting, turn{chunks: c.chunks, result: res})
			var got collect
			_, err := cl.Stream(t.Context(), &sandboxv1.StreamExecRequest{Exec: request(), StdoutOffset: c.from}, got.take)
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestAReaderThatFailsEndsTheCallAndIsNotAskedAgain(t *testing.T) {
	s, c := serveScript(t, trusting, turn{chunks: []*sandboxv1.OutputChunk{out(0, "x")}, result: exited(0)})
	full := errors.New("disk full")
	_, err := c.Stream(t.Context(), &sandboxv1.StreamExecRequest{Exec: request()}, func(Chunk) error { return full })
	require.ErrorIs(t, err, full)
	require.ErrorIs(t, err, ErrUncertain)
	require.Len(t, s.execs, 1)
}

func TestACancelIsAskedAgain(t *testing.T) {
	cancelled := &sandboxv1.ExecResult{SessionId: "s1", ExecId: "e1", Status: sandboxv1.ExecResult_CANCELLED, Evidence: &sandboxv1.Evidence{Complete: true}}
	_, c := serveScript(t, Options{}, turn{cut: true}, refuse(connect.CodeUnavailable, "shutting down"), turn{result: cancelled}, refuse(connect.CodeNotFound, "no exec"))
	r := &sandboxv1.CancelExecRequest{SessionId: "s1", ExecId: "e1"}
	res, err := c.CancelExec(t.Context(), r)
	require.NoError(t, err)
	require.True(t, res.GetEvidence().GetComplete())
	_, err = c.CancelExec(t.Context(), r)
	require.ErrorIs(t, err, ErrNotFound)
}

func TestASessionIsCreatedOnceUnderAnIdMadeBefore(t *testing.T) {
	s, c := serveScript(t, Options{}, turn{cut: true}, refuse(connect.CodeAlreadyExists, "it is just being created"), turn{}, refuse(connect.CodeAlreadyExists, "used for another request"))
	made, err := c.CreateSession(t.Context(), &sandboxv1.CreateSessionRequest{})
	require.NoError(t, err)
	require.Len(t, s.creates, 3)
	require.NotEmpty(t, made.GetSessionId())
	require.Equal(t, s.creates[0].GetSessionId(), made.GetSessionId())
	_, err = c.CreateSession(t.Context(), &sandboxv1.CreateSessionRequest{SessionId: "mine"})
	require.ErrorIs(t, err, ErrAlreadyExists, "nothing was lost, so it is another's")
}

func TestEventsGoOnAfterTheLastCursor(t *testing.T) {
	s, c := serveScript(t, Options{},
		turn{events: []string{"1", "2"}, cut: true}, refuse(connect.CodeUnavailable, "shutting down"), turn{events: []string{"3"}, cut: true},
		refuse(connect.CodeFailedPrecondition, "the oldest one is 9"))
	var cursors []string
	var last error
	for e, err := range c.WatchEvents(t.Context(), &sandboxv1.WatchEventsRequest{}) {
		if last = err; err == nil {
			cursors = append(cursors, e.GetCursor())
		}
	}
	require.ErrorIs(t, last, ErrFailedPrecondition)
	require.Equal(t, []string{"1", "2", "3"}, cursors)
	require.Equal(t, "2", s.watches[2].GetCursor())
	require.Equal(t, "3", s.watches[3].GetCursor())

	_, c = serveScript(t, Options{}, turn{events: []string{"1", "2"}}, refuse(connect.CodeUnavailable, "never was there"))
	for e, err := range c.WatchEvents(t.Context(), &sandboxv1.WatchEventsRequest{UntilNow: true}) {
		require.NoError(t, err)
		require.Equal(t, "1", e.GetCursor(), "the caller left")
		break
	}
	for _, err := range c.WatchEvents(t.Context(), &sandboxv1.WatchEventsRequest{}) {
		require.ErrorIs(t, err, ErrUnavailable)
	}
}
