package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	calledFinding   = `{"finding":{"osv":"GO-1","fixed_version":"v1.26.9","trace":[{"module":"stdlib","version":"v1.26.8","package":"net","function":"Dial"}]}}`
	importedFinding = `{"finding":{"osv":"GO-2","trace":[{"module":"stdlib","package":"net"}]}}`
	config          = `{"config":{"protocol_version":"v1.0.0"}}`
)

func gate(t *testing.T, exceptions, stream string) (string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "exceptions.json")
	require.NoError(t, os.WriteFile(file, []byte(exceptions), 0o600))
	var out strings.Builder
	day := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	err := run([]string{file}, strings.NewReader(stream), &out, day)
	return out.String(), err
}

func TestAVulnerabilityThatIsCalledFails(t *testing.T) {
	_, err := gate(t, `[]`, config+calledFinding)
	require.ErrorContains(t, err, "GO-1 in stdlib@v1.26.8 (net.Dial), fixed in v1.26.9")
}

func TestOneThatIsOnlyImportedDoesNot(t *testing.T) {
	_, err := gate(t, `[]`, config+importedFinding)
	require.NoError(t, err)
}

func TestAnExceptionHoldsUntilItsDayIsOver(t *testing.T) {
	out, err := gate(t, `[{"id":"GO-1","reason":"no newer Go","until":"2026-11-29"}]`, config+calledFinding)
	require.NoError(t, err)
	require.Contains(t, out, "stands until 2026-11-29: GO-1")

	_, err = gate(t, `[{"id":"GO-1","reason":"no newer Go","until":"2026-11-28"}]`, config+calledFinding)
	require.ErrorContains(t, err, "GO-1")
}

func TestAnExceptionNeedsAReasonAndADay(t *testing.T) {
	for _, e := range []string{
		`[{"id":"GO-1","until":"2026-11-29"}]`, `[{"id":"GO-1","reason":"x"}]`, `[{"reason":"x","until":"2026-11-29"}]`,
	} {
		_, err := gate(t, e, config)
		require.ErrorContains(t, err, "needs an id, a reason and a day")
	}
}

func TestSilenceIsNoPass(t *testing.T) {
	_, err := gate(t, `[]`, "")
	require.ErrorContains(t, err, "it did not run")
	_, err = gate(t, `[]`, config+"{cut")
	require.ErrorContains(t, err, "reading govulncheck's output")
}

func TestAnUnneededExceptionIsNamed(t *testing.T) {
	out, err := gate(t, `[{"id":"GO-9","reason":"x","until":"2027-01-01"}]`, config)
	require.NoError(t, err)
	require.Contains(t, out, "no longer needed: the exception for GO-9")
}
