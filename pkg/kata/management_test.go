package kata

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

const sandbox = "sb-0123456789abcdef"

// shimDirs are stand-ins for /run/vc/sbs and /run/kata.
func shimDirs(t *testing.T) (string, string) {
	t.Helper()
	testkit.Need(t, testkit.Root)
	dir := short(t)
	goDir, rustDir := filepath.Join(dir, "vc"), filepath.Join(dir, "kata")
	for _, d := range []string{goDir, filepath.Join(rustDir, sandbox)} {
		require.NoError(t, os.MkdirAll(d, 0o755))
	}
	return goDir, rustDir
}

func client(t *testing.T) (*Shim, string) {
	t.Helper()
	goDir, rustDir := shimDirs(t)
	s, err := NewShim(sandbox, goDir, rustDir)
	require.NoError(t, err)
	return s, filepath.Join(rustDir, sandbox, socketName)
}

// shim serves a stand-in for the shim's management server.
func shim(t *testing.T, path string, handler http.HandlerFunc) {
	t.Helper()
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	srv := &http.Server{Handler: handler}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
}

// rawShim answers each connection's request with what say writes, and nothing of HTTP's own.
func rawShim(t *testing.T, path string, say func(net.Conn)) {
	t.Helper()
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 4096))
			say(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
}

func TestTheShimTellsWhereTheAgentListens(t *testing.T) {
	s, path := client(t)
	shim(t, path, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + " " + r.URL.Path {
		case "GET /agent-url":
			fmt.Fprint(w, "vsock://3:1024")
		case "GET /metrics":
			fmt.Fprint(w, "kata_shim_fds 12\n")
		default:
			w.WriteHeader(http.StatusNotImplemented)
		}
	})
	e, err := s.AgentURL(t.Context())
	require.NoError(t, err)
	require.Equal(t, Endpoint{CID: 3, Port: AgentPort}, e)
	m, err := s.Metrics(t.Context())
	require.NoError(t, err)
	require.Equal(t, "kata_shim_fds 12\n", string(m))
	pid, err := s.Pid(t.Context())
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), pid, "it is the process that listens")
}

func TestAnAgentThatIsNotUpYetIsTold(t *testing.T) {
	s, path := client(t)
	shim(t, path, func(http.ResponseWriter, *http.Request) {})
	_, err := s.AgentURL(t.Context())
	require.ErrorIs(t, err, ErrNotReady)
}

