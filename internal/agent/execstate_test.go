package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

var (
	allPhases     = []ExecPhase{Queued, Intended, Cancelling, Ended}
	allExecEvents = []ExecEvent{ExTurn, ExRefused, ExCancel, ExUnrecorded, ExReceipt, ExCancelled, ExNotStarted, ExNeverSeen, ExBad, ExLost, ExShutdown}
)

func TestEveryExecTransitionIsTheExpectedOne(t *testing.T) {
	want := map[ExecPhase]map[ExecEvent]ExecPhase{
		Queued:     {ExTurn: Intended, ExRefused: Ended, ExCancel: Ended, ExShutdown: Ended},
		Intended:   {ExCancel: Cancelling, ExUnrecorded: Ended, ExReceipt: Ended, ExCancelled: Ended, ExNotStarted: Ended, ExNeverSeen: Ended, ExBad: Ended, ExLost: Ended, ExShutdown: Intended},
		Cancelling: {ExCancel: Cancelling, ExUnrecorded: Ended, ExReceipt: Ended, ExCancelled: Ended, ExNotStarted: Ended, ExNeverSeen: Ended, ExBad: Ended, ExLost: Ended, ExShutdown: Cancelling},
		Ended:      {ExCancel: Ended},
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

func TestAnOutcomeThatTheReceiptAloneDoesNotGiveIsDurableBeforeTheAnswer(t *testing.T) {
	for _, p := range []ExecPhase{Intended, Cancelling} {
		for _, e := range []ExecEvent{ExCancelled, ExNotStarted, ExNeverSeen, ExBad, ExLost} {
			_, effects, err := p.Next(e)
			require.NoError(t, err)
			require.True(t, effects.Durable && effects.Answer, "%s %s", p, e)
			require.Equal(t, e != ExNeverSeen, effects.StopSandbox, "%s %s", p, e)
		}
		_, effects, err := p.Next(ExReceipt)
		require.NoError(t, err)
		require.False(t, effects.StopSandbox, "a command that ended by itself leaves its sandbox alone, cancelled or not")
	}
}

func TestAQueuedExecIsWithdrawnForGoodAndARunningOneIsEndedOnce(t *testing.T) {
	to, effects, err := Queued.Next(ExCancel)
	require.NoError(t, err)
	require.Equal(t, Ended, to)
	require.Equal(t, ExecEffects{Journal: true, Durable: true, Answer: true}, effects)
	_, _, err = to.Next(ExTurn)
	require.Error(t, err, "it has no turn any more")
	asked := 0
	for p, i := Intended, 0; i < 3; i++ {
		p, effects, err = p.Next(ExCancel)
		require.NoError(t, err)
		if effects.Cancel {
			asked++
		}
	}
	require.Equal(t, 1, asked, "each cancel sets pid1's clock anew")
	_, effects, err = Ended.Next(ExCancel)
	require.NoError(t, err)
	require.Zero(t, effects, "what is known already is the answer")
}

func TestEveryAnswerIsTheExpectedOne(t *testing.T) {
	type cases struct{ quiet, evident, cancelled, both sandboxv1.ExecResult_Status }
	const ns, un, ca = sandboxv1.ExecResult_NOT_STARTED, sandboxv1.ExecResult_UNCERTAIN, sandboxv1.ExecResult_CANCELLED
	for e, want := range map[ExecEvent]cases{
		ExReceipt:    {0, 0, 0, 0},
		ExCancelled:  {un, ca, un, ca},
		ExNotStarted: {ns, ns, ns, ns},
		ExNeverSeen:  {ns, ns, ns, ns},
		ExBad:        {un, un, un, un},
		ExLost:       {un, un, un, ca},
	} {
		for _, x := range []struct {
			cancelling, evidence bool
			want                 sandboxv1.ExecResult_Status
		}{{false, false, want.quiet}, {false, true, want.evident}, {true, false, want.cancelled}, {true, true, want.both}} {
			got, plain := Answer(e, x.cancelling, x.evidence)
			require.Equal(t, x.want, got, "%s %v %v", e, x.cancelling, x.evidence)
			require.Equal(t, e == ExReceipt, plain, string(e))
		}
	}
}

func TestP6WhatBecomesOfAnIntentIsDecidedFromTheFolderAndReceiptd(t *testing.T) {
	known := []Knowledge{KnowsNothing, KnowsRunning, KnowsReceipt, KnowsReceiptLost, Unreachable, Gone, NotNow}
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
	for _, k := range []Knowledge{KnowsRunning, NotNow} {
		_, wait := Decide(ReceiptAbsent, k)
		require.True(t, wait, "knowledge %d", k)
	}
}
