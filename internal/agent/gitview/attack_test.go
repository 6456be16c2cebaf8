package gitview

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
)

// everything is what the base clone has that a command must not change: refs, files of the worktree's folder.
func (w *world) everything() string {
	w.Helper()
	var b strings.Builder
	b.WriteString(w.host("for-each-ref"))
	for _, name := range []string{"HEAD", "index"} {
		b.WriteString(read(w, w.meta+"/"+name))
	}
	return b.String()
}

func TestP12WhatIsNeitherAFileNorAFolderIsNamedAndNeverOpened(t *testing.T) {
	w := newWorld(t)
	outside := testkit.StateDir(t) // root's: a command can't write there, and the harvest could
	before := w.everything()
	for name, c := range map[string]struct{ plant, heal string }{
		"a FIFO as a ref":            {"mkfifo $C/refs/heads/f", "rm $C/refs/heads/f"},
		"a FIFO as HEAD":             {"rm $M/HEAD; mkfifo $M/HEAD", "rm $M/HEAD; echo 'ref: refs/heads/topic' > $M/HEAD"},
		"a FIFO as the index":        {"mv $M/index $M/kept; mkfifo $M/index", "mv $M/kept $M/index"},
		"a FIFO as packed-refs":      {"mv $C/packed-refs $C/kept; mkfifo $C/packed-refs", "mv $C/kept $C/packed-refs"},
		"a link as a folder of refs": {"ln -s " + outside + " $C/refs/heads/d", "rm $C/refs/heads/d"},
		"a link as a log":            {"rm $M/logs/HEAD; ln -s " + outside + "/log $M/logs/HEAD", "rm $M/logs/HEAD"},
		"a link among the objects":   {"ln -s " + outside + " $C/objects/aa", "rm $C/objects/aa"},
		"a link as a message":        {"ln -sf " + outside + "/message $M/COMMIT_EDITMSG", "rm $M/COMMIT_EDITMSG"},
	} {
		where := "C=" + w.git + "; M=" + w.meta + "; "
		_, h := w.command("git branch made; " + where + c.plant)
		require.Equal(t, Failed, h.Status, name)
		require.Contains(t, h.Detail, w.git, name)
		require.Equal(t, before, w.everything(), "%s: nothing of the base clone is moved", name)
		// What is written in between goes nowhere else.
		w.try("timeout 1 git commit -q --allow-empty -m x")
		left, err := os.ReadDir(outside)
		require.NoError(t, err)
		require.Empty(t, left, name)
		_, h = w.command(where + c.heal + "; git reset -q --soft main; git branch -D made; rm -f $M/kept")
		require.NotEqual(t, Failed, h.Status, "%s: %+v", name, h)
		require.Equal(t, before, w.everything(), name)
	}
}

func TestP12Attack24AHeadThatLeadsOutsideIsNotFollowed(t *testing.T) {
	w := newWorld(t)
	for _, head := range []string{"ref: refs/heads/../../../../outside/new", "ref: /etc/passwd", "ref: refs/heads/x.lock", "junk", ""} {
		_, h := w.command("git commit -q --allow-empty -m x && printf '" + head + "\\n' > " + w.meta + "/HEAD")
		require.Equal(t, "ref: refs/heads/topic\n", read(t, w.meta+"/HEAD"), head)
		require.NotEmpty(t, h.Detail, head)
		require.NoDirExists(t, filepath.Dir(filepath.Dir(w.repo))+"/outside")
		w.command("echo 'ref: refs/heads/topic' > " + w.meta + "/HEAD")
		require.Equal(t, "x", w.host("log", "-1", "--format=%s", "topic"), "and it goes on once HEAD is right")
	}
}

