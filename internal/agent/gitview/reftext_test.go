package gitview

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
)

const someID = "0123456789abcdef0123456789abcdef01234567"

// taken gives the printed text to refLines in pieces of a length.
func taken(t *testing.T, printed string, piece int) (*refLines, refText, error) {
	t.Helper()
	l := &refLines{left: notShared, most: 1 << 20}
	for rest := printed; rest != ""; {
		n := min(piece, len(rest))
		took, err := l.Write([]byte(rest[:n]))
		require.NoError(t, err)
		require.Equal(t, n, took)
		rest = rest[n:]
	}
	text, err := l.text()
	return l, text, err
}

func TestWhatGitListsIsTakenInAnyPieces(t *testing.T) {
	printed := someID + " refs/heads/a \n" + someID + " refs/heads/b refs/heads/a\n" + someID + " refs/heads/c \n" +
		someID + " refs/sandboxes/s/refs/heads/x \n" + someID + " refs/stash \n" + someID + " refs/worktree/y \n"
	for piece := 1; piece <= len(printed); piece++ {
		l, text, err := taken(t, printed, piece)
		require.NoError(t, err)
		require.Equal(t, someID+" refs/heads/a\n"+someID+" refs/heads/c\n", string(text.packed()))
		require.Equal(t, string(text.packed())+"@refs/heads/a refs/heads/b\n", string(text.lines))
		require.Equal(t, 3, l.counted)
	}
}

func TestRefsAsTextAndAsMapsAreTheSame(t *testing.T) {
	s := snapshot{ids: refs{"refs/heads/b": someID, "refs/heads/a": someID, "refs/tags/\xff": someID}, symbolic: refs{"refs/remotes/o/HEAD": "refs/heads/b"}}
	text := s.encode()
	require.Equal(t, s, text.decode())
	parsed, err := parseRefText(text.lines)
	require.NoError(t, err)
	require.Equal(t, text, parsed)
	for _, broken := range []string{"x", "x\n", someID + " refs/heads/a\n" + someID + "\n", someID + " refs/heads/a"} {
		_, err := parseRefText([]byte(broken))
		require.Error(t, err, broken)
	}
}

func TestRefsThatGitListsInAnotherOrderAreSorted(t *testing.T) {
	_, text, err := taken(t, someID+" refs/heads/b \n"+someID+" refs/heads/a \n", 7)
	require.NoError(t, err)
	require.Equal(t, someID+" refs/heads/a\n"+someID+" refs/heads/b\n", string(text.packed()))
}

func TestAListOfRefsThatIsNoneOrTooLongIsRefused(t *testing.T) {
	for _, printed := range []string{"x\n", someID + " refs/heads/a\n", someID + " refs/heads/a ", strings.Repeat("x", 2<<20), strings.Repeat(someID+" refs/heads/a \n", 1<<16)} {
		_, _, err := taken(t, printed, 4096)
		require.ErrorIs(t, err, gitjail.ErrGit)
	}
}

// A hundred thousand refs are common enough: a session's creation must not make several of each.
func TestTakingALongListAllocatesNothingForEachRef(t *testing.T) {
	var b strings.Builder
	const n = 100_000
	for i := range n {
		fmt.Fprintf(&b, "%s refs/heads/many/%06d \n", someID, i)
	}
	printed := []byte(b.String())
	allocs := testing.AllocsPerRun(1, func() {
		l := &refLines{left: notShared, most: keptOutput}
		l.plain.Grow(len(printed))
		for rest := printed; len(rest) > 0; {
			piece := min(len(rest), 32<<10)
			_, _ = l.Write(rest[:piece])
			rest = rest[piece:]
		}
		text, err := l.text()
		if err != nil || len(text.packed()) != len(printed)-n {
			panic(fmt.Sprint(err, len(text.packed())))
		}
	})
	require.Less(t, allocs, 50.0)
}

func TestNobodyLooksIntoTheRefsOfANewSession(t *testing.T) {
	w := newWorld(t)
	v := w.create(w.repo+"/wt-created", "created")
	require.NoError(t, v.Refresh(t.Context()))
	require.Nil(t, v.known, "they are text")
	kept, err := os.ReadFile(v.path(snapshotName))
	require.NoError(t, err)
	require.Equal(t, string(kept), string(v.text.lines))
	again := &View{o: v.o}
	require.NoError(t, again.loadState())
	require.Equal(t, v.text, again.text)
	w.host("pack-refs", "--all")
	require.NoError(t, v.Refresh(t.Context()))
	require.Nil(t, v.known, "they are where they were")
	w.host("branch", "fresh")
	require.NoError(t, v.Refresh(t.Context()))
	require.NotNil(t, v.known, "the control case: one came")
	require.Contains(t, v.snapshot().ids, "refs/heads/fresh")
}