func TestAnswersOutsideTheContractAreErrors(t *testing.T) {
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		message string
	}{
		"the Go shim's error": {func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "no sandbox", http.StatusInternalServerError)
		}, `answers 500 Internal Server Error: "no sandbox`},
		"no address":    {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "vsock://3:1024\n") }, "context id"},
		"a remote VM":   {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "remote:///x:1024") }, "nothing is known of a VM"},
		"a huge answer": {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(w, zeros{}) }, "answers more than"},
		"a redirection": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
		}, "answers 302"},
		"one to the same place": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/agent-url", http.StatusTemporaryRedirect)
		}, "answers 307"},
		"no content": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }, "answers 204"},
	} {
		t.Run(name, func(t *testing.T) {
			s, path := client(t)
			shim(t, path, c.answer)
			_, err := s.AgentURL(t.Context())
			require.ErrorIs(t, err, ErrShim)
			require.NotErrorIs(t, err, ErrNotReady)
			if name != "no address" {
				require.ErrorContains(t, err, c.message)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func TestAServerThatSpeaksHTTPBadlyIsAnError(t *testing.T) {
	for name, say := range map[string]string{
		"nothing":          "",
		"half a header":    "HTTP/1.1 200 O",
		"half a body":      "HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\nvsock://",
		"no HTTP":          "vsock://3:1024",
		"endless headers":  "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: "+strings.Repeat("x", 1000)+"\r\n", 100),
		"a broken chunk":   "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
		"two lengths":      "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"a gzip that lies": "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
	} {
		t.Run(name, func(t *testing.T) {
			s, path := client(t)
			rawShim(t, path, func(c net.Conn) { _, _ = io.WriteString(c, say) })
			_, err := s.AgentURL(t.Context())
			require.ErrorIs(t, err, ErrShim)
		})
	}
}

func TestAShimThatNeverAnswersIsLeftWhenTheContextEnds(t *testing.T) {
	for name, first := range map[string]string{"at all": "", "to its end": "HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\nvsock"} {
		t.Run(name, func(t *testing.T) {
			s, path := client(t)
			ctx, cancel := cancelled(t)
			release := make(chan struct{})
			rawShim(t, path, func(c net.Conn) {
				_, _ = io.WriteString(c, first)
				cancel()
				<-release
			})
			_, err := s.AgentURL(ctx)
			close(release)
			require.ErrorIs(t, err, ErrShim)
			require.ErrorIs(t, err, context.Canceled)
		})
	}
}

func TestP10NoLinkAndNoOtherUsersSocketIsTakenForTheShims(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "vsock://666:1024") }
	for name, plant := range map[string]func(t *testing.T, path string){
		"the socket is a link": func(t *testing.T, path string) {
			shim(t, path+".real", answer)
			require.NoError(t, os.Symlink(path+".real", path))
		},
		"the folder is a link": func(t *testing.T, path string) {
			elsewhere := short(t)
			shim(t, filepath.Join(elsewhere, socketName), answer)
			require.NoError(t, os.Remove(filepath.Dir(path)))
			require.NoError(t, os.Symlink(elsewhere, filepath.Dir(path)))
		},
		"the socket is another user's": func(t *testing.T, path string) {
			shim(t, path, answer)
			require.NoError(t, os.Lchown(path, 65534, 65534))
		},
		"it is a file": func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, []byte("vsock://666:1024"), 0o600))
		},
		"it is a fifo": func(t *testing.T, path string) { mkfifo(t, path) },
		"another user listens": func(t *testing.T, path string) {
			listenAs(t, path, 65534)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, path := client(t)
			plant(t, path)
			_, err := s.AgentURL(t.Context())
			require.ErrorIs(t, err, ErrShim)
			require.NotContains(t, err.Error(), "666")
		})
	}
	// The control case: the same server, where it belongs.
	s, path := client(t)
	shim(t, path, answer)
	e, err := s.AgentURL(t.Context())
	require.NoError(t, err)
	require.Equal(t, uint32(666), e.CID)
}

// listenAs has a process of another user listen, in a folder that it was let into, on a socket that root then owns.
func listenAs(t *testing.T, path string, uid uint32) {
	t.Helper()
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o777))
	for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		st, err := os.Stat(dir)
		require.NoError(t, err)
		require.NoError(t, os.Chmod(dir, st.Mode().Perm()|0o111))
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = []string{listenVariable + "=" + path}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	cmd.Stderr = os.Stderr
	ready, err := cmd.StdoutPipe()
	require.NoError(t, err)
	end, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { end.Close(); _ = cmd.Wait() })
	_, err = ready.Read(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, os.Chown(path, 0, 0))
}

func TestTheIdIsCheckedBeforeItIsAPartOfAPath(t *testing.T) {
	for _, id := range []string{"", ".", "..", "a", "../x", "a/b", "/etc", "-x", "_x", "a b", "a\x00b", "a\nb", "é1", strings.Repeat("x", 129)} {
		_, err := NewShim(id)
		require.ErrorIs(t, err, ErrID, "%q", id)
	}
	for _, id := range []string{"ab", sandbox, "A.b_c-9", "a..", strings.Repeat("x", 128)} {
		require.NoError(t, CheckID(id))
	}
}

// Kata's own tools take a prefix for the id when only one sandbox has it.
func TestAPrefixOfAnIdIsAnotherSandbox(t *testing.T) {
	goDir, rustDir := shimDirs(t)
	shim(t, filepath.Join(rustDir, sandbox, socketName), func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "vsock://3:1024") })
	s, err := NewShim(sandbox[:8], goDir, rustDir)
	require.NoError(t, err)
	_, err = s.AgentURL(t.Context())
	require.ErrorIs(t, err, ErrShim)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoDirExists(t, filepath.Join(rustDir, sandbox[:8]), "nothing is made by asking")
}