// indexOf makes an index as a command could write it byte by byte: one entry, and extensions.
func indexOf(path, id string, extensions ...[]byte) []byte {
	var b bytes.Buffer
	raw, _ := hex.DecodeString(id)
	b.WriteString("DIRC")
	put := func(words ...uint32) { _ = binary.Write(&b, binary.BigEndian, words) }
	put(2, 1, 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, 0)
	b.Write(raw)
	_ = binary.Write(&b, binary.BigEndian, uint16(len(path)))
	b.WriteString(path)
	b.Write(make([]byte, 8-(62+len(path))%8))
	for _, e := range extensions {
		b.Write(e)
	}
	sum := sha1.Sum(b.Bytes())
	b.Write(sum[:])
	return b.Bytes()
}

func extension(name string, content []byte) []byte {
	return append(append([]byte(name), binary.BigEndian.AppendUint32(nil, uint32(len(content)))...), content...)
}

// plantIndex puts an index where the session has its own.
func (w *world) plantIndex(content []byte) {
	w.Helper()
	path := filepath.Join(w.v.Private(), "worktrees/wt-topic/index")
	require.NoError(w, os.Remove(path))
	require.NoError(w, os.WriteFile(path, content, 0o644))
	require.NoError(w, os.Chown(path, uid, uid))
}

func TestP12Attack22AForgedIndexIsNotExportedAndNotUsed(t *testing.T) {
	w := newWorld(t)
	blob := w.host("rev-parse", "main:README")
	before := read(t, w.meta+"/index")
	for path, says := range map[string]string{
		"/etc/shadow": "absolute", "../base/.git/config": "..", ".git/config": ".git", "a/../../x": "..", "a/.GIT/hooks/x": ".GIT",
	} {
		require.NoError(t, w.v.Refresh(t.Context()))
		w.plantIndex(indexOf(path, blob))
		h := w.v.Harvest(t.Context())
		require.Contains(t, h.Detail, "the index is not in the base clone", path)
		require.Contains(t, h.Detail, says, path)
		require.Equal(t, before, read(t, w.meta+"/index"), path)
		_, err := w.v.Git(t.Context(), gitguard.GitCommand{Args: []string{"status"}}, 0, 0)
		require.ErrorIs(t, err, gitguard.ErrIndex, path)
	}
	_, h := w.command("git read-tree HEAD && git commit -q --allow-empty -m Fine")
	require.Equal(t, Harvested, h.Status, h)
	w.sound()
}

func TestP12Attack33AnIndexThatNamesWhatIsNotThereLeavesTheBaseClonesGcAlone(t *testing.T) {
	missing := strings.Repeat("12", 20)
	tree := extension("TREE", append([]byte("\x001 0\n"), bytes.Repeat([]byte{0x12}, 20)...))
	for name, index := range map[string]func(w *world) []byte{
		"a missing object":         func(*world) []byte { return indexOf("x", missing) },
		"a commit as a file":       func(w *world) []byte { return indexOf("x", w.host("rev-parse", "main")) },
		"a cache of missing trees": func(w *world) []byte { return indexOf("x", w.host("rev-parse", "main:README"), tree) },
	} {
		w := newWorld(t)
		forged := index(w)
		// The control case: the same index in the base clone's own folder stops its gc.
		control := filepath.Join(filepath.Dir(w.repo), "control")
		testkit.GitAs(t, uid, w.repo, "worktree", "add", "-q", "--detach", control)
		write(t, w.git+"/worktrees/control/index", string(forged))
		_, err := gitOf(w, "gc", "--prune=now")
		require.Error(t, err, name)
		testkit.GitAs(t, uid, w.repo, "worktree", "remove", "--force", control)

		require.NoError(t, w.v.Refresh(t.Context()))
		w.plantIndex(forged)
		h := w.v.Harvest(t.Context())
		if !strings.Contains(name, "cache") {
			require.Contains(t, h.Detail, "the index is not in the base clone", name)
		}
		w.sound()
	}
}

