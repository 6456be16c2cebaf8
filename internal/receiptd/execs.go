package receiptd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// shell is what runs a command: `bash -c COMMAND`.
const shell = "/bin/bash"

// execution is one admitted exec. It goes on when its connection doesn't.
type execution struct {
	id     string
	stream *stream
	spills [2]*spill // stdout's and stderr's
	done   chan struct{}
	// traffic is what went over the network since it was admitted.
	traffic func() receipt.Network

	mu  sync.Mutex
	run *nsexec.Running // nil until it has started
	// cancelled: nothing of it is started any more.
	cancelled bool

	// Set before done is closed.
	sha        string // of the receipt's envelope
	notStarted string
	lost       error
}

func (e *execution) cancel() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.cancelled = true
	if e.run == nil {
		return nil
	}
	return e.run.Cancel()
}

// Exec runs one command. The stream carries its output as it comes and ends with what became of it; the command does
// not depend on the stream.
func (c *connection) Exec(ctx context.Context, req *receiptdv1.ExecRequest, srv receiptdv1.Receiptd_ExecServer) error {
	e, run, err := c.start(req)
	if err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() { sent <- e.stream.serve(ctx, srv) }()
	if run != nil {
		// Here and not on a goroutine of its own: each one that has to be woken costs a command 50 to 100 µs on an idle
		// machine. A connection that is lost does not end it.
		c.see(e, run, req)
	}
	if err := <-sent; err != nil {
		return err
	}
	return srv.Send(e.last())
}

// start admits an exec and hands it to a pid1. Without an error and without a Running the command certainly never ran.
func (c *connection) start(req *receiptdv1.ExecRequest) (*execution, *nsexec.Running, error) {
	s := c.server
	s.starting.Lock()
	defer s.starting.Unlock()
	e, err := c.register(req)
	if err != nil {
		return nil, nil, err
	}
	run, err := s.launch(e, req)
	if err != nil {
		e.notStarted = err.Error()
		s.finish(e)
		return e, nil, nil
	}
	return e, run, nil
}

// startAgain gives a command that its first pid1 never read to another one, as if it came now: under the same lock, and
// only if its connection is still the newest, so that an Init that was answered in between keeps its word (promise P6).
func (c *connection) startAgain(e *execution, req *receiptdv1.ExecRequest) (*nsexec.Running, error) {
	s := c.server
	s.starting.Lock()
	defer s.starting.Unlock()
	s.mu.Lock()
	err := c.admit(req.GetAttachEpoch())
	s.mu.Unlock()
	if err != nil {
		return nil, errors.New(status.Convert(err).Message())
	}
	return s.launch(e, req)
}

// register checks an exec and makes it the running one (promise P4).
func (c *connection) register(req *receiptdv1.ExecRequest) (*execution, error) {
	s := c.server
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := c.admit(req.GetAttachEpoch()); err != nil {
		return nil, err
	}
	if err := s.checkRequest(req); err != nil {
		return nil, err
	}
	if s.running != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "exec %s is running: one command at a time", s.running.id)
	}
	e := &execution{id: req.GetExecId(), stream: newStream(), done: make(chan struct{}), spills: s.newSpills(req), traffic: countTraffic()}
	s.running = e
	s.total++
	return e, nil
}

func (s *Server) checkRequest(req *receiptdv1.ExecRequest) error {
	id := req.GetExecId()
	if err := receipt.CheckExecID(id); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	limits := s.init.GetLimits()
	switch {
	case len(req.GetNonce()) != receipt.NonceSize:
		return status.Errorf(codes.InvalidArgument, "exec %s: the nonce has %d bytes instead of %d", id, len(req.GetNonce()), receipt.NonceSize)
	case req.GetTimeoutMs() == 0 || req.GetTimeoutMs() > limits.GetMaxTimeoutMs():
		return status.Errorf(codes.InvalidArgument, "exec %s: timeout_ms %d is not between 1 and %d", id, req.GetTimeoutMs(), limits.GetMaxTimeoutMs())
	case s.lost[id] != "":
		return status.Errorf(codes.AlreadyExists, "exec %s ran here already and its receipt is lost: %s", id, s.lost[id])
	}
	if s.store.Has(id) {
		return status.Errorf(codes.AlreadyExists, "exec %s ran here already: its receipt is in the folder", id)
	}
	return nil
}

