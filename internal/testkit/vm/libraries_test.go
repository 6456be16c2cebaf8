package vm

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestTheLibrariesOfProgramsAreThoseThatTheLinkerLoads(t *testing.T) {
	testkit.Need(t, testkit.Program("ldd"), testkit.Git)
	git, err := exec.LookPath("git")
	require.NoError(t, err)
	out, err := exec.Command("ldd", "/bin/bash", git).Output()
	require.NoError(t, err)
	var want []string
	for _, m := range regexp.MustCompile(`(?m)^\t(?:.* => )?(/\S+) \(`).FindAllStringSubmatch(string(out), -1) {
		want = append(want, m[1])
	}
	require.NotEmpty(t, want)
	got := libraries([]string{"/bin/bash", git})
	require.Subset(t, got, want)
	for _, lib := range got {
		require.True(t, slices.Contains(want, lib) || strings.HasPrefix(filepath.Base(lib), "ld-linux"), "%s: nothing loads it", lib) // the linker has two names
	}
	require.Empty(t, libraries([]string{"/usr/bin/ldd", "/nothing"}), "a script, and nothing at all")
}
