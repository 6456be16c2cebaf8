package gitguard

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const page = "../../docs/git-guard.md"

func tableOfRules() string {
	effect := map[bool]string{true: "refused", false: "left out"}
	var b strings.Builder
	b.WriteString("| keys | but not | kind | isolated | shared | why |\n|---|---|---|---|---|---|\n")
	for _, r := range rules {
		var keys []string
		for _, k := range r.keys {
			keys = append(keys, "`"+string(k)+"`")
		}
		f := Finding{Kind: r.kind}
		shared := "refused"
		if !f.Refuses(layoutShared) {
			shared = "stays"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", strings.Join(keys, ", "), r.unlessSays, r.kind, effect[f.Refuses(layoutIsolated)], shared, r.why)
	}
	return b.String()
}

func listOfHarmless() string { return "```\n" + strings.TrimSpace(harmlessText) + "\n```\n" }

func listOfCommands() string {
	var reads, writes []string
	for _, name := range subcommandsInFull() {
		switch c := commands[name]; {
		case c.writes:
			writes = append(writes, "`"+name+"`")
		default:
			reads = append(reads, "`"+name+"`")
		}
	}
	return "Looking: " + strings.Join(reads, ", ") + ".\n\nChanging: " + strings.Join(writes, ", ") + ".\n"
}

func TestTheDocumentationListsWhatTheGuardKnows(t *testing.T) {
	b, err := os.ReadFile(page)
	require.NoError(t, err)
	for what, text := range map[string]string{"rules": tableOfRules(), "harmless": listOfHarmless(), "commands": listOfCommands()} {
		require.True(t, strings.Contains(string(b), text), "%s: the part on %s should be:\n%s", page, what, text)
	}
}

func TestEveryPatternCanMatch(t *testing.T) {
	for _, r := range rules {
		require.NotEmpty(t, r.why)
		require.Equal(t, r.unless != nil, r.unlessSays != "", r.keys)
		for _, k := range r.keys {
			example := strings.NewReplacer(".**", ".x", ".*.", ".sub.").Replace(string(k))
			require.True(t, k.matches(Entry{Key: strings.ToLower(example)}), k)
			require.False(t, k.matches(Entry{Key: strings.ToLower(example) + "y"}) && !strings.HasSuffix(string(k), ".**"), k)
		}
	}
}
