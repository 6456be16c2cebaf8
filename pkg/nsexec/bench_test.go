package nsexec

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"os"
)

func benchView(b *testing.B) *View {
	b.Helper()
	testkit.Need(b, testkit.Root, testkit.UserNamespaces)
	_, pid1 := testkit.Binaries(b)
	fd, err := unix.Open(pid1, unix.O_PATH|unix.O_CLOEXEC, 0)
	require.NoError(b, err)
	v, err := NewView(Config{Pid1: os.NewFile(uintptr(fd), "pid1"), Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000, NoFile: 1024})
	require.NoError(b, err)
	b.Cleanup(v.Close)
	return v
}

// BenchmarkRunPrepared is what a command costs once a pid1 waits for it.
func BenchmarkRunPrepared(b *testing.B) {
	v := benchView(b)
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		p, err := v.Prepare()
		require.NoError(b, err)
		b.StartTimer()
		r, err := p.Start(request("true"))
		require.NoError(b, err)
		r.Wait()
	}
}

// BenchmarkPrepare is what happens beforehand, in the background.
func BenchmarkPrepare(b *testing.B) {
	v := benchView(b)
	b.ResetTimer()
	for range b.N {
		p, err := v.Prepare()
		require.NoError(b, err)
		b.StopTimer()
		p.Discard()
		b.StartTimer()
	}
}

// BenchmarkBash is the peer: fork, exec and wait.
func BenchmarkBash(b *testing.B) {
	for range b.N {
		require.NoError(b, exec.Command("/bin/bash", "-c", "true").Run())
	}
}
