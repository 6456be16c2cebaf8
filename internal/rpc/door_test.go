package rpc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const stranger = 4321

// dial connects as this process; whatever is read or written then ends within bound.
func dial(t testing.TB, socket string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", socket)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(bound)))
	return c
}

// hungUp waits for the other end to hang up, and tells what it said.
func hungUp(t testing.TB, c net.Conn) string {
	t.Helper()
	b, err := io.ReadAll(c)
	if !errors.Is(err, syscall.ECONNRESET) { // what we sent was not read
		require.NoError(t, err, "it must hang up, having said %q", b)
	}
	return string(b)
}

// half is a request of which the rest never comes.
const half = "POST /x HTTP/1.1\r\nHost: agent\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"

// behind serves h behind a door, and the limits that change sets.
func behind(t testing.TB, h http.Handler, change func(*door, *http.Server)) (socket string) {
	t.Helper()
	socket = filepath.Join(testkit.StateDir(t), "x.sock")
	l, err := Listen(config.Socket{Path: socket, Mode: "0600"})
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	d := newDoor(l, []uint32{uint32(os.Getuid())}, log)
	srv := newHTTPServer(onlyAdmitted(h), log)
	change(d, srv)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(d) }()
	t.Cleanup(func() {
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	return socket
}

func TestARefusedPeerThatHoldsItsRequestBackIsAnsweredAndHungUpOn(t *testing.T) {
	s := serve(t, func(c *config.Config) { c.Socket.AllowUIDs = []uint32{stranger} })
	c := dial(t, s.socket)
	_, err := io.WriteString(c, half)
	require.NoError(t, err)
	answer := hungUp(t, c)
	require.Contains(t, answer, "403 Forbidden")
	require.Contains(t, answer, "permission_denied")
	require.Contains(t, answer, "socket.allow_uids")
}

func TestARefusedPeerThatSaysNothingIsHungUpOn(t *testing.T) {
	socket := behind(t, http.NotFoundHandler(), func(d *door, srv *http.Server) {
		d.allow, d.refusedTime = nil, 10*time.Millisecond
		srv.ReadHeaderTimeout, srv.ReadTimeout = 0, 0
	})
	require.Empty(t, hungUp(t, dial(t, socket)))
}

func TestEveryProtocolTellsARefusedPeerWhy(t *testing.T) {
	s := serve(t, func(c *config.Config) { c.Socket.AllowUIDs = []uint32{stranger} })
	for name, options := range map[string][]connecthttp.Option{
		"connect": nil, "connect with JSON": {connecthttp.WithProtoJSON()}, "gRPC": {connecthttp.WithGRPC()}, "gRPC-Web": {connecthttp.WithGRPCWeb()},
	} {
		_, err := sandboxv1connect.NewNodeServiceClient(s.connect(options...)).GetNodeInfo(s.ctx(), &sandboxv1.GetNodeInfoRequest{})
		require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, fmt.Sprintf("uid %d is not in socket.allow_uids", os.Getuid()), name)
	}
}

func TestRefusedPeersTakeNoPlaceFromAllowedOnes(t *testing.T) {
	testkit.Need(t, testkit.Program("curl"))
	s := serve(t, func(c *config.Config) { c.Socket.AllowUIDs, c.Socket.Mode = []uint32{stranger}, "0666" })
	conns := make([]net.Conn, 4*maxRefused)
	for i := range conns {
		conns[i] = dial(t, s.socket)
	}
	cmd := exec.CommandContext(s.ctx(), "curl", "-sS", "--unix-socket", s.socket, "-H", "Content-Type: application/json", "-d", "{}",
		"http://agent"+sandboxv1connect.NodeServiceGetNodeInfoProcedure)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
	out, err := cmd.Output()
	require.NoError(t, err)
	require.Contains(t, string(out), fmt.Sprintf(`"peerUid":%d`, stranger))
	for _, c := range conns {
		require.Empty(t, hungUp(t, c))
	}
	require.NoError(t, s.stop())
	require.Equal(t, 1, strings.Count(s.log.String(), "peer refused"), "they must not fill the log: %s", s.log)
}

