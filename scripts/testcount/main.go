// Command testcount reads the stream of "go test -json", shows it as people read it (a line per package, the whole
// output of what failed, the reason of what was skipped), and closes with the packages that took longest, the names of
// all that failed, and the line "N passed, N failed, N skipped".
//
// It never calls a run good that wasn't: a package that fails without a failed test (it didn't build, it panicked,
// its time was up) counts as one failure, so does a test that began and never ended, and so does a run without any
// test. Its exit code is 1 then.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
)

// event is one line of test2json's output (go doc test2json).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output lines
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

type testKey struct{ pkg, test string }

// counter folds events into totals and prints as it goes.
type counter struct {
	out                     io.Writer
	passed, failed, skipped int
	output                  map[testKey][]string
	running                 map[testKey]bool
	failedTests             map[string]int // by package
	builds                  map[string][]string
	times                   []packageTime
	failures                []string
}

type packageTime struct {
	pkg     string
	seconds float64
}

func newCounter(out io.Writer) *counter {
	return &counter{
		out: out, output: map[testKey][]string{}, running: map[testKey]bool{},
		failedTests: map[string]int{}, builds: map[string][]string{},
	}
}

func main() {
	c := newCounter(os.Stdout)
	if err := c.read(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "testcount: reading the test stream: %v\n", err)
		os.Exit(1)
	}
	if !c.close() {
		os.Exit(1)
	}
}

func (c *counter) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			c.line(line)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// line takes one line; what isn't an event (a tool's own complaint) is shown as it is.
func (c *counter) line(line string) {
	var e event
	if err := json.Unmarshal([]byte(line), &e); err != nil || e.Action == "" {
		if strings.TrimSpace(line) != "" {
			fmt.Fprint(c.out, line)
		}
		return
	}
	if e.Test == "" {
		c.packageEvent(e)
		return
	}
	c.testEvent(e)
}

func (c *counter) testEvent(e event) {
	k := testKey{e.Package, e.Test}
	switch e.Action {
	case "run":
		c.running[k] = true
	case "output":
		c.output[k] = append(c.output[k], e.Output)
	case "pass", "fail", "skip":
		c.ended(k, e)
	}
}

func (c *counter) ended(k testKey, e event) {
	switch e.Action {
	case "pass":
		c.passed++
	case "skip":
		c.skipped++
		fmt.Fprintf(c.out, "--- SKIP: %s %s\n", short(k.pkg), k.test)
		c.show(k)
	case "fail":
		c.failed++
		c.failedTests[k.pkg]++
		c.failures = append(c.failures, short(k.pkg)+" "+k.test)
		fmt.Fprintf(c.out, "--- FAIL: %s %s (%.2fs)\n", short(k.pkg), k.test, e.Elapsed)
		c.show(k)
	}
	delete(c.running, k)
	delete(c.output, k)
}

func (c *counter) packageEvent(e event) {
	k := testKey{pkg: e.Package}
	switch e.Action {
	case "build-output":
		c.builds[e.ImportPath] = append(c.builds[e.ImportPath], e.Output)
	case "output":
		c.output[k] = append(c.output[k], e.Output)
	case "pass":
		c.times = append(c.times, packageTime{short(e.Package), e.Elapsed})
		fmt.Fprintf(c.out, "ok    %s %.1fs\n", short(e.Package), e.Elapsed)
		delete(c.output, k)
	case "fail":
		c.packageFailed(k, e)
	}
}

func (c *counter) packageFailed(k testKey, e event) {
	for t := range c.running {
		if t.pkg == e.Package {
			c.ended(t, event{Action: "fail"})
		}
	}
	if c.failedTests[e.Package] == 0 {
		c.failed++
		c.failures = append(c.failures, short(e.Package)+", the package itself")
	}
	c.times = append(c.times, packageTime{short(e.Package), e.Elapsed})
	fmt.Fprintf(c.out, "FAIL  %s %.1fs\n", short(e.Package), e.Elapsed)
	for _, line := range c.builds[e.FailedBuild] {
		fmt.Fprintf(c.out, "      %s", line)
	}
	c.show(k)
	delete(c.output, k)
}

// show prints what was written, less the marks that go test itself adds.
func (c *counter) show(k testKey) {
	for _, line := range c.output[k] {
		t := strings.TrimSpace(line)
		if strings.HasPrefix(t, "=== ") || strings.HasPrefix(t, "--- ") {
			continue
		}
		fmt.Fprintf(c.out, "      %s", line)
	}
}

// close counts what never ended, prints the totals, and says whether the run was good.
func (c *counter) close() bool {
	left := make([]testKey, 0, len(c.running))
	for k := range c.running {
		left = append(left, k)
	}
	sort.Slice(left, func(i, j int) bool { return left[i].pkg+left[i].test < left[j].pkg+left[j].test })
	for _, k := range left {
		fmt.Fprintf(c.out, "--- FAIL: %s %s began and never ended\n", short(k.pkg), k.test)
		c.failed++
		c.failures = append(c.failures, short(k.pkg)+" "+k.test)
	}
	c.summary()
	good := c.failed == 0
	if c.passed+c.failed+c.skipped == 0 {
		fmt.Fprintln(c.out, "no test ran")
		good = false
	}
	fmt.Fprintf(c.out, "%d passed, %d failed, %d skipped\n", c.passed, c.failed, c.skipped)
	return good
}

// longest is how many packages the closing part names.
const longest = 10

// summary names what took longest, where a run's time can be won, and once more what failed: where a run is long,
// people see its end.
func (c *counter) summary() {
	sort.SliceStable(c.times, func(i, j int) bool { return c.times[i].seconds > c.times[j].seconds })
	sum := 0.0
	for _, t := range c.times {
		sum += t.seconds
	}
	for _, t := range c.times[:min(longest, len(c.times))] {
		fmt.Fprintf(c.out, "took  %s %.0fs\n", t.pkg, t.seconds)
	}
	fmt.Fprintf(c.out, "took  %d packages %.0fs\n", len(c.times), sum)
	for _, f := range c.failures {
		fmt.Fprintf(c.out, "failed: %s\n", f)
	}
}

func short(pkg string) string {
	return strings.TrimPrefix(pkg, "github.com/sandbox-agent/sandbox-agent/")
}
