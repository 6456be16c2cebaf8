package vm

import (
	"regexp"
	"strings"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit/vm/plan"
)

// Results reads the output of the programs of a plan, each "go test -v", and keeps what every test of them said, so that it can be
// told as the outcome of subtests.
type Results struct {
	suites []*suite
}

type suite struct {
	name    string
	tests   []*result // in the order in which they began
	byName  map[string]*result
	current *result // whose output the next line is
	outside []string
}

type result struct {
	name    string
	verdict string // "PASS", "FAIL", "SKIP"; empty: it never ended
	output  []string
}

// event is a line by which a test program says what comes (go doc test2json); the output of a test may stand before it, without an
// end of line.
var (
	begun = regexp.MustCompile(`^=== (RUN|NAME|CONT|PAUSE)\s+(\S+)$`)
	ended = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+) \([0-9.]+s\)$`)
)

// Line takes one line of the output.
func (r *Results) Line(line string) {
	if name, ok := strings.CutPrefix(line, plan.Begin); ok {
		r.suites = append(r.suites, &suite{name: name, byName: map[string]*result{}})
		return
	}
	if len(r.suites) == 0 {
		r.suites = append(r.suites, &suite{name: "guest", byName: map[string]*result{}})
	}
	r.suites[len(r.suites)-1].line(line)
}

func (s *suite) line(line string) {
	if m := begun.FindStringSubmatch(line); m != nil {
		s.current = s.test(m[2])
		return
	}
	if m := ended.FindStringSubmatch(line); m != nil {
		s.current = s.test(m[2])
		s.current.verdict = m[1]
		return
	}
	if s.current == nil {
		s.outside = append(s.outside, line)
		return
	}
	s.current.output = append(s.current.output, line)
}

func (s *suite) test(name string) *result {
	if s.byName[name] == nil {
		s.byName[name] = &result{name: name}
		s.tests = append(s.tests, s.byName[name])
	}
	return s.byName[name]
}

// Report tells each suite as a subtest of t, and in it each test with its own verdict and what it said. A suite without tests
// fails, and so does a test that began and never ended.
func (r *Results) Report(t *testing.T) {
	for _, s := range r.suites {
		t.Run(s.name, s.report)
	}
	if len(r.suites) == 0 {
		t.Error("the guest ran no program")
	}
}

func (s *suite) report(t *testing.T) {
	if len(s.tests) == 0 {
		t.Errorf("no test ran:\n%s", strings.Join(s.outside, "\n"))
	}
	for _, test := range s.tests {
		t.Run(test.name, test.report)
	}
}

func (r *result) report(t *testing.T) {
	said := strings.Join(r.output, "\n")
	switch r.verdict {
	case "PASS":
	case "SKIP":
		t.Skip(said)
	case "FAIL":
		t.Error(said)
	default:
		t.Errorf("it began and never ended:\n%s", said)
	}
}
