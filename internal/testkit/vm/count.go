package vm

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Counter reads the output of "go test -v" and keeps what is to be shown: that of tests that failed, and why others were
// skipped.
type Counter struct {
	Passed, Failed, Skipped int
	held                    []string // of the test that runs
	shown                   strings.Builder
	reasons                 map[string]int
}

// needs begins the reason of a skip (testkit.Need).
const needs = "this test needs "

// heldLines bounds what is shown of one test.
const heldLines = 60

// Line takes one line of the output.
func (c *Counter) Line(s string) {
	switch word, _, _ := strings.Cut(strings.TrimSpace(s), ": "); word {
	case "--- PASS":
		c.Passed++
		c.held = nil
	case "--- SKIP":
		c.Skipped++
		c.held = nil
	case "--- FAIL":
		c.Failed++
		c.show(s)
	default:
		c.held = append(c.held, s)
		if _, what, ok := strings.Cut(s, needs); ok {
			if c.reasons == nil {
				c.reasons = map[string]int{}
			}
			c.reasons[what]++
		}
	}
}

// Skips says how many tests were skipped for which reason.
func (c *Counter) Skips() string {
	var b strings.Builder
	for _, what := range slices.Sorted(maps.Keys(c.reasons)) {
		fmt.Fprintf(&b, "  %d skipped: need %s\n", c.reasons[what], what)
	}
	return b.String()
}

// Shown is what is to be shown of tests that failed.
func (c *Counter) Shown() string { return c.shown.String() }

func (c *Counter) show(verdict string) {
	if cut := len(c.held) - heldLines; cut > 0 {
		c.held = append([]string{fmt.Sprintf("(%d lines)", cut)}, c.held[cut:]...)
	}
	for _, h := range append(c.held, verdict) {
		fmt.Fprintf(&c.shown, "  %s\n", h)
	}
	c.held = nil
}
