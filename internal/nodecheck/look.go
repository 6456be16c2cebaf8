package nodecheck

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// probeTime bounds each probe. A healthy node takes milliseconds for most; loading kernel modules takes longest. An emulated
// machine takes seconds; tests, which run on such ones too, give it more.
var probeTime = 30 * time.Second

// backTime is how long a probe may take to come back once its time is up.
const backTime = 500 * time.Millisecond

// Scope is how much is looked at.
type Scope int

const (
	// Everything is what a check looks at.
	Everything Scope = iota
	// Promises is what the agent looks at before it starts: only features that stop it, and only those that are needed.
	Promises
)

// Check looks at the node and judges what it saw. It takes well under a second on a healthy node; a probe that does not
// answer is inconclusive after probeTime, or when ctx ends.
func Check(ctx context.Context, n Needs, s Scope) Report { return Judge(Look(ctx, n, s), n) }

// probe is one look. Its facts are all of ids.
type probe struct {
	ids  []ID
	need Need
	// subject tells probes of the same ids apart.
	subject string
	look    func(ctx context.Context) map[ID][]Fact
}

// Look runs the probes, a few at a time: each has its time for itself, and one that hangs holds up no other for longer.
func Look(ctx context.Context, n Needs, s Scope) Facts {
	f := Facts{Node: lookAtNode()}
	var mu sync.Mutex
	var wg sync.WaitGroup
	turns := make(chan struct{}, max(2, runtime.NumCPU()))
	for _, p := range probes(f.Node, n) {
		if s == Promises && (!n.has(p.need) || !slices.ContainsFunc(p.ids, func(id ID) bool { return row(id).Stops })) {
			continue
		}
		wg.Go(func() {
			turns <- struct{}{}
			seen := bounded(ctx, p)
			<-turns
			mu.Lock()
			defer mu.Unlock()
			for id, facts := range seen {
				f.add(id, facts...)
			}
		})
	}
	wg.Wait()
	for _, facts := range f.Seen {
		slices.SortStableFunc(facts, func(a, b Fact) int { return strings.Compare(a.Subject, b.Subject) })
	}
	return f
}

// running has a place for one look of each probe. What may hang for ever, for example in a dead file system, keeps its
// place, so that asking again and again does not pile up what hangs.
var running sync.Map

func bounded(ctx context.Context, p probe) map[ID][]Fact {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	place, _ := running.LoadOrStore(string(p.ids[0])+"\x00"+p.subject, make(chan struct{}, 1))
	select {
	case place.(chan struct{}) <- struct{}{}:
	case <-ctx.Done():
		return p.inconclusive("an earlier look has not come back", hangs)
	}
	done := make(chan map[ID][]Fact, 1)
	go func() {
		defer func() { <-place.(chan struct{}) }()
		done <- p.look(ctx)
	}()
	select {
	case seen := <-done:
		return seen
	case <-ctx.Done():
	}
	// A probe that heeds ctx is back in a moment, and may have seen what hung.
	select {
	case seen := <-done:
		return seen
	case <-time.After(backTime):
		return p.inconclusive("it did not answer in time", hangs)
	}
}

// hangs is what to do about a probe that does not come back.
const hangs = "check again; if it stays so, see what hangs: a dead file system, or a node that is overloaded"

func (p probe) inconclusive(why, remedy string) map[ID][]Fact {
	seen := map[ID][]Fact{}
	for _, id := range p.ids {
		seen[id] = []Fact{unsure("%s", why).of(p.subject).do(remedy)}
	}
	return seen
}
