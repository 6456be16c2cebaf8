package network

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// newEmbedded is a world whose agent has the embedded runtime alone.
func newEmbedded(t *testing.T, more string) *world {
	t.Helper()
	testkit.Need(t, testkit.Program("python3"))
	testkit.Leaks(t)
	w := newNode(t, bridged)
	w.serve(node.Program(), more)
	return w
}

// python is a command that runs a script.
func python(script string) string { return "python3 - <<'END'\n" + script + "\nEND" }

// ways tries a listener beside the sandbox by what begins with a system call of its own, and says what it got to.
const ways = `
import array, ctypes, os, platform, socket
def tried(name, f):
    try: f(); print("reached", name)
    except OSError: pass
def connect(s, host):
    s.settimeout(10); s.connect((host, 44772))
    if s.recv(5) != b"execd": raise OSError
def datagram(family, host):
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(10); s.connect((host, 5000)); s.send(b"x"); s.recv(5)
def passed():
    a, b = socket.socketpair(); s = socket.socket()
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fileno()]))]); s.close()
    _, fds, _, _ = socket.recv_fds(b, 1, 1); connect(socket.socket(fileno=fds[0]), "127.0.0.1")
def ring():
    if ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120)) < 0: raise OSError
def bound():
    s = socket.socket(); s.bind(("127.0.0.1", 44773)); connect(s, "127.0.0.1")
def fast():
    s = socket.socket(); s.sendto(b"x", 0x20000000, ("127.0.0.1", 44772))
    if s.recv(5) != b"execd": raise OSError
def listening():
    s = socket.socket(); s.listen(); connect(socket.socket(), "127.0.0.1")
for host in ("127.0.0.1", "0.0.0.0", OWN4): tried(host, lambda: connect(socket.socket(), host))
for host in ("::1", "::", "::ffff:127.0.0.1", OWN6): tried(host, lambda: connect(socket.socket(socket.AF_INET6), host))
tried("udp", lambda: datagram(socket.AF_INET, "127.0.0.1")); tried("udp6", lambda: datagram(socket.AF_INET6, "::1"))
tried("a passed socket", passed); tried("io_uring", ring); tried("a bound socket", bound); tried("fast open", fast)
tried("a socket beside one that listens without an address", listening)
`

func TestP10NothingBesideASandboxIsReachedByAnyWay(t *testing.T) {
	w := newEmbedded(t, "listeners: {tcp: [44772, 18080], udp: [5000]}")
	for _, mode := range []string{"bridge", "cni"} {
		t.Run(mode, func(t *testing.T) {
			s := w.session("embedded", mode)
			ns := filepath.Join(w.State, "network", "netns", s.GetSandbox().GetId())
			tcp, udp := w.TCP(ns, "execd", "[::]:44772"), w.UDP(ns, "execd", "[::]:5000")
			addresses := s.GetSandbox().GetNetwork().GetAddresses()
			require.Len(t, addresses, 2)
			script := strings.NewReplacer("OWN4", strconv.Quote(addresses[0]), "OWN6", strconv.Quote(addresses[1])).Replace(ways)

			out, err := w.Command(ns, "python3", "-c", script).CombinedOutput()
			require.NoError(t, err, string(out))
			for _, way := range []string{"127.0.0.1", "0.0.0.0", addresses[0], "::1", "::", "::ffff:127.0.0.1", addresses[1], "udp", "udp6", "a passed socket", "a bound socket", "fast open",
				"a socket beside one that listens without an address"} {
				require.Contains(t, string(out), "reached "+way+"\n", "control: the node's root, who may, reaches it")
			}
			before, datagrams := len(tcp.Peers()), len(udp.Peers())
			r := w.run(s, python(script))
			require.Zero(t, r.GetExitCode(), r.GetStderrText())
			require.Empty(t, r.GetStdoutText())
			require.Len(t, tcp.Peers(), before)
			require.Len(t, udp.Peers(), datagrams)
			again := w.run(s, python(`import socket
l = socket.create_server(("127.0.0.1", 8000)); c = socket.create_connection(("127.0.0.1", 8000)); print("own")`))
			require.Equal(t, "own\n", again.GetStdoutText(), "its own server at another port")
			require.Equal(t, r.GetGeneration(), again.GetGeneration(), "what is beside a sandbox is nothing that a command left")
			out, err = w.Command(ns, "python3", "-c", script).CombinedOutput()
			require.NoError(t, err, string(out))
			require.Contains(t, string(out), "reached 127.0.0.1\n", "it goes on after commands")
			require.Contains(t, string(out), "reached udp\n", "it goes on after commands")
			w.delete(s)
		})
	}
	w.nothingLeft()
}

// listens has no address when it begins to listen: the kernel gives it one on every interface.
const listens = `
import os, socket, time
s = socket.socket(); s.listen(); s.settimeout(60)
open("port~", "w").write(str(s.getsockname()[1])); os.rename("port~", "port")
c, peer = s.accept(); print(peer[0]); c.close()
`

func TestP10AListenerWithoutAnAddressIsTheSandboxsAlone(t *testing.T) {
	w := newEmbedded(t, "")
	s, other := w.session("embedded", "bridge"), w.session("embedded", "bridge")
	address := s.GetSandbox().GetNetwork().GetAddresses()[0]
	ended := make(chan *sandboxv1.ExecResult, 1)
	go func() {
		r, err := w.Client.Exec(context.Background(), &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), Command: python(listens), Text: true})
		if err != nil {
			t.Error(err)
		}
		ended <- r.ExecResult
	}()
	file := filepath.Join(s.GetWorkspace().GetWorktree(), "port")
	w.Until("it listens", func() bool { _, err := os.Stat(file); return err == nil })
	port, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, at := range []string{"127.0.0.1", netlab.NodeAddr} {
		out, err := w.Command(w.Node, "bash", "-c", dial(at, string(port))).CombinedOutput()
		require.Error(t, err, string(out))
		require.Contains(t, string(out), "Connection refused", "it is not on the node")
	}
	r := w.run(other, dial(address, string(port)))
	require.NotZero(t, r.GetExitCode(), "another sandbox reaches it")
	require.Contains(t, r.GetStderrText(), "Connection refused")
	ns := filepath.Join(w.State, "network", "netns", s.GetSandbox().GetId())
	out, err := w.Command(ns, "bash", "-c", dial(address, string(port))).CombinedOutput()
	require.NoError(t, err, "control: it listens, and who is beside the sandbox gets to it: %s", out)
	require.Zero(t, (<-ended).GetExitCode())
	w.delete(s)
	w.delete(other)
	w.nothingLeft()
}

func TestP10ASandboxShowsEachWayInItsProof(t *testing.T) {
	w := newEmbedded(t, "listeners: {tcp: [22, 44772], udp: [123, 5000]}\n")
	for mode, want := range map[string]string{"none": `^\d tried$`, "bridge": `^\d{2,3} tried$`} {
		proved := map[string]string{}
		s := w.session("embedded", mode)
		for _, i := range s.GetSandbox().GetProof() {
			require.True(t, i.GetHolds(), i.GetWhat())
			proved[i.GetWhat()] = i.GetDetail()
		}
		require.Regexp(t, want, proved["no connection to a listener of the node"], mode)
		for _, what := range []string{"no vsock socket can be made", "no io_uring can be made", "no socket can be had by its name in /proc", "no listener of the node hears a command"} {
			require.Contains(t, proved, what, mode)
		}
		w.delete(s)
	}
	w.nothingLeft()
}
