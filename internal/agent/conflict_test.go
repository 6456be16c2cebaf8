package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitview"
)

func TestAConflictsSentenceSaysWhoDidWhat(t *testing.T) {
	for want, c := range map[string]gitview.Conflict{
		"x was at 1, the base clone moved it to 2 and the session moved it to 3: R":    {BeforeID: "1", BaseID: "2", SessionID: "3"},
		"x was at 1, the base clone deleted it and the session moved it to 3: R":       {BeforeID: "1", SessionID: "3"},
		"x was at 1, the base clone moved it to 2 and the session deleted it: R":       {BeforeID: "1", BaseID: "2"},
		"x was at 1, the base clone left it there and the session moved it to 3: R":    {BeforeID: "1", BaseID: "1", SessionID: "3"},
		"x was not there, the base clone made it at 2 and the session made it at 3: R": {BaseID: "2", SessionID: "3"},
		"x was not there, the base clone has none and the session made it at 3: R":     {SessionID: "3"},
		"x: R": {},
	} {
		c.Ref, c.Remedy = "x", "R"
		require.Equal(t, want, conflictSentence(c))
	}
}
