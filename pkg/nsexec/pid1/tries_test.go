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
	addresses := map[string]string{"as it is": "\x7f\x00\x00\x01", "without one": "\x00\x00\x00\x00"}
	if unix.Access("/proc/sys/net/ipv6", unix.F_OK) == nil {
		addresses["as IPv6 writes it"] = string(net.ParseIP("::ffff:127.0.0.1"))
	}
	var tries []wire.Try
	var all []string
	for name, a := range addresses {
		tries = append(tries, wire.Try{Name: name, Address: a, Port: port})
		all = append(all, name, "passed "+name, "listened "+name)
	}
	reached, listening := connectAll(tries)
	require.ElementsMatch(t, all, reached)
	require.True(t, listening)
	require.NoError(t, tcp.Close())
	reached, _ = connectAll(tries)
	require.Empty(t, reached, "nobody listens")
	_, listening = connectAll([]wire.Try{{Name: "of a link that is not named", Address: string(net.ParseIP("fe80::1")), Port: port}})
	require.True(t, listening, "no socket connects there (EINVAL), whether it listened or not")

	abstract, err := net.Listen("unix", "@"+t.Name())
	require.NoError(t, err)
	defer abstract.Close()
	require.True(t, reachesUnix(wire.Try{Unix: true, Address: "\x00" + t.Name()}))
	require.False(t, reachesUnix(wire.Try{Unix: true, Address: "\x00" + t.Name() + "x"}))
	path := t.TempDir() + "/s"
	datagrams, err := net.ListenPacket("unixgram", path)
	require.NoError(t, err)
	defer datagrams.Close()
	require.True(t, reachesUnix(wire.Try{Unix: true, Address: path, Token: "token"}))
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

// Where a kernel can't refuse at an interface's ingress, what is refused there is dropped: each attempt takes its whole time then.
func TestP10ManyTargetsThatDoNotAnswerAreTriedWithinAProofsTime(t *testing.T) {
	silent, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(silent)
	require.NoError(t, unix.Bind(silent, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, unix.Listen(silent, 0))
	at, err := unix.Getsockname(silent)
	require.NoError(t, err)
	first, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(first)
	require.NoError(t, unix.Connect(first, at), "the only one that there is room for")

	listening, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listening.Close()
	tries := make([]wire.Try, 100)
	for i := range tries {
		tries[i] = wire.Try{Name: "silent", Address: "\x7f\x00\x00\x01", Port: uint32(at.(*unix.SockaddrInet4).Port)}
	}
	tries[99] = wire.Try{Name: "listening", Address: "\x7f\x00\x00\x01", Port: uint32(listening.Addr().(*net.TCPAddr).Port)}
	reached, _ := connectAll(tries)
	require.ElementsMatch(t, []string{"listening", "passed listening", "listened listening"}, reached)
}