func TestP12Attack31AnObjectReplacedUnderTheSameIDIsNotTakenAndHealsLater(t *testing.T) {
	w := newWorld(t)
	before := w.host("rev-parse", "topic")
	_, h := w.command(`echo good > f && git add f && git commit -q -m Forged && git branch fine main
B=$(git rev-parse HEAD:f); F=` + w.git + `/objects/$(echo $B | cut -c1-2)/$(echo $B | cut -c3-); E=$(echo evil | git hash-object -w --stdin)
chmod u+w $F && cat ` + w.git + `/objects/$(echo $E | cut -c1-2)/$(echo $E | cut -c3-) > $F`)
	require.NotEmpty(t, h.Detail)
	require.Equal(t, before, w.host("rev-parse", "topic"), "%+v", h)
	w.sound()
	w.command(`B=$(git rev-parse HEAD:f); rm -f ` + w.git + `/objects/$(echo $B | cut -c1-2)/$(echo $B | cut -c3-); git hash-object -w f`)
	require.Equal(t, "good", w.host("show", "topic:f"))
	require.Contains(t, w.branches(), "fine")
	w.sound()
}

func TestOneRefWhoseObjectsAreBrokenHoldsBackNoOther(t *testing.T) {
	w := newWorld(t)
	out, h := w.command(`git switch -q -c broken && echo x > f && git add f && git commit -q -m Broken
B=$(git rev-parse HEAD:f); rm -f ` + w.git + `/objects/$(echo $B | cut -c1-2)/$(echo $B | cut -c3-)
git switch -q -f topic && git commit -q --allow-empty -m Fine && git rev-parse HEAD`)
	require.Contains(t, h.Detail, "refs/heads/broken")
	require.Equal(t, out, w.host("rev-parse", "topic"))
	require.NotContains(t, w.branches(), "broken")
	w.sound()
	w.command("git branch -D broken; git reflog expire --expire=now --all")
	w.harvested("git commit -q --allow-empty -m More")
}

func TestForgedRefsGoNowhere(t *testing.T) {
	w := newWorld(t)
	blob := w.host("rev-parse", "main:README")
	_, h := w.command(fmt.Sprintf(`(cd %s && echo %s > refs/heads/blob && echo %s > refs/heads/missing && echo junk > refs/heads/junk
echo 'ref: refs/heads/../../../x' > refs/heads/link && mkdir -p 'refs/heads/a b' && echo %s > 'refs/heads/a b/c' && echo %[2]s > refs/tags/blob)
git commit -q --allow-empty -m Fine`, w.git, blob, strings.Repeat("12", 20), w.host("rev-parse", "main")))
	require.Contains(t, h.Detail, "refs/heads/blob")
	require.Equal(t, "main\ntopic", w.branches())
	require.Equal(t, "Fine", w.host("log", "-1", "--format=%s", "topic"))
	w.sound()
}

func TestAHugeFolderOfRefsIsTakenInPortions(t *testing.T) {
	w := newWorld(t)
	_, h := w.command(fmt.Sprintf(`git commit -q --allow-empty -m Mine; I=$(git rev-parse HEAD); cd %s/refs/heads && mkdir many && cd many && for i in $(seq %d); do echo $I > $i; done`, w.git, mostChanged+10))
	require.Equal(t, Harvested, h.Status, h.Detail)
	require.Contains(t, h.Detail, "10 changed refs are left")
	require.Equal(t, "Mine", w.host("log", "-1", "--format=%s", "topic"))
	h = w.v.Harvest(t.Context())
	require.Empty(t, h.Detail)
	require.Equal(t, mostChanged+10+2, len(strings.Split(w.branches(), "\n")))
}

func TestP12Attack35LocksOfAKilledGitAreRemovedAndReported(t *testing.T) {
	w := newWorld(t)
	_, h := w.command("touch " + w.meta + "/index.lock " + w.git + "/packed-refs.lock " + w.git + "/refs/heads/topic.lock")
	require.Equal(t, Unchanged, h.Status, h)
	require.ElementsMatch(t, []string{w.meta + "/index.lock", w.git + "/packed-refs.lock", w.git + "/refs/heads/topic.lock"}, h.StaleLocks)
	w.harvested("echo x > x && git add x && git commit -q -m X && git pack-refs --all")
}

