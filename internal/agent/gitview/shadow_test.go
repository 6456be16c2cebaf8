package gitview

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

func TestP12ANewBranchDoesNotShadowANameOfTheHosts(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.host("remote", "add", "up/stream", "/nowhere")
		w.host("update-ref", "refs/remotes/origin/main", "main")
		w.host("tag", "v1", "main")
	})
	short := w.host("rev-parse", "--short=7", "main")
	names := []string{"origin/main", "up/stream/x", "v1", short, "HEAD", "@", "FETCH_HEAD", "refs/heads/main", "heads/main", "tags/v1", "-d"}

	// The control case: where such branches are, Git takes them instead of what was meant.
	control := filepath.Join(filepath.Dir(w.repo), "control")
	testkit.GitAs(t, uid, w.repo, "clone", "-q", "--bare", w.repo, control)
	git := func(args ...string) string { return strings.TrimSpace(testkit.GitAs(t, uid, control, args...)) }
	git("update-ref", "refs/remotes/origin/main", "main")
	evil := git("commit-tree", "-m", "evil", "main^{tree}")
	for _, name := range []string{"origin/main", short} {
		git("update-ref", "refs/heads/"+name, evil)
		require.Contains(t, git("rev-parse", name), evil, name)
	}
	require.NoError(t, os.RemoveAll(control))

	script := "git commit -q --allow-empty -m Mine\n"
	for _, name := range names {
		script += "git update-ref 'refs/heads/" + name + "' HEAD\n"
	}
	_, h := w.command(script + "git branch fine")
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Equal(t, "fine\nmain\ntopic", w.branches())
	require.Contains(t, h.Detail, fmt.Sprintf("%d new branches are only below refs/sandboxes/s1", len(names)))
	require.Contains(t, h.Detail, "git branch -m")
	require.Contains(t, w.host("for-each-ref", "refs/sandboxes/s1/heads"), "refs/sandboxes/s1/heads/origin/main")
	w.sound()

	// Renamed, it arrives.
	w.try("git branch -m origin/main better") // it says that the configuration can't be changed
	require.Contains(t, w.branches(), "better")
}

func TestP12FoldersDeeperThanAPathCanNameDoNotEndTheWorkspace(t *testing.T) {
	w := newWorld(t)
	deep := `cd "$(git rev-parse --git-common-dir)/refs" && P=$(printf 'dddddddddddddddddddd/%.0s' $(seq 150)) && mkdir -p "$P" "e/$P" && mv e "$P"`
	_, h := w.command(deep)
	require.Equal(t, Failed, h.Status)
	require.Contains(t, h.Detail, "rm -rf")
	require.Less(t, len(h.Detail), 600)
	w.host("update-ref", "refs/heads/news", "main") // a refresh that has something to do

	out, _ := w.command("echo works")
	require.Equal(t, "works", out)
	w.reopen()
	_, h = w.command(`rm -rf "$(git rev-parse --git-common-dir)/refs/dddddddddddddddddddd"`)
	require.NotEqual(t, Conflicts, h.Status, h)
	out = w.harvested("git commit -q --allow-empty -m Mine && git rev-parse HEAD news")
	require.Equal(t, w.host("rev-parse", "topic", "news"), out)
}

