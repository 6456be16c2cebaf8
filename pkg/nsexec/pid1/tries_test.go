package pid1

import (
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
)

// What a proof tries is there to be had where nothing keeps it away: the control case for every proof.
func TestP10WhatTheLauncherTriesWorksWithoutTheSandbox(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer tcp.Close()
	port := uint32(tcp.Addr().(*net.TCPAddr).Port)
	require.True(t, reaches(wire.Try{Address: "\x7f\x00\x00\x01", Port: port}), "by a socket that was passed")
	require.True(t, reaches(wire.Try{Address: "\x00\x00\x00\x00", Port: port}))
	if unix.Access("/proc/sys/net/ipv6", unix.F_OK) == nil {
		require.True(t, reaches(wire.Try{Address: string(net.ParseIP("::ffff:127.0.0.1")), Port: port}), "as IPv6 writes it")
	}
	require.NoError(t, tcp.Close())
	require.False(t, reaches(wire.Try{Address: "\x7f\x00\x00\x01", Port: port}), "nobody listens")

	abstract, err := net.Listen("unix", "@"+t.Name())
	require.NoError(t, err)
	defer abstract.Close()
	require.True(t, reaches(wire.Try{Unix: true, Address: "\x00" + t.Name()}))
	require.False(t, reaches(wire.Try{Unix: true, Address: "\x00" + t.Name() + "x"}))
	path := t.TempDir() + "/s"
	datagrams, err := net.ListenPacket("unixgram", path)
	require.NoError(t, err)
	defer datagrams.Close()
	require.True(t, reaches(wire.Try{Unix: true, Address: path, Token: "token"}))
	b := make([]byte, 16)
	n, _, err := datagrams.ReadFrom(b)
	require.NoError(t, err)
	require.Equal(t, "token\n", string(b[:n]))

	require.True(t, seesDescriptors() || os.Geteuid() != 0, "those of other processes")
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 0, 0, 0)
	require.NotZero(t, e, fd)
	if e == unix.EINVAL || e == unix.EFAULT { // the kernel has it
		require.True(t, makesRing())
	}
	vsock, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.Equal(t, err == nil, makesVsock(), "where the kernel has it")
	if err == nil {
		require.NoError(t, unix.Close(vsock))
	}
}
