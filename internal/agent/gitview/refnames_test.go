package gitview

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP12ANewBranchIsNotWhatGitDescribePrintsForACommitOfTheHosts(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.host("tag", "-a", "-m", "x", "v1", "main")
		w.host("commit", "-q", "--allow-empty", "-m", "After the tag")
	})
	described := w.host("describe", "main")
	require.Regexp(t, `^v1-1-g[0-9a-f]+$`, described)
	main := w.host("rev-parse", "main")
	require.Equal(t, main, w.host("rev-parse", described))

	// The control case: where there is such a branch, Git takes it for what git describe meant.
	control := filepath.Join(filepath.Dir(w.repo), "control")
	testkit.GitAs(t, uid, w.repo, "clone", "-q", "--bare", w.repo, control)
	evil := strings.TrimSpace(testkit.GitAs(t, uid, control, "commit-tree", "-m", "evil", "main^{tree}"))
	testkit.GitAs(t, uid, control, "update-ref", "refs/heads/"+described, evil)
	require.Contains(t, testkit.GitAs(t, uid, control, "rev-parse", described), evil)
	require.NoError(t, os.RemoveAll(control))

	names := []string{described, "any/thing-gABCD", "x-g" + main}
	script := "git commit -q --allow-empty -m Mine\n"
	for _, name := range names {
		script += "git branch " + name + "\n"
	}
	_, h := w.command(script + "git branch v1-5-gabc; git branch my-gadget; git branch -- x-gabcd-fix")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Contains(t, h.Detail, "3 new branches are only below")
	require.Contains(t, h.Detail, described+" (it looks like what git describe prints)")
	require.Equal(t, "main\nmy-gadget\ntopic\nv1-5-gabc\nx-gabcd-fix", w.branches())

	// Each is told once, also when the agent was restarted meanwhile, until it is another change.
	w.reopen()
	_, h = w.command("git commit -q --allow-empty -m More")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Empty(t, h.Detail)
	_, h = w.command("git branch -f " + names[1])
	require.Contains(t, h.Detail, "1 new branch is only below")
	require.Contains(t, h.Detail, "give it another name")
	require.NotContains(t, h.Detail, described)
	require.Equal(t, main, w.host("rev-parse", described))
}

func TestABranchWhoseNameIsNotUTF8DoesNotEndTheAnswers(t *testing.T) {
	w := newWorld(t)
	_, h := w.command("git commit -q --allow-empty -m Mine && git branch \"$(printf 'bad\\377')\" && git branch good")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Contains(t, h.Refs, "refs/heads/good")
	require.True(t, utf8.ValidString(h.Detail))
	require.Contains(t, h.Detail, "not UTF-8")
	require.NotContains(t, w.branches(), "bad")
	require.Contains(t, w.host("for-each-ref", "refs/sandboxes"), "s1/heads/bad%FF", "it is kept")
	w.reopen()
	_, h = w.command("git update-ref -d \"$(printf 'refs/heads/bad\\377')\"")
	require.NotEqual(t, Failed, h.Status, "%+v", h)
	require.NotContains(t, w.host("for-each-ref", "refs/sandboxes"), "bad")
}

func TestBranchesWhoseNamesAreTheSameInUTF8AreEachToldOnce(t *testing.T) {
	require.Equal(t, inUTF8("refs/heads/\xff-gabcd"), inUTF8("refs/heads/%FF-gabcd"), "the control case")
	w := newWorld(t)
	_, h := w.command("git commit -q --allow-empty -m Mine && git branch '%FF-gabcd' && git branch \"$(printf '\\377-gabcd')\" main")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Contains(t, h.Detail, "2 new branches are only below")
	w.reopen()
	_, h = w.command("git commit -q --allow-empty -m More")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Empty(t, h.Detail)
}

