package kata

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"
)

// socketName is the management socket's name in the sandbox's folder.
const socketName = "shim-monitor.sock"

// runDirs are where the shims keep a folder for each sandbox: the Go one's, the Rust one's.
var runDirs = []string{"/run/vc/sbs", "/run/kata"}

// Bounds of the management socket's answers.
const (
	managementTime = 5 * time.Second
	maxAgentURL    = maxPath + 32
	maxMetrics     = 8 << 20
)

var sandboxID = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}$`)

// CheckID says whether id can be the id of a sandbox: Kata's own rule, with a bound. An error wraps ErrID.
func CheckID(id string) error {
	if !sandboxID.MatchString(id) {
		return fmt.Errorf("%w: %.150q does not match %s", ErrID, id, sandboxID)
	}
	return nil
}

// Shim is a client of one sandbox's shim, at its management socket. Its methods are safe for concurrent use; each makes
// a connection of its own.
type Shim struct {
	id   string
	dirs []string
}

// NewShim is the shim of a sandbox. dirs replaces the folders that are looked in; without any these are Kata's two. No
// prefix of an id is taken for it, as Kata's own tools do: it would be another sandbox.
func NewShim(id string, dirs ...string) (*Shim, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	if len(dirs) == 0 {
		dirs = runDirs
	}
	return &Shim{id, dirs}, nil
}

// AgentURL asks where the guest's agent listens. ErrNotReady: the shim is there and the guest is not yet.
func (s *Shim) AgentURL(ctx context.Context) (Endpoint, error) {
	body, err := s.get(ctx, "/agent-url", maxAgentURL)
	if err != nil {
		return Endpoint{}, err
	}
	if len(body) == 0 {
		// The Rust shim answers 200 and nothing until the agent's socket is known.
		return Endpoint{}, fmt.Errorf("sandbox %s: %w", s.id, ErrNotReady)
	}
	e, err := ParseAgentURL(string(body))
	if err != nil {
		return Endpoint{}, fmt.Errorf("sandbox %s: %w: /agent-url: %w", s.id, ErrShim, err)
	}
	return e, nil
}

// Metrics returns the shim's, the VMM's and the guest's metrics in Prometheus' text format, at most 8 MiB. The text is
// partly the guest's own: it is untrusted.
func (s *Shim) Metrics(ctx context.Context) ([]byte, error) {
	return s.get(ctx, "/metrics", maxMetrics)
}

// Pid is the process that listens at the management socket, as the kernel tells it: the shim's. It is the pid in this
// process's PID namespace, and says nothing once that process has ended: see FindVM.
func (s *Shim) Pid(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, managementTime)
	defer cancel()
	conn, err := s.dial(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	cred, err := peer(conn)
	if err != nil {
		return 0, fmt.Errorf("sandbox %s: %w: %w", s.id, ErrShim, err)
	}
	if cred.Pid <= 0 {
		return 0, fmt.Errorf("sandbox %s: %w: its process is not in this PID namespace; run the agent in the host's", s.id, ErrShim)
	}
	return int(cred.Pid), nil
}

// dial connects to the socket and sees to it that root listens there.
func (s *Shim) dial(ctx context.Context) (*net.UnixConn, error) {
	var missing error
	for _, dir := range s.dirs {
		f, err := openSocket(dir, filepath.Join(s.id, socketName))
		if errors.Is(err, fs.ErrNotExist) {
			missing = err
			continue
		} else if err != nil {
			return nil, fmt.Errorf("sandbox %s: %w: %w", s.id, ErrShim, err)
		}
		defer f.Close()
		conn, err := connectSocket(ctx, f)
		if err != nil {
			return nil, fmt.Errorf("sandbox %s: %w: %w", s.id, ErrShim, err)
		}
		cred, err := peer(conn)
		if err == nil && cred.Uid != 0 {
			err = fmt.Errorf("uid %d listens there, and not root", cred.Uid)
		}
		if err != nil {
			conn.Close()
			return nil, fmt.Errorf("sandbox %s: %w: %w", s.id, ErrShim, err)
		}
		return conn, nil
	}
	return nil, fmt.Errorf("sandbox %s: %w: %w", s.id, ErrShim, missing)
}

// peer is who called listen(2) on the other end's socket (unix(7), SO_PEERCRED).
func peer(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	return cred, credErr
}

func (s *Shim) get(ctx context.Context, path string, limit int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, managementTime)
	defer cancel()
	client := http.Client{
		Transport: &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx) },
			Proxy:                  nil, // an environment must not send this anywhere
			DisableKeepAlives:      true,
			DisableCompression:     true, // a small answer must not become a large one
			MaxResponseHeaderBytes: 16 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://shim"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		if errors.Is(err, ErrShim) {
			return nil, err
		}
		return nil, fmt.Errorf("sandbox %s: %w: %w", s.id, ErrShim, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("sandbox %s: %w: %s: %w", s.id, ErrShim, path, err)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("sandbox %s: %w: %s answers %s: %.200q", s.id, ErrShim, path, resp.Status, body)
	case int64(len(body)) > limit:
		return nil, fmt.Errorf("sandbox %s: %w: %s answers more than %d bytes", s.id, ErrShim, path, limit)
	}
	return body, nil
}
