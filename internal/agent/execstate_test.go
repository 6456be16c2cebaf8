package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	allPhases     = []ExecPhase{Queued, Intended, Ended}
	allExecEvents = []ExecEvent{ExTurn, ExRefused, ExReceipt, ExNotStarted, ExNeverSeen, ExBad, ExLost, ExShutdown}
)

func TestEveryExecTransitionIsTheExpectedOne(t *testing.T) {
	want := map[ExecPhase]map[ExecEvent]ExecPhase{
		Queued:   {ExTurn: Intended, ExRefused: Ended, ExShutdown: Ended},
		Intended: {ExReceipt: Ended, ExNotStarted: Ended, ExNeverSeen: Ended, ExBad: Ended, ExLost: Ended, ExShutdown: Intended},
	}
	for _, p := range allPhases {
		for _, e := range allExecEvents {
			to, _, err := p.Next(e)
			if expected, ok := want[p][e]; ok {
				require.NoError(t, err, "%s %s", p, e)
				require.Equal(t, expected, to, "%s %s", p, e)
				continue
			}
			require.Error(t, err, "%s %s", p, e)
		}
	}
}

func TestP1NothingStartsWithoutADurableIntent(t *testing.T) {
	for _, p := range allPhases {
		for _, e := range allExecEvents {
			_, effects, err := p.Next(e)
			if err == nil && effects.Start {
				require.True(t, effects.Journal && effects.Durable, "%s %s", p, e)
				require.Equal(t, Queued, p)
			}
		}
	}
}

func TestAnOutcomeWithoutAReceiptIsDurableBeforeTheAnswer(t *testing.T) {
	for _, e := range []ExecEvent{ExNotStarted, ExNeverSeen, ExBad, ExLost} {
		_, effects, err := Intended.Next(e)
		require.NoError(t, err)
		require.True(t, effects.Durable && effects.Answer, string(e))
		require.Equal(t, e != ExNeverSeen, effects.StopSandbox, string(e))
	}
}

func TestP6WhatBecomesOfAnIntentIsDecidedFromTheFolderAndReceiptd(t *testing.T) {
	known := []Knowledge{KnowsNothing, KnowsRunning, KnowsReceipt, KnowsReceiptLost, Unreachable, Gone}
	for _, k := range known {
		e, wait := Decide(ReceiptGood, k)
		require.Equal(t, ExReceipt, e, "a receipt that verifies wins over what receiptd says (%d)", k)
		require.False(t, wait)
		e, wait = Decide(ReceiptBad, k)
		require.Equal(t, ExBad, e)
		require.False(t, wait)
	}
	for k, want := range map[Knowledge]ExecEvent{
		KnowsNothing: ExNeverSeen, KnowsReceipt: ExLost, KnowsReceiptLost: ExLost, Unreachable: ExLost, Gone: ExLost,
	} {
		e, wait := Decide(ReceiptAbsent, k)
		require.Equal(t, want, e, "knowledge %d", k)
		require.False(t, wait)
	}
	_, wait := Decide(ReceiptAbsent, KnowsRunning)
	require.True(t, wait)
}