func TestWhoComesWhenEveryPlaceIsTakenIsToldAndAPlaceThatIsLeftIsFree(t *testing.T) {
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "welcome") })
	socket := behind(t, ok, func(d *door, _ *http.Server) { d.admitted = make(chan struct{}, 2) })
	ask := func(c net.Conn) string {
		_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
		require.NoError(t, err)
		return hungUp(t, c)
	}
	first, second := dial(t, socket), dial(t, socket)
	answer := ask(dial(t, socket))
	require.Contains(t, answer, "resource_exhausted")
	require.Contains(t, answer, "2 connections to the exec socket are open")
	require.Contains(t, ask(first), "welcome")
	require.Eventually(t, func() bool { return strings.Contains(ask(dial(t, socket)), "welcome") }, bound, time.Millisecond)
	require.Contains(t, ask(second), "welcome")
}

func TestARequestThatDoesNotComeToItsEndIsGivenUp(t *testing.T) {
	read := make(chan error, 1)
	h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		read <- err
	})
	socket := behind(t, h, func(_ *door, srv *http.Server) {
		require.Positive(t, srv.ReadTimeout)
		srv.ReadTimeout = 20 * time.Millisecond
	})
	c := dial(t, socket)
	_, err := io.WriteString(c, half)
	require.NoError(t, err)
	hungUp(t, c)
	require.ErrorIs(t, <-read, os.ErrDeadlineExceeded)
}

func TestAnAnswerMayTakeLongerThanARequest(t *testing.T) {
	const limit = 20 * time.Millisecond
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		for range 4 {
			time.Sleep(limit)
			io.WriteString(w, ".")
			http.NewResponseController(w).Flush()
		}
		fmt.Fprintf(w, "%s %v %v", b, err, r.Context().Err())
	})
	socket := behind(t, h, func(_ *door, srv *http.Server) { srv.ReadTimeout = limit })
	for _, http2 := range []bool{false, true} {
		s := &served{t: t, socket: socket}
		r, err := s.httpClient(http2).Post("http://agent/", "application/json", bytes.NewReader([]byte("{}")))
		require.NoError(t, err)
		b, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
		require.Equal(t, "....{} <nil> <nil>", string(b))
	}
}

func TestARequestThatCameThroughNoDoorIsRefused(t *testing.T) {
	w := httptest.NewRecorder()
	onlyAdmitted(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/x", nil))
	require.Equal(t, http.StatusForbidden, w.Code)
	require.Contains(t, w.Body.String(), "permission_denied")
}

func TestAPeerWhomTheKernelDoesNotNameIsRefused(t *testing.T) {
	d := &door{allow: []uint32{0}}
	require.NoError(t, d.judge(peer{}, nil))
	err := d.judge(peer{}, syscall.ENOPROTOOPT)
	require.ErrorIs(t, err, errPeer)
	require.ErrorIs(t, err, syscall.ENOPROTOOPT)
}

func TestRefusalsAreLoggedOncePerSpanAndTheOthersCounted(t *testing.T) {
	q := quieter{every: 10 * time.Second}
	start := time.Unix(1000, 0)
	for _, step := range []struct {
		after  time.Duration
		told   bool
		untold int
	}{{0, true, 0}, {time.Second, false, 0}, {9 * time.Second, false, 0}, {10 * time.Second, true, 2}, {11 * time.Second, false, 0}, {time.Hour, true, 1}} {
		told, untold := q.speak(start.Add(step.after))
		require.Equal(t, step.told, told, step.after)
		require.Equal(t, step.untold, untold, step.after)
	}
}

func TestConnectionsLeaveHalfOfTheDescriptors(t *testing.T) {
	for files, want := range map[uint64]int{0: 1, 1024: 512, 1 << 20: maxConnections, 1<<64 - 1: maxConnections} {
		require.Equal(t, want, connectionsFor(files), files)
	}
}
