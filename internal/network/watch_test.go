package network

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/network/resolver"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// looks counts how often the rules of all sandboxes are compared.
type looks struct {
	slog.Handler
	n atomic.Int32
}

func (k *looks) Enabled(context.Context, slog.Level) bool { return true }

func (k *looks) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "the rules of all sandboxes are compared with what they should be" {
		k.n.Add(1)
	}
	return nil
}

// manySandboxes are so many that a look after each of them would be noticed.
const manySandboxes = 60

func TestAnAgentsOwnChangesAreNoReasonToLookAtTheRulesOfAll(t *testing.T) {
	l := newEgressLab(t)
	counted := &looks{Handler: slog.DiscardHandler}
	l.log = slog.New(counted)
	ctx, cancel := context.WithCancel(t.Context())
	heard, stop, err := l.rules.listen()
	require.NoError(t, err)
	ticks, lapses, ended := make(chan time.Time), make(chan Lapses, 1), make(chan struct{})
	go func() {
		defer close(ended)
		l.watch(ctx, heard, ticks, func(found Lapses) { lapses <- found })
	}()
	defer func() { cancel(); <-ended; stop() }()
	tick := func() {
		ticks <- time.Now()
		ticks <- time.Now() // the one before is done
	}
	one := l.under("sb-one", Egress{Mode: egress.Allowlist, Entries: entries(t, "web.example:443 web")})
	tick()
	before := counted.n.Load()
	require.NotZero(t, before, "control: the first look is counted")
	web := resolver.Destination{Addr: one.Addresses[0], Protocol: egress.TCP, Port: 443}
	for i := range manySandboxes {
		rec := &Record{ID: fmt.Sprintf("sb-%d", i), Egress: Egress{Mode: egress.None}, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})}}
		l.changing.Lock()
		require.NoError(t, l.egress.add(rec))
		require.NoError(t, l.rules.add(rec))
		l.changing.Unlock()
		require.NoError(t, l.egress.admit(one.ID, []resolver.Destination{web}, time.Duration(i+1)*time.Hour))
		l.changing.Lock()
		require.NoError(t, l.unguard(rec))
		l.changing.Unlock()
		if i%10 == 0 {
			tick()
		}
	}
	tick()
	require.Equal(t, before, counted.n.Load())
	require.Empty(t, lapses)

	targets := l.serve(l.Node, "tcp "+netlab.NodeAddr+" 9000")
	nft(t, "flush ruleset") // is heard
	require.Equal(t, Lapses{Restored: []string{"sb-one"}}, <-lapses)
	require.Equal(t, []string{"refused"}, l.try(one, targets))
	require.Greater(t, counted.n.Load(), before)

	// What nobody has told of is found all the same, after some time.
	tick()
	before = counted.n.Load()
	for range anyway {
		ticks <- time.Now()
	}
	tick()
	require.Greater(t, counted.n.Load(), before)
}
