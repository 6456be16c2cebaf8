package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
)

func TestASessionsCreationAndItsCommandsMakeFewJails(t *testing.T) {
	n := newNode(t)
	made := func(f func()) int64 {
		before, _ := gitjail.Made()
		f()
		after, _ := gitjail.Made()
		return after - before
	}
	require.LessOrEqual(t, made(func() { n.session("s") }), int64(2), "of the base clone, and of it with the worktree")
	require.LessOrEqual(t, made(func() { n.ok("s", "first", "true") }), int64(1), "the worktree may have been made just before")
	require.Zero(t, made(func() { n.ok("s", "second", "true") }))
	require.LessOrEqual(t, made(func() { n.ok("s", "commit", commitNew) }), int64(2), "the harvest's")
	require.Zero(t, made(func() { n.ok("s", "after", "true") }), "nobody else wrote in the base clone")
}
