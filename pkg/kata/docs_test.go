package kata

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The page and the code have the same advisories, with the same releases.
func TestThePageHasEachAdvisory(t *testing.T) {
	const path = "../../docs/kata.md"
	if _, err := os.Stat(path); err != nil {
		t.Skip("the documentation is not beside the package (an emulated guest)")
	}
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	rows := map[string]string{}
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, "|"); strings.HasPrefix(line, "| GHSA-") {
			rows[strings.TrimSpace(cells[1])] = line
		}
	}
	require.Len(t, rows, len(Advisories))
	for _, a := range Advisories {
		require.Contains(t, rows[a.ID], a.Fixed.String(), a.ID)
		require.Contains(t, rows[a.ID], a.CVE, a.ID)
	}
	require.Contains(t, string(page), "The oldest release is **"+oldest.String()+"**")
}
