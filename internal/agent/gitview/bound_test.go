package gitview

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// requireSmall wants a harvest to fit into a record of the journal many times.
func requireSmall(t *testing.T, h Harvest) {
	t.Helper()
	b, err := json.Marshal(h)
	require.NoError(t, err)
	require.Less(t, len(b), 512<<10)
	require.Less(t, len(h.Detail), mostSaid+256)
}

func TestP16AsManyRefsAsACommandLikesMakeNoLargeHarvest(t *testing.T) {
	w := newWorld(t)
	// Each is 900 bytes, and as JSON six times that.
	part := "/" + strings.Repeat("<", 225)
	const refs = 150
	_, h := w.command(fmt.Sprintf(`I=$(git rev-parse HEAD) && for i in $(seq %d); do echo "$I refs/heads/b$i%s"; done >> %s/packed-refs`, refs, strings.Repeat(part, 4), w.git))
	require.Equal(t, Harvested, h.Status, h.Detail)
	requireSmall(t, h)
	require.NotEmpty(t, h.Refs)
	require.Contains(t, h.Detail, fmt.Sprintf("there are %d more written refs", refs-len(h.Refs)))
	require.Equal(t, refs, strings.Count(w.host("for-each-ref", "refs/heads/"), "/b"), "all are there, also those that are not named")
}

func TestP16AsManyNamesThatAreNoneAsACommandLikesMakeNoLargeHarvest(t *testing.T) {
	w := newWorld(t)
	_, h := w.command(fmt.Sprintf(`I=$(git rev-parse HEAD) && seq -f "$I refs/heads/%s%%06.0f" 20000 >> %s/packed-refs && git commit -q --allow-empty -m Mine`, strings.Repeat("x", 250), w.git))
	require.Equal(t, Harvested, h.Status, h.Detail)
	requireSmall(t, h)
	require.Contains(t, h.Detail, "a component of more than 250 bytes")
	require.Equal(t, "Mine", w.host("log", "-1", "--format=%s", "topic"))
}

func TestP16AsManyLocksAsACommandLikesMakeNoLargeHarvest(t *testing.T) {
	w := newWorld(t)
	plant := func(n int) string {
		return fmt.Sprintf(`mkdir -p %s/refs/j && for i in $(seq %[2]d); do : > "%[1]s/refs/j/%[3]s$i.lock"; done`, w.git, n, strings.Repeat("<", 200))
	}
	_, h := w.command(plant(mostLocks))
	require.NotEqual(t, Failed, h.Status, h.Detail)
	requireSmall(t, h)
	require.Contains(t, h.Detail, fmt.Sprintf("there are %d more removed lock files", mostLocks-len(h.StaleLocks)))
	left, err := os.ReadDir(filepath.Join(w.v.Private(), "refs/j"))
	require.NoError(t, err)
	require.Empty(t, left, "all are removed, also those that are not named")

	_, h = w.command(plant(mostLocks+1) + " && git commit -q --allow-empty -m Mine")
	require.Equal(t, Failed, h.Status)
	require.Contains(t, h.Detail, "remove them in the session")
	requireSmall(t, h)
	_, h = w.command("cd " + w.git + " && find . -name '*.lock' -delete")
	require.Equal(t, Harvested, h.Status, h.Detail)
	require.Equal(t, "Mine", w.host("log", "-1", "--format=%s", "topic"), "and it goes on once they are removed as was said")
}

func TestP16InTheSharedLayoutAsManyLocksAsACommandLikesAreRemovedAndNotHeld(t *testing.T) {
	w := newSharedWorld(t)
	write(t, w.meta+"/HEAD.lock", "")
	_, h := w.command(fmt.Sprintf(`cd %s && for i in $(seq %d); do : > $i.lock; done`, w.meta, mostLocks+2000))
	require.Len(t, h.StaleLocks, mostLocks)
	require.Contains(t, h.Detail, "2000 lock files were removed besides")
	requireSmall(t, h)
	left, err := filepath.Glob(w.meta + "/*.lock")
	require.NoError(t, err)
	require.Equal(t, []string{w.meta + "/HEAD.lock"}, left, "it was there before: somebody else's")

	_, h = w.command(fmt.Sprintf(`cd %s && for i in $(seq %d); do : > $i.lock; done`, w.meta, mostRemoved+mostLocks))
	require.Contains(t, h.Detail, "1000 more lock files stay (remove them in the session: find "+w.meta+" -name '*.lock' -delete)")
	_, h = w.command("touch " + w.meta + "/mine.lock")
	require.Empty(t, h.StaleLocks, "whose they are is not known any more")
	require.Contains(t, h.Detail, "more than 1000 lock files before the command")
	require.FileExists(t, w.meta+"/mine.lock")
	w.command("find " + w.meta + " -name '*.lock' -delete")
	_, h = w.command("touch " + w.meta + "/mine.lock")
	require.Equal(t, []string{w.meta + "/mine.lock"}, h.StaleLocks, "it goes on once they are removed as was said")

	// What can't be removed takes its time as well. Some come first, and some last, in whatever order the folder has.
	_, h = w.command(fmt.Sprintf(`cd %s && seq -f first%%g.lock 250 | xargs touch && seq -f %%g.lock/x %d | xargs mkdir -p && seq -f last%%g.lock 250 | xargs touch`, w.meta, mostRemoved+500))
	require.Less(t, len(h.StaleLocks), 500, "it ends before it has tried all")
	first, err := filepath.Glob(w.meta + "/[fl]*st*.lock")
	require.NoError(t, err)
	require.Len(t, first, 500-len(h.StaleLocks), "control: all were made")
	requireSmall(t, h)
}

func TestInTheSharedLayoutALocksNameIsUTF8(t *testing.T) {
	w := newSharedWorld(t)
	_, h := w.command(`touch "$(printf '` + w.meta + `/\377.lock')"`)
	require.Len(t, h.StaleLocks, 1, h.Detail)
	require.True(t, utf8.ValidString(h.StaleLocks[0]), "an answer holds nothing else")
}

func TestWhatIsSaidOfAHarvestIsBoundedAndWhyItFailedIsInIt(t *testing.T) {
	h := &harvest{}
	for range 10_000 {
		h.say("something long %s", strings.Repeat("ü", 100))
	}
	require.Less(t, len(h.Detail), mostSaid+16)
	require.True(t, utf8.ValidString(h.Detail))
	h.Detail = cutTo(h.Detail, mostSaid/2)
	h.say("why")
	require.Contains(t, h.Detail, "; why")
}
