package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"
)

// The groups of cases; ratios are taken within a group.
const (
	groupCommand = "one command"
	groupSandbox = "a sandbox"
	groupGit     = "git status"
	groupCommit  = "git commit"
	groupLayout  = "a command without Git"
	groupSession = "a session"
	groupPolicy  = "a command under a network policy"

	groupConnections = "64 connections"
)

// testCase takes one sample of each of its series at a time.
type testCase struct {
	group  string
	series []string
	// baseline: the group's other series are compared with this one's (the first series).
	baseline bool
	sample   func(ctx context.Context) ([]time.Duration, error)
	// every: only each so many rounds; 0 and 1 are all of them.
	every int
	// missing says why it can't be measured here.
	missing string
}

// series is what was measured under one name.
type series struct {
	Group    string `json:"group"`
	Name     string `json:"name"`
	Baseline bool   `json:"baseline,omitempty"`
	Missing  string `json:"missing,omitempty"`
	Samples  int    `json:"samples"`
	// Milliseconds.
	Median float64 `json:"median_ms"`
	P99    float64 `json:"p99_ms"`
	// Ratios of medians, by the baseline's name.
	Ratios map[string]float64 `json:"ratios,omitempty"`

	all []time.Duration
}

// one makes a sample function of a case with a single series.
func one(f func(ctx context.Context) (time.Duration, error)) func(context.Context) ([]time.Duration, error) {
	return func(ctx context.Context) ([]time.Duration, error) {
		d, err := f(ctx)
		return []time.Duration{d}, err
	}
}

// measureLatency makes the cases, takes their samples in rounds, and lets go of what they hold.
func measureLatency(ctx context.Context, o options, p *place, s *session) ([]*series, error) {
	var cases []testCase
	for _, group := range []func(context.Context, options, *place, *session) ([]testCase, error){
		bareCases, bubblewrapCase, ociCases, agentCases, receiptdCase, startCase, gitCases, trustedCase, commitCases, layoutCases, createCases, egressCases,
	} {
		more, err := group(ctx, o, p, s)
		if err != nil {
			return nil, err
		}
		cases = append(cases, more...)
	}
	return interleave(ctx, o, cases)
}

// interleave takes the rounds. Each has an order of its own, and not merely a rotated one: then a case would always
// follow the same other. The seed is fixed, so every run has the same orders.
func interleave(ctx context.Context, o options, cases []testCase) ([]*series, error) {
	results := make([][]*series, len(cases))
	for i, c := range cases {
		for k, name := range c.series {
			results[i] = append(results[i], &series{Group: c.group, Name: name, Baseline: c.baseline && k == 0, Missing: c.missing})
		}
	}
	progress := newProgress(o.warmup + o.rounds)
	order := rand.New(rand.NewPCG(1, 2))
	for round := range o.warmup + o.rounds {
		for _, i := range order.Perm(len(cases)) {
			if cases[i].missing != "" || cases[i].every > 1 && round%cases[i].every != 0 {
				continue
			}
			if err := rest(ctx, o.pause); err != nil {
				return nil, err
			}
			took, err := cases[i].sample(ctx)
			if err != nil {
				return nil, fmt.Errorf("measuring %q, round %d: %w", cases[i].series[0], round, err)
			}
			if round >= o.warmup {
				for k, d := range took {
					results[i][k].all = append(results[i][k].all, d)
				}
			}
		}
		progress.step()
	}
	flat := slices.Concat(results...)
	summarise(flat)
	return flat, nil
}

// rest waits, so that the machine is done with the sample before.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func summarise(all []*series) {
	for _, s := range all {
		slices.Sort(s.all)
		s.Samples, s.Median, s.P99 = len(s.all), milliseconds(quantile(s.all, 0.5)), milliseconds(quantile(s.all, 0.99))
	}
	for _, s := range all {
		for _, base := range all {
			if base.Baseline && base.Group == s.Group && base.Samples > 0 && s.Samples > 0 {
				if s.Ratios == nil {
					s.Ratios = map[string]float64{}
				}
				s.Ratios[base.Name] = s.Median / base.Median
			}
		}
	}
}

// quantile is the nearest-rank quantile of a sorted list: always a value that was measured.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(q*float64(len(sorted)) + 0.9999999)
	return sorted[min(max(rank, 1), len(sorted))-1]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// progress is for a person who waits, on a terminal only.
type progress struct {
	w           io.Writer
	done, total int
}

func newProgress(total int) *progress {
	p := &progress{w: io.Discard, total: total}
	if st, err := os.Stderr.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
		p.w = os.Stderr
	}
	return p
}

func (p *progress) step() {
	p.done++
	fmt.Fprintf(p.w, "\rround %d of %d", p.done, p.total)
	if p.done == p.total {
		fmt.Fprint(p.w, "\r\033[K")
	}
}
