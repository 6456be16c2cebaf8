package gitguard

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// runsOrMoves is written by hand, apart from the rules, so that a rule that goes missing shows.
var runsOrMoves = regexp.MustCompile(`^(include|includeif|filter|alias|hook|credential|url|difftool|mergetool|man|browser|guitool|instaweb|tar|imap|sendemail|bundle)\.|` +
	`^core\.(pager|editor|sshcommand|gitproxy|askpass|alternaterefscommand|worktree|attributesfile|excludesfile)$|` +
	`^(diff|merge|gpg|trailer)\.(.*\.)?(command|cmd|textconv|driver|program|external|defaultkeycommand)$|` +
	`^remote\..*\.(uploadpack|receivepack|vcs|promisor)$|^protocol\.(.*\.)?allow$|^http\..*(cert|key|cookie|header|proxy|cainfo|capath)|` +
	`^(sequence\.editor|interactive\.difffilter|gc\.recentobjectshook|commit\.template|mailmap\.file|blame\.ignorerevsfile|init\.templatedir|fetch\.bundleuri)$|` +
	`^extensions\.(worktreeconfig|partialclone)$`)

// FuzzConfig: what the guard reads of any bytes is what Git reads in a file of them, and what it writes, Git reads, and
// holds nothing that runs a program or moves a path.
func FuzzConfig(f *testing.F) {
	files, err := filepath.Glob("testdata/config/*")
	require.NoError(f, err)
	for _, name := range files {
		if b, err := os.ReadFile(name); err == nil && filepath.Ext(name) == "" {
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > maxConfig {
			return
		}
		c, err := parseConfig(t.Context(), "config", raw)
		if bytes.IndexByte(raw, 0) >= 0 {
			require.ErrorIs(t, err, ErrConfig)
			return
		}
		ok, entries := gitReads(t, writeConfig(t, string(raw)))
		require.Equal(t, ok, err == nil, "%v", err)
		if !ok {
			return
		}
		require.Equal(t, entries, c.Entries)
		text, leftOut, err := c.Sanitise(SanitiseOptions{})
		require.NoError(t, err)
		ok, entries = gitReads(t, writeConfig(t, string(text)))
		require.True(t, ok)
		kept := 0
		for _, e := range entries {
			forcedOff := e.Key == "core.hookspath" && e.Value == "/dev/null" || e.Key == "core.fsmonitor" && e.Value == "false"
			require.False(t, !forcedOff && runsOrMoves.MatchString(e.Key) && !e.off(), "%+v", e)
			require.False(t, hasCredentials(e.Value), "%+v", e)
			_, found := c.judge(e)
			require.False(t, !forcedOff && found, "%+v", e)
			kept++
		}
		require.LessOrEqual(t, kept, len(c.Entries)+len(forced)+1)
		for _, f := range leftOut {
			require.NotEmpty(t, f.Why)
			require.Equal(t, f.Key, strings.ToValidUTF8(f.Key, "?"))
		}
	})
}

// FuzzIndex: of what is accepted, every path stays in the worktree and out of every repository.
func FuzzIndex(f *testing.F) {
	const id = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
	for _, path := range []string{"a", "a/b", "/etc/passwd", "../x", "a/../b", ".git/config", "a/.GIT/x", "git~1/x", ".git /x", ".g\u200cit/x", `a\.git\x`, "a//b", "", "."} {
		f.Add([]byte("100644 " + id + " 0\t" + path + "\x00"))
		f.Add([]byte("160000 " + id + " 0\t" + path + "\x00"))
	}
	f.Fuzz(func(t *testing.T, list []byte) {
		ids, err := CheckIndex(list)
		if err != nil {
			require.ErrorIs(t, err, ErrIndex)
			return
		}
		entries := bytes.Count(list, []byte{0})
		require.Len(t, ids, entries)
		for i, entry := range strings.SplitN(string(list), "\x00", entries+1)[:entries] {
			head, path, _ := strings.Cut(entry, "\t")
			require.True(t, filepath.IsLocal(path), "%q", path)
			require.Equal(t, path, filepath.Clean(path))
			require.NotContains(t, strings.Split(strings.ToLower(path), "/"), ".git")
			require.NotEqual(t, "160000", head[:6])
			require.Equal(t, ids[i], strings.Fields(head)[1])
		}
	})
}

// neverSaid begins a word before "--" that no accepted command line may have.
var neverSaid = regexp.MustCompile(`^(-C|-O|--output|--ext-diff|--textconv|--no-index|--exec|--upload-pack|--receive-pack|--open-files-in-pager|` +
	`--git-dir|--work-tree|--config|--filters|--submodule|--recurse-submodules|--pathspec-from-file|--edit|--interactive|--gpg-sign|--show-signature|--ignore-submodules=[^a])`)

// FuzzAllowGit: what is accepted begins with a subcommand of the list, has no word that runs a program or names a place,
// and is accepted again as the same.
func FuzzAllowGit(f *testing.F) {
	for _, line := range []string{"status -sb", "log -pn3 --format %s", "diff --output=x", "grep -Ovi x", "stash", "branch --contains -D", "commit -m --amend -- x",
		"rebase --continue", "-c x status", "checkout -b -x", "show --ext", "merge -s x", "merge --strategy=ours a"} {
		f.Add(strings.ReplaceAll(line, " ", "\n"))
	}
	f.Fuzz(func(t *testing.T, line string) {
		c, err := AllowGit(strings.Split(line, "\n"))
		if err != nil {
			require.ErrorIs(t, err, ErrNotAllowed)
			return
		}
		require.Contains(t, subcommands(), c.Args[0])
		for _, w := range c.Args[1:] {
			if w == "--" {
				break
			}
			require.False(t, neverSaid.MatchString(w), "%q", c.Args)
			require.NotEqual(t, "-c=", w)
		}
		again, err := AllowGit(c.Args)
		require.NoError(t, err, "%q", c.Args)
		require.Equal(t, c, again)
	})
}

// FuzzRefName: what is accepted, Git accepts, and what Git accepts is refused for its length alone.
func FuzzRefName(f *testing.F) {
	for _, ref := range []string{"refs/heads/main", "refs/heads/../../../outside/new", "HEAD", "refs/heads/a.lock", "refs/heads/.a", "refs/heads/a..b", "refs/heads/@{0}",
		"refs//heads", "refs/heads/", "refs/heads/a b", "refs/heads/\x7f", "refs/heads/a.lock/b", "refs/heads/@", "refs/heads/-x", "refs/heads/ü", "refs/heads/a.", "refs/x"} {
		f.Add(ref)
	}
	f.Fuzz(func(t *testing.T, ref string) {
		err := CheckRefName(ref)
		if strings.Contains(ref, "\x00") {
			require.ErrorIs(t, err, ErrRefName)
			return
		}
		if len(ref) > 250 || !strings.HasPrefix(ref, "refs/") {
			return
		}
		code, _ := tryGit(t, "/", "check-ref-format", ref)
		require.Equal(t, code == 0, err == nil, "%q: %v", ref, err)
		require.True(t, err == nil || errors.Is(err, ErrRefName))
	})
}
