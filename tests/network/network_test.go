package network

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/containerd"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

const (
	cniSubnet, cniSubnet6 = "10.77.0.0/24", "fd77::/64"
	subnet, subnet6       = "10.231.0.0/16", "fd23:1::/64"
)

// world is a lab with an agent on its node.
type world struct {
	*netlab.Lab
	*node.Agent
	t *testing.T
	// conf is the folder of the node's CNI configurations, plugins that of its plugins.
	conf, plugins string
	made          int
}

// newWorld starts an agent with runc and gVisor in a containerd of its own beside the embedded runtime, and with the node's CNI.
func newWorld(t *testing.T, conflist, more string) *world {
	t.Helper()
	containerd.Need(t, "runc", "gvisor", "cni")
	testkit.Leaks(t)
	w := newNode(t, conflist)
	d := containerd.Start(t, "runc", "gvisor")
	w.serve(node.Program(), fmt.Sprintf("runtime: {default: embedded, allowed: [embedded, runc, gvisor]}\ncontainerd: {address: %s}\n%s", d.Address, more))
	return w
}

// newNode makes a lab whose node has real CNI plugins, and no agent yet.
func newNode(t *testing.T, conflist string) *world {
	t.Helper()
	w := &world{t: t, Lab: netlab.New(t, cniSubnet, cniSubnet6), conf: testkit.StateDir(t), plugins: containerd.Folder(t, "cni")}
	require.NoError(t, os.WriteFile(filepath.Join(w.conf, "10-test.conflist"), []byte(strings.ReplaceAll(conflist, "DIR", w.conf)), 0o600))
	return w
}

// serve starts the agent on the lab's node.
func (w *world) serve(program, config string, env ...string) {
	w.t.Helper()
	w.Agent = node.Start(w.t, node.Options{
		Program: w.Program(program), Env: env,
		Config: fmt.Sprintf("network: {allowed: [none, bridge, cni], nameservers: [%s], bridge: {subnet: %s, subnet6: '%s'}, cni: {conf_dir: %s, bin_dirs: [%s]}}\n%s",
			netlab.Web, subnet, subnet6, w.conf, w.plugins, config),
	})
}

// bridged is a configuration of real plugins, with addresses of both families. DIR is a folder of the test's.
const bridged = `{"cniVersion": "1.0.0", "name": "lab", "plugins": [{
  "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "DIR/ipam", "ranges": [[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}
}]}`

// id is a new one for each session that there has been.
func (w *world) id(runtime, mode string) string {
	return fmt.Sprintf("s-%s-%s-%d", runtime, mode, w.made)
}

func (w *world) create(runtime, mode string) (*sandboxv1.Session, error) {
	w.t.Helper()
	w.made++
	repo := testkit.Repo(w.t, 1234)
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	r, err := w.Client.Sessions.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		SessionId: w.id(runtime, mode), Runtime: runtime, Network: &sandboxv1.Network{Mode: mode},
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: testkit.Worktree(w.t, 1234, repo, "topic")},
	})
	return r.GetSession(), err
}

func (w *world) session(runtime, mode string) *sandboxv1.Session {
	w.t.Helper()
	s, err := w.create(runtime, mode)
	require.NoError(w.t, err)
	return s
}

func (w *world) run(s *sandboxv1.Session, command string) *sandboxv1.ExecResult {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: s.GetSessionId(), Command: command, Text: true})
	require.NoError(w.t, err)
	return r.ExecResult
}

func (w *world) delete(s *sandboxv1.Session) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	_, err := w.Client.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: s.GetSessionId()})
	require.NoError(w.t, err)
}

// dial is a command that connects and prints what it is told; bash is there wherever a sandbox is.
func dial(address, port string) string {
	return fmt.Sprintf("exec 3<>/dev/tcp/%s/%s && cat <&3", address, port)
}

func TestASandboxIsConnectedByTheNodesCNIPluginsAndTakenOffAgain(t *testing.T) {
	w := newWorld(t, bridged, "")
	w.TCP(w.World, "web", netlab.Web+":80")
	w.TCP(w.World, "web6", "["+netlab.Web6+"]:80")
	for _, runtime := range []string{"runc", "gvisor", "embedded"} {
		t.Run(runtime, func(t *testing.T) {
			s := w.session(runtime, "cni")
			n := s.GetSandbox().GetNetwork()
			require.Equal(t, "cni", n.GetMode())
			require.Equal(t, "lab", n.GetCniNetwork())
			require.Len(t, n.GetAddresses(), 2)
			require.Equal(t, []string{netlab.Web}, n.GetNameservers())
			require.Subset(t, w.Links(w.Node), n.GetNodeInterfaces())

			r := w.run(s, dial(netlab.Web, "80"))
			require.Equal(t, "web to "+n.GetAddresses()[0]+"\n", r.GetStdoutText(), r.GetStderrText())
			r = w.run(s, dial(netlab.Web6, "80"))
			require.Equal(t, "web6 to "+n.GetAddresses()[1]+"\n", r.GetStdoutText(), r.GetStderrText())
			r = w.run(s, "cat /etc/resolv.conf")
			require.Equal(t, "nameserver "+netlab.Web+"\n", r.GetStdoutText())

			w.delete(s)
			require.NotSubset(t, w.Links(w.Node), n.GetNodeInterfaces())
			w.nothingLeft()
		})
	}
}

