package receipt

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestTheRequestDigestIsFixedForEver(t *testing.T) {
	r := Request{SessionID: "s1", Command: "make test", TimeoutMS: 60000, Labels: map[string]string{"turn": "7", "agent": "a"}}
	require.Equal(t, "cd913133a1d876ded3dbadf87e845621c323b84391b56208da193cace0f627d9", r.Digest())
}

func TestP7RequestsThatDifferInAnythingHaveDifferentDigests(t *testing.T) {
	seen := map[string]Request{}
	for _, r := range []Request{
		{},
		{SessionID: "a"},
		{Command: "a"},
		{SessionID: "ab", Command: "c"},
		{SessionID: "a", Command: "bc"},
		{Command: "a", TimeoutMS: 1},
		{Command: "a", Labels: map[string]string{"": ""}},
		{Command: "a", Labels: map[string]string{"k": ""}},
		{Command: "a", Labels: map[string]string{"": "k"}},
		{Command: "a", Labels: map[string]string{"k": "v"}},
		{Command: "a", Labels: map[string]string{"k": "v", "k2": ""}},
		{Command: "a", Labels: map[string]string{"kv": "", "k2": ""}},
		{Command: "a\x00"},
	} {
		d := r.Digest()
		require.NotContains(t, seen, d, "%+v", r)
		seen[d] = r
	}
}

func TestTheRequestDigestDoesNotDependOnTheOrderOfLabels(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		labels := rapid.MapOf(rapid.String(), rapid.String()).Draw(r, "labels")
		a := Request{SessionID: "s", Command: "c", Labels: labels}.Digest()
		again := map[string]string{}
		for k, v := range labels {
			again[k] = v
		}
		require.Equal(r, a, Request{SessionID: "s", Command: "c", Labels: again}.Digest())
		if len(labels) == 0 {
			require.Equal(r, a, Request{SessionID: "s", Command: "c"}.Digest(), "no labels and an empty map are one request")
		}
	})
}

func TestExecIDsThatCannotBeFileNamesAreRefused(t *testing.T) {
	for _, good := range []string{"a", "A-Z_0.9", "-rf", "...", ".hidden", "a.json", strings.Repeat("x", MaxExecID)} {
		require.NoError(t, CheckExecID(good), good)
	}
	for _, bad := range []string{"", ".", "..", "a/b", "a~", "a b", "a\x00", "é", "a\n", strings.Repeat("x", MaxExecID+1)} {
		require.ErrorIs(t, CheckExecID(bad), ErrExecID, bad)
	}
}

func TestNoTwoExecsShareAFile(t *testing.T) {
	ids := []string{"a", "a.json", "a.stdout", "a.stderr", "a.json.stdout", "json", ".json", ".stdout"}
	owner := map[string]string{}
	for _, id := range ids {
		for _, name := range []string{FileName(id), StdoutName(id), StderrName(id)} {
			require.NotContains(t, owner, name)
			owner[name] = id
		}
	}
	for _, name := range []string{"~.json", "a~.json", ".json", "a", "..json/x.json"} {
		_, ok := ExecIDOf(name)
		require.False(t, ok, name)
	}
}
