package mcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect/v2"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
)

// Waits between two attempts: the agent's restart takes about a second.
const (
	firstWait = 20 * time.Millisecond
	maxWait   = 2 * time.Second
)

// cancelTime is how long an agent that is there may take over one cancel: the command's grace and boundary, each up to a
// minute, and the end of its sandbox.
const cancelTime = 4 * time.Minute

// call is the tool.
func (s *Server) call(ctx context.Context, req *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
	id, err := s.execID(req.Params.Meta)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	b := s.bounds
	s.mu.Unlock()
	args, err := parseArguments(req.Params.Arguments, b)
	if err != nil {
		return failed(neverRan(err), id), nil
	}
	if !s.begin(id) {
		return failed(neverRan(errors.New("this server is stopping")), id), nil
	}
	x := s.newExecution(id, args)
	result, err := x.follow(ctx, s.progressOf(ctx, req))
	s.refresh(ctx)
	if err != nil {
		s.o.Log.Warn("call without a result", "exec", id, "error", err)
		return failed(err, id), nil
	}
	s.o.Log.Info("call ended", "exec", id, "status", result.GetStatus().String())
	return answer(result, s.o.TextBytes), nil
}

// execID makes a request's exec id of its JSON-RPC id, which the connection has written down (withRequestID).
func (s *Server) execID(meta sdk.Meta) (string, error) {
	text, ok := meta[requestKey].(string)
	if !ok || text == "" {
		return "", errors.New("the request has no id: nothing ran")
	}
	if text[0] != '"' {
		return s.prefix() + "n" + text, nil
	}
	sum := sha256.Sum256([]byte(text))
	return s.prefix() + "s" + hex.EncodeToString(sum[:12]), nil
}

// refresh sees whether the session is described as it is, if it can be asked.
func (s *Server) refresh(ctx context.Context) {
	if record, err := s.session(context.WithoutCancel(ctx)); err == nil {
		s.offerFor(record, nil)
	}
}

// failure is a call without a result of the agent's.
type failure struct {
	err error
	// never: it certainly did not run.
	never bool
}

func neverRan(err error) error { return &failure{err: err, never: true} }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// execution is one call from its exec id to what became of it, over as many connections as it takes.
type execution struct {
	*Server
	req *sandboxv1.ExecRequest
	// withdrawn: nothing may be started any more.
	withdrawn atomic.Bool

	mu      sync.Mutex // guards what follows
	started bool
	output  [3]uint64 // bytes so far, by stream
}

func (s *Server) newExecution(id string, a arguments) *execution {
	return &execution{Server: s, req: &sandboxv1.ExecRequest{
		SessionId: s.o.Session, OwnerEpoch: s.o.OwnerEpoch, ExecId: id, Command: a.command, TimeoutSeconds: a.timeout,
		Labels: s.o.Labels, SpillAbove: uint64(s.o.TextBytes),
	}}
}

// outcome is what an execution ends with.
type outcome struct {
	result *sandboxv1.ExecResult
	err    error
}

// follow has the command run and tells of it until there is an outcome. Telling holds up neither a cancel nor the server's
// end: a caller that does not read may still want the command to end. It ends what begin began.
func (x *execution) follow(ctx context.Context, tell func(message string)) (*sandboxv1.ExecResult, error) {
	ended := make(chan outcome, 1)
	go func() {
		var o outcome
		o.result, o.err = x.run(ctx)
		x.end(x.req.GetExecId())
		ended <- o
	}()
	tick := time.NewTicker(x.o.ProgressEvery)
	defer tick.Stop()
	for {
		select {
		case o := <-ended:
			return o.result, o.err
		case <-tick.C:
			tell(x.news())
		}
	}
}

// news is how far the command is.
func (x *execution) news() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.started {
		return "waiting for its turn"
	}
	return fmt.Sprintf("running, %d bytes of output so far", x.output[sandboxv1.Stream_STDOUT]+x.output[sandboxv1.Stream_STDERR])
}

