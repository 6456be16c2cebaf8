package kernel

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// ran is a test of a guest's, with its subtests.
type ran struct {
	name   string // the last part of it
	action string // pass, fail, skip; empty: it began and never ended
	output []string
	below  []*ran
}

// tests are those of one test program.
type tests struct{ ran }

// parse reads what a test program said, run with -test.v=test2json, by the toolchain's own reader.
func parse(pkg string, lines []string) (tests, error) {
	all := tests{}
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
			return all, err
		}
		if e.Test == "" {
			continue
		}
		r := all.find(strings.Split(e.Test, "/"))
		switch e.Action {
		case "output":
			r.output = append(r.output, strings.TrimRight(e.Output, "\n"))
		case "pass", "fail", "skip":
			r.action = e.Action
		}
	}
}

func (r *ran) find(path []string) *ran {
	if len(path) == 0 {
		return r
	}
	for _, b := range r.below {
		if b.name == path[0] {
			return b.find(path[1:])
		}
	}
	b := &ran{name: path[0]}
	r.below = append(r.below, b)
	return b.find(path[1:])
}

// count counts a test and its subtests.
func (r *ran) count(c *counts) {
	switch r.action {
	case "pass":
		c.Passed++
	case "skip":
		c.Skipped++
	default:
		c.Failed++
	}
	for _, b := range r.below {
		b.count(c)
	}
}

// repeat has each test of the guest's be a subtest here, with the same end.
func (all tests) repeat(t *testing.T) {
	require.NotEmpty(t, all.below, "no test ran")
	for _, r := range all.below {
		r.repeat(t)
	}
}

func (r *ran) repeat(t *testing.T) {
	t.Run(r.name, func(t *testing.T) {
		for _, b := range r.below {
			b.repeat(t)
		}
		said := r.said()
		switch r.action {
		case "pass":
		case "skip":
			if !guestLacksRE.MatchString(said) {
				t.Errorf("it was skipped for a reason that is none in a guest (guestLacks):\n%s", said)
			}
			t.Skip(said)
		case "fail":
			t.Error(said)
		default:
			t.Errorf("it began and never ended:\n%s", said)
		}
	})
}

// said is what a test said, less the marks that go test itself adds.
func (r *ran) said() string {
	var b strings.Builder
	for _, line := range r.output {
		if s := strings.TrimSpace(line); strings.HasPrefix(s, "=== ") || strings.HasPrefix(s, "--- ") {
			continue
		}
		fmt.Fprintln(&b, line)
	}
	return b.String()
}

func TestWhatAGuestsTestsSaidIsReadTestByTest(t *testing.T) {
	const mark = "\x16"
	got, err := parse("some/package", []string{
		mark + "=== RUN   TestA", mark + "=== RUN   TestA/one", "    a_test.go:1: loud", mark + "=== NAME  TestA", mark + "--- FAIL: TestA (0.00s)",
		"    " + mark + "--- FAIL: TestA/one (0.00s)", mark + "=== RUN   TestB", "    b_test.go:7: this test needs gcc: install it", mark + "--- SKIP: TestB (0.00s)",
		mark + "=== RUN   TestC", mark + "--- PASS: TestC (0.10s)", mark + "=== RUN   TestD", "and then the kernel panicked",
	})
	require.NoError(t, err)
	require.Len(t, got.below, 4)
	require.Equal(t, "fail", got.below[0].below[0].action)
	require.Contains(t, got.below[0].below[0].said(), "loud")
	require.Regexp(t, guestLacksRE, got.below[1].said())
	require.NotEqual(t, "pass", got.below[3].action, "a test that never ended has not passed")
	var c counts
	for _, r := range got.below {
		r.count(&c)
	}
	require.Equal(t, counts{Passed: 1, Failed: 3, Skipped: 1}, c)
	require.NotRegexp(t, guestLacksRE, "a_test.go:1: this test needs user namespaces: set the sysctl", "a hole in the matrix is none that may be skipped")
}
