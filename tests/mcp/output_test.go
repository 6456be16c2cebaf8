package mcp

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/node"
)

func TestOutputThatIsNotShownIsInAFile(t *testing.T) {
	testkit.Leaks(t)
	a := node.Start(t, node.Options{Config: "limits: {output_bytes: 65536, spill_bytes: 1048576}\n"})
	s := newSession(t, a)
	c := connect(t, s, nil, "--text-bytes", "1000")
	for name, command := range map[string]string{
		"more than is shown":            "seq 1 2000",
		"more than the agent keeps":     "seq 1 100000",
		"more than the file may hold":   "seq 1 200000",
		"on the other stream":           "seq 1 100000 >&2; seq 1 1000",
		"cut, and then a timeout of it": "seq 1 100000; exit 3",
	} {
		got := c.bash(command)
		require.Equal(t, "EXITED", got.Status, name)
		require.True(t, got.Info.Truncated, name)
		require.Less(t, len(got.Stdout), 1200, name)
		require.True(t, strings.HasPrefix(got.Stdout, "1\n2\n3\n"), name)
		require.Contains(t, got.Stdout, "bytes are left out here]", name)
		require.Equal(t, s.file(".sandbox-tmp/output/"+got.ExecID+".stdout"), got.Info.File, name)
		b, err := os.ReadFile(got.Info.File)
		require.NoError(t, err)
		require.EqualValues(t, len(b), got.Info.FileBytes, name)
		require.Contains(t, got.texts[0], got.Info.File)
		if got.Info.Bytes > 1<<20 {
			require.Len(t, b, 1<<20, "up to the bound")
			require.Contains(t, got.texts[0], "Its first 1048576 bytes are in")
		} else {
			sum := sha256.Sum256(b)
			require.Equal(t, got.Info.SHA256, hex.EncodeToString(sum[:]), "the digest that is signed is this file's")
		}
		// As a command sees it, and its answer is short again.
		last := fmt.Sprintf("tail -c 7 %s", got.Info.File)
		require.Equal(t, string(b[len(b)-7:]), c.must(last))
		require.Equal(t, got.Info, answerInfo(s, t, got), "the record says the same")
	}
	require.Empty(t, c.must("git status --porcelain"))
	spills, err := filepath.Glob(filepath.Join(s.State, "receipts", "*", "~*.spill"))
	require.NoError(t, err)
	require.Empty(t, spills, "nothing of it stays among the receipts")
}

// answerInfo is what the agent's record says of an answer's standard output, in the shape of the answer.
func answerInfo(s *session, t *testing.T, a *answer) any {
	r, info := s.result(t, a.ExecID), a.Info
	info.Bytes, info.SHA256 = r.GetStdoutInfo().GetBytes(), r.GetStdoutInfo().GetSha256()
	info.File, info.FileBytes = r.GetStdoutInfo().GetFile(), r.GetStdoutInfo().GetFileBytes()
	return info
}

func neverThroughALink(t *testing.T, s *session) {
	c := connect(t, s, nil, "--text-bytes", "1000")
	first := c.bash("seq 1 2000")
	victim := filepath.Join(t.TempDir(), "victim")
	require.NoError(t, os.WriteFile(victim, []byte("keep"), 0o666))
	require.NoError(t, os.Chmod(victim, 0o666))
	// A command sees the names of earlier files, and so the next ones.
	at := strings.LastIndex(first.ExecID, "n") + 1
	var number int
	_, err := fmt.Sscan(first.ExecID[at:], &number)
	require.NoError(t, err)
	next := fmt.Sprintf("%s%d", first.ExecID[:at], number+2)
	c.must(fmt.Sprintf(`ln -s %s "$TMPDIR/output/%s.stdout"`, victim, next))
	link, err := os.Readlink(s.file(".sandbox-tmp/output/" + next + ".stdout"))
	require.NoError(t, err)
	require.Equal(t, victim, link)
	got := c.bash("seq 1 2000")
	require.Equal(t, next, got.ExecID, "the name was guessed: the attack was made")
	st, err := os.Lstat(got.Info.File)
	require.NoError(t, err)
	require.True(t, st.Mode().IsRegular())
	b, err := os.ReadFile(victim)
	require.NoError(t, err)
	require.Equal(t, "keep", string(b))
}

func TestAnOperatorCanHaveNoFiles(t *testing.T) {
	testkit.Leaks(t)
	a := node.Start(t, node.Options{Config: "limits: {spill_bytes: 0}\n"})
	s := newSession(t, a)
	c := connect(t, s, nil, "--text-bytes", "1000")
	require.Contains(t, c.description(), "What is left out is not kept")
	got := c.bash("seq 1 2000")
	require.True(t, got.Info.Truncated)
	require.Empty(t, got.Info.File)
	require.Contains(t, got.texts[0], "They are not kept")
	require.NoDirExists(t, s.file(".sandbox-tmp/output"))
}
