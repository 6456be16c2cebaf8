// Command vulngate reads "govulncheck -format json" from standard input and decides: a vulnerability whose code this
// module calls fails, unless the list of exceptions names it with a reason and a day until which it may stand.
//
//	govulncheck -format json ./... | vulngate tools/lint/vulnerabilities.json
//
// What is only required or imported, and not called, is left alone: that is govulncheck's own measure.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
	"time"
)

// exception lets one vulnerability stand.
type exception struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
	// Until is the last day that it holds, 2006-01-02.
	Until string `json:"until"`
}

// message is the part of govulncheck's stream that matters here (golang.org/x/vuln/internal/govulncheck).
type message struct {
	Finding *finding `json:"finding"`
	OSV     *struct {
		ID      string `json:"id"`
		Summary string `json:"summary"`
	} `json:"osv"`
}

type finding struct {
	OSV          string `json:"osv"`
	FixedVersion string `json:"fixed_version"`
	Trace        []struct {
		Module   string `json:"module"`
		Version  string `json:"version"`
		Package  string `json:"package"`
		Function string `json:"function"`
		Receiver string `json:"receiver"`
	} `json:"trace"`
}

// called says that the vulnerable function is reached from this module's code.
func (f *finding) called() bool { return len(f.Trace) > 0 && f.Trace[0].Function != "" }

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout, time.Now()); err != nil {
		fmt.Fprintf(os.Stderr, "vulngate: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer, now time.Time) error {
	if len(args) != 1 {
		return errors.New("usage: vulngate EXCEPTIONS.json < govulncheck's JSON")
	}
	b, err := os.ReadFile(args[0])
	if err != nil {
		return fmt.Errorf("reading the exceptions: %w", err)
	}
	var exceptions []exception
	if err := json.Unmarshal(b, &exceptions); err != nil {
		return fmt.Errorf("reading the exceptions in %s: %w", args[0], err)
	}
	called, summaries, err := read(in)
	if err != nil {
		return err
	}
	return decide(called, summaries, exceptions, out, now)
}

// read collects one finding per vulnerability, and what each is about.
func read(in io.Reader) (called map[string]*finding, summaries map[string]string, err error) {
	called, summaries = map[string]*finding{}, map[string]string{}
	messages := 0
	dec := json.NewDecoder(in)
	for {
		var m message
		err := dec.Decode(&m)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, nil, fmt.Errorf("reading govulncheck's output: %w", err)
		}
		messages++
		if m.OSV != nil {
			summaries[m.OSV.ID] = m.OSV.Summary
		}
		if m.Finding != nil && m.Finding.called() {
			called[m.Finding.OSV] = m.Finding
		}
	}
	if messages == 0 {
		return nil, nil, errors.New("govulncheck said nothing: it did not run")
	}
	return called, summaries, nil
}

func decide(called map[string]*finding, summaries map[string]string, exceptions []exception, out io.Writer, now time.Time) error {
	stand, err := inForce(exceptions, now)
	if err != nil {
		return err
	}
	ids := make([]string, 0, len(called))
	for id := range called {
		ids = append(ids, id)
	}
	sort.Strings(ids)
	var bad []string
	for _, id := range ids {
		f := called[id]
		where := f.Trace[0]
		line := fmt.Sprintf("%s in %s@%s (%s.%s), fixed in %s: %s", id, where.Module, where.Version, where.Package, where.Function, f.FixedVersion, summaries[id])
		if e, ok := stand[id]; ok {
			fmt.Fprintf(out, "stands until %s: %s\n", e.Until, line)
			continue
		}
		bad = append(bad, line)
	}
	for id := range stand {
		if called[id] == nil {
			fmt.Fprintf(out, "no longer needed: the exception for %s\n", id)
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("vulnerable code is called:\n  %s", strings.Join(bad, "\n  "))
	}
	return nil
}

// inForce checks the exceptions and leaves out those whose day has passed.
func inForce(exceptions []exception, now time.Time) (map[string]exception, error) {
	stand := map[string]exception{}
	for _, e := range exceptions {
		until, err := time.Parse(time.DateOnly, e.Until)
		if err != nil || e.ID == "" || e.Reason == "" {
			return nil, fmt.Errorf("exception %q: it needs an id, a reason and a day (2006-01-02) in \"until\"", e.ID)
		}
		if now.Before(until.AddDate(0, 0, 1)) {
			stand[e.ID] = e
		}
	}
	return stand, nil
}