func TestWhatAHarvestSaysIsUTF8WhateverANameIs(t *testing.T) {
	h := Harvest{
		Refs: []string{"refs/x/\xff"}, StaleLocks: []string{"/a/\xfe.lock"}, Detail: "x\xff",
		Conflicts: []Conflict{{Ref: "refs/\xff", Remedy: "git \xff"}}, Standing: []Conflict{{Ref: "refs/\xfe"}},
	}
	told := h.Conflicts
	h.speakable()
	b, err := json.Marshal(h)
	require.NoError(t, err)
	var again Harvest
	require.NoError(t, json.Unmarshal(b, &again))
	require.Equal(t, h, again)
	require.Equal(t, []string{`"refs/x/\xff"`}, h.Refs)
	require.Equal(t, `"refs/\xfe"`, h.Standing[0].Ref)
	require.Equal(t, "refs/\xff", told[0].Ref, "what the state keeps is not touched")
}

func TestAConflictIsToldOncePerChangeAndStandsUntilItIsResolved(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Mine") })
	theirs := w.commitOnHost("topic", "Theirs")
	told := w.v.Harvest(t.Context())
	require.Equal(t, Conflicts, told.Status)
	require.Len(t, told.Conflicts, 1)
	require.Empty(t, told.Standing)

	// Other work is brought over, and the conflict is not told again.
	_, h := w.command("git branch other")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Empty(t, h.Conflicts)
	require.Equal(t, told.Conflicts, h.Standing)
	require.Equal(t, Conflicts, h.Whole().Status)
	require.Equal(t, told.Conflicts, h.Whole().Conflicts)
	w.reopen()
	_, h = w.command("true")
	require.Equal(t, Harvest{Status: Unchanged, Standing: told.Conflicts}, h)

	// A change on either side is news.
	_, h = w.command("git commit -q --allow-empty -m More")
	require.Equal(t, Conflicts, h.Status)
	require.Len(t, h.Conflicts, 1)
	require.Empty(t, h.Standing)
	again := w.commitOnHost("topic", "Theirs too")
	_, h = w.command("true")
	require.Equal(t, Conflicts, h.Status)
	require.Equal(t, again, h.Conflicts[0].BaseID)

	// Taken over in the base clone, it is over, and that is said.
	w.host("update-ref", "refs/heads/topic", h.Conflicts[0].SessionID)
	_, h = w.command("true")
	require.Equal(t, Harvest{Status: Harvested}, h)
	_, h = w.command("true")
	require.Equal(t, Harvest{Status: Unchanged}, h)
	require.NotEqual(t, theirs, again)
}

func TestP12ARemedyIsSafeToPasteWhateverACommandCalledItsBranch(t *testing.T) {
	const name = "refs/heads/x;touch${IFS}/var/tmp/sa-ran'"
	d := decision{now: refs{name: "1"}, before: refs{name: "0"}, base: refs{}, branch: name}
	for _, gone := range []bool{false, true} {
		if gone {
			d.base, d.now = refs{name: "2"}, refs{}
		}
		out, err := decide(decision{
			before: d.before, now: d.now, base: d.base, branch: name,
			arrived: func(string, string) bool { return true }, isAncestor: func(string, string) (bool, error) { return false, nil },
		})
		require.NoError(t, err)
		require.Len(t, out.conflicts, 1)
		_, command, _ := strings.Cut(out.conflicts[0].Remedy, "(git ")
		command, _, _ = strings.Cut(command, ")")
		said, err := run("/", "sh", "-c", "printf '%s\n' "+command+"; test ! -e /var/tmp/sa-ran")
		require.NoError(t, err, said)
		require.Contains(t, said, strings.TrimPrefix(name, "refs/heads/")+"\n", "the shell reads one word")
	}
}

// docs/git.md tells of it: the complaint is about the configuration, which is sealed, and not about the branch.
func TestABranchThatIsDeletedInsideIsGoneWhateverGitSaysOfTheConfiguration(t *testing.T) {
	w := newWorld(t)
	w.harvested("git branch x && git branch y")
	out := w.harvested("git branch -D x && git branch -d y && git branch --list x y")
	require.Contains(t, out, "could not write config file")
	require.Contains(t, out, "Deleted branch y")
	require.Equal(t, "main\ntopic", w.branches())
}
