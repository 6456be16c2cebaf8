package egress

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

func TestMain(m *testing.M) { os.Exit(node.Main(m)) }

const subnet, subnet6 = "10.231.0.0/16", "fd23:1::/64"

// world is a lab with an agent on its node, and a nameserver behind the node's uplink.
type world struct {
	*netlab.Lab
	*node.Agent
	t    *testing.T
	zone *netlab.Zone
}

func newWorld(t *testing.T) *world {
	t.Helper()
	testkit.Leaks(t)
	w := &world{t: t, Lab: netlab.New(t)}
	w.zone = w.DNS(w.World, netlab.Web+":53")
	w.Agent = node.Start(t, node.Options{
		Program: w.Program(node.Program()),
		Config: fmt.Sprintf(`network:
  default: bridge
  allowed: [none, bridge]
  nameservers: [%s]
  bridge: {subnet: %s, subnet6: '%s'}
  egress:
    default: allowlist
    allowed: [none, open, allowlist]
    allow:
      - {to: web.example, ports: [80], reason: the site}
      - {to: '*.cdn.example', ports: [80], reason: its content}
      - {to: rebound.example, ports: [80], reason: a name that turns}
`, netlab.Web, subnet, subnet6),
	})
	return w
}

func (w *world) session(id string, n *sandboxv1.Network) (*sandboxv1.Session, error) {
	w.t.Helper()
	repo := testkit.Repo(w.t, 1234)
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	return w.Client.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		SessionId: id, Network: n,
		Workspace: &sandboxv1.Workspace{Repository: repo, Worktree: testkit.Worktree(w.t, 1234, repo, "topic")},
	})
}

func (w *world) run(session, command string) *sandboxv1.ExecResult {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: session, Command: command, Text: true})
	require.NoError(w.t, err)
	return r.ExecResult
}

// dial is a command that connects and prints what it is told.
func dial(address string, port int) string {
	return fmt.Sprintf("exec 3<>/dev/tcp/%s/%d && cat <&3", address, port)
}

func TestACommandReachesWhatIsListedAndIsToldWhatIsNot(t *testing.T) {
	w := newWorld(t)
	w.TCP(w.World, "web", netlab.Web+":80")
	w.TCP(w.World, "web6", "["+netlab.Web6+"]:80")
	w.TCP(w.World, "other", netlab.Other+":80")
	w.TCP(w.World, "metadata", netlab.Metadata+":80")
	w.zone.Set("web.example", netlab.Web)
	w.zone.Set("six.cdn.example", netlab.Web6)
	w.zone.Set("other.example", netlab.Other)
	w.zone.Set("rebound.example", netlab.Metadata, "10.231.0.1")

	_, err := w.session("open", &sandboxv1.Network{Egress: "open"})
	require.NoError(t, err)
	for _, to := range []string{"web.example", "other.example", netlab.Other} {
		r := w.run("open", dial(to, 80))
		require.Contains(t, r.GetStdoutText(), " to 203.0.113.2", "control: under no list %s answers: %s", to, r.GetStderrText())
	}

	asked := len(w.zone.Asked())
	s, err := w.session("listed", nil)
	require.NoError(t, err)
	require.Equal(t, []string{"169.254.53.53"}, s.GetSandbox().GetNetwork().GetNameservers())
	r := w.run("listed", dial("web.example", 80))
	require.Equal(t, "web to 203.0.113.2\n", r.GetStdoutText(), r.GetStderrText())
	require.Empty(t, r.GetRefusedDestinations())
	require.EqualValues(t, 1, r.GetNetwork().GetConnections())
	require.NotZero(t, r.GetNetwork().GetBytesOut())
	r = w.run("listed", dial("six.cdn.example", 80))
	require.Contains(t, r.GetStdoutText(), "web6 to", r.GetStderrText())

	r = w.run("listed", "for a in "+netlab.Other+" "+netlab.Metadata+" other.example rebound.example; do (exec 3<>/dev/tcp/$a/80) && echo reached $a; done; true")
	require.Empty(t, r.GetStdoutText())
	require.Contains(t, r.GetRefusedDestinations(), netlab.Other+":80/tcp")
	require.Contains(t, r.GetRefusedDestinations(), "other.example")
	require.Contains(t, strings.Join(r.GetRefusedDestinations(), "\n"), "rebound.example (")
	require.NotZero(t, r.GetNetwork().GetRefused())
	require.NotContains(t, w.zone.Asked()[asked:], "other.example", "nothing of it went out")
	r = w.run("listed", "true")
	require.Empty(t, r.GetRefusedDestinations(), "each command is told its own")
	require.Zero(t, r.GetNetwork().GetRefused())

	w.showAndProbe()
	w.restart()
}

