package gitview

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUnsavedNamesATagThatOnlyTheSessionHasAlthoughItsCommitIsInTheBaseClone(t *testing.T) {
	w := newWorld(t)
	unsaved := func() string {
		t.Helper()
		out, err := w.v.Unsaved(t.Context())
		require.NoError(t, err)
		return strings.Join(out, "\n")
	}
	id, _ := w.command("git commit -q --allow-empty -m Saved && git tag -a -m 'What was done' v1 && git -c advice.nestedTag=false tag -a -m Nested v2 v1 && git tag plain && git rev-parse v1")
	require.Contains(t, unsaved(), "the session's refs/tags/v1, a tag ("+id+")")
	require.Contains(t, unsaved(), "the session's refs/tags/v2, a tag")
	require.Contains(t, unsaved(), "git tag NAME "+id)
	require.NotContains(t, unsaved(), "plain", "it has nothing but the commit's id")
	require.NotContains(t, unsaved(), "commits of")
	w.host("update-ref", "refs/tags/v1", id)
	require.NotContains(t, unsaved(), "refs/tags/v1,")
	w.command("git tag -d v2")
	require.Empty(t, unsaved())
	w.command("git update-ref refs/tags/data $(echo only here | git hash-object -w --stdin)")
	require.Contains(t, unsaved(), "the session's refs/tags/data, a blob")
}
