package journal

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// remembered is what a journal holds at one moment.
type remembered struct {
	records map[string]string
	entries []string
}

func (r remembered) clone() remembered {
	return remembered{maps.Clone(r.records), slices.Clone(r.entries)}
}

func rememberedOf(t *testing.T, j *Journal) remembered {
	t.Helper()
	r := remembered{records: contents(t, j)}
	require.NoError(t, j.ReadEntries(0, func(_ uint64, value []byte) error {
		r.entries = append(r.entries, string(value))
		return nil
	}))
	return r
}

func (r remembered) is(o remembered) bool {
	return maps.Equal(r.records, o.records) && slices.Equal(r.entries, o.entries)
}

// paired says whether each intent without an outcome has its open key, and nothing else has one.
func (r remembered) paired() error {
	open := 0
	for key, value := range r.records {
		id, isExec := strings.CutPrefix(key, "exec/")
		if !isExec {
			continue
		}
		_, isOpen := r.records["open/"+id]
		if isOpen != strings.HasPrefix(value, "intent") {
			return fmt.Errorf("%s is %.10q, and that it is open is %v", key, value, isOpen)
		}
		if isOpen {
			open++
		}
	}
	for key := range r.records {
		if strings.HasPrefix(key, "open/") {
			open--
		}
	}
	if open != 0 {
		return fmt.Errorf("%d open keys have no intent", -open)
	}
	return nil
}

// writer changes a journal as the agent does, one change after the other, and remembers each state and how far it was
// promised to be durable.
type writer struct {
	rng *rand.Rand
	j   *Journal

	mu      sync.Mutex
	states  []remembered // before the first change, after each one; the last one may not be acknowledged
	promise int          // the index of the newest state that a durable change had returned with
	next    int
}

// change makes one random change. A change that is not durable is promised with the next durable one.
func (w *writer) change() error {
	w.mu.Lock()
	now := w.states[len(w.states)-1].clone()
	ops, durable := w.draw(&now)
	w.states = append(w.states, now)
	index := len(w.states) - 1
	w.mu.Unlock()
	if err := w.j.Update(ctx, durable, ops...); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if durable {
		w.promise = index
	}
	return nil
}

func (w *writer) draw(now *remembered) (ops []Op, durable bool) {
	set := func(key, value string) {
		now.records[key] = value
		ops = append(ops, Set(key, []byte(value)))
	}
	remove := func(key string) {
		delete(now.records, key)
		ops = append(ops, Delete(key))
	}
	var open, ended []string
	for key, value := range now.records {
		if id, ok := strings.CutPrefix(key, "exec/"); ok && strings.HasPrefix(value, "intent") {
			open = append(open, id)
		} else if ok {
			ended = append(ended, id)
		}
	}
	slices.Sort(open)
	slices.Sort(ended)
	w.next++
	tail := strings.Repeat("x", w.rng.IntN(2000))
	switch k := w.rng.IntN(10); {
	case k < 4 && len(open) > 0: // an outcome
		id := open[w.rng.IntN(len(open))]
		set("exec/"+id, "outcome "+tail)
		remove("open/" + id)
		durable = w.rng.IntN(4) == 0
	case k == 4 && len(ended) > 0: // a record expires
		id := ended[w.rng.IntN(len(ended))]
		remove("exec/" + id)
		set("expired/"+id, "")
		durable = true
	case k == 5: // a session's state
		set("session/s", fmt.Sprint(w.next, tail))
		durable = w.rng.IntN(2) == 0
	default: // an intent
		id := fmt.Sprint(w.next)
		set("exec/"+id, "intent "+tail)
		set("open/"+id, "")
		durable = true
	}
	event := fmt.Sprint("event ", w.next)
	now.entries = append(now.entries, event)
	ops = append(ops, Append([]byte(event)))
	return ops, durable
}

// cut is the power cut: the files as they may be afterwards, and which of the states are allowed then.
func (w *writer) cut(t *testing.T, rng *rand.Rand, files *vfs.MemFS) (after *vfs.MemFS, highWater []byte, from, to int) {
	t.Helper()
	highWater, err := os.ReadFile(filepath.Join(w.j.dir, highWaterName))
	require.NoError(t, err)
	w.mu.Lock()
	from = w.promise
	w.mu.Unlock()
	after = files.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 0, 30, 70, 100}[rng.IntN(5)], RNG: rng})
	w.mu.Lock()
	to = len(w.states) - 1
	w.mu.Unlock()
	if rng.IntN(3) == 0 {
		highWater = nil // it is never synced itself
	}
	return after, highWater, from, to
}

// TestP6NothingPromisedIsLostInAPowerCut lets an agent's kind of changes run against a file system that forgets what was
// not synced, all of it or random parts, cuts the power at a random moment, in the middle of changes too, and opens what
// is left. It must be one of the states that there were, in whole, and none older than the newest durable one.
func TestP6NothingPromisedIsLostInAPowerCut(t *testing.T) {
	histories := 25
	if os.Getenv("SANDBOX_TEST_LONG") == "1" {
		histories = 500
	}
	cuts, changes, dropped := 0, 0, 0
	for seed := range uint64(histories) {
		rng := rand.New(rand.NewPCG(seed, 3))
		dir := filepath.Join(t.TempDir(), "journal")
		files := vfs.NewCrashableMem()
		j, err := openOn(files, dir, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		w := &writer{rng: rng, states: []remembered{{records: map[string]string{}}}}
		for range 4 {
			w.j = j
			after, highWater, from, to := runUntilCut(t, w, files)
			require.NoError(t, os.WriteFile(filepath.Join(dir, highWaterName), highWater, 0o600))
			cuts++
			changes += to
			files = after
			j, err = openOn(files, dir, slog.New(slog.DiscardHandler))
			require.NoError(t, err, "seed %d: the journal after the power cut", seed)
			got := rememberedOf(t, j)
			at := slices.IndexFunc(w.states[from:to+1], got.is)
			require.NotEqual(t, -1, at, "seed %d: what is there is none of the states %d to %d", seed, from, to)
			require.NoError(t, got.paired(), "seed %d", seed)
			dropped += to - from - at
			w.states, w.promise = []remembered{got}, 0
		}
		require.NoError(t, j.Close())
	}
	require.NotZero(t, dropped, "the power was never cut before a change was on disk")
	t.Logf("%d histories, %d power cuts, %d changes, %d of them never promised and dropped, 0 violations", histories, cuts, changes, dropped)
}

// runUntilCut runs changes until a random one, and cuts the power while they go on.
func runUntilCut(t *testing.T, w *writer, files *vfs.MemFS) (after *vfs.MemFS, highWater []byte, from, to int) {
	t.Helper()
	quiet := w.rng.IntN(60)
	for range quiet {
		require.NoError(t, w.change())
	}
	if w.rng.IntN(2) == 0 {
		require.NoError(t, w.j.db.Flush())
	}
	// w.rng is the changing goroutine's as long as that runs.
	rng := rand.New(rand.NewPCG(w.rng.Uint64(), 1))
	stop, ended := make(chan struct{}), make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		close(begun)
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if err := w.change(); err != nil {
				ended <- err
				return
			}
		}
	}()
	<-begun
	after, highWater, from, to = w.cut(t, rng, files)
	close(stop)
	require.NoError(t, <-ended)
	require.NoError(t, w.j.Close())
	return after, highWater, from, to
}
