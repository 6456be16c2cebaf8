package agent

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// edges are the arrows of a state machine, from and to.
type edges map[[2]string]bool

func (e edges) add(from, to string) { e[[2]string{from, to}] = true }

var (
	section = regexp.MustCompile("(?s)\n## (\\w+)\n.*?```mermaid\nstateDiagram-v2\n(.*?)```")
	arrow   = regexp.MustCompile(`(?m)^ +(\w+) --> (\w+): `)
)

// drawn are the machines of docs/sessions.md, by the heading above them. What leads from and to the dot is left out.
func drawn(t *testing.T) map[string]edges {
	t.Helper()
	b, err := os.ReadFile("../../docs/sessions.md")
	require.NoError(t, err)
	all := map[string]edges{}
	for _, m := range section.FindAllStringSubmatch(string(b), -1) {
		all[m[1]] = edges{}
		for _, a := range arrow.FindAllStringSubmatch(m[2], -1) {
			all[m[1]].add(a[1], a[2])
		}
	}
	return all
}

func TestTheMachinesAreDrawnAsTheyAre(t *testing.T) {
	built := map[string]edges{"Session": {}, "Sandbox": {}, "Command": {}, "Workspace": {}}
	for from, row := range sessionTable {
		for _, to := range row {
			built["Session"].add(string(from), string(to.to))
		}
	}
	for from, row := range sandboxTable {
		for _, to := range row {
			if from != NoSandbox {
				built["Sandbox"].add(string(from), string(to))
			}
		}
	}
	for from, row := range execTable {
		for _, to := range row {
			built["Command"].add(string(from), string(to.to))
		}
	}
	for from, row := range workspaceTable {
		for _, to := range row {
			built["Workspace"].add(string(from), string(to.to))
		}
	}
	drawings := drawn(t)
	require.ElementsMatch(t, slices.Collect(maps.Keys(built)), slices.Collect(maps.Keys(drawings)))
	for name, want := range built {
		for e := range want {
			require.True(t, drawings[name][e], "%s: %s is not drawn", name, strings.Join(e[:], " --> "))
		}
		for e := range drawings[name] {
			require.True(t, want[e], "%s: %s is drawn, and can't happen", name, strings.Join(e[:], " --> "))
		}
	}
}