// progressOf gives what sends a progress notification, to a caller who wants them.
func (s *Server) progressOf(ctx context.Context, req *sdk.CallToolRequest) func(string) {
	token := req.Params.GetProgressToken()
	if token == nil {
		return func(string) {}
	}
	begun := time.Now()
	return func(message string) {
		// Seconds: it must rise with each notification, and a command may print nothing.
		err := req.Session.NotifyProgress(ctx, &sdk.ProgressNotificationParams{
			ProgressToken: token, Progress: time.Since(begun).Seconds(), Message: message,
		})
		if err != nil && ctx.Err() == nil {
			s.o.Log.Warn("progress not sent", "error", err)
		}
	}
}

// run asks the agent, and has it cancel the command when the caller cancels the request or goes away. The request itself
// is never just let go: it may be on its way to the agent, and would start what nobody waits for.
func (x *execution) run(ctx context.Context) (*sandboxv1.ExecResult, error) {
	work, release := context.WithCancel(context.WithoutCancel(ctx))
	defer release()
	ended := make(chan outcome, 1)
	go func() {
		var o outcome
		o.result, o.err = x.ask(work)
		ended <- o
	}()
	select {
	case o := <-ended:
		return o.result, o.err
	case <-ctx.Done():
	case <-x.stopping:
	}
	x.withdrawn.Store(true)
	return x.cancel(work, ended)
}

// cancel ends the command with evidence, and logs it: the caller may not see the answer. An agent that is away may come
// back and go on with the command, so it is asked until it has answered, for a while.
func (x *execution) cancel(ctx context.Context, ended <-chan outcome) (*sandboxv1.ExecResult, error) {
	id := x.req.GetExecId()
	x.o.Log.Info("cancelling", "exec", id)
	ctx, release := context.WithTimeout(ctx, x.o.RetryFor+cancelTime)
	defer release()
	until := time.Now().Add(x.o.RetryFor)
	var lost error // what the request ended with, when that says nothing of the command
	for wait := firstWait; ; wait = min(2*wait, maxWait) {
		r, err := x.o.Client.Execs.CancelExec(ctx, &sandboxv1.CancelExecRequest{SessionId: x.o.Session, OwnerEpoch: x.o.OwnerEpoch, ExecId: id})
		switch code := connectCode(err); {
		case err == nil:
			x.logCancelled(r.GetResult())
			return r.GetResult(), nil
		case lost != nil && code == connect.CodeNotFound: // and nothing is on its way any more
			return nil, x.unknown(ctx, lost)
		case code == connect.CodeFailedPrecondition, code == connect.CodePermissionDenied, time.Now().After(until), ctx.Err() != nil:
			return nil, x.notCancelled(err)
		}
		select {
		case o := <-ended:
			if f, ok := errors.AsType[*failure](o.err); o.err == nil || ok && f.never {
				x.o.Log.Info("ended before it was cancelled", "exec", id, "status", o.result.GetStatus().String(), "error", o.err)
				return o.result, o.err
			}
			lost, ended = o.err, nil
		case <-time.After(wait):
		}
	}
}

func (x *execution) notCancelled(err error) error {
	id := x.req.GetExecId()
	err = fmt.Errorf("%w; it was not seen to be cancelled: \"sandbox-agent cancel %s %s\" tries again", x.o.Client.Explain("cancelling exec "+id, err), x.o.Session, id)
	x.o.Log.Error("not cancelled", "exec", id, "error", err)
	return &failure{err: err}
}

func (x *execution) logCancelled(r *sandboxv1.ExecResult) {
	var seen []string
	for _, i := range r.GetEvidence().GetItems() {
		seen = append(seen, i.GetSource()+": "+i.GetDetail())
	}
	x.o.Log.Info("cancelled", "exec", r.GetExecId(), "status", r.GetStatus().String(), "reason", r.GetReason(),
		"evidence_complete", r.GetEvidence().GetComplete(), "evidence", seen)
}

