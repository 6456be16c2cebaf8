package interrupt

import (
	"bytes"
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// heard is a catcher with a clock and an exit of the test's.
type heard struct {
	*catcher
	ctx   context.Context
	at    time.Time
	out   bytes.Buffer
	codes []int
}

func newHeard(t *testing.T) *heard {
	t.Helper()
	h := &heard{at: time.Unix(1, 0)}
	ctx, cancel := context.WithCancelCause(t.Context())
	h.catcher = &catcher{cancel: cancel, stderr: &h.out, now: func() time.Time { return h.at }, exit: func(code int) { h.codes = append(h.codes, code) }}
	h.ctx = context.WithValue(ctx, key{}, h.catcher)
	return h
}

func TestTheFirstSignalEndsTheContextAndSaysWhichItWas(t *testing.T) {
	h := newHeard(t)
	_, ended := By(h.ctx)
	require.False(t, ended)
	h.hear(syscall.SIGTERM)
	sig, ended := By(h.ctx)
	require.True(t, ended)
	require.Equal(t, syscall.SIGTERM, sig)
	require.Empty(t, h.out.String())
}

func TestAProgramThatCleansUpIsNotCutShortWithinItsPatience(t *testing.T) {
	h := newHeard(t)
	Describe(h.ctx, CleanUp{Left: func() []string { return []string{"left: a worktree", "left: a branch"} }})
	h.hear(os.Interrupt)
	h.hear(syscall.SIGTERM)
	h.at = h.at.Add(Patience - 1)
	h.hear(os.Interrupt)
	require.Empty(t, h.codes)
	line := "cleaning up; again after 5 seconds to leave it all behind\n"
	require.Equal(t, line+line, h.out.String())

	h.out.Reset()
	h.at = h.at.Add(1)
	h.hear(os.Interrupt)
	require.Equal(t, []int{130}, h.codes)
	require.Equal(t, "left: a worktree\nleft: a branch\n", h.out.String())
}

func TestAProgramWithoutACleanUpIsQuietAboutASecondSignal(t *testing.T) {
	h := newHeard(t)
	h.hear(syscall.SIGTERM)
	h.hear(syscall.SIGTERM)
	require.Empty(t, h.codes)
	h.at = h.at.Add(Patience)
	h.hear(syscall.SIGTERM)
	require.Equal(t, []int{143}, h.codes)
	require.Empty(t, h.out.String())
}

func TestWhatIsSaidCanGoElsewhere(t *testing.T) {
	h := newHeard(t)
	var said []string
	Describe(h.ctx, CleanUp{Say: func(line string) { said = append(said, line) }})
	h.hear(syscall.SIGTERM)
	h.hear(syscall.SIGTERM)
	require.Len(t, said, 1)
	require.Empty(t, h.out.String())
}

func TestTheNewestCatcherIsInCharge(t *testing.T) {
	outer, stopOuter := Catch(t.Context(), os.Stderr)
	defer stopOuter()
	inner, stopInner := Catch(context.WithoutCancel(outer), os.Stderr)
	defer stopInner()
	self, err := os.FindProcess(os.Getpid())
	require.NoError(t, err)
	require.NoError(t, self.Signal(syscall.SIGHUP))
	<-inner.Done()
	sig, _ := By(inner)
	require.Equal(t, syscall.SIGHUP, sig)
	require.NoError(t, outer.Err())
	Describe(context.Background(), CleanUp{}) // no catcher, no matter
}