// launch hands the command to a prepared pid1. An error means that the command certainly never ran.
func (s *Server) launch(e *execution, req *receiptdv1.ExecRequest) (*nsexec.Running, error) {
	r := s.request(e, req)
	var last error
	// A pid1 may have been killed while it waited, or was made (the node out of memory): one more try with a fresh one.
	for range 2 {
		p, err := s.prepared.take()
		if err != nil {
			last = err
			continue
		}
		e.mu.Lock()
		if e.cancelled {
			e.mu.Unlock()
			p.Discard()
			return nil, errors.New("cancelled before it started")
		}
		run, err := p.Start(r)
		e.run = run
		e.mu.Unlock()
		if err == nil {
			return run, nil
		}
		last = err
	}
	return nil, last
}

func (s *Server) request(e *execution, req *receiptdv1.ExecRequest) nsexec.Request {
	view, limits := s.init.GetView(), s.init.GetLimits()
	return nsexec.Request{
		Command: wire.Command{
			Path: shell, Argv: []string{"bash", "-c", req.GetCommand()}, Dir: view.GetDir(),
			Env: environ(view.GetEnv(), req.GetEnv()),
		},
		Timeout:     time.Duration(req.GetTimeoutMs()) * time.Millisecond,
		Grace:       time.Duration(limits.GetGraceMs()) * time.Millisecond,
		OutputBytes: limits.GetOutputBytes(),
		Stdout:      e.spills[0].behind(e.stream.sink(receiptdv1.Stream_STDOUT)),
		Stderr:      e.spills[1].behind(e.stream.sink(receiptdv1.Stream_STDERR)),
	}
}

// environ joins two lists; a later value of a name replaces an earlier one.
func environ(lists ...[]*receiptdv1.EnvVar) []string {
	var out []string
	at := map[string]int{}
	for _, list := range lists {
		for _, v := range list {
			entry := v.GetName() + "=" + v.GetValue()
			if i, ok := at[v.GetName()]; ok {
				out[i] = entry
				continue
			}
			at[v.GetName()] = len(out)
			out = append(out, entry)
		}
	}
	return out
}

// boundary waits for the command's end. One whose pid1 was killed before the command was read is run by another; when that
// happens twice, somebody is at work, and it is said instead.
func (c *connection) boundary(e *execution, run *nsexec.Running, req *receiptdv1.ExecRequest) nsexec.Result {
	stop := c.server.prepared.refillAfter(prepareDelay)
	defer stop()
	res := run.Wait()
	if !res.Untouched {
		return res
	}
	logf("exec %s: %s: trying another pid1", e.id, res.NotStarted)
	again, err := c.startAgain(e, req)
	if err != nil {
		res.NotStarted = join(res.NotStarted, err.Error())
		return res
	}
	return again.Wait()
}

// see waits for the boundary and writes the receipt. The order is design.md's, section 3 step 6.
func (c *connection) see(e *execution, run *nsexec.Running, req *receiptdv1.ExecRequest) {
	s, res := c.server, c.boundary(e, run, req)
	e.spills[0].close()
	e.spills[1].close()
	if res.NotStarted != "" {
		e.notStarted = res.NotStarted
		s.finish(e)
		return
	}
	destroyed, left, err := nsexec.DestroySockets()
	if err != nil {
		logf("exec %s: destroying its sockets: %v", e.id, err)
		if left == 0 {
			left = receipt.SocketsUnknown
		}
	}
	p := s.predicate(e, req, res)
	p.Boundary.SocketsDestroyed, p.Boundary.SocketsLeft = destroyed, left
	p.Usage.Network = e.traffic() // now that nothing of it can send any more
	e.sha, err = s.store.Commit(e.id, &p, res.Stdout.Kept(), res.Stderr.Kept(), s.signer)
	if err != nil {
		e.lost = fmt.Errorf("the receipt of exec %s could not be written: %w", e.id, err)
		logf("%v", e.lost)
	}
	s.finish(e)
}

// finish records what became of an exec and lets the next one in.
func (s *Server) finish(e *execution) {
	s.mu.Lock()
	if e.lost != nil {
		s.lost[e.id] = e.lost.Error()
	}
	s.running = nil
	s.mu.Unlock()
	close(e.done)
	e.stream.close()
	s.prepared.refill()
	s.idle.Reset(idleTime)
}

