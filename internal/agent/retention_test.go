package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/journal"
	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

func (n *node) listed(session string) []string {
	n.t.Helper()
	list, _, err := n.agent.ListExecs(n.ctx(), &sandboxv1.ListExecsRequest{SessionId: session})
	require.NoError(n.t, err)
	var ids []string
	for _, e := range list {
		ids = append(ids, e.GetExecId())
	}
	return ids
}

func (n *node) chain(sandbox string) verify.ChainReport {
	n.t.Helper()
	key, err := verify.LoadKey(filepath.Join(n.state, "keys", sandbox+".pub"))
	require.NoError(n.t, err)
	r, err := verify.Chain(filepath.Join(n.state, "receipts", sandbox), key)
	require.NoError(n.t, err)
	require.True(n.t, r.OK(), r.Problems)
	return r
}

func TestP7RecordsBeyondTheCountExpireAndTheirIdsNeverRunAgain(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Retention.Execs = 2 })
	s := n.session("many")
	x := n.agent.sessions["many"]
	require.NoError(t, x.sweep(time.Now()), "nothing to do")
	for i := 1; i <= 4; i++ {
		n.exec("many", fmt.Sprintf("e%d", i), fmt.Sprintf("echo %d | tee -a ran", i))
	}
	require.Eventually(t, func() bool { return len(n.listed("many")) == 2 }, bound, pollEvery, "without being asked")
	require.NoError(t, x.sweep(time.Now()), "the files are gone when a sweep returns")
	require.Equal(t, []string{"e3", "e4"}, n.listed("many"))
	dir := n.agent.receiptsDir(s.GetSandbox().GetId())
	for i, there := range map[int]bool{1: false, 2: false, 3: true, 4: true} {
		for _, name := range []string{receipt.FileName(fmt.Sprintf("e%d", i)), receipt.StdoutName(fmt.Sprintf("e%d", i))} {
			_, err := os.Stat(filepath.Join(dir, name))
			require.Equal(t, there, err == nil, name)
		}
	}
	r := n.chain(s.GetSandbox().GetId())
	require.Len(t, r.Receipts, 2)
	require.EqualValues(t, 2, r.Removed.Sequence)

	same := &sandboxv1.ExecRequest{SessionId: "many", ExecId: "e1", Command: "echo 1 | tee -a ran"}
	check := func() {
		t.Helper()
		_, err := n.agent.Exec(n.ctx(), same)
		require.ErrorIs(t, err, ErrPrecondition)
		require.ErrorContains(t, err, "has expired")
		require.ErrorContains(t, err, time.Now().UTC().Format("2006-01"))
		err = n.agent.StreamExec(n.ctx(), &sandboxv1.StreamExecRequest{Exec: same}, func(*sandboxv1.StreamExecResponse) error { return nil })
		require.ErrorIs(t, err, ErrPrecondition)
		_, err = n.agent.Exec(n.ctx(), &sandboxv1.ExecRequest{SessionId: "many", ExecId: "e1", Command: "another"})
		require.ErrorIs(t, err, ErrExists)
		_, err = n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "many", ExecId: "e1"})
		require.ErrorIs(t, err, ErrPrecondition)
		_, err = n.cancel("many", "e1")
		require.ErrorIs(t, err, ErrPrecondition)
	}
	check()
	require.NoError(t, n.agent.Close())
	n.start()
	check()
	require.Equal(t, "1\n2\n3\n4\n", n.exec("many", "e5", "cat ran").GetStdoutText(), "each ran once")

	_, err := n.agent.DeleteSession(n.ctx(), &sandboxv1.DeleteSessionRequest{SessionId: "many"})
	require.NoError(t, err)
	for _, prefix := range []string{execPrefix, expiredPrefix, sweptPrefix, openPrefix} {
		require.NoError(t, n.agent.journal.Scan(prefix, "", func(key string, _ []byte) error {
			return fmt.Errorf("%s is left", key)
		}))
	}
	require.FileExists(t, filepath.Join(dir, receipt.FileName("e5")), "receipts outlive their session")
}

func TestRecordsOlderThanTheAgeExpire(t *testing.T) {
	n := newNode(t, func(c *config.Config) { c.Retention.Age = config.Duration(time.Hour) })
	s := n.session("old")
	n.exec("old", "e1", "echo 1")
	n.exec("old", "e2", "echo 2")
	x := n.agent.sessions["old"]
	require.NoError(t, x.sweep(time.Now().Add(59*time.Minute)))
	require.Equal(t, []string{"e1", "e2"}, n.listed("old"))
	require.NoError(t, x.sweep(time.Now().Add(61*time.Minute)))
	require.Empty(t, n.listed("old"))
	require.Empty(t, n.chain(s.GetSandbox().GetId()).Receipts)
	require.Equal(t, "3\n", n.exec("old", "e3", "echo 3").GetStdoutText(), "the chain goes on")
	require.Len(t, n.chain(s.GetSandbox().GetId()).Receipts, 1)
}

