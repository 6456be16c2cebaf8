package agent

import (
	"context"
	"net"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// reaching is the real runtime, whose sandboxes' proofs are told of a canary that somebody then reaches in the sandbox's name, by a
// way that the proof itself does not see.
type reaching struct{ runtime.Runtime }

func (r reaching) Create(ctx context.Context, spec runtime.Spec) (runtime.Sandbox, error) {
	s, err := r.Runtime.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return reachingSandbox{s}, nil
}

type reachingSandbox struct{ runtime.Sandbox }

func (s reachingSandbox) Dial(ctx context.Context) (net.Conn, error) {
	c, err := s.Sandbox.Dial(ctx)
	if err != nil {
		return nil, err
	}
	return reachingConn{c}, nil
}

type reachingConn struct{ net.Conn }

// canary is how the request for a proof names one, and the token by which it knows who was there.
var canary = regexp.MustCompile(`(@sandbox-agent-canary-[A-Z2-7]{26})[^A-Z2-7]+([A-Z2-7]{26})`)

func (c reachingConn) Write(b []byte) (int, error) {
	if found := canary.FindSubmatch(b); found != nil {
		to, err := net.Dial("unix", string(found[1]))
		if err != nil {
			return 0, err
		}
		if _, err := to.Write(append(found[2], '\n')); err != nil {
			return 0, err
		}
		if err := to.Close(); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(b)
}

func TestP10ASandboxThatReachesAListenerIsNotMade(t *testing.T) {
	const visible = "/usr/bin/bash" // it is no socket, and that it is in a command's view is all that counts
	for name, c := range map[string]struct {
		listed []string
		wrap   func(map[string]runtime.Runtime)
		says   string
	}{
		"control":                      {},
		"a listed path in its view":    {listed: []string{visible}, says: "can't prove P10 (no connection to a listener of the node: reached: unix " + visible + ")"},
		"the node's side has heard it": {wrap: func(all map[string]runtime.Runtime) { all["embedded"] = reaching{all["embedded"]} }, says: "can't prove P10 (no listener of the node hears a command: heard: unix @sandbox-agent-canary-"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(cfg *config.Config) { cfg.Listeners.Unix = c.listed })
			if n.wrap = c.wrap; c.wrap != nil {
				n.restart(func() {})
			}
			s, err := n.on("reaches", func(*sandboxv1.CreateSessionRequest) {})
			if c.says == "" {
				require.NoError(t, err)
				require.Equal(t, sandboxv1.Session_READY, s.GetState())
				return
			}
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, c.says)
			left, err := n.agent.hosts.all["embedded"].List(n.ctx())
			require.NoError(t, err)
			require.Empty(t, left, "it is stopped")
			_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "reaches", ExecId: "e1", Command: "true"})
			require.ErrorIs(t, err, ErrNotFound)
		})
	}
}

func TestTheNodeCheckSaysWhatARuntimeConcedes(t *testing.T) {
	n := newNode(t, bothAllowed)
	n.wrap = func(all map[string]runtime.Runtime) {
		all["runc"] = classed{all["runc"], runtime.SeparateKernel, []runtime.Concession{{Promise: "P9", What: "pid1 is not visible", Why: "its /proc shows it"}}}
	}
	n.restart(func() {})
	status := n.agent.hosts.status(n.ctx(), n.agent.hosts.all["runc"], 0)
	require.Equal(t, sandboxv1.Isolation_SEPARATE_KERNEL, status.GetIsolation())
	require.Len(t, status.GetConcessions(), 1)
	got := status.GetConcessions()[0]
	require.Equal(t, []string{"P9", "pid1 is not visible", "its /proc shows it"}, []string{got.GetPromise(), got.GetWhat(), got.GetWhy()})
	require.Empty(t, n.agent.hosts.status(n.ctx(), n.agent.hosts.all["embedded"], 0).GetConcessions())
}
