package events

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
)

// place is a journal with its chain.
type place struct {
	t     *testing.T
	dir   string
	keep  int64
	j     *journal.Journal
	chain *Chain
}

func newPlace(t *testing.T, keep int64) *place {
	t.Helper()
	p := &place{t: t, dir: filepath.Join(t.TempDir(), "journal"), keep: keep}
	p.open()
	t.Cleanup(func() { require.NoError(t, p.j.Close()) })
	return p
}

func (p *place) open() {
	p.t.Helper()
	var err error
	p.j, err = journal.Open(p.dir, slog.New(slog.DiscardHandler))
	require.NoError(p.t, err)
	p.chain, err = Open(p.t.Context(), p.j, p.keep, "v1", slog.New(slog.DiscardHandler))
	require.NoError(p.t, err)
}

// again is the agent's restart; cleanly is whether it said that it stops.
func (p *place) again(cleanly bool) {
	p.t.Helper()
	if cleanly {
		require.NoError(p.t, p.chain.Close(p.t.Context()))
	}
	require.NoError(p.t, p.j.Close())
	p.open()
}

func (p *place) tell(n int) {
	p.t.Helper()
	for i := range n {
		require.NoError(p.t, p.chain.Tell(Event{Kind: ExecResult, Session: fmt.Sprintf("s%d", i%2), Exec: fmt.Sprintf("e%d", i)}))
	}
}

func (p *place) all(after Cursor, session string) []Entry {
	p.t.Helper()
	var list []Entry
	require.NoError(p.t, p.chain.Watch(p.t.Context(), after, session, true, func(e Entry) error {
		list = append(list, e)
		return nil
	}))
	return list
}

func kinds(list []Entry) []Kind {
	var out []Kind
	for _, e := range list {
		out = append(out, e.Kind)
	}
	return out
}

func TestCursorsRiseStrictlyAlsoAsTextAndAcrossRestarts(t *testing.T) {
	p := newPlace(t, 1000)
	for i := range 4 {
		p.tell(3)
		p.again(i%2 == 0)
	}
	list := p.all(0, "")
	require.Greater(t, len(list), 4*3+4)
	for i := 1; i < len(list); i++ {
		require.Greater(t, list[i].Cursor, list[i-1].Cursor)
		require.Greater(t, list[i].Cursor.String(), list[i-1].Cursor.String())
	}
	c, err := ParseCursor(list[5].Cursor.String())
	require.NoError(t, err)
	require.Equal(t, list[5].Cursor, c)
	for _, bad := range []string{"x", "1", "00000000000000001", "-000000000000001", "000001000000000A"} {
		_, err := ParseCursor(bad)
		require.ErrorIs(t, err, ErrCursor, bad)
	}
}

func TestAnEndWithoutNoticeIsSaidAndACleanOneIsNot(t *testing.T) {
	p := newPlace(t, 1000)
	require.Equal(t, []Kind{AgentStarted}, kinds(p.all(0, "")))
	p.again(true)
	require.Equal(t, []Kind{AgentStarted, AgentStopped, AgentStarted}, kinds(p.all(0, "")))
	p.tell(1)
	last := p.chain.Newest()
	p.again(false)
	after := p.all(last, "")
	require.Equal(t, []Kind{Gap, AgentStarted}, kinds(after))
	require.Contains(t, after[0].Detail, last.String(), "it names the event after which something may be missing")
}

func TestAReaderGoesOnWhereItWasAndSeesOneSessionOnly(t *testing.T) {
	p := newPlace(t, 1000)
	p.tell(700) // more than a batch
	list := p.all(0, "s1")
	require.Len(t, list, 350)
	rest := p.all(list[299].Cursor, "s1")
	require.Equal(t, list[300:], rest)
	require.Empty(t, p.all(p.chain.Newest(), ""))
	_, err := p.chain.Read(p.chain.Newest() + 1)
	require.ErrorIs(t, err, ErrAhead)
}

func TestAWatcherSeesWhatComes(t *testing.T) {
	p := newPlace(t, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan Entry)
	done := make(chan error, 1)
	from := p.chain.Newest() // before anything is told
	go func() {
		done <- p.chain.Watch(ctx, from, "", false, func(e Entry) error { got <- e; return nil })
	}()
	for i := range 5 {
		require.NoError(t, p.chain.Tell(Event{Kind: ExecRequested, Exec: fmt.Sprint(i)}))
		require.Equal(t, fmt.Sprint(i), (<-got).Exec)
	}
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	mine := errors.New("mine")
	require.ErrorIs(t, p.chain.Watch(t.Context(), 0, "", false, func(Entry) error { return mine }), mine)
}

