package nodecheck

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/nodecheck/feature"
)

const requirements = "../../docs/host-requirements.md"

func TestTheDocumentHasThisTable(t *testing.T) {
	if _, err := os.Stat(filepath.Dir(requirements)); err != nil {
		t.Skip("the documentation is not beside the package (an emulated guest)")
	}
	b, err := os.ReadFile(requirements)
	require.NoError(t, err)
	require.Contains(t, string(b), feature.Markdown(), "put this into %s:\n%s", requirements, feature.Markdown())
}

func TestEachRowSaysEverything(t *testing.T) {
	seen := map[ID]bool{}
	for _, f := range Table {
		require.False(t, seen[f.ID], "%s is there twice", f.ID)
		seen[f.ID] = true
		for what, text := range map[string]string{"For": f.For, "By": string(f.By), "Instead": f.Instead, "Remedy": f.Remedy} {
			require.NotEmpty(t, text, "%s of %s", what, f.ID)
			require.NotContains(t, text, "|", "%s of %s breaks the document's table", what, f.ID)
		}
		if f.Stops {
			require.Equal(t, Refused, f.Kept, "%s: what stops the agent has nothing in its place", f.ID)
		}
		if strings.HasPrefix(f.Since, "Linux") {
			require.True(t, f.OlderThan("2.0.0"), "%s: %q can't be compared", f.ID, f.Since)
			require.False(t, f.OlderThan("99.0"), f.ID)
		}
	}
}

// TestEachFeatureIsLookedAt: nothing is promised in the table that no probe and no reading decides.
func TestEachFeatureIsLookedAt(t *testing.T) {
	looked := map[ID]int{}
	for id := range derive(Facts{}, Needs{}) {
		looked[id]++
	}
	for _, p := range probes(Node{}, Needs{StateDir: "/", WorkspaceRoots: nil}) {
		for _, id := range p.ids {
			looked[id]++
		}
	}
	for _, f := range Table {
		require.Equal(t, 1, looked[f.ID], f.ID)
		delete(looked, f.ID)
	}
	require.Empty(t, looked, "these have no row")
}

func TestAVersionIsComparedWithARelease(t *testing.T) {
	row, ok := Find(Landlock)
	require.True(t, ok)
	for release, older := range map[string]bool{
		"5.10.0-46-cloud-amd64": true, "4.18.0-553.el8.x86_64": true, "5.13.0": false, "5.13": false, "6.1.0": false, "7.3.4+deb14-amd64": false, "what": false,
	} {
		require.Equal(t, older, row.OlderThan(release), release)
	}
	git, _ := Find(Git)
	require.False(t, git.OlderThan("2.0.0"), "it has no version of Linux")
}