func (s *Server) predicate(e *execution, req *receiptdv1.ExecRequest, res nsexec.Result) receipt.Predicate {
	id := s.init.GetIdentity()
	p := receipt.Predicate{
		SessionID: id.GetSessionId(), SandboxID: id.GetSandboxId(), Generation: id.GetGeneration(),
		ExecID: e.id, Nonce: fmt.Sprintf("%x", req.GetNonce()),
		// Digested here, from what was really run, and not copied from the request.
		RequestDigest: receipt.Request{SessionID: id.GetSessionId(), Command: req.GetCommand(), TimeoutMS: req.GetRequestedTimeoutMs(), Labels: req.GetLabels()}.Digest(),
		StartedAt:     res.StartedAt.UTC(), EndedAt: res.EndedAt.UTC(), Labels: req.GetLabels(), GrantsDigest: req.GetGrantsDigest(),
		Provenance: provenance(s.init.GetProvenance()),
		Stdout:     output(res.Stdout), Stderr: output(res.Stderr),
		Boundary: receipt.Boundary{PIDNamespace: res.Namespace, Method: res.Method, Pid1: res.Pid1, Cgroup: res.Cgroup, Wait: res.BoundaryWait},
		Usage:    receipt.Usage{UserCPU: res.UserCPU, SystemCPU: res.SystemCPU, MaxRSS: res.MaxRSS, PeakMemory: res.PeakMemory},
		OOM:      res.OOM,
	}
	conclude(&p, res)
	p.SealsIntact, p.SealsBroken = sealVerdict(res.Report, len(s.init.GetView().GetSeals()) > 0)
	if res.DrainError != nil {
		p.Reason = join(p.Reason, "the end of its output was not seen: "+res.DrainError.Error())
	}
	return p
}

// provenance is what the agent told at the first Init; zero if it told nothing.
func provenance(p *receiptdv1.Provenance) receipt.Provenance {
	return receipt.Provenance{
		Rootfs: p.GetRootfs(), RootfsKind: p.GetRootfsKind(), RootfsDigest: p.GetRootfsDigest(),
		ReceiptdSHA256: p.GetReceiptdSha256(), Pid1SHA256: p.GetPid1Sha256(),
	}
}

// conclude is how the command ended, as far as pid1 said or its wait proved. The reason is made of lower-case clauses
// (join); the agent adds its own to them.
func conclude(p *receipt.Predicate, res nsexec.Result) {
	p.Status, p.Reason = ended(res)
	if r := res.Report; r != nil {
		p.Cancelled = r.Cancelled
		if r.Ended {
			p.ExitCode, p.Signal = int(r.Code), int(r.Signal)
		}
	} else {
		p.Cancelled = res.Cancelled && res.SecondLine
	}
	if p.OOM {
		p.Reason = join(p.Reason, receipt.ReasonOOM)
	}
}

func ended(res nsexec.Result) (receipt.Status, string) {
	r := res.Report
	switch {
	case r == nil && res.SecondLine && res.Cancelled:
		return receipt.Killed, "pid1 did not end it: receiptd ended the namespace"
	case r == nil && res.SecondLine:
		return receipt.TimedOut, "pid1 did not keep the time: receiptd ended the namespace"
	case r == nil:
		return receipt.Killed, fmt.Sprintf("pid1 ended without a report (%s), so how the command ended is not known; nothing of it is left", res.Pid1)
	case r.TimedOut && r.Ended:
		return receipt.TimedOut, "its time was up"
	case r.TimedOut:
		return receipt.TimedOut, "its time was up; it outlived SIGTERM and the grace period and was ended with its namespace"
	case !r.Ended: // a cancel, which the receipt says too
		return receipt.Killed, "it outlived SIGTERM and the grace period and was ended with its namespace"
	case r.Signal != 0:
		return receipt.Signaled, ""
	}
	return receipt.Exited, ""
}

// sealVerdict: without pid1's report nobody compared the seals in the command's mount namespace, which is gone.
func sealVerdict(r *wire.Report, any bool) (intact bool, broken []string) {
	if r == nil {
		if any {
			return false, []string{receipt.SealsUnknown}
		}
		return true, nil
	}
	return len(r.SealsBroken) == 0, r.SealsBroken
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

func output(c *nsexec.Capture) receipt.Output {
	from, omitted := c.Omitted()
	return receipt.Output{Bytes: c.Total(), SHA256: c.SHA256(), OmittedFrom: from, OmittedBytes: omitted}
}
