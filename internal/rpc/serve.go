package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/sandbox-agent/sandbox-agent/internal/agent"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
)

const (
	// maxRequest bounds one message. The longest command fits many times, also with every byte escaped in JSON, so that
	// one that is too long is refused by limits.command_bytes, which says so.
	maxRequest = 8 << 20
	// noCompression: on a unix socket gzip costs more than it saves. Compressed requests are still understood.
	noCompression = 1 << 30
	headerTimeout = 10 * time.Second
	// requestTimeout is for all of a request, its body included: it is small, and comes from this node. The answer may
	// take as long as it takes.
	requestTimeout  = 30 * time.Second
	idleTimeout     = 10 * time.Minute
	shutdownTimeout = 5 * time.Second
)

// Options are what Serve needs.
type Options struct {
	Agent  *agent.Agent
	Socket config.Socket
	Log    *slog.Logger
	// Ready, if set, is called once callers can connect.
	Ready func()
}

// Serve answers on the exec socket until ctx ends. Then it takes no more calls, closes the agent, so that those who
// wait for a command get an error and can ask the next agent with the same exec id, and gives answers a moment to get
// out. Sandboxes and their commands go on.
func Serve(ctx context.Context, o Options) error {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	l, err := Listen(o.Socket)
	if err != nil {
		return err
	}
	srv := newHTTPServer(onlyAdmitted(handler(o.Agent, o.Log)), o.Log)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(newDoor(l, o.Socket.AllowUIDs, o.Log)) }()
	if o.Ready != nil {
		o.Ready()
	}
	select {
	case err := <-served:
		return fmt.Errorf("serving on %s: %w", o.Socket.Path, err)
	case <-ctx.Done():
	}
	return shutDown(srv, l, o.Agent)
}

func shutDown(srv *http.Server, l net.Listener, a *agent.Agent) error {
	lErr := l.Close()
	aErr := a.Close()
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	sErr := srv.Shutdown(ctx)
	if errors.Is(sErr, context.DeadlineExceeded) {
		sErr = srv.Close()
	}
	if errors.Is(lErr, net.ErrClosed) {
		lErr = nil
	}
	if errors.Is(sErr, net.ErrClosed) {
		sErr = nil
	}
	return errors.Join(lErr, aErr, sErr)
}

// handler is the API as an HTTP handler.
func handler(a *agent.Agent, log *slog.Logger) http.Handler {
	server := connect.NewServer(guard(log))
	register(server, a)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server, connecthttp.WithCodecs(codecs()...), connecthttp.WithReadMaxBytes(maxRequest), connecthttp.WithCompressMinBytes(noCompression))
	return http.MaxBytesHandler(mux, maxRequest)
}

// newHTTPServer speaks HTTP/1.1 (curl) and HTTP/2 without TLS (gRPC) on one socket.
func newHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: h, Protocols: p, ConnContext: withPeer,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, IdleTimeout: idleTimeout,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}
