package network

import (
	"context"
	"os/exec"
	"testing"

	nl "github.com/mdlayher/netlink"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

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

// told is a message of nftables' about a table, and about a set of it.
func told(t *testing.T, kind uint16, table, set string) nl.Message {
	t.Helper()
	attrs, err := nl.MarshalAttributes([]nl.Attribute{{Type: tableAttribute, Data: append([]byte(table), 0)}, {Type: setAttribute, Data: append([]byte(set), 0)}})
	require.NoError(t, err)
	return nl.Message{Header: nl.Header{Type: nl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind)}, Data: append(make([]byte, nfgenmsgSize), attrs...)}
}

func TestARulesChangeIsLookedAtAndWhatNamesOpenIsNot(t *testing.T) {
	r := &rules{}
	ours := ourTables + "egress-1"
	for _, c := range []struct {
		kind       uint16
		table, set string
		looked     bool
	}{
		{unix.NFT_MSG_DELRULE, ours, "out-sb", true},
		{unix.NFT_MSG_DELSETELEM, ours, "from4", true},
		{unix.NFT_MSG_DELSET, ours, "open4-sb", true},
		{unix.NFT_MSG_DELSETELEM, ours, "open4-sb", false},
		{unix.NFT_MSG_DELSETELEM, ours, "open6-sb", false},
		{unix.NFT_MSG_NEWSETELEM, ours, "from4", false},
		{unix.NFT_MSG_DELRULE, "somebody's", "out-sb", false},
	} {
		require.Equal(t, c.looked, r.changedBy([]nl.Message{told(t, c.kind, c.table, c.set)}), "%+v", c)
	}
	require.True(t, r.changedBy([]nl.Message{told(t, unix.NFT_MSG_DELSETELEM, ours, "open4-sb"), told(t, unix.NFT_MSG_DELTABLE, ours, "")}))
}
