package network

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// crashing builds an agent that can be killed at its crash points (internal/runtime/crashpoint).
func crashing(t *testing.T) string {
	t.Helper()
	program := filepath.Join(testkit.StateDir(t), "sandbox-agent")
	if built := filepath.Join(os.Getenv(testkit.BinDirEnv), "sandbox-agent-crashpoints"); os.Link(built, program) == nil {
		return program // for a machine that has no Go
	}
	testkit.Need(t, testkit.Program("go"), testkit.GCC)
	root, err := testkit.ModuleRoot()
	require.NoError(t, err)
	build := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-tags", "crashpoints", "-o", program, "./cmd/sandbox-agent")
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}

func TestNothingOfANetworkIsLeftWhereverTheAgentIsKilled(t *testing.T) {
	testkit.Leaks(t)
	w := newNode(t, bridged)
	w.TCP(w.World, "web", netlab.Web+":80")
	armed := filepath.Join(testkit.StateDir(t), "armed")
	arm := func(point string) { require.NoError(t, os.WriteFile(armed, []byte(point), 0o600)) }
	arm("")
	w.serve(crashing(t), "", "SANDBOX_AGENT_CRASH_AT="+armed)
	for mode, points := range map[string][]string{
		"bridge": {"network.recorded", "network.bound", "network.allocated", "network.plugged", "network.guarded", "network.unplugged", "network.unbound"},
		"cni":    {"network.asked", "network.plugged", "network.unplugged"},
	} {
		for _, point := range points {
			t.Run(mode+" "+point, func(t *testing.T) {
				w.t, w.Agent.T = t, t
				defer func() { w.Agent.T = w.Lab.T }()
				arm(point + ":1")
				s, err := w.create("embedded", mode)
				if err == nil {
					require.Error(t, w.tryDelete(s.GetSessionId()), "the agent is killed when it takes the network away")
				}
				<-w.Ended
				arm("")
				w.Serve()
				_ = w.tryDelete(w.id("embedded", mode)) // if it ever came into being
				s = w.session("embedded", mode)
				require.Contains(t, w.run(s, dial(netlab.Web, "80")).GetStdoutText(), "web to ")
				w.delete(s)
				w.nothingLeft()
				for _, link := range w.Links(w.Node) {
					require.NotRegexp(t, "^(sb|veth)", link)
				}
				reserved, err := filepath.Glob(filepath.Join(w.conf, "ipam", "lab", "[1f]*"))
				require.NoError(t, err)
				require.Empty(t, reserved, "addresses of the plugin's")
			})
		}
	}
}

func (w *world) tryDelete(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	_, err := w.Client.Sessions.DeleteSession(ctx, &sandboxv1.DeleteSessionRequest{SessionId: id})
	return err
}
