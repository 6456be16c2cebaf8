package mcp

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

// A call outlives the agent's crash: the command goes on, the same exec id is asked again, and the answer is the truth of
// the record.
func TestP7ACallSurvivesAnAgentThatIsKilledMeanwhile(t *testing.T) {
	testkit.Leaks(t)
	a := node.Start(t, node.Options{})
	s := newSession(t, a)
	p := open(t, s)
	p.call("1", "echo ran >> count; touch begun; until [ -e gate ]; do sleep 0.01; done; echo ended; exit 7")
	s.awaitFile(t, "begun")
	a.Kill()
	eventually(t, "the loss is noticed", func() bool { return strings.Contains(p.log.String(), "lost the agent") })
	// Meanwhile another one is told that there is no agent, and runs nothing.
	p.call("2", "touch second")
	require.Equal(t, "NOT_STARTED", p.answer(2.0).Status)
	a.Serve()
	s.touch(t, "gate")
	got := p.answer(1.0)
	require.Equal(t, "EXITED", got.Status)
	require.Equal(t, 7, *got.Code)
	require.Equal(t, "ended\n", got.Stdout)
	require.NotEmpty(t, got.Receipt)
	require.Equal(t, "ran\n", s.read(t, "count"), "it ran once")
	require.NoFileExists(t, s.file("second"))
	p.call("1", "echo ran >> count; touch begun; until [ -e gate ]; do sleep 0.01; done; echo ended; exit 7")
	require.Equal(t, got, p.answer(1.0), "the same answer after the restart")
}

func TestAnAgentThatStaysAwayIsUncertaintyAndNotSilence(t *testing.T) {
	testkit.Leaks(t)
	a := node.Start(t, node.Options{})
	s := newSession(t, a)
	p := open(t, s, "--retry-for", "100ms")
	p.call("1", "touch begun; until [ -e gate ]; do sleep 0.01; done")
	s.awaitFile(t, "begun")
	a.Kill()
	got := p.answer(1.0)
	require.Equal(t, "UNCERTAIN", got.Status)
	require.True(t, got.isError)
	require.True(t, got.May)
	require.Contains(t, got.texts[0], "may have taken effect")
	require.Contains(t, got.Reason, got.ExecID)
	a.Serve()
	s.touch(t, "gate")
	eventually(t, "the record", func() bool {
		r, err := s.Client.Execs.GetExec(t.Context(), &sandboxv1.GetExecRequest{SessionId: s.id, ExecId: got.ExecID})
		return err == nil && r.GetResult().GetStatus() == sandboxv1.ExecResult_EXITED
	})
	// A caller that asks again with the same request gets the truth.
	p.call("1", "touch begun; until [ -e gate ]; do sleep 0.01; done")
	require.Equal(t, "EXITED", p.answer(1.0).Status)
}

// The caller cancels while the agent is away: the command goes on meanwhile, and is ended once the agent is back.
func TestACancelReachesAnAgentThatComesBack(t *testing.T) {
	testkit.Leaks(t)
	a := node.Start(t, node.Options{})
	s := newSession(t, a)
	p := open(t, s)
	p.call("1", "touch begun; until [ -e never ]; do sleep 0.01; done; touch lived")
	s.awaitFile(t, "begun")
	a.Kill()
	p.send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`)
	p.in.Close()
	eventually(t, "the cancel is asked for", func() bool { return len(p.log.logged("cancelling")) == 1 })
	a.Serve()
	require.NoError(t, p.end())
	entry := p.log.logged("cancelled")
	require.Len(t, entry, 1, p.log.String())
	require.Equal(t, "CANCELLED", entry[0]["status"])
	require.Equal(t, true, entry[0]["evidence_complete"])
	require.Equal(t, sandboxv1.ExecResult_CANCELLED, s.result(t, entry[0]["exec"].(string)).GetStatus())
	require.NoFileExists(t, s.file("lived"))
}

// A session's records end with it: that the agent knows no such exec is no proof that the command did not run.
func TestP6AnExecOfASessionThatWasDeletedMeanwhileMayHaveRun(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		t.Run(fmt.Sprintf("cancelled %v", cancelled), func(t *testing.T) {
			testkit.Leaks(t)
			a := node.Start(t, node.Options{})
			s := newSession(t, a)
			// The server's own way to the agent, which can be cut.
			way := filepath.Join(a.Dir, "way.sock")
			require.NoError(t, os.Symlink(a.Socket, way))
			p := open(t, s, "--socket", way)
			p.call("1", "touch begun; until [ -e never ]; do sleep 0.01; done")
			s.awaitFile(t, "begun")
			a.Kill()
			require.NoError(t, os.Remove(way))
			eventually(t, "the loss is noticed", func() bool { return strings.Contains(p.log.String(), "lost the agent") })
			if cancelled {
				p.send(`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`)
				eventually(t, "the cancel is asked for", func() bool { return len(p.log.logged("cancelling")) == 1 })
			}
			a.Serve()
			_, err := a.Client.Sessions.DeleteSession(t.Context(), &sandboxv1.DeleteSessionRequest{SessionId: s.id})
			require.NoError(t, err)
			require.NoError(t, os.Symlink(a.Socket, way))
			if cancelled { // nobody is answered, and the log says it
				eventually(t, "the end", func() bool { return len(p.log.logged("call without a result")) == 1 })
				require.Contains(t, p.log.logged("call without a result")[0]["error"], "can't be known")
			} else {
				got := p.answer(1.0)
				require.Equal(t, "UNCERTAIN", got.Status, got.Reason)
				require.True(t, got.May)
			}
			p.call("2", "true")
			got := p.answer(2.0)
			require.Equal(t, "NOT_STARTED", got.Status, "nothing of it can have run")
		})
	}
}