func TestP12ASessionsFolderThatIsBrokenFailsAndHealsAndTheHostNeverHangs(t *testing.T) {
	w := newWorld(t)
	before := w.everything()
	_, h := w.command("mv " + w.git + "/refs " + w.git + "/gone; chmod 0 " + w.git + "/objects/pack")
	require.Equal(t, Failed, h.Status, h)
	require.Equal(t, before, w.everything())
	w.host("update-ref", "refs/heads/news", "main")
	_, h = w.command("chmod 755 " + w.git + "/objects/pack")
	require.Equal(t, Failed, h.Status, h)
	_, h = w.command("mv " + w.git + "/gone " + w.git + "/refs")
	require.NotEqual(t, Conflicts, h.Status, h)
	out, h := w.command("git rev-parse news")
	require.Equal(t, w.host("rev-parse", "news"), out)
	require.NotEqual(t, Failed, h.Status, h)
}

// gitOf runs Git in the base clone where it may fail.
func gitOf(w *world, args ...string) (string, error) {
	w.Helper()
	return run(w.repo, append([]string{"git"}, args...)...)
}

func TestP12APrivateFifoEndsTrustedGitByItsTime(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.v.Private(), "worktrees/wt-topic/MERGE_MSG")
	require.NoError(t, unix.Mkfifo(path, 0o666))
	require.NoError(t, os.Chown(path, uid, uid))
	h := w.v.Harvest(t.Context())
	require.Equal(t, Failed, h.Status)
	require.Contains(t, h.Detail, "MERGE_MSG")
}

// evilBranch makes a branch whose tree Git's own check refuses: a submodule's address that would be an option. extra is
// run before it.
const evilBranch = `G=$(printf '[submodule "../../x"]\n\tpath=a\n\turl=--upload-pack=x\n' | git hash-object -w --stdin)
T=$({ printf '100644 blob %s\t.gitmodules\n' $G; cat /tmp/many 2>/dev/null; } | git mktree)
git update-ref refs/heads/evil $(git commit-tree -p HEAD -m evil $T) && git rev-parse evil`

// incoming are the names in the base clone's object folder that Git would clean up one day.
func (w *world) incoming() []string {
	w.Helper()
	var out []string
	for _, pattern := range []string{"/objects/tmp_*", "/objects/pack/tmp_*"} {
		found, err := filepath.Glob(w.git + pattern)
		require.NoError(w, err)
		out = append(out, found...)
	}
	return out
}

func TestP12ObjectsThatGitsCheckRefusesNeverReachTheBaseClone(t *testing.T) {
	for name, extra := range map[string]string{
		"few objects":  "",
		"many objects": `for i in $(seq 200); do I=$(echo $i | git hash-object -w --stdin); printf '100644 blob %s\tf%s\n' $I $i; done > /tmp/many; `,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			evil, h := w.command(extra + evilBranch + "; rm -f /tmp/many")
			evil = strings.TrimSpace(evil)
			require.Equal(t, Failed, h.Status, "%+v", h)
			for range 2 {
				_, h = w.command("true")
				require.NotEqual(t, Harvested, h.Status, "%+v", h)
				_, err := gitOf(w, "cat-file", "-e", evil)
				require.Error(t, err, "the base clone does not even have the commit")
			}
			require.Empty(t, w.incoming())

			_, h = w.command("git commit -q --allow-empty -m Fine && git branch other HEAD")
			require.Contains(t, h.Detail, "refs/heads/evil")
			require.Equal(t, "main\nother\ntopic", w.branches())
			require.Equal(t, "Fine", w.host("log", "-1", "--format=%s", "topic"), "what is sound arrives")
			require.Empty(t, w.incoming())
			w.sound()
		})
	}
}

