package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
)

const (
	// requestTimeout bounds a scrape from its first byte to its last: a peer that stops reading costs a connection for so long.
	requestTimeout = 10 * time.Second
	// mostScrapes are answered at a time; more get 503.
	mostScrapes = 4
	// mostConnections are open at a time; more wait to be taken.
	mostConnections = 64
	maxHeader       = 16 << 10
)

// Options say where metrics are served, and what is asked for health.
type Options struct {
	Metrics *Metrics
	// Address is HOST:PORT.
	Address string
	// Healthy says whether the agent works; Ready, whether it takes new work. An error is the answer's text.
	Healthy, Ready func(context.Context) error
	Log            *slog.Logger
}

// Server listens.
type Server struct {
	http *http.Server
	l    net.Listener
	log  *slog.Logger
	done chan error
}

// Serve answers until Close: /metrics, /healthz and /readyz, to GET and HEAD.
func Serve(o Options) (*Server, error) {
	l, err := net.Listen("tcp", o.Address) //nolint:forbidigo // the one port that an operator asks for; commands are kept from it
	if err != nil {
		return nil, fmt.Errorf("serving metrics at %s: %w (metrics.listen names another address, or none)", o.Address, err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Metrics.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: mostScrapes, Timeout: requestTimeout, ErrorHandling: promhttp.ContinueOnError,
		ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn), DisableCompression: true,
	}))
	mux.HandleFunc("GET /healthz", answer(o.Healthy))
	mux.HandleFunc("GET /readyz", answer(o.Ready))
	s := &Server{
		http: &http.Server{
			Handler: mux, ReadTimeout: requestTimeout, WriteTimeout: requestTimeout, IdleTimeout: time.Minute, MaxHeaderBytes: maxHeader,
			ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
		},
		l: l, log: o.Log, done: make(chan error, 1),
	}
	go func() { s.done <- s.http.Serve(netutil.LimitListener(l, mostConnections)) }()
	return s, nil
}

// Addr is where it listens.
func (s *Server) Addr() string { return s.l.Addr().String() }

// Close ends it, also scrapes that are under way.
func (s *Server) Close() error {
	err := s.http.Close()
	if served := <-s.done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func answer(look func(context.Context) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if err := look(r.Context()); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, err.Error()+"\n")
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	}
}