// The agent's own sweep may come at the same time as another.
func TestSweepsAtTheSameTimeDontGetInEachOthersWay(t *testing.T) {
	n := newNode(t)
	s := n.session("twice")
	for i := 1; i <= 8; i++ {
		n.exec("twice", fmt.Sprintf("e%d", i), "true")
	}
	x := n.agent.sessions["twice"]
	list, err := x.endedExecs()
	require.NoError(t, err)
	for left := 7; left >= 0; left-- {
		require.NoError(t, x.expireRecords(toExpire(list, left, time.Time{})[7-left:], time.Now()))
		errs := make(chan error)
		for range 4 {
			go func() { errs <- x.sweep(time.Now()) }()
		}
		for range 4 {
			require.NoError(t, <-errs)
		}
	}
	require.EqualValues(t, 8, n.chain(s.GetSandbox().GetId()).Removed.Sequence)
}

// A crash after the records were expired and before the files were removed leaves them to the next start.
func TestWhatACrashLeftOfASweepIsCompleted(t *testing.T) {
	n := newNode(t)
	s := n.session("cut")
	n.exec("cut", "e1", "echo 1")
	n.exec("cut", "e2", "echo 2")
	x := n.agent.sessions["cut"]
	list, err := x.endedExecs()
	require.NoError(t, err)
	require.NoError(t, x.expireRecords(toExpire(list, 1, time.Time{}), time.Now()))
	file := filepath.Join(n.agent.receiptsDir(s.GetSandbox().GetId()), receipt.FileName("e1"))
	require.FileExists(t, file)
	n.chain(s.GetSandbox().GetId())
	_, err = n.agent.GetExec(n.ctx(), &sandboxv1.GetExecRequest{SessionId: "cut", ExecId: "e1"})
	require.ErrorIs(t, err, ErrPrecondition, "whole or expired, never in between")
	require.NoError(t, n.agent.Close())
	n.start()
	require.Eventually(t, func() bool { _, err := os.Stat(file); return os.IsNotExist(err) }, bound, pollEvery)
	require.Eventually(t, func() bool {
		_, err := n.agent.journal.Get(sweptKey("cut", "e1"))
		return errors.Is(err, journal.ErrNotFound)
	}, bound, pollEvery)
	require.Len(t, n.chain(s.GetSandbox().GetId()).Receipts, 1)
}

func TestOnlyTheBeginningOfAChainExpiresWhateverTheClockDid(t *testing.T) {
	day := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(h int) time.Time { return day.Add(time.Duration(h) * time.Hour) }
	chained := func(generation, sequence uint64, hour int) endedExec {
		return endedExec{id: fmt.Sprintf("g%d-%d", generation, sequence), generation: generation, sequence: sequence, at: at(hour)}
	}
	loose := func(hour int) endedExec { return endedExec{id: fmt.Sprintf("loose-%d", hour), at: at(hour)} }
	for name, c := range map[string]struct {
		list   []endedExec
		count  int
		before time.Time
		want   []string
	}{
		"nothing":                         {nil, 2, at(9), nil},
		"by count, the oldest first":      {[]endedExec{chained(1, 2, 2), chained(1, 1, 1), loose(0), chained(2, 1, 3)}, 2, day, []string{"loose-0", "g1-1"}},
		"by age":                          {[]endedExec{chained(1, 1, 1), chained(1, 2, 5), loose(2)}, 9, at(3), []string{"g1-1", "loose-2"}},
		"the clock was in the future":     {[]endedExec{chained(1, 1, 90), chained(1, 2, 1), chained(1, 3, 2)}, 9, at(2), []string{"g1-1", "g1-2"}},
		"the clock went back":             {[]endedExec{chained(1, 1, 8), chained(1, 2, 1)}, 1, day, []string{"g1-1"}},
		"and back across two generations": {[]endedExec{chained(1, 1, 8), chained(2, 1, 1), chained(2, 2, 9)}, 2, day, []string{"g1-1"}},
		"all of them":                     {[]endedExec{chained(1, 1, 1), chained(1, 2, 2)}, 9, at(9), []string{"g1-1", "g1-2"}},
	} {
		var got []string
		for _, e := range toExpire(c.list, c.count, c.before) {
			got = append(got, e.id)
		}
		require.Equal(t, c.want, got, name)
	}
}

func TestWhatACrashLeftOfADeletedSessionsRecordsIsCleared(t *testing.T) {
	n := newNode(t)
	n.session("x-1")
	n.exec("x-1", "e1", "true")
	left := []string{execKey("x", "e1"), expiredKey("x", "e2"), sweptKey("x", "e3"), execKey("x.1", "e1")}
	ops := []journal.Op{journal.Set(tombKey("x"), encode(tombRecord{})), journal.Set(tombKey("x.1"), encode(tombRecord{}))}
	for _, key := range left {
		ops = append(ops, journal.Set(key, encode(execRecord{})))
	}
	require.NoError(t, n.agent.journal.Update(t.Context(), true, ops...))
	require.NoError(t, n.agent.clearForgotten())
	for _, key := range left {
		_, err := n.agent.journal.Get(key)
		require.ErrorIs(t, err, journal.ErrNotFound, key)
	}
	require.Equal(t, []string{"e1"}, n.listed("x-1"))
}
