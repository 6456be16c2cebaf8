package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func count(t *testing.T, lines ...string) (*counter, string, bool) {
	t.Helper()
	var out strings.Builder
	c := newCounter(&out)
	require.NoError(t, c.read(strings.NewReader(strings.Join(lines, "\n")+"\n")))
	good := c.close()
	return c, out.String(), good
}

func TestEachEndedTestIsCountedOnce(t *testing.T) {
	_, out, good := count(t,
		`{"Action":"run","Package":"p","Test":"TestA"}`,
		`{"Action":"run","Package":"p","Test":"TestA/sub"}`,
		`{"Action":"pass","Package":"p","Test":"TestA/sub"}`,
		`{"Action":"pass","Package":"p","Test":"TestA"}`,
		`{"Action":"run","Package":"p","Test":"TestB"}`,
		`{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:1: needs root\n"}`,
		`{"Action":"skip","Package":"p","Test":"TestB"}`,
		`{"Action":"pass","Package":"p"}`)
	require.True(t, good)
	require.Contains(t, out, "needs root", "a skipped test says why")
	require.True(t, strings.HasSuffix(out, "2 passed, 0 failed, 1 skipped\n"), out)
}

func TestAFailedTestShowsItsOutputAndFailsTheRun(t *testing.T) {
	_, out, good := count(t,
		`{"Action":"run","Package":"p","Test":"TestA"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: the command was alive\n"}`,
		`{"Action":"fail","Package":"p","Test":"TestA"}`,
		`{"Action":"fail","Package":"p"}`)
	require.False(t, good)
	require.Contains(t, out, "the command was alive")
	require.NotContains(t, out, "=== RUN")
	require.True(t, strings.HasSuffix(out, "0 passed, 1 failed, 0 skipped\n"), out)
}

func TestAPackageThatDidNotBuildIsAFailure(t *testing.T) {
	_, out, good := count(t,
		`{"ImportPath":"p [p.test]","Action":"build-output","Output":"p/a.go:1: undefined: x\n"}`,
		`{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}`)
	require.False(t, good)
	require.Contains(t, out, "undefined: x")
	require.True(t, strings.HasSuffix(out, "0 passed, 1 failed, 0 skipped\n"), out)
}

func TestATestThatNeverEndedIsAFailure(t *testing.T) {
	_, out, good := count(t,
		`{"Action":"run","Package":"p","Test":"TestA"}`,
		`{"Action":"pass","Package":"p","Test":"TestA"}`,
		`{"Action":"run","Package":"p","Test":"TestB"}`)
	require.False(t, good)
	require.Contains(t, out, "TestB began and never ended")
	require.True(t, strings.HasSuffix(out, "1 passed, 1 failed, 0 skipped\n"), out)
}

func TestAPanicBlamesTheTestThatWasRunning(t *testing.T) {
	_, out, good := count(t,
		`{"Action":"run","Package":"p","Test":"TestB"}`,
		`{"Action":"output","Package":"p","Test":"TestB","Output":"panic: boom\n"}`,
		`{"Action":"fail","Package":"p"}`)
	require.False(t, good)
	require.Contains(t, out, "boom")
	require.True(t, strings.HasSuffix(out, "0 passed, 1 failed, 0 skipped\n"), out)
}

func TestARunWithoutTestsIsNotGood(t *testing.T) {
	_, out, good := count(t, `not json`, `{"Action":"pass","Package":"p"}`)
	require.False(t, good)
	require.Contains(t, out, "no test ran")
	require.Contains(t, out, "not json")
}

func TestTheEndSaysWhatTookLongestAndOnceMoreWhatFailed(t *testing.T) {
	_, out, _ := count(t,
		`{"Action":"run","Package":"p","Test":"TestA"}`,
		`{"Action":"pass","Package":"p","Test":"TestA"}`,
		`{"Action":"pass","Package":"p","Elapsed":2}`,
		`{"Action":"run","Package":"q","Test":"TestB"}`,
		`{"Action":"fail","Package":"q","Test":"TestB"}`,
		`{"Action":"fail","Package":"q","Elapsed":30}`,
		`{"Action":"fail","Package":"r","Elapsed":1}`)
	require.True(t, strings.HasSuffix(out,
		"took  q 30s\ntook  p 2s\ntook  r 1s\ntook  3 packages 33s\nfailed: q TestB\nfailed: r, the package itself\n1 passed, 2 failed, 0 skipped\n"), out)
}
