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
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

func TestManySandboxesWithANetworkComeAndGoAndNothingIsLeft(t *testing.T) {
	testkit.Need(t, testkit.Program("nft"))
	rounds := 3
	if os.Getenv("SANDBOX_TEST_LONG") != "" {
		rounds = 67 // three at once: 201
	}
	w := newWorld(t, bridged, "")
	w.TCP(w.World, "web", netlab.Web+":80")
	sessions := []*sandboxv1.Session{w.session("embedded", "bridge"), w.session("runc", "bridge"), w.session("runc", "cni")}
	busy := w.footprint()
	w.upAndDown(sessions, 1) // what stays is made: CNI's bridge, connections, threads
	before := w.footprint()
	require.NotEqual(t, busy.rules, before.rules, "control: a sandbox's rules are seen")
	require.Greater(t, len(busy.links), len(before.links), "control: and its interface")
	require.Len(t, busy.addresses, 2, "control: and its addresses of the plugin's")
	require.Equal(t, len(sessions), busy.namespaces, "control: and its network namespace")

	w.upAndDown(sessions, rounds)
	w.nothingLeft()
	after := w.footprint()
	require.Equal(t, before.rules, after.rules)
	require.Equal(t, before.links, after.links)
	require.Empty(t, after.addresses)
	require.Zero(t, after.namespaces, "bound network namespaces")
	w.Until("the agent has as many descriptors as before", func() bool { return w.footprint().descriptors <= before.descriptors })
}

// upAndDown has each session run a command in a sandbox, and in another one after that, all sessions at once.
func (w *world) upAndDown(sessions []*sandboxv1.Session, rounds int) {
	w.t.Helper()
	errs := make(chan error, len(sessions))
	for _, s := range sessions {
		go func() {
			var err error
			for i := 0; i < rounds && err == nil; i++ {
				err = w.once(s.GetSessionId())
			}
			errs <- err
		}()
	}
	for range sessions {
		require.NoError(w.t, <-errs)
	}
}

// once has a session's sandbox reach the web, and stops it.
func (w *world) once(session string) error {
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	r, err := w.Client.Exec(ctx, &sandboxv1.ExecRequest{SessionId: session, Command: dial(netlab.Web, "80"), Text: true})
	if err != nil {
		return err
	}
	if !strings.HasPrefix(r.GetStdoutText(), "web to ") {
		return fmt.Errorf("session %s does not reach the web: %s", session, r.GetStderrText())
	}
	_, err = w.Client.Sessions.RetireSandbox(ctx, &sandboxv1.RetireSandboxRequest{SessionId: session})
	return err
}

// footprint is what sandboxes with a network have on the node.
type footprint struct {
	rules            string   // of nftables, without their counters
	links, addresses []string // interfaces; addresses that CNI's plugin has given
	namespaces       int      // network namespaces that are bound
	descriptors      int      // of the agent, without its journal, which comes to have more files
}

func (w *world) footprint() (f footprint) {
	w.t.Helper()
	rules, err := w.Command(w.Node, "nft", "--stateless", "list", "ruleset").CombinedOutput()
	require.NoError(w.t, err, string(rules))
	f.rules, f.links = string(rules), w.Links(w.Node)
	f.addresses, err = filepath.Glob(filepath.Join(w.conf, "ipam", "lab", "[1f]*"))
	require.NoError(w.t, err)
	proc := fmt.Sprintf("/proc/%d", w.Cmd.Process.Pid)
	mounts, err := os.ReadFile(proc + "/mountinfo")
	require.NoError(w.t, err)
	f.namespaces = strings.Count(string(mounts), " "+filepath.Join(w.State, "network", "netns")+"/")
	fds, err := os.ReadDir(proc + "/fd")
	require.NoError(w.t, err)
	for _, fd := range fds {
		to, err := os.Readlink(filepath.Join(proc, "fd", fd.Name()))
		if err == nil && !strings.HasPrefix(to, filepath.Join(w.State, "journal")+"/") { // else it was there for a moment
			f.descriptors++
		}
	}
	return f
}