// ask sends the request, and sends it again with the same exec id while only the connection is at fault.
func (x *execution) ask(ctx context.Context) (*sandboxv1.ExecResult, error) {
	what := "running exec " + x.req.ExecId
	wait, sent := firstWait, false
	var lostSince time.Time
	for {
		res, err := x.once(ctx)
		if err == nil {
			return res, nil
		}
		if !sent && client.NeverSent(err) {
			return nil, neverRan(x.o.Client.Explain(what, err))
		}
		if !client.ConnectionLost(err) {
			if o := x.settle(ctx, err, !sent); o != nil {
				return o.result, o.err
			}
		}
		sent = true
		if lostSince.IsZero() {
			lostSince = time.Now()
		}
		lost := func() error {
			return &failure{err: fmt.Errorf("%w; the agent was lost in the middle and did not come back within %s: \"sandbox-agent events --session %s\" tells what became of exec %s",
				x.o.Client.Explain(what, err), time.Since(lostSince).Round(time.Second), x.o.Session, x.req.GetExecId())}
		}
		if time.Since(lostSince) > x.o.RetryFor || x.withdrawn.Load() {
			return nil, lost()
		}
		x.o.Log.Warn("lost the agent, asking again with the same exec id", "exec", x.req.GetExecId(), "error", err)
		select {
		case <-time.After(wait):
			wait = min(2*wait, maxWait)
		case <-ctx.Done():
			return nil, &failure{err: ctx.Err()}
		}
		if x.withdrawn.Load() { // while it waited
			return nil, lost()
		}
	}
}

// once is one attempt. The output is only counted: the result has what is shown.
func (x *execution) once(ctx context.Context) (*sandboxv1.ExecResult, error) {
	stream, err := x.o.Client.Execs.StreamExec(ctx, &sandboxv1.StreamExecRequest{Exec: x.req})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for {
		msg, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil, io.ErrUnexpectedEOF // a stream without a result is a cut stream
		}
		if err != nil {
			return nil, err
		}
		if r := msg.GetResult(); r != nil {
			return r, nil
		}
		x.saw(msg)
	}
}

func (x *execution) saw(msg *sandboxv1.StreamExecResponse) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.started = true
	if o := msg.GetOutput(); o != nil && int(o.GetStream()) < len(x.output) {
		x.output[o.GetStream()] = max(x.output[o.GetStream()], o.GetOffset()+uint64(len(o.GetData())))
	}
}

// settle finds out what an error of the agent's means for the command. nil: the agent has to be asked again, because it
// went away, or the command runs on. first: nothing was sent before, so a request that was refused at the door never ran.
func (x *execution) settle(ctx context.Context, cause error, first bool) *outcome {
	explained := x.o.Client.Explain("running exec "+x.req.ExecId, cause)
	switch connectCode(cause) {
	case connect.CodeAlreadyExists:
		return &outcome{err: neverRan(fmt.Errorf("the request's id was used before, for another command: %w", explained))}
	case connect.CodeInvalidArgument, connect.CodePermissionDenied, connect.CodeUnimplemented:
		return &outcome{err: &failure{err: explained, never: first}}
	}
	r, err := x.o.Client.Execs.GetExec(ctx, &sandboxv1.GetExecRequest{SessionId: x.o.Session, ExecId: x.req.GetExecId()})
	switch {
	case err == nil && r.GetState() == sandboxv1.ExecState_EXEC_DONE:
		return &outcome{result: r.GetResult()}
	case err == nil || client.ConnectionLost(err):
		return nil
	case connectCode(err) == connect.CodeNotFound && first && connectCode(cause) == connect.CodeNotFound:
		return &outcome{err: neverRan(explained)} // there was no such session when it was asked for
	case connectCode(err) == connect.CodeNotFound:
		return &outcome{err: x.unknown(ctx, explained)}
	default:
		return &outcome{err: &failure{err: explained}}
	}
}

// unknown says what it means that the agent has no record of the exec: that it never ran, unless the session is gone, and
// all its records with it. The session is asked for after the exec was, and its id is never used again.
func (x *execution) unknown(ctx context.Context, err error) error {
	if _, gone := x.o.Client.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: x.o.Session}); gone != nil {
		return &failure{err: fmt.Errorf("%w; whether exec %s ran can't be known: its session is not to be found any more (%w)", err, x.req.GetExecId(), gone)}
	}
	return neverRan(err)
}

func connectCode(err error) connect.Code {
	if e, ok := errors.AsType[*connect.Error](err); ok {
		return e.Code()
	}
	return 0
}
