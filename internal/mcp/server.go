package mcp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/cli/client"
)

// toolName is the one tool.
const toolName = "bash"

const instructions = "The tool bash is the only shell. Its commands run in a sandbox on this session's Git worktree; its description says what holds there, and each result says what became of the command."

// lastWords is how long the answers of calls that have ended may take to reach a caller who is slow to read them, when
// the server stops.
const lastWords = 5 * time.Second

// askTime bounds a question about the session, which the agent answers from memory.
const askTime = 10 * time.Second

// Options bind a server to one session.
type Options struct {
	Client  *client.Client
	Session string
	// OwnerEpoch, when it is not 0, has the agent refuse to start anything once another owner has claimed the session.
	OwnerEpoch uint64
	// Labels are recorded and signed with each exec.
	Labels map[string]string
	// TextBytes is what a result shows of each stream, 1 or more.
	TextBytes int
	// ProgressEvery is the time between two progress notifications of a call, above 0.
	ProgressEvery time.Duration
	// RetryFor is how long an agent that was lost in the middle of a call is asked again.
	RetryFor time.Duration
	Version  string
	// Log gets what happened, never a command's text or output.
	Log *slog.Logger
}

// Server serves one caller.
type Server struct {
	o   Options
	mcp *sdk.Server
	// process is in every exec id: another process's requests have the same ids.
	process  string
	stopping chan struct{}

	mu      sync.Mutex
	stopped bool
	execs   sync.WaitGroup
	running map[string]bool // exec ids
	offered string          // the tool as it was offered last
	bounds  bounds
}

// New makes a server. It asks the agent nothing: whether there is one shows at each call.
func New(o Options) *Server {
	s := &Server{o: o, process: randomHex(8), stopping: make(chan struct{}), running: map[string]bool{}, bounds: boundsOf(nil)}
	s.mcp = sdk.NewServer(&sdk.Implementation{Name: "sandbox-agent", Title: "sandbox-agent", Version: o.Version}, &sdk.ServerOptions{
		Instructions: instructions, Logger: o.Log,
		Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{ListChanged: true}},
		SetCacheable: notForOthers,
	})
	s.mcp.AddReceivingMiddleware(s.beforeList)
	return s
}

// notForOthers: the tool's description is of this session, and of this moment.
func notForOthers(_ context.Context, _ sdk.Request, c *sdk.Cacheable) {
	c.TTLMs, c.CacheScope = 0, "private"
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// Run serves until the caller closes its end or ctx ends. Then no call is begun any more, and what runs is cancelled: whoever
// started it can't read its result. Run waits for the evidence of that. When ctx ends, the calls that were cancelled are
// still answered.
func (s *Server) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	s.offer(ctx)
	conn := newStdio(in, out, s.o.Log)
	session, err := s.mcp.Connect(context.WithoutCancel(ctx), conn, nil)
	if err != nil {
		return fmt.Errorf("starting the MCP session: %w", err)
	}
	s.o.Log.Info("ready", "session", s.o.Session, "execs", s.prefix())
	done := make(chan struct{})
	var broken error
	go func() {
		broken = session.Wait()
		close(done)
	}()
	answers := false
	select {
	case <-done: // it could not be written to
		s.stop("the connection to the caller broke")
		s.execs.Wait()
		return broken
	case <-conn.ended:
		s.stop("the caller closed standard input")
	case <-ctx.Done():
		s.stop(context.Cause(ctx).Error())
		answers = true
	}
	s.execs.Wait()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
	defer cancel()
	if answers {
		err = conn.quiet(last)
	}
	go session.Close() // it waits for whoever still writes
	select {
	case <-done:
		return err
	case <-last.Done():
		return errors.New("the caller does not read its answers: leaving without the last ones")
	}
}

// Running lists the exec ids of calls that have no result yet.
func (s *Server) Running() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]string, 0, len(s.running))
	for id := range s.running {
		ids = append(ids, id)
	}
	return ids
}

func (s *Server) stop(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	s.stopped = true
	s.o.Log.Info("stopping", "why", why, "running", len(s.running))
	close(s.stopping)
}

// begin lets an exec in, and end says what became of it is known. false: the server stops.
func (s *Server) begin(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.execs.Add(1)
	s.running[id] = true
	return true
}

func (s *Server) end(id string) {
	s.mu.Lock()
	delete(s.running, id)
	s.mu.Unlock()
	s.execs.Done()
}

// beforeList has the description say what holds when the tools are asked for, not what held at the start.
func (s *Server) beforeList(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		if method == "tools/list" {
			s.offer(ctx)
		}
		return next(ctx, method, req)
	}
}

// offer describes the tool anew; the SDK tells the caller when that changes anything.
func (s *Server) offer(ctx context.Context) {
	record, err := s.session(ctx)
	if err != nil {
		s.o.Log.Warn("session not asked", "error", err)
	}
	s.offerFor(record, err)
}

func (s *Server) offerFor(record *sandboxv1.Session, err error) {
	text := describe(record, err, s.o.TextBytes)
	b := boundsOf(record.GetConditions())
	in := inputSchema(b, defaultTimeout(record))
	s.mu.Lock()
	defer s.mu.Unlock()
	all := text + string(in)
	if all == s.offered {
		return
	}
	s.offered, s.bounds = all, b
	openWorld, destructive := network(record.GetNetwork()) != network(nil), true
	s.mcp.AddTool(&sdk.Tool{
		Name: toolName, Title: "Bash in the sandbox", Description: text, InputSchema: in, OutputSchema: outputSchema,
		Annotations: &sdk.ToolAnnotations{Title: "Bash in the sandbox", DestructiveHint: &destructive, OpenWorldHint: &openWorld},
	}, s.call)
}

func (s *Server) session(ctx context.Context) (*sandboxv1.Session, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	r, err := s.o.Client.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: s.o.Session})
	if err != nil {
		return nil, s.o.Client.Explain("looking at session "+s.o.Session, err)
	}
	return r.GetSession(), nil
}

// prefix is what the exec ids of this process begin with.
func (s *Server) prefix() string { return "mcp-" + s.process + "-" }