// showAndProbe asks the command line.
func (w *world) showAndProbe() {
	w.t.Helper()
	out, err := w.Command(w.Node, node.Program(), "egress", "show", "listed", "--socket", w.Socket).CombinedOutput()
	require.NoError(w.t, err, string(out))
	require.Regexp(w.t, `\*\.cdn\.example:80/tcp +- +its content`, string(out))
	probe := func(more ...string) (string, int) {
		cmd := w.Command(w.Node, append([]string{node.Program(), "egress", "probe", "listed", "--socket", w.Socket, "--other", "other.example:80"}, more...)...)
		out, _ := cmd.CombinedOutput()
		return string(out), cmd.ProcessState.ExitCode()
	}
	text, code := probe()
	require.Equal(w.t, 0, code, text)
	require.Contains(w.t, text, "web.example:80")
	text, code = probe("--allowed", "down.cdn.example:80")
	require.Equal(w.t, 11, code, text)
	text, code = probe("--address", netlab.Web+":80")
	require.Equal(w.t, 13, code, "%s: its address is open by its name", text)
}

// restart has the agent killed and started again.
func (w *world) restart() {
	w.t.Helper()
	w.Restart()
	r := w.run("listed", dial("web.example", 80))
	require.Equal(w.t, "web to 203.0.113.2\n", r.GetStdoutText(), r.GetStderrText())
	r = w.run("listed", dial(netlab.Other, 80))
	require.Empty(w.t, r.GetStdoutText())
	require.Equal(w.t, []string{netlab.Other + ":80/tcp"}, r.GetRefusedDestinations())
}

func TestASessionsListIsWithinTheOperatorsAndHasReasons(t *testing.T) {
	w := newWorld(t)
	w.zone.Set("a.cdn.example", netlab.Web)
	w.TCP(w.World, "web", netlab.Web+":80")
	for name, c := range map[string]struct {
		n    *sandboxv1.Network
		want string
	}{
		"no reason":    {&sandboxv1.Network{Allow: []string{"web.example:80"}}, "reason is missing"},
		"not within":   {&sandboxv1.Network{Allow: []string{"web.example:443 x"}}, "network.egress.allow"},
		"not listed":   {&sandboxv1.Network{Allow: []string{"evil.example:80 x"}}, "evil.example:80/tcp"},
		"another mode": {&sandboxv1.Network{Egress: "open", Allow: []string{"web.example:80 x"}}, "allowlist"},
		"no network":   {&sandboxv1.Network{Mode: "none", Egress: "open"}, "network.mode"},
		"no such mode": {&sandboxv1.Network{Egress: "most"}, "network.egress.allowed"},
	} {
		_, err := w.session("refused", c.n)
		require.ErrorContains(t, err, c.want, name)
	}
	_, err := w.session("narrow", &sandboxv1.Network{Allow: []string{"a.cdn.example:80 only this"}})
	require.NoError(t, err)
	require.Equal(t, "web to 203.0.113.2\n", w.run("narrow", dial("a.cdn.example", 80)).GetStdoutText())
	require.Equal(t, []string{"web.example"}, w.run("narrow", dial("web.example", 80)).GetRefusedDestinations())
}

// What is buffered in a socket when its command ends is not sent after the answer.
func TestP3NothingArrivesAfterTheAnswer(t *testing.T) {
	w := newWorld(t)
	const sent = 600000 // more than the receiver's window
	for name, command := range map[string]string{
		"control": "head -c %d /dev/zero >&3 & cat <&3 >/dev/null", // it is still there when its buffer is read
		"gone":    "(head -c %d /dev/zero >&3) & sleep 0.5",
	} {
		t.Run(name, func(t *testing.T) {
			got := w.Silent(w.World, netlab.Web+":80")
			_, err := w.session(name, &sandboxv1.Network{Egress: "open"})
			require.NoError(t, err)
			answered := make(chan *sandboxv1.ExecResult, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
				defer cancel()
				r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: name, Command: "exec 3<>/dev/tcp/" + netlab.Web + "/80; " + fmt.Sprintf(command, sent)})
				if err == nil {
					answered <- r.ExecResult
				}
				close(answered)
			}()
			c := <-got
			defer c.Close()
			if name == "control" {
				n, err := io.ReadFull(c, make([]byte, sent))
				require.NoError(t, err, "after %d bytes", n)
				require.NoError(t, c.Close())
				require.NotNil(t, <-answered)
				return
			}
			require.NotNil(t, <-answered)
			n, err := io.Copy(io.Discard, c)
			require.ErrorContains(t, err, "reset", "after %d bytes", n)
			require.Less(t, n, int64(sent))
		})
	}
}
