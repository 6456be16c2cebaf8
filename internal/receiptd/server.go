package receiptd

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// Options say where things are in the container.
type Options struct {
	// Receipts is the folder of receipts, Socket the control socket, Pid1 the path of the pid1 binary.
	Receipts, Socket, Pid1 string
	Version                string
	// Log, when not empty, is the file that receiptd's own messages go to instead of standard error.
	Log string
	// Handover, when not empty, is the socket over which Handed descriptors of the commands' cgroups come before anything
	// else; otherwise they are inherited.
	Handover string
	Handed   int
	// OwnCgroups, when not empty, is a folder to be made for cgroups of the commands' that receiptd makes itself, with at most
	// OwnPids processes in each. OwnOOM, when not empty, is a file in which the node's kernel counts what the memory limit has
	// killed (memory.oom_control or memory.events).
	OwnCgroups string
	OwnPids    int64
	OwnOOM     string
}

// Server is one receiptd. It serves one connection after another; the newest Init wins.
//
// Lock order: starting, then mu. starting is held from the moment an Exec is admitted until its command has started or
// certainly has not, so that an Init of a newer epoch, which takes it too, never answers while an older connection
// could still start something.
type Server struct {
	opts   Options
	signer *receipt.Signer
	pid1   *os.File
	// descriptor gives the cgroups' descriptors.
	descriptor descriptors
	// own are the commands' cgroups where receiptd makes them.
	own []*nsexec.Slot

	starting sync.Mutex

	mu       sync.Mutex
	epoch    uint64
	init     *receiptdv1.InitRequest
	view     *nsexec.View
	store    *receipt.Store
	prepared *preparer
	running  *execution
	lost     map[string]string // exec id → why its receipt could not be written
	total    uint64
	conns    map[*connection]struct{}

	idle *time.Timer
}

// idleTime is how long after a command unused memory goes back to the system (8.5 MiB became 4.8 in the prototype).
const idleTime = 500 * time.Millisecond

// New makes receiptd's key and opens what it needs before anyone can connect.
func New(opts Options) (*Server, error) {
	signer, err := receipt.NewSigner()
	if err != nil {
		return nil, fmt.Errorf("making the receipts' key: %w", err)
	}
	pid1, err := openPath(opts.Pid1)
	if err != nil {
		return nil, fmt.Errorf("opening the pid1 binary %s: %w", opts.Pid1, err)
	}
	return &Server{
		opts: opts, signer: signer, pid1: pid1, descriptor: inherited, lost: map[string]string{}, conns: map[*connection]struct{}{},
		idle: time.AfterFunc(time.Hour, debug.FreeOSMemory),
	}, nil
}

// Serve accepts connections until the listener fails. Each has a ttrpc server of its own, which is how the service
// knows on which connection a request came.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	for {
		nc, err := l.Accept()
		if err != nil {
			return fmt.Errorf("accepting a connection on %s: %w", l.Addr(), err)
		}
		c := &connection{server: s}
		if err := c.serve(ctx, nc); err != nil {
			nc.Close()
			logf("refusing a connection: %v", err)
		}
	}
}

// connection is one attach. Its epoch is 0 until its Init.
type connection struct {
	server *Server
	rpc    *ttrpc.Server
	epoch  uint64
}

func (c *connection) serve(ctx context.Context, nc net.Conn) error {
	rpc, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	c.rpc = rpc
	receiptdv1.RegisterReceiptdService(rpc, c)
	c.server.mu.Lock()
	c.server.conns[c] = struct{}{}
	c.server.mu.Unlock()
	one := &oneConn{conn: nc, closed: make(chan struct{})}
	one.onClose = func() { c.server.forget(c) }
	go func() {
		_ = rpc.Serve(ctx, one)
		// A newer Init may have come before it had begun to serve: then it did not take the connection, nor closed it.
		_ = nc.Close()
		c.server.forget(c)
	}()
	return nil
}

func (s *Server) forget(c *connection) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	go c.rpc.Close()
}

// oneConn is a listener that gives one connection, and ends when that is closed.
type oneConn struct {
	conn    net.Conn
	given   bool
	once    sync.Once
	closed  chan struct{}
	onClose func()
}

type noticedConn struct {
	net.Conn
	l *oneConn
}

func (n noticedConn) Close() error {
	err := n.Conn.Close()
	_ = n.l.Close()
	n.l.onClose()
	return err
}