func TestP12AFloodedLogDoesNotEndTheHarvests(t *testing.T) {
	w := newWorld(t)
	zero := strings.Repeat("0", 40)
	line := func(old, id, what string) string {
		return fmt.Sprintf("%s %s A <a@example.com> 1 +0000\t%s\n", old, id, what)
	}
	main := w.host("rev-parse", "main")
	// Lines that Git would not write go nowhere.
	_, h := w.command("cat >> " + w.meta + "/logs/HEAD <<'END'\n" + line(zero, zero, "junk") +
		line(main, main, strings.Repeat("x", mostLogLine)) + line(main, main, "kept") + "END")
	require.Equal(t, Harvested, h.Status, h)
	log := read(t, w.meta+"/logs/HEAD")
	require.Contains(t, log, "kept")
	require.NotContains(t, log, "junk")
	require.NotContains(t, log, "xxxx")

	// One harvest brings so many, and the newest.
	_, h = w.command(fmt.Sprintf("for i in $(seq %d); do printf '%s\\tline %%d\\n' $i; done >> %s/logs/HEAD",
		mostLogLines+5, strings.TrimSuffix(line(main, main, ""), "\t\n"), w.meta))
	require.Contains(t, h.Detail, "the oldest 5 lines")
	log = read(t, w.meta+"/logs/HEAD")
	require.Contains(t, log, fmt.Sprintf("\tline %d\n", mostLogLines+5))
	require.NotContains(t, log, "\tline 5\n")

	// A log of its whole size gets no more lines, and everything else goes on.
	write(t, w.meta+"/logs/HEAD", strings.Repeat(line(main, main, strings.Repeat("y", 1000)), mostLogTotal/1000))
	out, h := w.command("git commit -q --allow-empty -m Mine && git rev-parse HEAD")
	require.Equal(t, Harvested, h.Status, h)
	require.Contains(t, h.Detail, "gets no more lines")
	require.Equal(t, out, w.host("rev-parse", "topic"))

	// So it is with one that can't be read.
	require.NoError(t, os.Truncate(w.meta+"/logs/HEAD", mostLog+1))
	out, h = w.command("git commit -q --allow-empty -m More && git rev-parse HEAD")
	require.Equal(t, Harvested, h.Status, h)
	require.Contains(t, h.Detail, "can't be read")
	require.Equal(t, out, w.host("rev-parse", "topic"))
}

func TestP12AFloodOfRefsIsRefusedOnceAndHeals(t *testing.T) {
	w := newWorld(t)
	before := w.everything()
	_, h := w.command(fmt.Sprintf(`git commit -q --allow-empty -m Mine; I=$(git rev-parse HEAD); cd "$(git rev-parse --git-common-dir)"
cp packed-refs kept; seq -f "$I refs/x/%%08.0f" %d >> packed-refs`, moreRefs+10))
	require.Equal(t, Failed, h.Status, h.Detail)
	require.Contains(t, h.Detail, errFlood.Error())
	require.Equal(t, before, w.everything())

	_, h = w.command("sleep 0.1; echo hi")
	require.Equal(t, Failed, h.Status)
	require.NotEmpty(t, w.v.flood)
	// Git is not asked again: it would answer with fewer than are allowed now.
	for i := range 20 {
		w.v.snapshot().ids[fmt.Sprintf("refs/y/%d", i)] = "x"
	}
	h = w.v.Harvest(t.Context())
	require.Contains(t, h.Detail, errFlood.Error())
	for i := range 20 {
		delete(w.v.snapshot().ids, fmt.Sprintf("refs/y/%d", i))
	}

	out, h := w.command(`cd "$(git rev-parse --git-common-dir)" && mv kept packed-refs && git rev-parse topic`)
	require.Equal(t, Harvested, h.Status, h)
	require.Equal(t, out, w.host("rev-parse", "topic"))
	w.sound()
}

func TestP12InTheSharedLayoutAFolderThatIsCalledALockEndsNoCleanUp(t *testing.T) {
	w := newSharedWorld(t)
	_, h := w.command("cd " + w.meta + "; mkdir a.lock b.lock; touch b.lock/x z.lock; echo '[alias] x = !false' > config.worktree")
	require.Equal(t, Shared, h.Status)
	require.ElementsMatch(t, []string{w.meta + "/a.lock", w.meta + "/z.lock"}, h.StaleLocks)
	require.NoDirExists(t, w.meta+"/a.lock")
	require.Contains(t, h.Detail, w.meta+"/b.lock")
	require.NoFileExists(t, w.meta+"/config.worktree", h.Detail)
	w.command("rm -rf " + w.meta + "/b.lock; mkdir " + w.meta + "/config.worktree")
	require.NoDirExists(t, w.meta+"/config.worktree")
}
