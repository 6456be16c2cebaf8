package gitguard

import (
	"bytes"
	"context"
	"sort"
)

// maxLocate bounds the runs of Git for the lines of one file's findings.
const maxLocate = 300

// Locate fills in the findings' lines, by asking Git how many entries it reads in the first n lines: the entry begins
// on the first line with which its list is long enough. Where that takes too many runs, or ctx ends, Line stays 0.
func (c Config) Locate(ctx context.Context, findings []Finding) []Finding {
	out := append([]Finding(nil), findings...)
	l := locator{lines: bytes.SplitAfter(c.raw, []byte("\n")), counts: map[int]int{}}
	for i, f := range out {
		if f.entry == 0 || f.File != plain(c.Path) {
			continue
		}
		line := 1 + sort.Search(len(l.lines), func(n int) bool { return l.count(ctx, n+1) >= f.entry })
		if !l.gaveUp && line <= len(l.lines) {
			out[i].Line = line
		}
	}
	return out
}

type locator struct {
	lines  [][]byte
	counts map[int]int
	gaveUp bool
}

// count is how many entries Git reads in the first n lines. Lines that end inside of a quoted value, which goes on on the
// next line, are closed first.
func (l *locator) count(ctx context.Context, n int) int {
	if count, known := l.counts[n]; known {
		return count
	}
	if l.gaveUp = l.gaveUp || len(l.counts) >= maxLocate || ctx.Err() != nil; l.gaveUp {
		return 0
	}
	prefix := bytes.Join(l.lines[:n], nil)
	list, err := listConfig(ctx, prefix)
	count := bytes.Count(list, []byte{0})
	if err != nil {
		list, _ = listConfig(ctx, append(prefix, "\"\n"...))
		count = max(count, bytes.Count(list, []byte{0}))
	}
	l.counts[n] = count
	return count
}
