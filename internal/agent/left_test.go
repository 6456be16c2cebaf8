package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

func TestP3WhatACommandLeftBehindStopsTheSandbox(t *testing.T) {
	good := receipt.Predicate{SealsIntact: true, Boundary: receipt.Boundary{Cgroup: "empty"}}
	require.Empty(t, leftBehind(nil))
	require.Empty(t, leftBehind(&proven{predicate: good}))
	for want, spoil := range map[string]func(*receipt.Predicate){
		"broken seals": func(p *receipt.Predicate) { p.SealsIntact = false },
		"processes in its cgroup that were not in its PID namespace": func(p *receipt.Predicate) { p.Boundary.Cgroup = "populated" },
		"2 sockets that could not be destroyed":                      func(p *receipt.Predicate) { p.Boundary.SocketsLeft = 2 },
	} {
		p := good
		spoil(&p)
		require.Equal(t, want, leftBehind(&proven{predicate: p}))
	}
}
