package kata

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func thePage(t *testing.T) string {
	t.Helper()
	const path = "../../docs/kata.md"
	if _, err := os.Stat(path); err != nil {
		t.Skip("the documentation is not beside the package (an emulated guest)")
	}
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(page)
}

// The page and the code let the same parameters and arguments.
func TestThePageHasWhatIsLet(t *testing.T) {
	_, let, found := strings.Cut(thePage(t), "**Let in `kernel_params`**")
	require.True(t, found)
	params, args, found := strings.Cut(let, "**Let in `virtio_fs_extra_args`**")
	require.True(t, found)
	_, params, _ = strings.Cut(params, ":")
	words := regexp.MustCompile("`[a-z0-9_.]+`").FindAllString(params, -1)
	require.Len(t, words, len(harmlessParams))
	for _, name := range harmlessParams {
		require.Contains(t, words, "`"+name+"`")
	}
	for name := range harmlessArgs {
		require.Regexp(t, "`"+name+"(`|=)", args)
	}
}

// The page and the code have the same advisories, with the same releases.
func TestThePageHasEachAdvisory(t *testing.T) {
	page := thePage(t)
	rows := map[string]string{}
	for line := range strings.Lines(page) {
		if cells := strings.Split(line, "|"); strings.HasPrefix(line, "| GHSA-") {
			rows[strings.TrimSpace(cells[1])] = line
		}
	}
	require.Len(t, rows, len(Advisories))
	for _, a := range Advisories {
		require.Contains(t, rows[a.ID], a.Fixed.String(), a.ID)
		require.Contains(t, rows[a.ID], a.CVE, a.ID)
	}
	require.Contains(t, page, "The oldest release is **"+oldest.String()+"**")
}