// nothingLeft looks at what the agent and the plugins keep of sandboxes.
func (w *world) nothingLeft() {
	w.t.Helper()
	for _, dir := range []string{"records", "netns"} {
		entries, err := os.ReadDir(filepath.Join(w.State, "network", dir))
		require.NoError(w.t, err)
		require.Empty(w.t, entries, dir)
	}
}

func TestP10ASandboxProvesThatItReachesNoListenerOfTheNode(t *testing.T) {
	w := newWorld(t, bridged, "")
	w.TCP(w.World, "web", netlab.Web+":80")
	live := w.TCP(w.Node, "kubelet", netlab.NodeAddr+":10250")
	w.Sysctl(w.Node, "net/ipv4/ip_forward", "0")
	for _, c := range []struct{ runtime, mode string }{{"embedded", "bridge"}, {"runc", "bridge"}, {"runc", "cni"}, {"gvisor", "bridge"}, {"gvisor", "cni"}} {
		t.Run(c.runtime+" "+c.mode, func(t *testing.T) {
			s := w.session(c.runtime, c.mode)
			proved := map[string]string{}
			for _, i := range s.GetSandbox().GetProof() {
				require.True(t, i.GetHolds() || c.runtime == "gvisor" && i.GetConceded(), i.GetWhat())
				proved[i.GetWhat()] = i.GetDetail()
			}
			require.Regexp(t, `^\d{2,3} tried$`, proved["no connection to a listener of the node"])
			require.Regexp(t, `^\d\d listeners$`, proved["no listener of the node hears a command"])
			before := len(live.Peers())
			require.NotZero(t, before, "the agent has seen that it answers")

			from := netlab.NodeAddr // translated
			if c.mode == "cni" {
				from = s.GetSandbox().GetNetwork().GetAddresses()[0]
			}
			require.Equal(t, "web to "+from+"\n", w.run(s, dial(netlab.Web, "80")).GetStdoutText())
			r := w.run(s, dial(netlab.NodeAddr, "10250"))
			require.NotZero(t, r.GetExitCode())
			require.Contains(t, r.GetStderrText(), "Connection refused")
			require.Len(t, live.Peers(), before)
			w.delete(s)
			require.NotSubset(t, w.Links(w.Node), s.GetSandbox().GetNetwork().GetNodeInterfaces())
			w.nothingLeft()
		})
	}
}

func TestSandboxesKeepTheirNetworkAndItsRulesOverRestartsAndFlushes(t *testing.T) {
	testkit.Need(t, testkit.Program("nft"))
	w := newWorld(t, bridged, "")
	w.TCP(w.World, "web", netlab.Web+":80")
	live := w.TCP(w.Node, "kubelet", netlab.NodeAddr+":10250")
	sessions := map[string]*sandboxv1.Session{
		"bridge": w.session("embedded", "bridge"), "cni": w.session("embedded", "cni"), "bridge under gVisor": w.session("gvisor", "bridge"),
	}
	holds := func(when string) {
		before := len(live.Peers())
		for mode, s := range sessions {
			require.Contains(t, w.run(s, dial(netlab.Web, "80")).GetStdoutText(), "web to ", "%s, %s", mode, when)
			require.NotZero(t, w.run(s, dial(netlab.NodeAddr, "10250")).GetExitCode(), "%s, %s", mode, when)
		}
		require.Len(t, live.Peers(), before, when)
	}
	generations := func() (all []uint64) {
		for _, s := range sessions {
			all = append(all, w.get(s).GetGeneration())
		}
		return all
	}
	marked := func(with string) (n int) {
		for _, s := range sessions {
			if strings.Contains(strings.Join(w.get(s).GetNotes(), "\n"), with) {
				n++
			}
		}
		return n
	}
	w.Restart()
	require.Zero(t, marked("changed by another program"))
	holds("after the agent was killed")
	require.Equal(t, []uint64{1, 1, 1}, generations(), "the same sandboxes")
	require.NotContains(t, w.LogText(), "is not as it was")

	w.Kill()
	out, err := w.Command(w.Node, "nft", "flush", "ruleset").CombinedOutput()
	require.NoError(t, err, string(out))
	w.Serve()
	holds("after the rules were flushed while there was no agent")
	require.Len(t, sessions, marked("since an unknown moment while there was no agent"))

	out, err = w.Command(w.Node, "nft", "flush", "ruleset").CombinedOutput()
	require.NoError(t, err, string(out))
	w.Until("the sessions are marked", func() bool { return marked("for at most some seconds before that") == len(sessions) })
	holds("after the rules were flushed")

	for _, s := range sessions {
		w.delete(s)
	}
	w.nothingLeft()
}

func (w *world) get(s *sandboxv1.Session) *sandboxv1.Session {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	got, err := w.Client.Sessions.GetSession(ctx, &sandboxv1.GetSessionRequest{SessionId: s.GetSessionId()})
	require.NoError(w.t, err)
	return got.GetSession()
}
