package network

import (
	"context"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
)

// watching has the rules watched without a clock. It gives what was put back or cut off.
func (l *lab) watching() <-chan Lapses {
	l.t.Helper()
	heard, deafen, err := l.rules.listen()
	require.NoError(l.t, err)
	ctx, stop := context.WithCancel(context.Background())
	told, ended := make(chan Lapses, 100), make(chan struct{})
	go func() {
		defer close(ended)
		l.watch(ctx, heard, nil, func(found Lapses) { told <- found })
	}()
	l.t.Cleanup(func() {
		stop()
		<-ended
		deafen()
	})
	return told
}

func TestWhatIsTakenFromTheRulesIsPutBackWhenTheKernelSaysSo(t *testing.T) {
	l := newLab(t, false)
	rec := l.connect("sb-one", Bridge)
	closed := l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000")
	told := l.watching()
	for _, attack := range []string{
		"flush ruleset",
		"delete table netdev " + l.rules.ingress.Name,
		"flush chain netdev " + l.rules.ingress.Name + " " + chainOf(rec, rec.Links[0]),
		"insert rule netdev " + l.rules.ingress.Name + " " + chainOf(rec, rec.Links[0]) + " accept",
		"delete element inet " + l.rules.routed.Name + " " + sandboxes4 + " { " + rec.Addresses[0].String() + " }",
	} {
		out, err := exec.Command("nft", attack).CombinedOutput()
		require.NoError(t, err, "%s: %s", attack, out)
		require.Equal(t, Lapses{Restored: []string{"sb-one"}}, <-told, attack)
		require.Equal(t, []string{"refused"}, l.try(rec, closed), attack)
	}
}
