package attack

import (
	"fmt"
	"slices"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// Result is what one attack came to.
type Result struct {
	Promise string  `json:"promise"`
	Attack  string  `json:"attack"`
	Verdict Verdict `json:"verdict"`
	// Why says what was broken, what the runtime says that it concedes, or why the attack could not be run.
	Why string `json:"why,omitempty"`
}

// Suite are the results of one runtime.
type Suite struct {
	Runtime string   `json:"runtime"`
	Results []Result `json:"results"`
}

// Report are those of all.
type Report struct {
	// Verdict is the worst of all.
	Verdict Verdict `json:"verdict"`
	Suites  []Suite `json:"suites"`
}

// worst is the order in which verdicts outweigh each other.
var worst = []Verdict{Held, Conceded, NotRun, Broken}

// Add takes a suite in. One without results is not run.
func (r *Report) Add(s Suite) {
	if r.Verdict == "" {
		r.Verdict = Held
	}
	if len(s.Results) == 0 {
		s.Results = []Result{{Verdict: NotRun, Why: "nothing was attacked"}}
	}
	for _, x := range s.Results {
		if slices.Index(worst, x.Verdict) > slices.Index(worst, r.Verdict) {
			r.Verdict = x.Verdict
		}
	}
	r.Suites = append(r.Suites, s)
}

// ExitCode is 0 when everything was held or is conceded, 1 when something was broken, 2 when something could not be run.
func (r Report) ExitCode() int {
	switch r.Verdict {
	case Held, Conceded:
		return 0
	case Broken:
		return 1
	}
	return 2
}

// Text is the line of one result.
func (x Result) Text() string {
	text := fmt.Sprintf("%-8s  %-3s  %s", map[Verdict]string{Held: "held", Broken: "BROKEN", Conceded: "conceded", NotRun: "NOT RUN"}[x.Verdict], x.Promise, x.Attack)
	if x.Why != "" {
		text += ": " + x.Why
	}
	return text
}

// Summary is the last line.
func (r Report) Summary() string {
	counts := map[Verdict]int{}
	for _, s := range r.Suites {
		for _, x := range s.Results {
			counts[x.Verdict]++
		}
	}
	return fmt.Sprintf("%d held, %d broken, %d conceded, %d not run", counts[Held], counts[Broken], counts[Conceded], counts[NotRun])
}

// Unattacked are the concessions of a runtime that no attack of the table would show. They are part of its results, so that what a
// runtime does not keep is never left out.
func unattacked(concessions []*sandboxv1.Concession) (all []Result) {
	for _, c := range concessions {
		shown := slices.ContainsFunc(Table, func(a Attack) bool { return a.Promise == c.GetPromise() && a.Concession == c.GetWhat() })
		if !shown {
			all = append(all, Result{Promise: c.GetPromise(), Attack: c.GetWhat(), Verdict: Conceded, Why: c.GetWhy()})
		}
	}
	return all
}
