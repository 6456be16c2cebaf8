package agent

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/config"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

func TestP6IntentsOfASessionThatIsAwayAreKeptAlsoWhenItsStateIsNot(t *testing.T) {
	for state, refused := range map[SandboxState]bool{SandboxReady: false, SandboxStopping: true} {
		a := &Agent{cfg: &config.Config{}, log: slog.New(slog.DiscardHandler), clock: nodeClock(), closing: make(chan struct{})}
		close(a.closing) // nobody looks again
		s := newSession(a, sessionRecord{ID: "s", State: Ready, Sandbox: &sandboxRecord{ID: "sb-1", State: state}})
		e := s.recovered(intentRecord{ExecID: "e1"})
		err := s.stayAway([]*execution{e}, runtime.ErrUnreachable)
		require.Equal(t, refused, err != nil, "%v", err)
		require.True(t, s.isStillAway(), "the runtime is asked again")
		require.Equal(t, []*execution{e}, s.endAway(), "nobody else has them")
		a.watchers.Wait()
	}
}