func TestP12ABlobThatArrivedAsAnOrdinaryFileIsNoSubmodulesLaterOn(t *testing.T) {
	w := newWorld(t)
	w.harvested(`printf '[submodule "../../x"]\n\tpath=a\n\turl=--upload-pack=x\n' > plain && git add plain && git commit -q -m Plain`)
	_, h := w.command(evilBranch)
	require.Equal(t, Failed, h.Status, "%+v", h)
	_, h = w.command("true")
	require.NotEqual(t, Harvested, h.Status, "%+v", h)
	require.NotContains(t, w.branches(), "evil")
	w.sound()
}

func TestP12ACommitThatACommandReplacedUnderItsIDDropsNoCommitOfTheHost(t *testing.T) {
	w := newWorld(t)
	_, h := w.command("git commit -q --allow-empty -m Mine") // it stays a loose object: of packs the base clone's are first
	require.Equal(t, Harvested, h.Status, "%+v", h)
	host := w.host("commit-tree", "-p", "topic~1", "-m", "Host", "topic^{tree}")
	require.NoError(t, w.v.Refresh(t.Context()))
	// The control case is in the script's last line: by the session's own objects the host's commit is an ancestor.
	w.inside(func(in *testkit.Inside) {
		in.Must(w.wt, `at() { echo `+w.git+`/objects/$(echo $1 | cut -c1-2)/$(echo $1 | cut -c3-); }
P=$(git rev-parse HEAD); N=$(git commit-tree -p $P -m More $P^{tree}); git update-ref refs/heads/topic $N
X=$(git cat-file commit $P | sed 's/^parent .*/parent `+host+`/' | git hash-object -t commit -w --stdin)
mkdir -p $(dirname $(at $P)); rm -f $(at $P); cp $(at $X) $(at $P)
git merge-base --is-ancestor `+host+` $N`)
	})
	w.host("update-ref", "refs/heads/topic", host)
	h = w.v.Harvest(t.Context())
	require.Equal(t, host, w.host("rev-parse", "topic"), "%+v", h)
	require.Equal(t, Conflicts, h.Status, "%+v", h)
	w.sound()
}

func TestAHarvestWhoseTimeIsUpFailsAndTheNextOneTriesAgain(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Mine") })
	before := w.everything()

	whole := harvestTime
	t.Cleanup(func() { harvestTime = whole })
	harvestTime = 0
	h := w.v.Harvest(t.Context())
	require.Equal(t, Failed, h.Status)
	require.Contains(t, h.Detail, "deadline exceeded")
	harvestTime = whole

	// It ends also when what it has received is about to be taken in.
	ctx, cancel := context.WithCancel(t.Context())
	old := step
	t.Cleanup(func() { step = old })
	step = func(now string) {
		if now == "objects checked" {
			cancel()
		}
	}
	h = w.v.Harvest(ctx)
	require.Error(t, ctx.Err(), "it never came there")
	require.Equal(t, Failed, h.Status, "%+v", h)
	require.Equal(t, before, w.everything())
	require.Empty(t, w.incoming())

	step = old
	h = w.v.Harvest(t.Context())
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Equal(t, "Mine", w.host("log", "-1", "--format=%s", "topic"))
	w.sound()
}

func TestWhatAKilledHarvestHadReceivedIsRemovedByTheNext(t *testing.T) {
	w := newWorld(t)
	require.NoError(t, w.v.Refresh(t.Context()))
	w.inside(func(in *testkit.Inside) { in.Must(w.wt, "git commit -q --allow-empty -m Mine") })
	require.True(t, w.diesAt("objects checked"))
	require.Len(t, w.incoming(), 1)
	require.Empty(t, w.host("fsck", "--full", "--strict", "--no-dangling"), "it is in nobody's way")
	w.reopen()
	h := w.v.Harvest(t.Context())
	require.Equal(t, Harvested, h.Status, "%+v", h)
	require.Empty(t, w.incoming())
	w.sound()
}
