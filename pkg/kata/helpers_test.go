package kata

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func mkfifo(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, unix.Mkfifo(path, 0o600))
}

func cancelled(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return ctx, cancel
}

// listenVariable makes the test binary a stand-in that listens on the unix socket that it names, and answers as a shim.
const listenVariable = "KATA_TEST_LISTEN"

func TestMain(m *testing.M) {
	if path := os.Getenv(listenVariable); path != "" {
		os.Exit(listenAndAnswer(path))
	}
	os.Exit(m.Run())
}

func listenAndAnswer(path string) int {
	l, err := net.Listen("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	go func() {
		_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "vsock://666:1024") }))
	}()
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// short is a temporary folder with a short name: a socket that is bound holds 108 bytes.
func short(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kata")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