func TestOldEventsGoAndACursorBeforeThemIsToldTheOldestOne(t *testing.T) {
	p := newPlace(t, 300)
	first := p.chain.Newest()
	p.tell(1000)
	require.NoError(t, p.chain.trim(t.Context()))
	_, count := p.j.Entries()
	require.EqualValues(t, 300, count)
	_, err := p.chain.Read(first)
	require.ErrorIs(t, err, ErrTooOld)
	require.ErrorContains(t, err, p.chain.Oldest().String())
	require.Len(t, p.all(p.chain.Oldest(), ""), 300, "the cursor that the error names is good")
	require.Len(t, p.all(0, ""), 300)
	oldest := p.chain.Oldest()
	p.again(true)
	require.Equal(t, oldest, p.chain.Oldest(), "also after a restart")
	_, count = p.j.Entries()
	require.EqualValues(t, 302, count)
	_, err = p.chain.Read(first)
	require.ErrorIs(t, err, ErrTooOld)
}

func TestASlowWatcherHoldsUpNobodyAndIsToldWhatItMissed(t *testing.T) {
	p := newPlace(t, 500)
	stuck, goOn := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	seen := 0
	go func() {
		done <- p.chain.Watch(t.Context(), 0, "", false, func(Entry) error {
			if seen++; seen == 1 {
				close(stuck)
				<-goOn
			}
			return nil
		})
	}()
	<-stuck
	p.tell(1500) // would hang if anything waited for the watcher
	require.NoError(t, p.chain.trim(t.Context()))
	close(goOn)
	require.ErrorIs(t, <-done, ErrTooOld)
	require.Less(t, seen, 300, "what it had taken, and nothing after the hole")
}

func TestManySidesTellAndEveryWatcherSeesOneOrder(t *testing.T) {
	p := newPlace(t, 10_000)
	const sides, each = 4, 50
	orders := make([][]string, 3)
	var watchers, tellers sync.WaitGroup
	enough := errors.New("enough")
	for i := range orders {
		watchers.Go(func() {
			_ = p.chain.Watch(t.Context(), p.chain.Oldest(), "", false, func(e Entry) error {
				if e.Exec != "" {
					orders[i] = append(orders[i], e.Exec)
				}
				if len(orders[i]) == sides*each {
					return enough
				}
				return nil
			})
		})
	}
	for side := range sides {
		tellers.Go(func() {
			for i := range each {
				_ = p.chain.Tell(Event{Kind: ExecRequested, Exec: fmt.Sprintf("%d-%03d", side, i)})
			}
		})
	}
	tellers.Wait()
	watchers.Wait()
	require.Equal(t, orders[0], orders[1])
	require.Equal(t, orders[0], orders[2])
	for side := range sides {
		own := slices.DeleteFunc(slices.Clone(orders[0]), func(s string) bool { return !strings.HasPrefix(s, fmt.Sprintf("%d-", side)) })
		require.Len(t, own, each)
		require.True(t, slices.IsSorted(own), "each side's events keep their order")
	}
}

func TestAnEventIsThereTogetherWithItsRecordOrNotAtAll(t *testing.T) {
	p := newPlace(t, 1000)
	before := p.chain.Newest()
	err := p.j.Update(t.Context(), true, Event{Kind: SessionCreated, Session: "s"}.Op(), journal.Set(strings.Repeat("k", journal.MaxKey+1), nil))
	require.ErrorIs(t, err, journal.ErrBadKey)
	require.Empty(t, p.all(before, ""))
	require.NoError(t, p.j.Update(t.Context(), true, Event{Kind: SessionCreated, Session: "s"}.Op(), journal.Set("k", nil)))
	require.Len(t, p.all(before, "s"), 1)
}

func TestALongDetailIsCutAtARune(t *testing.T) {
	e := Event{Kind: ExecResult, Detail: strings.Repeat("ä", maxDetail), Command: strings.Repeat("x", maxCommand+7)}
	p := newPlace(t, 1000)
	require.NoError(t, p.chain.Tell(e))
	got := p.all(0, "")[1]
	require.Equal(t, strings.Repeat("ä", maxDetail/2)+"… (1024 bytes more)", got.Detail)
	require.True(t, strings.HasSuffix(got.Command, "x… (7 bytes more)"))
	require.True(t, bytes.HasPrefix([]byte(got.Command), bytes.Repeat([]byte("x"), maxCommand)))
}