func (l *oneConn) Accept() (net.Conn, error) {
	if !l.given {
		l.given = true
		return noticedConn{l.conn, l}, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }

// admit checks that a request came on the connection of the newest epoch. The caller holds s.mu.
func (c *connection) admit(epoch uint64) error {
	s := c.server
	switch {
	case s.init == nil || c.epoch == 0:
		return status.Error(codes.FailedPrecondition, "this connection has not been initialised: call Init first")
	case c.epoch != s.epoch || epoch != s.epoch:
		return status.Errorf(codes.FailedPrecondition, "attach epoch %d is over, the current one is %d: nothing was started", epoch, s.epoch)
	}
	return nil
}

// current admits a request and gives the exec that is running, if any.
func (c *connection) current(epoch uint64) (*execution, error) {
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	if err := c.admit(epoch); err != nil {
		return nil, err
	}
	return c.server.running, nil
}

// Init gives the sandbox its identity, or attaches a new connection to it.
func (c *connection) Init(_ context.Context, req *receiptdv1.InitRequest) (*receiptdv1.InitResponse, error) {
	s := c.server
	if req.GetAttachEpoch() == 0 {
		return nil, status.Error(codes.InvalidArgument, "attach_epoch is 0: epochs count from 1")
	}
	// Drain: whatever an older connection was admitted to start has started, or will not.
	s.starting.Lock()
	defer s.starting.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if req.GetAttachEpoch() <= s.epoch {
		return nil, status.Errorf(codes.FailedPrecondition, "attach epoch %d is not above the current %d", req.GetAttachEpoch(), s.epoch)
	}
	if s.init == nil {
		if err := s.begin(req); err != nil {
			return nil, err
		}
	} else if !proto.Equal(s.init.GetIdentity(), req.GetIdentity()) {
		return nil, status.Errorf(codes.FailedPrecondition, "this receiptd belongs to sandbox %s generation %d of session %s",
			s.init.GetIdentity().GetSandboxId(), s.init.GetIdentity().GetGeneration(), s.init.GetIdentity().GetSessionId())
	}
	s.epoch, c.epoch = req.GetAttachEpoch(), req.GetAttachEpoch()
	for old := range s.conns {
		if old != c {
			delete(s.conns, old)
			go old.rpc.Close()
		}
	}
	_, last := s.store.Last()
	res := &receiptdv1.InitResponse{PublicKey: s.signer.Public(), Version: s.opts.Version, LastReceiptSha256: last, Seals: s.prepared.seals()}
	if s.running != nil {
		res.RunningExecId = s.running.id
	}
	return res, nil
}

// begin is the first Init: it fixes the view and prepares the first pid1. The caller holds s.mu.
func (s *Server) begin(req *receiptdv1.InitRequest) error {
	id, view, limits := req.GetIdentity(), req.GetView(), req.GetLimits()
	if id.GetSandboxId() == "" || id.GetSessionId() == "" || view == nil || limits == nil {
		return status.Error(codes.InvalidArgument, "the first Init needs identity, view and limits")
	}
	if limits.GetMaxTimeoutMs() == 0 || limits.GetOutputBytes() == 0 {
		return status.Error(codes.InvalidArgument, "limits: max_timeout_ms and output_bytes must be above 0")
	}
	slots, err := openSlots(view.GetCgroups(), s.descriptor)
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	slots = append(slots, s.own...)
	store, err := receipt.OpenStore(s.opts.Receipts, limits.GetOutputBytes())
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	v, err := nsexec.NewView(nsexec.Config{
		Pid1: s.pid1, Hide: view.GetHide(),
		Pid1UID: view.GetPid1Uid(), CommandUID: view.GetCommandUid(), CommandGID: view.GetCommandGid(),
		NestedUserns: view.GetAllowNestedUserns(), Slots: slots, Seals: view.GetSeals(),
		NProc: limits.GetNproc(), NoFile: limits.GetNofile(), FSize: limits.GetFsize(),
	})
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	prepared, err := newPreparer(v, store)
	if err != nil {
		v.Close()
		return status.Error(codes.Internal, err.Error())
	}
	s.init, s.view, s.store, s.prepared = req, v, store, prepared
	return nil
}

// Info says what is known of an exec id, if wanted once it has ended.
func (c *connection) Info(ctx context.Context, req *receiptdv1.InfoRequest) (*receiptdv1.InfoResponse, error) {
	running, err := c.current(req.GetAttachEpoch())
	if err != nil {
		return nil, err
	}
	if running != nil && running.id == req.GetExecId() && req.GetWaitMs() > 0 {
		timer := time.NewTimer(time.Duration(req.GetWaitMs()) * time.Millisecond)
		defer timer.Stop()
		select {
		case <-running.done:
		case <-timer.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	s := c.server
	s.mu.Lock()
	defer s.mu.Unlock()
	res := &receiptdv1.InfoResponse{ExecsTotal: s.total, Prepared: s.prepared.waiting()}
	switch {
	case req.GetExecId() == "":
	case s.running != nil && s.running.id == req.GetExecId():
		res.Exec = receiptdv1.ExecKnowledge_RUNNING
	case s.lost[req.GetExecId()] != "":
		res.Exec, res.Detail = receiptdv1.ExecKnowledge_RECEIPT_LOST, s.lost[req.GetExecId()]
	default:
		res.Exec = receiptdv1.ExecKnowledge_NEVER_SEEN
		if s.store.Has(req.GetExecId()) {
			res.Exec = receiptdv1.ExecKnowledge_RECEIPTED
		}
	}
	return res, nil
}

// Cancel ends the running command.
func (c *connection) Cancel(_ context.Context, req *receiptdv1.CancelRequest) (*receiptdv1.CancelResponse, error) {
	running, err := c.current(req.GetAttachEpoch())
	if err != nil {
		return nil, err
	}
	if running == nil || running.id != req.GetExecId() {
		return &receiptdv1.CancelResponse{}, nil
	}
	if err := running.cancel(); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &receiptdv1.CancelResponse{WasRunning: true}, nil
}

func logf(format string, args ...any) { fmt.Fprintf(os.Stderr, "receiptd: "+format+"\n", args...) }
