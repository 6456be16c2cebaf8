package main

import (
	"fmt"
	"strings"
)

// counter reads the output of "go test -v" and keeps what is to be shown: that of tests that did not pass.
type counter struct {
	passed, failed, skipped int
	held                    []string // of the test that runs
	shown                   strings.Builder
}

// heldLines bounds what is shown of one test.
const heldLines = 60

func (c *counter) line(s string) {
	switch word, _, _ := strings.Cut(strings.TrimSpace(s), ": "); word {
	case "--- PASS":
		c.passed++
		c.held = nil
	case "--- SKIP":
		c.skipped++
		c.show(s)
	case "--- FAIL":
		c.failed++
		c.show(s)
	default:
		c.held = append(c.held, s)
	}
}

func (c *counter) show(verdict string) {
	if cut := len(c.held) - heldLines; cut > 0 {
		c.held = append([]string{fmt.Sprintf("(%d lines)", cut)}, c.held[cut:]...)
	}
	for _, h := range append(c.held, verdict) {
		fmt.Fprintf(&c.shown, "  %s\n", h)
	}
	c.held = nil
}
