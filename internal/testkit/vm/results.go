package vm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// Tests are those of one test program that a guest ran, so that each can be told as the outcome of a subtest.
type Tests struct{ root result }

// result is a test of a guest's, with its subtests.
type result struct {
	name   string // the last part of it
	began  bool   // false: it is no test, but a part of the name of some that have a slash in theirs
	action string // pass, fail, skip; empty: it began and never ended
	output []string
	below  []*result
}

// Counts are numbers of tests, their subtests included.
type Counts struct{ Passed, Failed, Skipped int }

// ReadTests reads what a test program said, run with -test.v (best =test2json, which marks what is its own), by the toolchain's
// own reader.
func ReadTests(pkg string, lines []string) (Tests, error) {
	all := Tests{}
	cmd := exec.Command("go", "tool", "test2json", "-p", pkg)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	out, err := cmd.Output()
	if err != nil {
		return all, fmt.Errorf("reading the tests' output: %w", err)
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var e struct{ Action, Test, Output string }
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return all, fmt.Errorf("reading the tests' output: %w", err)
		}
		if e.Test == "" {
			continue
		}
		r := all.root.find(strings.Split(e.Test, "/"))
		switch e.Action {
		case "run":
			r.began = true
		case "output":
			r.output = append(r.output, strings.TrimRight(e.Output, "\n"))
		case "pass", "fail", "skip":
			r.action = e.Action
		}
	}
}

func (r *result) find(path []string) *result {
	if len(path) == 0 {
		return r
	}
	for _, b := range r.below {
		if b.name == path[0] {
			return b.find(path[1:])
		}
	}
	b := &result{name: path[0]}
	r.below = append(r.below, b)
	return b.find(path[1:])
}

// Count counts the tests. One that never ended has failed.
func (all Tests) Count() (c Counts) {
	for _, r := range all.root.below {
		r.count(&c)
	}
	return c
}

func (r *result) count(c *Counts) {
	switch {
	case r.action == "pass":
		c.Passed++
	case r.action == "skip":
		c.Skipped++
	case r.began || r.action != "":
		c.Failed++
	}
	for _, b := range r.below {
		b.count(c)
	}
}

// Repeat has each test of the guest's be a subtest of t, with the same end and words. A program without tests fails, and so does
// a test that began and never ended. may says for which words a test may be skipped; nil: for any.
func (all Tests) Repeat(t *testing.T, may func(said string) bool) {
	if len(all.root.below) == 0 {
		t.Error("no test ran")
	}
	for _, r := range all.root.below {
		r.repeat(t, may)
	}
}

func (r *result) repeat(t *testing.T, may func(said string) bool) {
	t.Run(r.name, func(t *testing.T) {
		for _, b := range r.below {
			b.repeat(t, may)
		}
		said := r.said()
		switch {
		case r.action == "pass", r.action == "" && !r.began:
		case r.action == "skip":
			if may != nil && !may(said) {
				t.Errorf("it was skipped for a reason that is none in a guest:\n%s", said)
			}
			t.Skip(said)
		case r.action == "fail":
			t.Error(said)
		default:
			t.Errorf("it began and never ended:\n%s", said)
		}
	})
}

// said is what a test said, less the marks that go test itself adds.
func (r *result) said() string {
	var b strings.Builder
	for _, line := range r.output {
		if s := strings.TrimSpace(line); strings.HasPrefix(s, "=== ") || strings.HasPrefix(s, "--- ") {
			continue
		}
		fmt.Fprintln(&b, line)
	}
	return b.String()
}

// Results are the lines of a guest's programs, each a test program.
type Results struct{ programs []program }

type program struct {
	name  string
	lines []string
}

// Line takes one line of what the guest said.
func (r *Results) Line(line string) {
	if name, ok := strings.CutPrefix(line, plan.Begin); ok {
		r.programs = append(r.programs, program{name: name})
		return
	}
	if len(r.programs) == 0 {
		r.programs = append(r.programs, program{name: "guest"})
	}
	p := &r.programs[len(r.programs)-1]
	p.lines = append(p.lines, line)
}

// Of are the lines of a program, and whether it began.
func (r *Results) Of(name string) (lines []string, began bool) {
	for _, p := range r.programs {
		if p.name == name {
			return p.lines, true
		}
	}
	return nil, false
}

// Last are the last lines of each program, for whoever reads why the guest came to nothing.
func (r *Results) Last() string {
	var b strings.Builder
	for _, p := range r.programs {
		fmt.Fprintf(&b, "%s:\n  %s\n", p.name, strings.Join(p.lines[max(0, len(p.lines)-10):], "\n  "))
	}
	return b.String()
}

// Report tells each program as a subtest of t, and in it each test (Tests.Repeat).
func (r *Results) Report(t *testing.T) {
	for _, p := range r.programs {
		t.Run(p.name, func(t *testing.T) {
			tests, err := ReadTests(p.name, p.lines)
			if err != nil {
				t.Fatal(err)
			}
			tests.Repeat(t, nil)
			if t.Failed() && tests.Count() == (Counts{}) {
				t.Error(strings.Join(p.lines, "\n"))
			}
		})
	}
	if len(r.programs) == 0 {
		t.Error("the guest ran no program")
	}
}
