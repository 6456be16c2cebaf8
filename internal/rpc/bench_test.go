package rpc

import (
	"net/http"
	"os"
	"os/exec"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/api/sandbox/v1/sandboxv1connect"
)

// BenchmarkExec compares, interleaved, one command through the socket with bare bash and with the floor of any
// durable answer: bash and two fdatasync on the same file system. Read the medians with benchstat.
func BenchmarkExec(b *testing.B) {
	b.Run("bash", func(b *testing.B) {
		for b.Loop() {
			require.NoError(b, exec.Command("/bin/bash", "-c", "true").Run())
		}
	})
	b.Run("floor", func(b *testing.B) {
		f, err := os.CreateTemp("/var/tmp", "sa-floor-")
		require.NoError(b, err)
		defer os.Remove(f.Name())
		defer f.Close()
		line := make([]byte, 400)
		for b.Loop() {
			require.NoError(b, exec.Command("/bin/bash", "-c", "true").Run())
			for range 2 {
				_, err := f.Write(line)
				require.NoError(b, err)
				require.NoError(b, unix.Fdatasync(int(f.Fd())))
			}
		}
	})
	s := serve(b)
	s.create("bench")
	for name, client := range map[string]*http.Client{"http1": s.httpClient(false), "http2": s.httpClient(true)} {
		b.Run("socket/"+name, func(b *testing.B) {
			c := sandboxv1connect.NewExecServiceClient(connect.NewClient(connecthttp.NewTransport(client, "http://agent")))
			for b.Loop() {
				r, err := c.Exec(b.Context(), &sandboxv1.ExecRequest{SessionId: "bench", Command: "true"})
				require.NoError(b, err)
				require.NotEmpty(b, r.GetResult().GetReceipt())
			}
		})
	}
	b.Run("agent", func(b *testing.B) {
		for b.Loop() {
			_, err := s.agent.Exec(b.Context(), &sandboxv1.ExecRequest{SessionId: "bench", Command: "true"})
			require.NoError(b, err)
		}
	})
	b.Run("git status", func(b *testing.B) {
		for b.Loop() {
			_, err := s.agent.Exec(b.Context(), &sandboxv1.ExecRequest{SessionId: "bench", Command: "git status"})
			require.NoError(b, err)
		}
	})
}
